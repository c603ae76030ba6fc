"""From gathered rows to batches: decoded by threads or processes into their slots, transformed, collated.

A batch is a dict of field name to tensor, or to a list where values have no common shape.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...storage.daemon_pool import DaemonPool
from ..dataset.manifest import Manifest
from ..errors import ConfigError, LoaderClosedError
from ..metrics import Counters
from .byte_views import ByteViews
from .collate import collate_samples, collate_values, images_to_tensor
from .decode import FieldDecoders, is_channels_first
from .gather import Rows, Values
from .row_errors import explain_row_error
from .row_work import RowError, RowResults, RowTask, RowWork, Sample
from .worker_pool import WorkerPool

IDS, VALID = "__id__", "__valid__"

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # What collate= returns; without one a dict of name -> tensor or list.
    BatchT = TypeVar("BatchT", default=dict[str, Any])
else:
    from typing import TypeVar

    BatchT = TypeVar("BatchT")

Batch = Any


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """What happens to gathered rows. ``transform`` maps a sample to a sample, ``collate`` a list of samples to a batch.

    ``with_ids`` adds ``__id__``, a (B,) int64 tensor of sample ids; with ``collate``, to each sample.

    ``pad`` adds ``__valid__``, a (B,) bool tensor that is False for rows that only fill up the last batch.
    """

    transform: Callable[..., Sample] | None = None
    collate: Callable[[list[Sample]], Batch] | None = None
    with_ids: bool = False
    pad: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("transform", "collate"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ConfigError(f"{name}={value!r} cannot be called; pass a function, or None")


@dataclass(frozen=True, slots=True)
class BatchMaker:
    """Makes batches of gathered rows: has them decoded and transformed, about ``parts`` at once, then collates them.

    The threads of ``pool`` do this work, or ``workers``, which are processes.
    """

    options: BatchOptions
    decoders: FieldDecoders
    manifest: Manifest
    pool: DaemonPool
    workers: WorkerPool | None
    parts: int
    counters: Counters
    stopping: threading.Event

    def start(self, rows: Rows, epoch: int, num_rows: int, num_valid: int) -> PendingBatch:
        """Start a batch of the first ``num_rows`` of ``rows``, of which the first ``num_valid`` count.

        A batch without rows is made from one row, for its fields, types and shapes, and handed out empty.
        """
        return PendingBatch(self, rows, epoch, num_rows, num_valid)

    def is_stopped(self) -> bool:
        """Whether batches are no longer wanted."""
        return self.stopping.is_set()


class PendingBatch:
    """A batch in the making. ``result`` waits for it; called once, by one thread."""

    def __init__(self, maker: BatchMaker, rows: Rows, epoch: int, num_rows: int, num_valid: int) -> None:
        self._maker = maker
        self._rows = rows
        self._num_rows = num_rows
        self._num_valid = num_valid
        settled = maker.decoders.settled
        encoded = {
            name: decoder
            for name, values in rows.fields.items()
            if isinstance(values, list) and (decoder := settled.get(name)) is not None
        }
        self._task = RowTask(epoch, 0, rows.ids, rows.fields, encoded)
        self._work = RowWork(transform=maker.options.transform, seed=maker.options.seed)
        self._results = self._work.allocate(self._task)
        self._futures: list[Future[None]] = []
        if encoded or maker.options.transform is not None:
            count = len(rows.ids)
            size = max(1, -(-count // (2 * maker.parts)))
            self._futures = [self._submit(start, min(start + size, count)) for start in range(0, count, size)]

    def _submit(self, start: int, stop: int) -> Future[None]:
        maker = self._maker
        if maker.workers is None:
            return maker.pool.submit(self._run, start, stop)
        task = self._task.cut(start, stop, with_plain=maker.options.transform is not None)
        return maker.workers.submit(task, partial(self._place, start, stop), maker.is_stopped)

    def _run(self, start: int, stop: int) -> None:
        """Work on some of the rows; on a thread of the pool."""
        started = time.perf_counter()
        try:
            self._work.run(self._task, self._results, start, stop, self._maker.is_stopped)
        finally:
            self._maker.counters.add(decode_s=time.perf_counter() - started)

    def _place(self, start: int, stop: int, results: RowResults, busy_s: float) -> None:
        """Put a process's results into their places."""
        for name, values in results.values.items():
            of_field: Any = self._results.values[name]
            of_field[start:stop] = values
        self._results.samples[start:stop] = results.samples
        self._maker.counters.add(decode_s=busy_s)

    def result(self) -> Batch:
        """The batch. Raises what decoding, transform or collation raised, or LoaderClosedError if cancelled."""
        failed = self._wait()
        if failed is not None:
            raise explain_row_error(failed, self._rows, self._maker.manifest)
        options, values = self._maker.options, self._results.values
        if options.transform is None and options.collate is None:
            images = {name for name, decoder in self._task.encoded.items() if is_channels_first(decoder)}
            return self._finish({n: _collate(of_field, is_image=n in images) for n, of_field in values.items()})
        samples = self._results.samples or [self._task.sample(values, row) for row in range(len(self._rows.ids))]
        if options.collate is None:
            batch = collate_samples(samples)
            if self._maker.decoders.raw == "view":
                batch = {name: _gather_views(of_field) for name, of_field in batch.items()}
            return self._finish(batch)
        for name, extra in self._extras().items():
            for sample, value in zip(samples, extra.tolist(), strict=True):
                sample[name] = value
        return options.collate(samples[: self._num_rows])

    def _finish(self, batch: dict[str, Any]) -> dict[str, Any]:
        batch = {**batch, **self._extras()}
        if self._num_rows < len(self._rows.ids):
            return {name: values[: self._num_rows] for name, values in batch.items()}
        return batch

    def _wait(self) -> RowError | None:
        """The error of the first row that failed, in the order of rows."""
        try:
            for future in self._futures:
                future.result()
        except RowError as exc:
            return exc
        except CancelledError as exc:
            raise LoaderClosedError("the loader was closed while a batch was being decoded") from exc
        return None

    def _extras(self) -> dict[str, torch.Tensor]:
        extras = {}
        if self._maker.options.with_ids:
            extras[IDS] = torch.from_numpy(self._rows.ids.copy())
        if self._maker.options.pad:
            extras[VALID] = torch.arange(len(self._rows.ids)) < self._num_valid
        return extras

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()


def _gather_views(values: Any) -> Any:
    """A field's views as one value again, where a transform left them as they were."""
    kinds = set(map(type, values)) if isinstance(values, list) else set()
    are_views = memoryview in kinds and kinds <= {memoryview, type(None)}
    return ByteViews(values) if are_views and all(v is None or v.format == "B" for v in values) else values


def _collate(values: Values, *, is_image: bool) -> Any:
    if isinstance(values, ByteViews):
        return values
    if isinstance(values, list):
        return collate_values(values, is_image=is_image)
    return images_to_tensor(values) if is_image else torch.from_numpy(values)
