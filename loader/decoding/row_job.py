"""Rows that are being decoded and transformed, in parts, by the threads of a pool or by worker processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..columns import AnyArray, IntArray, Ragged
from ..errors import LoaderClosedError
from .batch_values import BatchValues
from .byte_views import ByteViews
from .collate import collate_values, images_to_tensor
from .decode import FieldDecoders, is_channels_first
from .pace import PROCESSES_LEAST_S, THREADS_LEAST_S, Pace
from .row_errors import explain_row_error
from .row_work import ResultValues, RowError, RowResults, RowTask, RowWork, Sample, channels_first

if TYPE_CHECKING:
    from ...storage.threads.daemon_pool import DaemonPool
    from ..dataset.manifest import Manifest
    from ..metrics import Counters
    from ..reading.bad.samples import BadSamples
    from .batch_memory import BatchMemory
    from .replace import Replacer
    from .rows import Rows
    from .workers.images import ImageProcesses
    from .workers.pool import WorkerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCrew:
    """The workers that do ``work`` on rows: ``pool``'s threads, ``workers``, or ``images``, about ``parts`` at once.

    Where bad samples are dropped, ``bad`` counts them; where others replace them, ``replacer`` does. ``avoided`` ids
    are bad without being tried. Slots of a batch lie in ``memory``. Where not all rows are of one source,
    ``random_keys`` makes the ``keys`` of their ``RowTask``, which they need if the work ``draws``.
    """

    work: RowWork
    decoders: FieldDecoders
    manifest: Manifest
    pool: DaemonPool
    workers: WorkerPool | None
    images: ImageProcesses | None
    parts: int
    pace: Pace
    counters: Counters
    is_stopped: Callable[[], bool]
    bad: BadSamples | None
    replacer: Replacer | None
    avoided: frozenset[int]
    memory: BatchMemory | None
    random_keys: Callable[[Rows], AnyArray] | None = None
    draws: bool = False


class RowJob:
    """Rows that are being decoded and transformed, by the threads of the pool or by worker processes.

    ``ids`` (n,) int64 are those of what is there after ``finish``, where others replace bad samples.
    """

    def __init__(self, crew: RowCrew, rows: Rows, epoch: int, keys: AnyArray | None = None) -> None:
        if keys is None and crew.draws and crew.random_keys is not None:
            keys = crew.random_keys(rows)
        self._crew = crew
        self.rows = rows
        self.ids: IntArray = rows.ids
        settled = crew.decoders.settled
        encoded = {
            name: decoder
            for name, values in rows.fields.items()
            if isinstance(values, list) and (decoder := settled.get(name)) is not None
        }
        avoided = crew.avoided.intersection(rows.ids.tolist()) if crew.avoided else crew.avoided
        self.task = RowTask(epoch, 0, rows.ids, rows.fields, encoded, keys, avoided)
        self._work = crew.work
        self._lock = threading.Lock()
        self._results: RowResults | None = None
        self._rows_left = len(rows.ids)  # that some thread has not worked on yet without an error
        self._futures: list[Future[None]] = []
        if encoded or crew.work.transform is not None or avoided:
            submit, parts, least_s = self._submit_to_threads, crew.parts, THREADS_LEAST_S
            if crew.workers is not None:
                submit, least_s = self._submit_to_workers, PROCESSES_LEAST_S
            elif crew.images is not None and crew.images.takes(self.task, crew.work):
                submit, parts, least_s = self._submit_images, crew.images.pool.processes, PROCESSES_LEAST_S
            count = len(rows.ids)
            size = crew.pace.part_rows(count, parts, least_s)
            self._futures = [submit(start, min(start + size, count)) for start in range(0, count, size)]

    @property
    def results(self) -> RowResults:
        """Get the room for the results, with those that are there; any thread may ask.

        It is made when it is first asked for: rows that wait for a thread have none, so that fewer batches take memory,
        and what the training loop is done with is used again sooner.
        """
        with self._lock:
            if self._results is None:
                self._results = self._work.allocate(self.task, self._crew.memory)
            return self._results

    def _submit_to_threads(self, start: int, stop: int) -> Future[None]:
        return self._crew.pool.submit(self._run, start, stop)

    def _submit_to_workers(self, start: int, stop: int) -> Future[None]:
        assert self._crew.workers is not None
        task = self.task.cut(start, stop, with_plain=self._work.transform is not None)
        return self._crew.workers.submit(task, partial(self._place, start), self._crew.is_stopped)

    def _submit_images(self, start: int, stop: int) -> Future[None]:
        assert self._crew.images is not None
        task, place = self.task.cut(start, stop, with_plain=False), partial(self._place, start)
        again = partial(self._submit_to_threads, start, stop)
        return self._crew.images.submit(task, place, self._crew.is_stopped, again)

    def _run(self, start: int, stop: int) -> None:
        """Work on some of the rows; on a thread of the pool."""
        started, cpu_s = time.perf_counter(), time.thread_time()
        try:
            results = self.results
            self._work.run(self.task, results, start, stop, self._crew.is_stopped)
            cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - started
            self._crew.pace.note(stop - start, cpu_s, wall_s, self._crew.parts)
            is_joint = any(isinstance(results.values[name], BatchValues) for name in self.task.encoded)
            if is_joint and self._is_last(stop - start):
                self._work.finish(self.task, results, self._crew.is_stopped)
        finally:
            self._crew.counters.add(decode_s=time.perf_counter() - started, decoded_rows=stop - start)

    def _is_last(self, rows: int) -> bool:
        """Return whether all others are done once these rows are; never where some failed."""
        with self._lock:
            self._rows_left -= rows
            return not self._rows_left

    def _place(self, start: int, results: RowResults, busy_s: float) -> None:
        """Put a process's results into their places; where a row failed, those of the rows before it."""
        own, rows = self.results, len(results.samples)
        for name in results.values:
            of_field: Any = own.values[name]
            found: Any = results.values[name]
            rows = len(found)
            of_field[start : start + rows] = found
        own.samples[start : start + len(results.samples)] = results.samples
        own.failed.extend(results.failed)
        if rows:
            self._crew.pace.note(rows, busy_s, busy_s, self._crew.parts)
        self._crew.counters.add(decode_s=busy_s, decoded_rows=rows)

    def wait(self) -> RowError | None:
        """Wait for all rows; return the error of the first that failed, in the order of rows, or None.

        Raises:
            LoaderClosedError: the pipeline is stopped.
        """
        try:
            for future in self._futures:
                future.result()
        except RowError as exc:
            return exc
        except CancelledError as exc:
            raise LoaderClosedError("the loader was closed while a batch was being decoded") from exc
        return None

    def explain(self, failed: RowError) -> Exception:
        """Make the error that users see for a row's error."""
        return explain_row_error(failed, self.rows, self._crew.manifest)

    def samples(self) -> tuple[list[Sample | None], Exception | None]:
        """Get the transformed samples, None for those dropped or bad, up to the first failed row; and its error."""
        failed = self.wait()
        samples: list[Sample | None] = list(self.results.samples)
        if self._work.transform is None:
            samples = [self.task.sample(self.results.values, row) for row in range(len(self.rows.ids))]
        for bad in self.results.failed:
            samples[bad.row] = None
        if self._crew.bad is not None:
            found = [bad for bad in self.results.failed if failed is None or bad.row < failed.row]
            from .replace import tell_bad

            try:
                tell_bad(found, self.rows, self.task.epoch, self._crew.manifest, self._crew.bad)
            except RowError as too_many:
                return samples[: too_many.row], too_many.cause
        return (samples, None) if failed is None else (samples[: failed.row], self.explain(failed))

    def finish(self) -> None:
        """Wait until all rows are done, and replace bad ones. Called once.

        Raises:
            What decoding or transform raised of the first that failed.
            DatasetError: more samples are bad than may be, or nothing is found that could replace one.
        """
        failed = self.wait()
        if failed is not None:
            raise self.explain(failed)
        if self._results is not None and self._results.failed:
            crew = self._crew
            assert crew.replacer is not None
            keys = self.task.keys
            if keys is None and crew.random_keys is not None:
                keys = crew.random_keys(self.rows)
            self.ids = crew.replacer.replace(self.task, self.rows, self._results, crew.decoders, self._work, keys)

    def fields(self) -> dict[str, Any]:
        """Get the values of each field, one a row, as batches have them; after ``finish``."""
        images = self._images
        return {n: _collate(of_field, is_image=n in images) for n, of_field in self.results.values.items()}

    def columns(self) -> dict[str, Any]:
        """Get the values as ``fields`` does, for a batch that also has other rows: non-arrays stay as in samples."""
        images = self._images
        return {
            n: _in_layout(of_field, is_image=n in images)
            if isinstance(of_field, list)
            else _collate(of_field, is_image=n in images)
            for n, of_field in self.results.values.items()
        }

    @property
    def _images(self) -> set[str]:
        return {name for name, decoder in self.task.encoded.items() if is_channels_first(decoder)}

    def all_samples(self) -> list[Any]:
        """Get all rows as samples, transformed or not; after ``finish``."""
        rows = range(len(self.rows.ids))
        return self.results.samples or [self.task.sample(self.results.values, row) for row in rows]

    @property
    def nbytes(self) -> int:
        """Estimate the bytes of the rows and of their decoded values."""
        return self.rows.count_bytes(self._crew.decoders.settled)

    @property
    def is_done(self) -> bool:
        """Return whether all rows are decoded and transformed; any thread may ask."""
        return all(future.done() for future in self._futures)

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()


def _in_layout(values: list[Any], *, is_image: bool) -> list[Any]:
    return list(map(channels_first, values)) if is_image else values


def _collate(values: ResultValues, *, is_image: bool) -> Any:
    if isinstance(values, np.ndarray):  # first: a batch may have hundreds
        return images_to_tensor(values) if is_image else torch.from_numpy(values)
    if isinstance(values, ByteViews):
        return values
    if isinstance(values, BatchValues):
        return values.tensor().movedim(-1, -3) if is_image else values.tensor()
    if isinstance(values, Ragged):
        return list(map(torch.from_numpy, values))
    return collate_values(values, is_image=is_image)
