"""The training process's end of a pipeline that runs in the loader's process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ....storage.threads.interruptible import Event
from ...counters import Levels
from ...errors import LoaderClosedError
from ..device import DeviceFeeder

if TYPE_CHECKING:
    import torch

    from ...counters import Counters
    from ..delivery_queue import Delivery
    from ..tuning import PipelineOptions
    from .process import LoaderProcess
    from .requests import Known, Request

_STAGED = 2  # batches on the device ahead of the loop
_LEVELS = frozenset(field.name for field in fields(Levels))


class RemotePipeline:
    """Delivers what a pipeline in ``process``, which gets what is ``known``, makes for ``request``.

    No thread of this process works for it.

    As ``Pipeline`` to those who use it: ``get`` is for the training loop's thread, all else for any.
    """

    def __init__(
        self,
        process: LoaderProcess,
        request: Request,
        known: Known,
        *,
        options: PipelineOptions,
        counters: Counters,
        feeder: DeviceFeeder | None = None,
    ) -> None:
        self._process = process
        self._request, self._known = request, known
        self._counters = counters
        # Half of what batches may take is for those that wait in shared memory.
        half = options.batch_budget_bytes // 2
        self._options, self._most_bytes = replace(options, device=None, batch_budget_bytes=half), half
        self._feeder = feeder
        self._staged: deque[Delivery] = deque()
        self._stopping = Event()
        self._interruption: BaseException | None = None
        self._generation = 0
        self._taken = 0
        self._waits_since: float | None = None
        self._waited_s = 0.0

    def start(self) -> None:
        """Start the process, if it does not run, and the pipeline in it; called once."""
        self._process.start()
        self._generation = self._process.begin(self._request, self._known, self._options, self._most_bytes)

    # -- the training loop's thread -----------------------------------------------------------------------------------

    def get(self) -> Delivery:
        """Get the next batch, ready for use, or an epoch's end. Raises the error at this point of the order."""
        since = time.perf_counter()
        self._waits_since = since
        self._process.write_waits(self._waited_s, since)
        try:
            return self._receive() if self._feeder is None else self._take_staged(self._feeder)
        finally:
            self._waits_since = None
            self._waited_s += time.perf_counter() - since
            self._process.write_waits(self._waited_s, None)

    def _receive(self) -> Delivery:
        delivery: Delivery
        delivery, batch = self._process.receive(self._check)
        self._taken += 1
        return delivery if delivery.is_end else replace(delivery, batch=batch)

    def _take_staged(self, feeder: DeviceFeeder) -> Delivery:
        """Take a batch whose copy to the device was started before, and start those of the batches that are there."""
        self._check()
        while not self._staged or (len(self._staged) < _STAGED and self._process.has_message):
            self._staged.append(self._stage(feeder, self._receive()))
        item = self._staged.popleft()
        return item if item.is_end else replace(item, batch=item.batch.take())

    def _stage(self, feeder: DeviceFeeder, item: Delivery) -> Delivery:
        if item.is_end:
            return item
        started = time.perf_counter()
        staged = feeder.stage(item.batch, self._is_pinned)
        self._counters.add(copy_s=time.perf_counter() - started, copied_batches=1, copied_bytes=item.nbytes)
        return replace(item, batch=staged)

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._process.is_pinned(tensor.data_ptr(), tensor.nbytes)

    def _check(self) -> None:
        if self._interruption is not None:
            raise self._interruption
        if self.is_stopped:
            raise LoaderClosedError("the loader was closed while it waited for a batch")

    # -- any thread ---------------------------------------------------------------------------------------------------

    def interrupt(self, error: BaseException | None) -> None:
        """Raise an error from outside at once, before the batches that wait; None withdraws it."""
        self._interruption = error
        self._process.wake()

    def activity(self) -> dict[str, Any]:
        """Describe what the next batch waits for, and for how long; empty if one is ready."""
        if self._staged or self._process.has_message:
            return {}
        if self._process.is_stopped:
            pid, since = self._process.pid, self._waits_since
            waited_s = 0.0 if since is None else time.perf_counter() - since
            what = f"the loader's process {pid}, which is stopped and which `kill -CONT {pid}` continues"
            return {"waiting_for": what, "since_s": round(waited_s, 1)}
        return dict(self._process.report().activity)

    def levels(self) -> Levels:
        """Measure how full each buffer is now, as the process last reported."""
        self._process.count()
        report = self._process.report()
        known: Mapping[str, Any] = {name: value for name, value in report.levels.items() if name in _LEVELS}
        levels = Levels(**known)
        if report.generation != self._generation:
            return levels
        there = max(0, report.sent - self._taken) + len(self._staged)
        ready = there + levels.ready_batches
        return replace(levels, waiting_batches=there + levels.waiting_batches, ready_batches=ready)

    @property
    def is_stopped(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """Wake who waits for a batch; does not wait."""
        self._stopping.set()
        self._process.wake()

    def close(self) -> None:
        """End the pipeline, and drop what it has made; safe at any time, and more than once."""
        self.stop()
        self._staged.clear()
        if self._generation:
            self._process.end()
            self._generation = 0
        if self._feeder is not None:
            self._feeder.close()
