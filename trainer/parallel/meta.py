"""Models built on torch's meta device, with shapes and without memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Module = TypeVar("Module", bound=nn.Module)

RESETS = ("reset_parameters", "_reset_parameters")
"""The methods by which modules of torch, and after them others, write their initial values."""

_RESET_FRAMES = (*RESETS, "reset_running_stats")
_LOST = "_penstock_lost_values"
_WRITERS = "_penstock_writers_of_tied"


def build_on_meta(build: Callable[..., Module], *arguments: Any, **options: Any) -> Module:
    """Call ``build`` under ``torch.device("meta")``, so that its model has shapes and no memory.

    Unlike the bare context, this keeps in mind which weights the constructor writes outside of ``reset_parameters``:
    their values are lost on the meta device, and the trainer refuses the model by their names, unless it gets a
    function that initialises them or weights to start from. Of tied weights it keeps whose values they have.
    """
    watch = _Writes()
    with torch.device("meta"), watch:
        model = build(*arguments, **options)
    if isinstance(model, nn.Module):
        object.__setattr__(model, _LOST, watch.list_lost(model))
        object.__setattr__(model, _WRITERS, watch.list_writers(model))
    return model


def is_on_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def lost_values(model: nn.Module) -> Mapping[str, str]:
    """Reasons why tensors lost the value that the constructor set, by name, as ``build_on_meta`` saw them."""
    found: Mapping[str, str] = getattr(model, _LOST, {})
    return found


def writers_of_tied(model: nn.Module) -> Mapping[str, str]:
    """The module whose reset gave a tied tensor its values, by each of its names, where ``build_on_meta`` saw that."""
    found: Mapping[str, str] = getattr(model, _WRITERS, {})
    return found


def move_values(model: nn.Module, device: torch.device, *, recurse: bool = True) -> None:
    """Move what has values, of the module alone or also of those in it; what is on meta gets its memory later."""
    if recurse and not is_on_meta(model):
        model.to(device)
        return

    def move(tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else tensor.to(device)

    model._apply(move, recurse=recurse)  # type: ignore[no-untyped-call]


def join_name(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of this module itself."""
    held = (*module._parameters.items(), *module._buffers.items())
    return {key: tensor for key, tensor in held if tensor is not None}


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees which meta tensors are written in place, and whether that is in a module's own reset."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Holding the tensor keeps its storage's address from being used again; it has no memory.
        self._last: dict[int, tuple[Tensor, nn.Module | None, str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and args and isinstance(args[0], Tensor) and args[0].is_meta:
            key = args[0].untyped_storage()._cdata
            self._last[key] = (args[0], _find_resetting_module(sys._getframe(1)), func._schema.name.partition("::")[2])
        return result

    def list_lost(self, model: nn.Module) -> dict[str, str]:
        """Reasons why parameters and buffers lost the constructor's value, by name."""
        lost: dict[str, str] = {}
        have_reset = {id(writer) for _, writer, _ in self._last.values() if writer is not None}
        for module_name, module in model.named_modules():
            for key, tensor in own_tensors(module).items():
                written = self._last.get(tensor.untyped_storage()._cdata)
                if written is None and id(module) in have_reset:
                    lost[join_name(module_name, key)] = "a constructor gives it its value"
                elif written is not None and written[1] is None:
                    lost[join_name(module_name, key)] = f"a constructor gives it its value, by {written[2]}"
        return lost

    def list_writers(self, model: nn.Module) -> dict[str, str]:
        """The module that reset a tensor last, of those that hold it, by each of the tensor's names."""
        holders: dict[int, list[tuple[str, str, nn.Module, Tensor]]] = {}
        for name, module in model.named_modules():
            for key, tensor in own_tensors(module).items():
                holders.setdefault(id(tensor), []).append((join_name(name, key), name, module, tensor))
        found: dict[str, str] = {}
        for group in holders.values():
            written = self._last.get(group[0][3].untyped_storage()._cdata)
            writers = [name for _, name, module, _ in group if written is not None and module is written[1]]
            if len(group) > 1 and writers:
                found.update({key: writers[0] for key, *_ in group})
        return found


def _find_resetting_module(frame: FrameType | None) -> nn.Module | None:
    """The module whose reset, which will be called again, is at work; None in a constructor."""
    while frame is not None:
        if frame.f_code.co_name in _RESET_FRAMES:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and (module._parameters or module._buffers):
                return module
        frame = frame.f_back
    return None
