"""Clock of a rank's own computing in a step: up to its last gradient, without waits for other ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_KEPT_SPANS = 256


class ComputeClock:
    """Adds up the time of forwards and backwards on one device; on CUDA by events, which are read late.

    Mutable state: the seconds so far, the spans whose events are not read yet, and the marks of the span in progress.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._spans: list[tuple[Any, Any, int]] = []  # from, to, and +1, or -1 for waiting
        self._is_open = False
        self._last: Any = None  # the last gradient of the span in progress
        self._waits: list[tuple[Any, Any]] = []
        self._waits_before_last = 0

    def listen(self, model: nn.Module) -> None:
        """Hear of each gradient of ``model``, which may be under DDP, and of DDP's wait for rank 0's buffers."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]
        if isinstance(model, DistributedDataParallel) and any(True for _ in model.buffers()):
            began: list[Any] = []

            def enter(module: nn.Module, inputs: Any) -> None:
                began[:] = [self._mark()]

            def leave(module: nn.Module, inputs: Any) -> None:
                if self._is_open and began:
                    self._waits.append((began.pop(), self._mark()))

            model.register_forward_pre_hook(enter)
            # DDP sends buffers between its own hooks and those of the model inside.
            model.module.register_forward_pre_hook(torch._dynamo.disable(leave), prepend=True)  # type: ignore[no-untyped-call]

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count this forward, or this backward up to the last gradient that arrives in it."""
        self._last, self._waits, self._waits_before_last, self._is_open = None, [], 0, True
        begin = self._mark()
        try:
            yield
        finally:
            self._is_open = False
        if self._last is None:
            self._last, self._waits_before_last = self._mark(), len(self._waits)
        self._spans.append((begin, self._last, 1))
        self._spans += [(start, end, -1) for start, end in self._waits[: self._waits_before_last]]
        if len(self._spans) > _KEPT_SPANS:
            self._read(wait=False)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave out what happens in this: an exchange inside backward, as some gradient compression has it."""
        begin = self._mark()
        yield
        if self._is_open:
            self._waits.append((begin, self._mark()))

    def take(self) -> float:
        """The seconds since the last call; on CUDA waits for the device."""
        self._read(wait=True)
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        if not self._is_open:
            return
        if self._on_cuda and self._last is not None:
            self._last.record()
        else:
            self._last = self._mark()
        self._waits_before_last = len(self._waits)

    def _mark(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _read(self, *, wait: bool) -> None:
        left = []
        for begin, end, sign in self._spans:
            if not self._on_cuda:
                self._seconds += sign * (end - begin)
            elif wait or end.query():
                end.synchronize()
                self._seconds += sign * begin.elapsed_time(end) / 1e3
            else:
                left.append((begin, end, sign))
        self._spans = left
