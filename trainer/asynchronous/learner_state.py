"""The inner optimizer of a learner in a file of its own, so that who begins anew need not begin it anew, too.

Each rank of a learner keeps what it holds. Weights are not in it: those are the servers'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..checkpoint.safetensors_file import write_safetensors
from ..parallel.precision import local_part

NamedState = Mapping[str, tuple[nn.Parameter, dict[str, Any]]]
"""A parameter and an optimizer's state of it, by name."""

_VERSION = "1"


def write_state(path: Path, named: NamedState, *, run: str, schema: str) -> str:
    """Write what this rank has of an inner optimizer; returns in words why it could not, else nothing.

    A file that is there stays until the new one is whole.
    """
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for name, (_, state) in named.items():
        for slot, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{slot} {name}"] = local_part(value.detach()).cpu()
            else:
                numbers[f"{slot} {name}"] = value
    partial = path.with_name(f"{path.name}.tmp")
    try:
        metadata = {"version": _VERSION, "run": run, "schema": schema, "numbers": json.dumps(numbers)}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(tensors, partial, metadata)
        partial.replace(path)
    except (OSError, ValueError, TypeError) as exc:
        partial.unlink(missing_ok=True)
        return f"{path} could not be written, so this learner would begin with a new inner optimizer: {exc}"
    return ""


def read_state(path: Path, named: NamedState, *, run: str, schema: str) -> str:
    """Read what ``write_state`` wrote; returns in words why nothing was read, else nothing.

    It must be of the same run and model, and the rank must hold what it held then.
    """
    try:
        with safe_open(path, framework="pt") as file:
            found = file.metadata() or {}
            if (found.get("version"), found.get("run"), found.get("schema")) != (_VERSION, run, schema):
                return f"{path} is of another run or model: the inner optimizer begins anew"
            values: dict[str, Any] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
            values |= json.loads(found["numbers"])
    except (OSError, ValueError, KeyError, SafetensorError) as exc:
        return f"{path} cannot be read ({exc}): the inner optimizer begins anew"
    states: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        slot, _, name = key.partition(" ")
        if name not in named:
            return f"{path} is of another run or model: the inner optimizer begins anew"
        states.setdefault(name, {})[slot] = value
    made: dict[str, dict[str, Any]] = {}
    for name, state in states.items():
        parameter = named[name][0]
        own = local_part(parameter.detach())
        for slot, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                if value.shape != own.shape:
                    return f"{path} is of ranks that held other parts: the inner optimizer begins anew"
                state[slot] = _placed(value.to(own.device), parameter)
        made[name] = state
    for name, state in made.items():
        named[name][1].update(state)
    return ""


def _placed(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """A part that this rank holds, as what the optimizer keeps beside a parameter."""
    if not isinstance(parameter, DTensor):
        return value
    made = DTensor.from_local(
        value, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )
    return made
