"""Settings of an optimizer over restarts: which a run was given, and which a checkpoint brings back."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Settings = Sequence[Mapping[str, Any]]
"""By group, the values of the optimizer's ``defaults`` by name."""


def copy_settings(optimizer: Optimizer) -> Settings:
    """What the groups have now; of tensors, into which a checkpoint is read, copies."""
    return [
        {name: _copy(group[name]) for name in optimizer.defaults if name in group} for group in optimizer.param_groups
    ]


def pack_settings(settings: Settings) -> bytes:
    """As one value, whose structure no reader needs to know beforehand."""
    held = io.BytesIO()
    torch.save([dict(group) for group in settings], held)
    return held.getvalue()


def unpack_settings(packed: bytes) -> Settings | None:
    """Undo ``pack_settings``; tensors are on the CPU. None where a value is more than tensors, numbers and text.

    What a checkpoint holds is data: no function that it names is called.
    """
    try:
        found: Settings = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return None
    return found


def settle_settings(
    optimizer: Optimizer, before: Settings, given: Settings | None = None, given_then: Settings | None = None
) -> list[str]:
    """Decide whose settings stay once a checkpoint was read into the groups; returns what it had otherwise.

    Some optimizers keep state among their settings (Prodigy's ``d``, ScheduleFree's ``k``), so that one which this run
    was ``given`` as the run that saved was ``given_then`` stays as the checkpoint has it, and one that is given anew
    replaces it. Rates are those of ``before`` the reading: the schedule sets them. So are all settings, where it is not
    known what was given.
    """
    changed = []
    for number, (group, old) in enumerate(zip(optimizer.param_groups, before, strict=True)):
        for name, value in old.items():
            if name != "lr" and given is not None and given_then is not None:
                value = _copy(given[number].get(name, value))
                if name in given_then[number] and _same(given_then[number][name], value):
                    continue
            saved, group[name] = group[name], value
            if name != "lr" and not _same(saved, value):
                changed.append(f"optimizer group {number}: {name}={value!r}, where the checkpoint had {saved!r}")
    return changed


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _same(one: object, other: object) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
