"""Passes over a loader: where each begins and ends, and what it hands out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from ..decoding.batch_options import BatchT
from ..errors import ConfigError
from ..metrics import Counters
from ..order.plan import Order, Share
from ..pipeline.assembler import Start
from ..pipeline.delivery_queue import Delivery
from ..pipeline.pipeline import Pipeline
from ..pipeline.tuning import PipelineOptions
from ..positions.position import RunPosition
from .resources import Resources


class Passes:
    """The passes over one loader, of which only the newest may go on. Used by the training loop's thread only.

    Mutable state besides the position and the resources: this rank's share, and how many passes have begun.
    """

    def __init__(
        self,
        *,
        position: RunPosition,
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
        self.tune = tune
        self._make_pipeline = make_pipeline

    def begin(self, loader: object) -> Pass[Any]:
        """A pass from the epoch's beginning, or from the state just loaded; it keeps ``loader`` alive."""
        self.resources.check_open()
        if self.position.begin_pass():
            self.resources.stop_pipeline()  # it is ahead in an epoch that begins anew
        self.begun += 1
        return Pass(self, loader)

    def start(self, epoch: int, consumed: int) -> Start:
        """Where a pipeline begins for a position that is the upcoming one, or an epoch's beginning."""
        cursors = self.position.cursors() if consumed else None
        return Start(order=self.position.order, share=self.share, epoch=epoch, position=consumed, cursors=cursors)

    def note_call(self, text: str, upcoming: tuple[int, int] | None = None) -> None:
        """Note a call that every rank must make alike; ``upcoming``: the position before it, if not that of now."""
        if self.resources.calls is not None:
            self.resources.calls.note(text, upcoming or self.position.upcoming, self.begun)

    def check_calls(self) -> None:
        """Raise ConfigError where another rank has called what this one should have called by now."""
        calls = self.resources.calls
        if calls is not None and calls.lacks_one:
            calls.check(self.position.upcoming, self.begun)

    def running(self) -> Pipeline | None:
        """The running pipeline, if there is one."""
        self.resources.check_open()
        pipeline = self.resources.pipeline
        if pipeline is not None and pipeline.is_stopped:  # an interrupt came before it was forgotten
            self.resources.stop_pipeline()
            pipeline = None
        return pipeline

    def pipeline(self) -> Pipeline:
        """The running pipeline, or a new one from the position on."""
        pipeline = self.running()
        if pipeline is None:
            try:
                pipeline = self._start_pipeline()
            finally:
                self.resources.close_if_closed()
        return pipeline  # another thread may have closed the loader meanwhile

    def _start_pipeline(self) -> Pipeline:
        if self.share.world_size > 1:
            self.resources.join_peers()
        workers = self.resources.workers
        if workers is not None:
            workers.start()
        # Held before its threads start: an interrupt at any point leaves nothing that cannot be closed.
        pipeline = self.resources.pipeline = self._make_pipeline(
            options=self.tune(self.position.order),
            start=self.start(self.position.epoch, self.position.consumed),
        )
        pipeline.start()
        return pipeline


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
        self._is_asked = False
        self._left_s = 0.0

    def __next__(self) -> BatchT:
        passes, position = self._passes, self._passes.position
        passes.resources.check_process()
        if self._has_ended:
            raise StopIteration
        if self._number != passes.begun:
            raise ConfigError(
                "another pass over this loader has begun, and a loader has one position; keep the newest iterator, or "
                "make one loader per pass"
            )
        if self._at is None:
            passes.check_rank()
        elif self._at != (position.epoch, position.times_set):
            self._end()
        before = position.save(), self._at
        if self._is_asked:
            raise ConfigError(
                "next() of a pass was called before the last call had returned, by another thread or by a function "
                "that the loader calls; ask for batches in one thread, and hand them on from there"
            )
        try:
            self._is_asked = True
            passes.resources.check_peers()
            passes.check_calls()
            item = self._take()
            if item is None:
                self._end()
            if passes.resources.log is not None:
                ids = item.ids if item.logged is None else item.logged
                passes.resources.log.record(
                    item.epoch, item.start, item.stop, ids, item.dropped, item.left, item.replaced
                )
            position.take(item)
            if passes.resources.log is not None and (tail := position.tail):
                # Now, since a loop may leave here; its next pass or attempt begins behind the tail.
                passes.resources.log.record_drop(item.epoch, position.consumed, position.consumed + tail)
            self._at = (position.epoch, position.times_set)
            self._left_s = time.perf_counter()
            batch: BatchT = item.batch
            self._is_asked = False
            return batch
        except BaseException as exc:
            self._is_asked = False
            if self._is_the_end(exc):
                raise
            # After an interrupt, too: what was taken out of the queue and not handed out is not lost.
            saved, self._at = before
            position.restore(saved)
            passes.resources.stop_pipeline()
            passes.resources.tell_peers(exc)
            if isinstance(exc, StopIteration):
                raise _not_the_end(exc) from exc
            raise

    def _take(self) -> Delivery | None:
        """The batch at the position; None where the epoch has ended, which the position then knows."""
        passes, position, is_first = self._passes, self._passes.position, self._at is None
        asked_s = time.perf_counter()
        while True:
            if not is_first and passes.running() is None and position.upcoming[0] != position.epoch:
                position.skip_end()  # the pipeline that would have told the epoch's end is gone
                return None
            item = passes.pipeline().get()
            got_s = time.perf_counter()
            is_end = item.is_end
            if not position.follows(item):
                passes.resources.stop_pipeline()  # an interrupt came between a move of the position and its end
            elif not is_end:
                break
            else:
                log = passes.resources.log
                if item.left is not None and log is not None:
                    log.record(item.epoch, item.start, item.stop, item.ids, item.dropped, item.left)
                elif position.epoch == item.epoch and position.tail and log is not None:
                    log.record_drop(item.epoch, position.consumed, item.stop)
                position.take(item)
                if not is_first:  # else it is the end of an epoch that another pass left after its last batch
                    return None
        passes.counters.add(batches=1, samples=len(item.ids))
        if is_first:
            passes.counters.add(first_batch_s=got_s - asked_s)
        else:
            passes.counters.add(consumer_busy_s=asked_s - self._left_s, consumer_wait_s=got_s - asked_s)
        return item

    def _end(self) -> NoReturn:
        self._has_ended = True
        raise StopIteration

    def _is_the_end(self, exc: BaseException) -> bool:
        return self._has_ended and isinstance(exc, StopIteration)


def _not_the_end(error: StopIteration) -> RuntimeError:
    """As in a generator (PEP 479): a user's StopIteration would end the loop over a pass, and nobody would know."""
    told = RuntimeError(
        "transform= or collate= raised StopIteration, which a loop over batches would take for the epoch's end; where "
        "a function calls next(), give it a default, or catch what it raises"
    )
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    return told
