"""Prefetch the weights of sharded modules ahead of their forward and backward, or turn that off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from torch import nn
from torch.distributed.fsdp import FSDPModule

from .precision import PrecisionConfig, list_batch_norms


class Prefetch:
    """With ``overlap`` each sharded module's forward begins to gather the weights of the one after it.

    What is gathered for a forward that does not come waits for the next one, or for the end of a backward.
    """

    def __init__(
        self, model: nn.Module, modules: Sequence[FSDPModule], precision: PrecisionConfig, *, overlap: bool
    ) -> None:
        # Batch norms are small: gathering each ahead of its time would only cost calls.
        norms = set() if precision.dtype == "fp32" else set(map(id, list_batch_norms(model)))
        sharded = [module for module in modules if id(module) not in norms]
        self._modules = modules
        self._pairs = list(pairwise(sharded[1:])) if overlap else []
        for module, following in self._pairs:
            module.set_modules_to_forward_prefetch([following])
        for module in [] if overlap else sharded:
            # Prefetching the module itself is a no-op that replaces the implicit prefetch.
            module.set_modules_to_backward_prefetch([module])

    @contextmanager
    def without_backward(self) -> Iterator[None]:
        """Leave no weights gathered after forwards that no backward follows: it would free them, and end what waits.

        Within this nothing is gathered ahead of a forward.
        """
        for module, _ in self._pairs:
            module.set_modules_to_forward_prefetch([])
        try:
            yield
        finally:
            for one in self._modules:  # with zero=1 and 2 forward leaves them whole
                one.reshard()
            for module, following in self._pairs:
                module.set_modules_to_forward_prefetch([following])
