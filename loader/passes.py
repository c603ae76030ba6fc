"""Passes over a loader: where each begins and ends, and what it hands out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from .decoding.batch import BatchT
from .errors import ConfigError
from .metrics import Counters
from .order.plan import Order, Share
from .pipeline.pipeline import Pipeline
from .pipeline.tuning import PipelineOptions
from .position import Position
from .resources import Resources


class Passes:
    """The passes over one loader, of which only the newest may go on. Used by the training loop's thread only.

    Mutable state besides the position and the resources: this rank's share, and how many passes have begun.
    """

    def __init__(
        self,
        *,
        position: Position,
        share: Share,
        resources: Resources,
        counters: Counters,
        tune: Callable[[Order], PipelineOptions],
        make_pipeline: Callable[..., Pipeline],
        check_rank: Callable[[], None],
    ) -> None:
        self.position = position
        self.share = share
        self.resources = resources
        self.counters = counters
        self.check_rank = check_rank
        self.begun = 0
        self._tune = tune
        self._make_pipeline = make_pipeline

    def begin(self, loader: object) -> Pass[Any]:
        """A pass from the epoch's beginning, or from the state just loaded; it keeps ``loader`` alive."""
        self.resources.check_open()
        if self.position.begin_pass():
            self.resources.stop_pipeline()  # it is ahead in an epoch that begins anew
        self.begun += 1
        return Pass(self, loader)

    def pipeline(self) -> Pipeline:
        """The running pipeline, or a new one from the position on."""
        self.resources.check_open()
        if self.resources.pipeline is None:
            if self.resources.workers is not None:
                self.resources.workers.start()
            self.resources.pipeline = self._make_pipeline(
                order=self.position.order,
                share=self.share,
                options=self._tune(self.position.order),
                epoch=self.position.epoch,
                position=self.position.consumed,
            )
        return self.resources.pipeline


class Pass(Iterator[BatchT]):
    """The batches from the position to its epoch's end, or until the position moves to another epoch.

    Its epoch is that of its first batch. After an error, ``next`` tries again from the same position.
    """

    def __init__(self, passes: Passes, loader: object) -> None:
        self._passes = passes
        self._loader = loader
        self._number = passes.begun
        self._at: tuple[int, int] | None = None  # the epoch, and how often it was set, at the last batch
        self._has_ended = False
        self._left_s = 0.0

    def __next__(self) -> BatchT:
        passes, position = self._passes, self._passes.position
        if self._has_ended:
            raise StopIteration
        if self._number != passes.begun:
            raise ConfigError(
                "another pass over this loader has begun, and a loader has one position; keep the newest iterator, or "
                "make one loader per pass"
            )
        is_first = self._at is None
        if not is_first and self._at != (position.epoch, position.times_set):
            self._end()
        if is_first:
            passes.check_rank()
        while True:
            pipeline = passes.pipeline()
            asked_s = time.perf_counter()
            try:
                item = pipeline.get()
            except BaseException:  # an interrupt, too: a batch taken out of the queue is not lost
                passes.resources.stop_pipeline()
                raise
            got_s = time.perf_counter()
            if item.batch is not None:
                break
            position.advance(item.epoch + 1, 0)
            if not is_first:  # else it is the end of an epoch that another pass left after its last batch
                self._end()
        passes.counters.add(batches=1, samples=len(item.ids))
        if is_first:
            passes.counters.add(first_batch_s=got_s - asked_s)
        else:
            passes.counters.add(consumer_wait_s=got_s - asked_s, consumer_busy_s=asked_s - self._left_s)
        position.advance(item.epoch, item.stop)
        self._at = (position.epoch, position.times_set)
        if passes.resources.log is not None:
            passes.resources.log.record(item.epoch, item.start, item.stop, item.ids)
        self._left_s = time.perf_counter()
        batch: BatchT = item.batch
        return batch

    def _end(self) -> None:
        self._has_ended = True
        raise StopIteration
