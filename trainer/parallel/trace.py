"""Tensors that a forward keeps for its backward, and that modules take and give, without memory or devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from ..errors import TrainerConfigError
from ..imports import describe_error
from .precision import PrecisionConfig, compute_context

Kind = Literal["saved", "mask", "input", "output", "keys"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """Bytes of a forward: ``fixed`` and ``by_row`` of the batch.

    ``saved`` is what is kept for backward while the module runs, ``mask`` that of booleans and whole numbers;
    ``input`` and ``output`` are the floating tensors that the module takes and gives; ``keys`` are the keys and values
    that attention in it reads.
    """

    kind: Kind
    module: str
    fixed: float
    by_row: float

    def count(self, rows: float) -> float:
        """Bytes with ``rows`` rows."""
        return self.fixed + self.by_row * rows


def trace_forward(
    model: nn.Module, loss: Callable[..., Any], make_batch: Callable[[int], Any], precision: PrecisionConfig
) -> list[Record]:
    """Run ``loss`` on batches of two and of three rows without memory, and tell what each row adds.

    ``model`` may be on the meta device, and stays as it is. ``make_batch(rows)`` is called where tensors have
    no values.

    Raises:
        TrainerConfigError: the loss cannot be computed without values, or keeps other tensors with more rows.
    """
    found = []
    for rows in (2, 3):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, _without_values(model):
            try:
                batch = make_batch(rows)
                found.append(_trace(model, loss, batch, precision))
            except Exception as exc:
                raise TrainerConfigError(f"the loss cannot be computed without values: {describe_error(exc)}") from exc
        del mode
    two, three = found
    if [one[:2] for one in two] != [one[:2] for one in three]:
        raise TrainerConfigError("the loss keeps other tensors for a batch with another number of rows")
    return [
        Record(kind=kind, module=module, fixed=float(few - 2 * (more - few)), by_row=float(more - few))
        for (kind, module, few), (_, _, more) in zip(two, three, strict=True)
    ]


def trace_optimizer(model: nn.Module, make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> dict[str, int]:
    """Make one update without memory, and return the bytes of each parameter's state, but for single numbers.

    Raises:
        TrainerConfigError: the update cannot be made without values.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), _without_values(model):
        try:
            trained = [one for one in model.parameters() if one.requires_grad]
            optimizer = make_optimizer(trained)
            for one in trained:
                one.grad = torch.zeros_like(one)
            optimizer.step()
        except Exception as exc:
            raise TrainerConfigError(f"the optimizer makes no update without values: {describe_error(exc)}") from exc
        return {
            name: sum(
                value.nbytes
                for value in optimizer.state.get(one, {}).values()
                if isinstance(value, Tensor) and value.ndim
            )
            for name, one in model.named_parameters()
        }


@contextmanager
def _without_values(model: nn.Module) -> Iterator[None]:
    """Give the model tensors of the mode that is active, on the CPU, and its own ones back at the end."""
    held: list[tuple[dict[str, Any], str, Any]] = []
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, one in tensors.items():
                if one is None:
                    continue
                held.append((tensors, key, one))
                if id(one) not in made:
                    fake = torch.empty(one.shape, dtype=one.dtype, device="cpu")
                    made[id(one)] = nn.Parameter(fake, one.requires_grad) if isinstance(one, nn.Parameter) else fake
                tensors[key] = made[id(one)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for tensors, key, one in held:
            tensors[key] = one


class _Attention(TorchFunctionMode):
    def __init__(self, note: Callable[[int], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and len(args) > 2:
            self._note(args[1].nbytes + args[2].nbytes)
        return func(*args, **(kwargs or {}))


def _trace(
    model: nn.Module, loss: Callable[..., Any], batch: Any, precision: PrecisionConfig
) -> list[tuple[Kind, str, int]]:
    found: list[tuple[Kind, str, int]] = []
    running: list[str] = [""]
    own = {one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}
    kept: list[Tensor] = []  # so that no storage takes the place of another
    seen = set(own)

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            kept.append(tensor)
            found.append(("saved" if tensor.is_floating_point() else "mask", running[-1], storage.nbytes()))
        return tensor

    def size(values: Any) -> int:
        if isinstance(values, Tensor):
            return values.nbytes if values.is_floating_point() and values.requires_grad else 0
        if isinstance(values, Mapping):
            values = values.values()
        return sum(map(size, values)) if isinstance(values, list | tuple | type({}.values())) else 0

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            running.append(name)
            found.append(("input", name, size(args) + size(kwargs)))

        return hook

    def leave(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            running.pop()
            found.append(("output", name, size(output)))

        return hook

    handles: list[Any] = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
        handles.append(module.register_forward_hook(leave(name)))
    was_training = [module for module in model.modules() if not module.training]
    model.train()
    try:
        with (
            torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
            compute_context(precision, torch.device("cpu"), model),
            _Attention(lambda bytes_: found.append(("keys", running[-1], bytes_))),
        ):
            loss(model, batch)
    except DataDependentOutputException:
        if ("output", "") not in {one[:2] for one in found}:
            raise
        # After forward that is a loss that counts its samples in Python.
    finally:
        for handle in handles:
            handle.remove()
        for module in was_training:
            module.training = False
    return found
