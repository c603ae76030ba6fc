"""The iterator over a loader's batches: the beginning and end of a pass, and the batches in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from ..decoding.row_work import BatchT
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..pipeline.delivery_queue import Delivery
    from .run import Run


class BatchIterator(Iterator[BatchT]):
    """The batches from the position to its epoch's end, or until the position moves to another epoch.

    Its epoch is that of its first batch. After an error, ``next`` tries again from the same position.
    """

    def __init__(self, run: Run, loader: object) -> None:
        self._run = run
        self._loader = loader
        self._number = run.begun
        self._at: tuple[int, int] | None = None  # the epoch, and how often it was set, at the last batch
        self._has_ended = False
        self._is_asked = False
        self._left_s = 0.0

    def __next__(self) -> BatchT:
        run, sampler = self._run, self._run.sampler
        run.resources.check_process()
        if self._has_ended:
            raise StopIteration
        if self._number != run.begun:
            raise ConfigError(
                "another pass over this loader has begun, and a loader has one position; keep the newest iterator, or "
                "make one loader per pass"
            )
        if self._at is None:
            run.check_rank()
        elif self._at != (sampler.epoch, sampler.times_set):
            self._end()
        before = sampler.save(), self._at
        if self._is_asked:
            raise ConfigError(
                "next() of a pass was called before the last call had returned, by another thread or by a function "
                "that the loader calls; ask for batches in one thread, and hand them on from there"
            )
        try:
            self._is_asked = True
            run.resources.check_peers()
            run.check_calls()
            item = self._take()
            if item is None:
                self._end()
            if run.resources.log is not None:
                ids = item.ids if item.logged is None else item.logged
                run.resources.log.record(item.epoch, item.start, item.stop, ids, item.dropped, item.left, item.replaced)
            sampler.take(item)
            if run.resources.log is not None and (tail := sampler.tail):
                # Now, since a loop may leave here; its next pass or attempt begins behind the tail.
                run.resources.log.record_drop(item.epoch, sampler.consumed, sampler.consumed + tail)
            self._at = (sampler.epoch, sampler.times_set)
            self._left_s = time.perf_counter()
            batch: BatchT = item.batch
            self._is_asked = False
            return batch
        except BaseException as exc:
            self._is_asked = False
            if self._is_the_end(exc):
                raise
            # After an interrupt, too: a batch taken out of the queue but not handed out is not lost.
            saved, self._at = before
            sampler.restore(saved)
            run.resources.stop_pipeline()
            run.resources.tell_peers(exc)
            if isinstance(exc, StopIteration):
                raise _not_the_end(exc) from exc
            raise

    def _take(self) -> Delivery | None:
        """Take the batch at the position; None where the epoch has ended, which the position then records."""
        run, sampler, is_first = self._run, self._run.sampler, self._at is None
        asked_s = time.perf_counter()
        while True:
            if not is_first and run.running() is None and sampler.upcoming[0] != sampler.epoch:
                sampler.skip_end()  # the pipeline that would have delivered the epoch's end is gone
                return None
            item = run.pipeline().get()
            got_s = time.perf_counter()
            is_end = item.is_end
            if not sampler.follows(item):
                run.resources.stop_pipeline()  # an interrupt came between a move of the position and its end
            elif not is_end:
                break
            else:
                log = run.resources.log
                if item.left is not None and log is not None:
                    log.record(item.epoch, item.start, item.stop, item.ids, item.dropped, item.left)
                elif sampler.epoch == item.epoch and sampler.tail and log is not None:
                    log.record_drop(item.epoch, sampler.consumed, item.stop)
                sampler.take(item)
                if not is_first:  # else it is the end of an epoch that another pass left after its last batch
                    return None
        run.counters.add(batches=1, samples=len(item.ids))
        if is_first:
            run.counters.add(first_batch_s=got_s - asked_s)
        else:
            run.counters.add(consumer_busy_s=asked_s - self._left_s, consumer_wait_s=got_s - asked_s)
        return item

    def _end(self) -> NoReturn:
        self._has_ended = True
        raise StopIteration

    def _is_the_end(self, exc: BaseException) -> bool:
        return self._has_ended and isinstance(exc, StopIteration)


def _not_the_end(ended: StopIteration) -> RuntimeError:
    """Convert a user's StopIteration, as generators do (PEP 479): it would end the loop over a pass unnoticed."""
    error = RuntimeError(
        "transform= or collate= raised StopIteration, which a loop over batches would take for the epoch's end; where "
        "a function calls next(), give it a default, or catch what it raises"
    )
    for note in getattr(ended, "__notes__", ()):
        error.add_note(note)
    return error
