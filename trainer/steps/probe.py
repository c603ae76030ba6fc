"""Probe whether a forward and backward fit into the device's memory, on the model itself, and restore it."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ...storage.suggestions import list_some
from ..parallel.activation import ActivationConfig
from ..parallel.buffers import BufferCopies
from ..parallel.model import ParallelModel
from ..parallel.precision import PrecisionConfig, compute_context
from .loss import LossFunction, check_loss

# Of cuBLAS, cuSOLVER, cuSPARSE and cuDNN 8; of cuFFT; of cuDNN 9; and of what asks the driver itself.
_OUT_OF_MEMORY = (
    "_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    "_DEVICE_ALLOCATION_FAILED",
    "_HOST_ALLOCATION_FAILED",
    "CUDA error: out of memory",
)
# Torch tries cuDNN's engines in turn, catches what they raise where memory is short, and then says this. It says the
# same where a device has none for a format, so the allocator is asked, which counts what it refused.
_NO_ENGINE = "unable to find an engine to execute this computation"
_OPTIMIZER_VALUES = 2  # a parameter, that are set aside where the optimizer has no state yet: Adam's


class MemoryProbe:
    """Tries microbatches on this rank alone: the engine around the model, which would exchange gradients, is passed by.

    What torch.compile made is passed by too: it would be made anew for each number of rows, and takes less memory.
    """

    def __init__(
        self, parallel: ParallelModel, optimizer: torch.optim.Optimizer, loss: LossFunction, precision: PrecisionConfig
    ) -> None:
        self._parallel = parallel
        self._optimizer = optimizer
        self._loss = loss
        self._precision = precision

    def fits(self, batch: Any, rounds: int) -> bool:
        """Return whether ``rounds`` such microbatches, one after another, fit. Errors other than of memory are raised.

        Weights, gradients, buffers and the global generators of random numbers are afterwards what they were.
        """
        device = self._parallel.world.device
        with _kept_as_is(self._parallel.inner, device), torch.compiler.set_stance("force_eager"):
            does_fit = self._try(batch, rounds)
        if not does_fit:
            gc.collect()  # what failed is kept by its traceback's frames
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return does_fit

    def _try(self, batch: Any, rounds: int) -> bool:
        device = self._parallel.world.device
        refused_before = _count_refusals(device)
        try:
            aside = self._set_aside()
            for _ in range(rounds):
                with compute_context(self._precision, device, self._parallel.inner):
                    total, _ = check_loss(self._loss(self._parallel.inner, batch))
                total.backward()  # type: ignore[no-untyped-call]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            del aside
        except (torch.OutOfMemoryError, RuntimeError) as exc:
            is_starved = _NO_ENGINE in str(exc) and _count_refusals(device) > refused_before
            if not (is_starved or is_out_of_memory(exc)):
                raise
            return False
        return True

    def _set_aside(self) -> list[torch.Tensor]:
        """Memory that the first update will take."""
        if self._optimizer.state or self._parallel.world.device.type == "cpu":
            return []
        trained = [one for one in self._parallel.inner.parameters() if one.requires_grad]
        return [torch.empty_like(one) for one in trained for _ in range(_OPTIMIZER_VALUES)]


def describe_memory(device: torch.device, precision: PrecisionConfig, activation: ActivationConfig) -> str:
    """Describe what a microbatch's use of memory depends on, and how much memory there is."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        what = f"{found.name}, {found.total_memory} bytes"
    else:
        what = device.type
    return f"{what}, {precision.dtype}, recomputed: {activation.every}"


def find_batch_norms(model: nn.Module) -> str:
    """Describe the model's batch statistics over microbatches; empty if it has none."""
    names = [name for name, one in model.named_modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
    if not names:
        return ""
    return f". Batch norms ({list_some(names, 1)}) take their statistics over microbatches, whose size they depend on"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device ran out of memory, in the words of torch or of other libraries."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
    )


def _count_refusals(device: torch.device) -> int:
    """Number of allocations that torch's allocator has refused so far."""
    return int(torch.cuda.memory_stats(device)["num_ooms"]) if device.type == "cuda" else 0


@contextmanager
def _kept_as_is(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back, at the end, what a forward and a backward change of a model and of the process."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = BufferCopies(model)
    drawn = torch.get_rng_state(), np.random.get_state(), random.getstate()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        buffers.restore()
        torch.set_rng_state(drawn[0])
        np.random.set_state(drawn[1])
        random.setstate(drawn[2])
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
