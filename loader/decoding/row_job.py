"""Rows that are being decoded and transformed, in parts, by the threads of a pool or by worker processes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..columns import AnyArray, IntArray, Ragged, float_holds
from ..errors import LoaderClosedError
from .byte_views import ByteViews
from .decode import FieldDecoders, is_channels_first
from .row_work import ResultValues, RowError, RowResults, RowTask, RowWork, Sample, channels_first
from .rows import explain_row_error
from .values import BatchValues

if TYPE_CHECKING:
    from ...storage.threads.daemon_pool import DaemonPool
    from ..counters import Counters
    from ..dataset.manifest import Manifest
    from ..reading.bad.samples import BadSamples
    from .batch_memory import BatchMemory
    from .replace import Replacer
    from .rows import Rows
    from .workers.images import ImageProcesses
    from .workers.pool import WorkerPool


# The overhead of a part is about a tenth: a thread's future and turns of the GIL, or a process's two messages.
THREADS_LEAST_S, PROCESSES_LEAST_S = 3e-4, 2e-3
_JOINT_PARTS = 1  # of rows that a device decodes: threads take turns to prepare them
_SMOOTHING = 0.2
_WAITS = 3.0  # times as long as all threads would wait for one another: then rows wait for something else


class Pace:
    """The processor time that rows took lately, or, of rows that wait for something else than each other, all of it.

    State: seconds a row, None before the first. Threads may call any method; of two that note at once one is lost.
    """

    def __init__(self) -> None:
        self.row_s: float | None = None

    def note(self, rows: int, cpu_s: float, wall_s: float, threads: int) -> None:
        """Note the time that rows took on one of some threads, or processes."""
        took = (wall_s if wall_s > _WAITS * threads * cpu_s else cpu_s) / rows
        known = self.row_s
        self.row_s = took if known is None else known + _SMOOTHING * (took - known)

    def part_rows(self, count: int, parts: int, least_s: float) -> int:
        """Choose the rows of each part of ``count``, for ``parts`` that work at once: two for each."""
        even = -(-count // (2 * parts))
        if not self.row_s:
            return max(1, even)
        return max(1, even, math.ceil(min(count, least_s / self.row_s)))


_LISTED = {bytes, str}  # values that no tensor holds
_NUMBERS = {bool, int, float}
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1


def collate_samples(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Samples to a batch: each field by ``collate_values``. A field that some samples lack is a list."""
    fields = dict.fromkeys(field for sample in samples for field in sample)
    return {field: collate_values([sample.get(field) for sample in samples]) for field in fields}


def collate_values(values: Sequence[Any], *, is_image: bool = False) -> Any:
    """Collate the B values of one field to a tensor, or to a list if they cannot be one.

    - arrays, tensors and numpy scalars of one shape and dtype: (B, *shape) of that dtype; arrays (c, h, w) whose memory
      is in the order (h, w, c) stay in it
    - bool: (B,) bool; int: (B,) int64; float, also mixed with int: (B,) float64, as torch's default_collate
    - arrays, tensors, numpy scalars and Python's numbers together: as if all were tensors, of these dtypes
    - arrays and tensors of different shapes or dtypes: a list of tensors
    - anything else (str, bytes, dict, list, None, mixtures, ints beyond 64 bits or, among floats, those that float64
      does not give back): the list unchanged

    With ``is_image`` the arrays are (h, w, c), and come out as (B, c, h, w) or a list of (c, h, w), without a copy:
    their memory format is channels_last.
    """
    if not values:
        return []
    kinds = set(map(type, values))
    if kinds <= _LISTED:
        return list(values)
    if kinds == {bool}:
        return torch.tensor(values, dtype=torch.bool)
    if kinds == {int} and min(values) >= _INT64_MIN and max(values) <= _INT64_MAX:
        return torch.tensor(values, dtype=torch.int64)
    if float in kinds and kinds <= {int, float}:
        are_held = all(float_holds(value) for value in values if type(value) is int)
        return torch.tensor(values, dtype=torch.float64) if are_held else list(values)
    if all(isinstance(value, np.ndarray | np.generic) for value in values):
        return _collate_arrays([np.asarray(value) for value in values], is_image)
    if all(isinstance(value, torch.Tensor) for value in values):
        return torch.stack(list(values)) if _are_alike(values) else list(values)
    return _collate_mixed(values, kinds)


def images_to_tensor(pixels: AnyArray) -> torch.Tensor:
    """View (..., h, w, c) pixels as a (..., c, h, w) tensor: a batch of four axes is channels_last."""
    return torch.from_numpy(pixels).movedim(-1, -3)


def _collate_mixed(values: Sequence[Any], kinds: set[type]) -> Any:
    """Values of several types: a tensor, if each by itself would be a part of it. Where each comes from decides what it
    is, and what else a batch has, whether they come together."""
    if all(kind in _NUMBERS or issubclass(kind, np.generic) for kind in kinds):
        return _collate_numbers(values, kinds)
    if not all(kind in _NUMBERS or issubclass(kind, np.ndarray | np.generic | torch.Tensor) for kind in kinds):
        return list(values)
    try:
        tensors = [
            value if isinstance(value, torch.Tensor) else _to_tensor(np.asarray(value), False) for value in values
        ]
    except TypeError:  # a dtype that torch lacks, as numpy's of ints beyond 64 bits
        return list(values)
    if _are_alike(tensors):
        return torch.stack(tensors)
    return tensors if kinds.isdisjoint(_NUMBERS) else list(values)


def _collate_numbers(values: Sequence[Any], kinds: set[type]) -> Any:
    """Numbers of Python's and numpy's: of one dtype, to which ints are added where it is that of Python's floats."""
    dtypes: set[np.dtype[Any]] = {np.dtype(kind) for kind in (kinds - {int} if kinds & {float, np.float64} else kinds)}
    if len(dtypes) > 1:
        return list(values)
    try:
        return _to_tensor(np.array(values, dtypes.pop()), False)
    except (TypeError, OverflowError):  # no dtype of torch's; ints beyond 64 bits, or beyond floats
        return list(values)


def _are_alike(tensors: Sequence[torch.Tensor]) -> bool:
    return len({(tensor.shape, tensor.dtype, tensor.device, tensor.layout) for tensor in tensors}) == 1


def _collate_arrays(arrays: list[AnyArray], is_image: bool) -> Any:
    if not is_image and all(_is_channels_last(array) for array in arrays):
        arrays, is_image = [np.moveaxis(array, 0, -1) for array in arrays], True
    try:
        if len({(array.shape, array.dtype) for array in arrays}) == 1:
            return _to_tensor(np.stack(arrays), is_image)
        return [_to_tensor(array, is_image) for array in arrays]
    except TypeError:  # a dtype that torch lacks: text, records, dates
        return arrays


def _is_channels_last(array: AnyArray) -> bool:
    return array.ndim == 3 and not array.flags.c_contiguous and np.moveaxis(array, 0, -1).flags.c_contiguous


def _to_tensor(array: AnyArray, is_image: bool) -> torch.Tensor:
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    writable = np.require(native, requirements=("C", "W"))
    return images_to_tensor(writable) if is_image and array.ndim >= 3 else torch.from_numpy(writable)


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
            if any(getattr(decoder, "codec", None) is not None for decoder in encoded.values()):
                parts = min(parts, _JOINT_PARTS)
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
