"""Check that the loss goes through the engine's forward, and that every parameter then gets its gradient."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.utils import _apply_to_tensors
from torch.nn.parallel import DistributedDataParallel

from ...errors import TrainerConfigError

_MIXED = "mixed torch.Tensor and DTensor"
_USED_IN_SHARDS = (
    "the loss function uses a weight that lies in shards: weights are whole while the sharded module that they belong "
    "to runs its forward (an item of an outermost ModuleList, a module of parallel.blocks, or the model), and this one "
    "was used outside of that. Call that module itself, not what is in it; name the modules that are called with "
    "parallel.blocks; or use parallel.zero=0"
)
_OTHER_FORMATS = re.compile(r"same dtype|should be the same|expected scalar type")
_OUTSIDE = (
    "with parallel.zero=1 to 3 the weights of linear layers, convolutions and attention come to forward in "
    "precision.dtype, and autocast converts what they meet; an operation met one outside of autocast (torch says: {}). "
    "Name the classes of the modules that leave autocast with precision.fp32_modules, whose weights then come in fp32; "
    "or use parallel.zero=0"
)
HIDDEN_OUTPUT = (
    "a sharded module returned an object in which torch finds no tensors, so that nothing told it of the gradient; "
    "return tensors, or tuples, dicts or dataclasses of them, from forward, or use parallel.zero=0"
)


def return_no_views(module: nn.Module) -> None:
    """Let a module that will be sharded return copies of views, so that what it returns may be written to in place.

    ``fully_shard`` learns from the returned tensors when backward comes, and writing to a view would make it deaf.
    """

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.requires_grad and tensor._base is not None else tensor

    def copy(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        return _apply_to_tensors(own, output)

    module.register_forward_hook(torch._dynamo.disable(copy))  # type: ignore[no-untyped-call]


class EngineEntry:
    """Watches the losses of a model under DDP or ``fully_shard``; does nothing for any other.

    Both engines exchange gradients, and weights, only where their own forward runs. Mutable state: whether it
    ran, until the first loss is through.
    """

    def __init__(self, module: nn.Module, inner: nn.Module, *, may_be_unused: bool, rounds: bool) -> None:
        self._module, self._inner = module, inner
        self._rounds = rounds and isinstance(module, FSDPModule)
        self._is_watched = isinstance(module, DistributedDataParallel | FSDPModule)
        self._entered = False
        self._needed: list[tuple[str, nn.Parameter]] = []
        self._frozen: list[tuple[str, nn.Parameter]] = []
        if isinstance(module, DistributedDataParallel):
            self._frozen = [(name, one) for name, one in inner.named_parameters() if not one.requires_grad]
            if not may_be_unused:
                self._needed = [(name, one) for name, one in inner.named_parameters() if one.requires_grad]
        if self._is_watched:
            self._hook = module.register_forward_pre_hook(torch._dynamo.disable(self._enter), prepend=True)  # type: ignore[no-untyped-call]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run a loss under checks.

        Raises:
            TrainerConfigError: the loss bypasses forward; or torch says that a parameter had no gradient before, or
                that an operation outside of autocast met a weight gathered for autocast.
        """
        if not self._is_watched:
            yield
            return
        try:
            yield
        except AttributeError as exc:
            if exc.obj is self._module and exc.name is not None and hasattr(self._inner, exc.name):
                raise self._refusal(f"takes {exc.name!r} of the model") from exc
            raise
        except RuntimeError as exc:
            if not self._entered:
                raise self._refusal("computes without calling the model") from exc
            if self._needed and "finished reduction in the prior iteration" in str(exc):
                raise _name_unused(self._find_unused(str(exc))) from exc
            if _MIXED in str(exc):
                raise TrainerConfigError(_USED_IN_SHARDS) from exc
            if self._rounds and _OTHER_FORMATS.search(str(exc)):
                raise TrainerConfigError(_OUTSIDE.format(str(exc).splitlines()[0])) from exc
            raise
        if not self._entered:
            raise self._refusal("computes without calling the model")
        self._hook.remove()

    @contextmanager
    def watched_backward(self) -> Iterator[None]:
        """Run a backward under checks.

        Raises:
            TrainerConfigError: a sharded module's weights were not gathered again.
        """
        try:
            yield
        except RuntimeError as exc:
            if isinstance(self._module, FSDPModule) and "out of bounds for storage of size 0" in str(exc):
                raise TrainerConfigError(
                    f"backward finds weights in shards, because {HIDDEN_OUTPUT}; or because the loss goes through "
                    "the model's graph twice, as torch.autograd.grad(..., create_graph=True) makes it: that needs "
                    "parallel.zero=0"
                ) from exc
            raise

    def check_gradients(self) -> None:
        """To be called after the last backward of a step, before the update.

        A parameter that only an earlier microbatch used has a gradient, of this rank alone, and DDP still waits for it.
        One that was frozen when DDP was made has a gradient of this rank alone, for which DDP never waits.

        Raises:
            TrainerConfigError: a parameter that DDP waits for got no gradient, or it exchanges none of one that has.
        """
        unfrozen = [name for name, one in self._frozen if one.requires_grad]
        if unfrozen:
            raise TrainerConfigError(
                f"the parameters {', '.join(unfrozen)} were frozen when the trainer was made and are trained now, and "
                "their gradients are not exchanged; make a new trainer after unfreezing them, or leave them trained "
                "from the beginning, in a parameter group whose rate is 0 until then"
            )
        if not self._needed or not isinstance(self._module, DistributedDataParallel):
            return
        try:
            self._module._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as exc:
            raise _name_unused(self._find_unused(str(exc))) from exc

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._entered = True

    def _refusal(self, what: str) -> TrainerConfigError:
        engine = "DistributedDataParallel" if isinstance(self._module, DistributedDataParallel) else "fully_shard"
        return TrainerConfigError(
            f"the loss function {what}, which is under {engine}: gradients would not be exchanged, which happens in "
            "forward only; call model(...), and let forward call the method"
        )

    def _find_unused(self, message: str) -> list[str]:
        """The names behind the numbers in torch's message, or torch's own names where its debug level shows them."""
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        numbers = [int(number) for number in found.group(1).split()] if found else []
        return [self._needed[number][0] for number in numbers if number < len(self._needed)]


def _name_unused(names: list[str]) -> TrainerConfigError:
    return TrainerConfigError(
        f"the parameters {', '.join(names) or '(unknown)'} got no gradient in a step's last microbatch, and the "
        "ranks wait for it; set parallel.unused_parameters=True, or freeze them with requires_grad_(False) "
        "before the trainer is made"
    )
