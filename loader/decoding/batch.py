"""From gathered rows to batches: decoded by threads or processes into their slots, transformed, collated.

A batch is a dict of field name to tensor, or to a list where values have no common shape.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

import numpy as np
import torch

from ...storage.threads.daemon_pool import DaemonPool, PoolClosedError
from ...storage.threads.interruptible import Event, Future
from ..errors import LoaderClosedError
from .byte_views import ByteViews
from .row_job import Pace, RowCrew, RowJob, collate_samples
from .row_work import IDS, VALID, Batch, BatchOptions
from .rows import Rows, complete_all

if TYPE_CHECKING:
    from ..columns import AnyArray, IntArray
    from ..counters import Counters
    from ..dataset.manifest import Manifest
    from ..reading.bad.samples import BadSamples
    from .batch_memory import BatchMemory
    from .decode import FieldDecoders
    from .replace import Replacer
    from .row_work import Sample
    from .workers.images import ImageProcesses
    from .workers.pool import WorkerPool


T = TypeVar("T")


class Call(Future[T]):
    """A call and its result. Any thread may ask. Mutable state: the function, until a thread takes it."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self._not_begun = [function]
        self._is_submitted = False

    def begin(self, pool: DaemonPool) -> None:
        """Have a thread of the pool make it soon; does nothing if asked before. Called by one thread."""
        if not self._is_submitted:
            self._is_submitted = True
            # PoolClosedError: ``cancel`` wakes the waiting thread; if no thread can start, the waiting one makes it.
            with suppress(RuntimeError):
                pool.submit(self._make_once)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result, or make it if no thread has begun. Raises the call's error, or CancelledError."""
        self._make_once()
        return super().result(timeout)

    def cancel(self) -> bool:
        """Cancel the call; returns False if a thread has begun it."""
        if self.take() is None:
            return self.cancelled()
        super().cancel()
        self.set_running_or_notify_cancel()  # so that those who wait for several hear of it
        return True

    def take(self) -> Callable[[], T] | None:
        """Take the function: only the first caller gets it, and must ``make`` its result."""
        try:
            return self._not_begun.pop()
        except IndexError:
            return None

    def _make_once(self) -> None:
        function = self.take()
        if function is not None:
            self.make(function)

    def make(self, function: Callable[[], T]) -> None:
        """Run ``function`` and keep its result; called by the thread that took it. Also raises an interrupt."""
        try:
            result = function()
        except BaseException as exc:
            self.set_exception(exc)
            if not isinstance(exc, Exception):  # else who makes the call of another would not be stopped
                raise
        else:
            self.set_result(result)


def started(job: RowJob) -> Future[RowJob]:
    """Make a job whose rows lie in no chunk."""
    future: Future[RowJob] = Future()
    future.set_result(job)
    return future


def start_on_call(crew: RowCrew, parts: Sequence[Rows], epoch: int) -> list[Call[RowJob]]:
    """Make jobs of successive batches: the rows of all are copied when one is asked for, or its call begun.

    Objects are made under Python's lock, which the training loop needs, too: a thread helps only while the loop is
    elsewhere. It is interrupted nowhere but in the loop's thread, which then closes the pipeline: nobody waits for the
    jobs that are left.
    """
    waiting: list[tuple[ref[Call[RowJob]], Rows]] = []  # no cycle: jobs never asked for release their files at once

    def copy(asked: Rows) -> RowJob:
        since = time.perf_counter()
        others = [(call, rows) for of_call, rows in waiting if (call := of_call()) is not None and call.take()]
        try:
            copied = complete_all([asked, *(rows for _, rows in others)], crew.memory)
            first, *jobs = [RowJob(crew, rows, epoch) for rows in copied]
        except Exception:  # noqa: BLE001 - each job finds out by itself whether it is its own
            for call, rows in others:
                call.make(partial(copy_alone, rows))
            return copy_alone(asked)
        for (call, _), job in zip(others, jobs, strict=True):
            call.set_result(job)
        crew.counters.add(assemble_s=time.perf_counter() - since)
        return first

    def copy_alone(rows: Rows) -> RowJob:
        return RowJob(crew, rows.complete(crew.memory), epoch)

    calls = [Call(partial(copy, rows)) for rows in parts]
    waiting += zip(map(ref, calls), parts, strict=True)
    return calls


