"""Refuse by name what could not be read back, before anything is written, or pack it into a form that can."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.optim import Optimizer

from ..errors import CheckpointError

_EXTRA_STATE = "_extra_state"
_PACKED = b"penstock extra state 1\n"
_LEAVES = (Tensor, int, float, str, type(None))


def refuse_unreadable_keys(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose state is not keyed by its parameters.

    Raises:
        CheckpointError: naming the optimizer and the key.
    """
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for key in optimizer.state:
        if id(key) not in known:
            name = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
            raise CheckpointError(
                f"optimizer={type(optimizer).__name__} keeps state by {name}, which is none of its parameters, and a "
                "checkpoint could not be read back; keep it in state[parameter] or in a parameter group, or train "
                "without checkpoints"
            )


def refuse_unreadable_values(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Refuse values that are neither tensors nor plain; ``state`` is by parameter name.

    Raises:
        CheckpointError: naming the optimizer, the parameter and the value's name.
    """
    for parameter, values in state.items():
        for name, value in values.items():
            if not isinstance(value, _LEAVES):
                raise CheckpointError(
                    f"optimizer={type(optimizer).__name__} keeps a {type(value).__name__} as {name!r} of {parameter}, "
                    "and a checkpoint of it could not be read back; keep tensors, numbers or text there, each by a "
                    "name of its own, or train without checkpoints"
                )


def pack_extra_state(model_state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace what modules return from ``get_extra_state`` by bytes, unless it is a tensor, whatever its structure.

    Raises:
        CheckpointError: it cannot be pickled; the message names the module.
    """
    return {key: _pack(key, value) if _is_extra(key, value) else value for key, value in model_state.items()}


def expect_extra_state(model_state: dict[str, Any], saved: Mapping[str, object]) -> None:
    """Put in place what can take up the extra state that was saved, which may be of another form than the present.

    ``saved`` is what the checkpoint says of each of the model's keys.
    """
    for key in model_state:
        kind = saved.get(key)
        if _names_extra(key) and isinstance(kind, TensorStorageMetadata):
            model_state[key] = torch.empty(kind.size, dtype=kind.properties.dtype)
        elif _names_extra(key) and isinstance(kind, BytesStorageMetadata):
            model_state[key] = b""


def unpack_extra_state(model_state: dict[str, Any]) -> None:
    """Turn the packed bytes that were read back into what the modules had returned; tensors are on the CPU."""
    for key, value in model_state.items():
        if _names_extra(key) and isinstance(value, bytes) and value.startswith(_PACKED):
            held = io.BytesIO(value.removeprefix(_PACKED))
            model_state[key] = torch.load(held, map_location="cpu", weights_only=False)


def _names_extra(key: str) -> bool:
    return key.rpartition(".")[2] == _EXTRA_STATE


def _is_extra(key: str, value: object) -> bool:
    return _names_extra(key) and not isinstance(value, Tensor)


def _pack(key: str, value: object) -> bytes:
    held = io.BytesIO(_PACKED)
    held.seek(len(_PACKED))
    try:
        torch.save(value, held)
    except Exception as exc:  # pickle raises what it likes
        module = key.rpartition(".")[0] or "the model"
        raise CheckpointError(
            f"get_extra_state of {module} returns what cannot be pickled ({type(exc).__name__}: {exc}); return tensors "
            "and plain values"
        ) from exc
    return held.getvalue()