def start_together(crew: RowCrew, late: Sequence[tuple[Rows, Future[RowJob]]], epoch: int) -> None:
    """Copy the rows of jobs that are not cancelled, none if the crew is stopped; on a thread of the pool."""
    if crew.is_stopped():
        for _, job in late:
            job.cancel()
    _start(crew, [(rows, job) for rows, job in late if job.set_running_or_notify_cancel()], epoch)


def _start(crew: RowCrew, late: Sequence[tuple[Rows, Future[RowJob]]], epoch: int) -> None:
    """Start job by job, where copying all together fails."""
    since = time.perf_counter()
    try:
        copied = complete_all([rows for rows, _ in late], crew.memory)
    except BaseException as error:  # noqa: BLE001 - raised where the job is asked for
        if len(late) == 1:
            late[0][1].set_exception(error)
            return
        for one in late:
            _start(crew, [one], epoch)
        return
    crew.counters.add(decode_s=time.perf_counter() - since)
    for (_, job), rows in zip(late, copied, strict=True):
        try:
            job.set_result(RowJob(crew, rows, epoch))
        except BaseException as error:  # noqa: BLE001 - as above
            job.set_exception(error)


_STORED = (torch.uint16, torch.uint32)


@dataclass(frozen=True, slots=True)
class Stored:
    """Unsigned numbers of a field as they are stored; the device that they go to widens them to int64."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class BatchMaker:
    """Makes batches of gathered rows: has them decoded and transformed, then collates them.

    The threads of ``pool`` do this work, or processes: ``workers``, or of images alone ``images``. ``replacer``
    replaces bad samples; where they are dropped, ``bad`` counts them. ``seed`` is that of the random numbers of rows of
    one source of a mixture; None: that of the options. ``random_keys`` gives those of rows of several sources, as of a
    ``RowCrew``. Rows that are copied late, and images of one size, go into ``memory``.
    """

    options: BatchOptions
    decoders: FieldDecoders
    manifest: Manifest
    pool: DaemonPool
    workers: WorkerPool | None
    counters: Counters
    stopping: Event
    replacer: Replacer | None = None
    bad: BadSamples | None = None
    seed: int | None = None
    random_keys: Callable[[Rows], AnyArray] | None = None
    memory: BatchMemory | None = None
    images: ImageProcesses | None = None
    pace: Pace = field(default_factory=Pace)

    @property
    def parts(self) -> int:
        """Number of threads or processes that work at once."""
        return (self.pool.max_threads or 1) if self.workers is None else self.workers.processes

    @property
    def processes(self) -> int:
        """Number of worker processes that decode now."""
        if self.images is not None:
            return self.images.running
        return 0 if self.workers is None else self.workers.processes

    @property
    def stopped(self) -> list[int]:
        """The ids of worker processes that are suspended by a signal."""
        workers = self.workers if self.images is None else self.images.pool
        return [] if workers is None else workers.stopped

    def start(
        self, rows: Rows, epoch: int, num_rows: int, num_valid: int, keys: AnyArray | None = None
    ) -> PendingBatch:
        """Start a batch of the first ``num_rows`` of ``rows``, which are copied; the first ``num_valid`` count.

        A batch without rows is made from one row, for its fields, types and shapes, and handed out empty. ``keys`` are
        those of a ``RowTask``.
        """
        return PendingBatch(self, rows, started(RowJob(self.crew, rows, epoch, keys)), num_rows, num_valid)

    def start_together(
        self, steps: Sequence[tuple[Rows, int, int]], epoch: int
    ) -> tuple[list[PendingBatch], Future[None] | None]:
        """Start a batch of each step's rows, ``num_rows`` and ``num_valid``; the future is that of ``start_jobs``."""
        jobs, copied = self.start_jobs([rows for rows, _, _ in steps], epoch)
        return [PendingBatch(self, rows, job, *sizes) for (rows, *sizes), job in zip(steps, jobs, strict=True)], copied

    def start_jobs(self, parts: Sequence[Rows], epoch: int) -> tuple[list[Future[RowJob]], Future[None] | None]:
        """Start to copy the rows of batches that follow each other, to decode and to transform them.

        Where one thread copies some batches' rows, the future is done once these need their chunks no longer.
        """
        crew = self.crew
        jobs: list[Future[RowJob]] = []
        together: list[tuple[Rows, Future[RowJob]]] = []
        on_call = iter(start_on_call(crew, [rows for rows in parts if self._waits(rows)], epoch))
        for rows in parts:
            if not rows.late:
                job = started(RowJob(crew, rows, epoch))
            elif self._waits(rows):
                job = next(on_call)
            else:
                job = Future()
                together.append((rows, job))
            jobs.append(job)
        return jobs, self.pool.submit(start_together, crew, together, epoch) if together else None

    def work(self, rows: Rows, epoch: int, keys: AnyArray | None = None) -> RowJob:
        """Start decoding and transforming rows that are not a batch yet."""
        if keys is None and self.seed is not None:
            keys = np.empty((len(rows.ids), 3), np.uint64)
            keys[:] = np.array([self.seed, epoch, 0], np.uint64)
            keys[:, 2] = rows.ids
        return RowJob(self.crew, rows, epoch, keys)

    def _draws(self) -> bool:
        """Return whether rows may need random numbers."""
        return self.options.transform is not None or any(self.decoders.settled.values())

    def _waits(self, rows: Rows) -> bool:
        """Return whether rows are copied only when their batch is due."""
        return bool(rows.late) and not rows.keeps_chunks and not self.works_on(rows)

    def works_on(self, rows: Rows) -> bool:
        """Return whether copied rows need more work before they are handed out."""
        options, settled = self.options, self.decoders.settled
        has_work = options.transform is not None or options.collate is not None or bool(options.avoided)
        return has_work or any(settled.get(name) is not None for name in rows.fields)

    @property
    def crew(self) -> RowCrew:
        """The crew that works on rows."""
        return RowCrew(
            work=self.options.work,
            decoders=self.decoders,
            manifest=self.manifest,
            pool=self.pool,
            workers=self.workers,
            images=self.images,
            parts=self.parts,
            pace=self.pace,
            counters=self.counters,
            is_stopped=self.stopping.is_set,
            bad=self.bad,
            replacer=self.replacer,
            avoided=self.options.avoided,
            memory=self.memory,
            random_keys=self.random_keys,
            draws=self._draws(),
        )

    def join(self, samples: list[Sample], ids: IntArray, num_rows: int, num_valid: int) -> JoinedBatch:
        """Make a batch of decoded and transformed samples; the numbers are as in ``start``."""
        return JoinedBatch(self, samples, ids, num_rows, num_valid)

    def extras(self, ids: IntArray, num_valid: int) -> dict[str, torch.Tensor]:
        """Make the fields that the loader adds to samples with these ids, (n,); the first ``num_valid`` count."""
        extras = {}
        if self.options.with_ids:
            columns = {IDS: ids} if self.options.identify is None else self.options.identify(ids)
            extras.update({name: torch.from_numpy(column.copy()) for name, column in columns.items()})
        if self.options.pad:
            extras[VALID] = torch.arange(len(ids)) < num_valid
        return extras

    def complete(self, batch: dict[str, Any], ids: IntArray, num_rows: int, num_valid: int) -> dict[str, Any]:
        """Add the loader's own fields to a batch of fields, cut it to its rows, and finish it."""
        batch = {**batch, **self.extras(ids, num_valid)}
        whole = batch if num_rows == len(ids) else {name: values[:num_rows] for name, values in batch.items()}
        finished: dict[str, Any] = self.finish(whole, num_rows)
        for name in self.decoders.stored:
            if isinstance(values := finished.get(name), torch.Tensor) and values.dtype in _STORED:
                finished[name] = Stored(values)
        return finished

    def finish(self, batch: Batch, num_rows: int) -> Batch:
        """Pass a batch through the user's ``finish``, if there is one."""
        return batch if self.options.finish is None else self.options.finish(batch, num_rows)


class UnfinishedBatch(ABC):
    """A batch in the making."""

    __slots__ = ()

    @abstractmethod
    def result(self) -> Batch:
        """Wait for the batch; called once, by one thread.

        Raises what decoding, transform or collation raised, or LoaderClosedError if cancelled.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Cancel it: the batch is no longer wanted."""

    @property
    def is_on_call(self) -> bool:
        """Return whether the batch is made only when asked for, or by ``begin``."""
        return False

    @property
    def is_copied(self) -> bool:
        """Return whether nothing is left to do but to copy rows from chunks in memory, which takes little time."""
        return False

    def begin(self) -> None:  # noqa: B027 - most have begun when they are made
        """Begin to make it, as it is wanted soon; called by one thread."""

    @property
    def is_done(self) -> bool:
        """Return whether all but collation is done; any thread may ask."""
        return True

    @property
    def delivered(self) -> IntArray | None:
        """(rows,) the sample ids of the rows that count, once there is a result; None where they are those planned."""
        return None


class PendingBatch(UnfinishedBatch):
    """A batch of rows that are being decoded and transformed, or copied before that."""

    def __init__(self, maker: BatchMaker, rows: Rows, job: Future[RowJob], num_rows: int, num_valid: int) -> None:
        self._maker = maker
        self._job = job
        self._num_rows = num_rows
        self._num_valid = num_valid
        self._planned_ids = rows.planned_ids
        self._ids = rows.ids  # of what is delivered
        self._is_copied = rows.keeps_chunks and not maker.works_on(rows)

    @property
    def is_on_call(self) -> bool:
        return isinstance(self._job, Call)

    @property
    def is_copied(self) -> bool:
        return self._is_copied

    def begin(self) -> None:
        if isinstance(self._job, Call):
            self._job.begin(self._maker.pool)

    @property
    def delivered(self) -> IntArray | None:
        return None if self._ids is self._planned_ids else self._ids[: self._num_valid]

    def result(self) -> Batch:
        job = wait_for_rows(self._job)
        job.finish()
        self._ids = job.ids
        options = self._maker.options
        if options.transform is None and options.collate is None:
            return self._maker.complete(job.fields(), self._ids, self._num_rows, self._num_valid)
        samples = job.all_samples()
        return self._maker.join(samples, self._ids, self._num_rows, self._num_valid).result()

    def cancel(self) -> None:
        cancel_rows(self._job)

    @property
    def is_done(self) -> bool:
        return are_rows_done(self._job)


def wait_for_rows(job: Future[RowJob]) -> RowJob:
    """Wait until rows are copied; return the work on them. Raises LoaderClosedError if they never will be."""
    try:
        return job.result()
    except (CancelledError, PoolClosedError) as exc:
        raise LoaderClosedError("the loader was closed while a batch was being copied") from exc


def cancel_rows(job: Future[RowJob]) -> None:
    """Stop copying rows, or working on them."""
    if not job.cancel() and (begun := _begun(job)) is not None:
        begun.cancel()


def are_rows_done(job: Future[RowJob]) -> bool:
    """Return whether rows are done, except work left until their batch is asked for."""
    return isinstance(job, Call) or ((begun := _begun(job)) is not None and begun.is_done)


def _begun(job: Future[RowJob]) -> RowJob | None:
    return job.result() if job.done() and not job.cancelled() and job.exception() is None else None


@dataclass(frozen=True, slots=True)
class JoinedBatch(UnfinishedBatch):
    """A batch of samples that only need to be collated: the first ``num_rows``, of which ``num_valid`` count."""

    maker: BatchMaker
    samples: list[Sample]
    ids: IntArray
    num_rows: int
    num_valid: int

    def result(self) -> Batch:
        maker = self.maker
        if maker.options.collate is None:
            batch = collate_samples(self.samples)
            if maker.decoders.raw == "view":
                batch = {name: _gather_views(of_field) for name, of_field in batch.items()}
            return maker.complete(batch, self.ids, self.num_rows, self.num_valid)
        for name, extra in maker.extras(self.ids, self.num_valid).items():
            for sample, value in zip(self.samples, extra.tolist(), strict=True):
                sample[name] = value
        return maker.finish(maker.options.collate(self.samples[: self.num_rows]), self.num_rows)

    def cancel(self) -> None:
        pass


def _gather_views(values: Any) -> Any:
    """Join a field's views into one value again, where a transform left them as they were."""
    kinds = set(map(type, values)) if isinstance(values, list) else set()
    are_views = memoryview in kinds and kinds <= {memoryview, type(None)}
    return ByteViews(values) if are_views and all(v is None or _is_plain(v) for v in values) else values


def _is_plain(view: memoryview) -> bool:
    """Return whether a view is contiguous bytes: a transform may also leave every second one, or numbers."""
    return view.format == "B" and view.ndim == 1 and view.c_contiguous
