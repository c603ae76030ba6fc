"""From chunks to batches: rows are gathered by whole columns, decoded by threads into their slots, and collated.

A batch is a dict of field name to tensor, or to a list where values have no common shape.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from .collate import collate_samples, collate_values
from .decode import DecodeChoice, FieldDecoder, field_decoder
from .decode_threads import DecodeThreads
from .errors import ConfigError, DecodeError, LoaderClosedError
from .formats.shard import AnyArray, ArrayColumn, Block, BytesColumn, IntArray, ObjectColumn, Records
from .manifest import Manifest
from .metrics import Counters
from .records import unpack_records
from .row_work import RowError, RowResults, RowTask, RowWork, Sample
from .spans import ChunkRows
from .worker_pool import WorkerPool

IDS, VALID, KEY = "__id__", "__valid__", "__key__"

Batch = Any  # what collate= returns; a dict of name -> tensor or list by default

_WIDE_ROW_BYTES = 1024
_IMAGE_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")


@dataclass(frozen=True, slots=True)
class Rows:
    """Gathered rows: ``ids`` (n,) int64 sample ids, and each field's values, an array (n, ...) or a list of n."""

    ids: IntArray
    fields: Mapping[str, AnyArray | list[Any]]

    def cut(self, start: int, stop: int) -> Rows:
        return Rows(self.ids[start:stop], {name: values[start:stop] for name, values in self.fields.items()})

    def pick(self, indices: Sequence[int]) -> Rows:
        fields: dict[str, AnyArray | list[Any]] = {
            name: values[list(indices)] if isinstance(values, np.ndarray) else [values[i] for i in indices]
            for name, values in self.fields.items()
        }
        return Rows(self.ids[list(indices)], fields)


class FieldDecoders:
    """The decoder of each field, settled when the field is first seen, the same from then on."""

    def __init__(self, choice: DecodeChoice) -> None:
        self.choice = choice
        self.settled: dict[str, FieldDecoder | None] = {}

    def of(self, name: str, column: BytesColumn) -> FieldDecoder | None:
        if name not in self.settled:
            self.settled[name] = self._settle(name, column)
        return self.settled[name]

    def _settle(self, name: str, column: BytesColumn) -> FieldDecoder | None:
        named = isinstance(self.choice, Mapping) and name in self.choice
        if column.text and not named:
            return None
        decoder = field_decoder(name, self.choice)
        if decoder is None and not named and self.choice is not None and _looks_like_image(column):
            return field_decoder("jpg", "auto")
        return decoder

    def dtype_of(self, values: AnyArray) -> np.dtype[Any]:
        """The dtype in which numbers are handed out: torch computes little with unsigned ones, so they are widened.

        But for uint64, for which there is no wider one.
        """
        wide = self.choice is not None and values.dtype.kind == "u" and values.dtype.itemsize in (2, 4)
        return np.dtype(np.int64) if wide else values.dtype


def _looks_like_image(column: BytesColumn) -> bool:
    """Whether a field without a telling name holds images: by the first value that is there."""
    present = np.flatnonzero(column.starts >= 0)
    if not len(present):
        return False
    start = int(column.starts[present[0]])
    head = bytes(column.buffer[start : start + 12])
    return head.startswith(_IMAGE_MAGIC) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")


def gather(
    groups: Iterable[tuple[ChunkRows, Block]], num_rows: int, first_ids: IntArray, decoders: FieldDecoders
) -> Rows:
    """Put rows of opened chunks together in their order of delivery; each column of each chunk is touched once.

    Values are laid down in the order in which chunks come, and put in order of delivery at the end, all at once; but
    wide rows are copied straight to their place.
    """
    ids = np.empty(num_rows, np.int64)
    arrived = np.empty(num_rows, np.int64)  # [i]: where the i-th row to arrive is to go
    wide: dict[str, AnyArray] = {}
    narrow: dict[str, AnyArray] = {}
    lists: dict[str, list[Any]] = {}
    records: list[tuple[Records, AnyArray]] = []
    done = 0
    for group, block in groups:
        stop = done + len(group.rows)
        arrived[done:stop] = group.targets
        ids[group.targets] = group.rows + first_ids[group.chunk]
        for name, column in block.columns.items():
            if not isinstance(column, ArrayColumn):
                values = lists.setdefault(name, [])
                values.extend([None] * (done - len(values)))  # earlier chunks had no such field
                # Settled for text, too: a decoder of a text column is given str.
                is_encoded = isinstance(column, BytesColumn) and decoders.of(name, column) is not None
                if isinstance(column, BytesColumn) and is_encoded and not column.text:
                    values.extend(column.copies(group.rows))
                else:
                    values.extend(_take(column, name, group))
                continue
            source = column.values
            if source.itemsize * math.prod(source.shape[1:]) >= _WIDE_ROW_BYTES:
                out = _array(wide, name, source, num_rows, decoders)
                for target, row in zip(group.targets.tolist(), group.rows.tolist(), strict=True):
                    out[target] = source[row]
            else:
                # numpy's take copies an array that is not contiguous whole
                taken = source.take(group.rows, axis=0) if source.flags.c_contiguous else source[group.rows]
                _array(narrow, name, source, num_rows, decoders)[done:stop] = taken
        for i, packed in enumerate(block.records):
            if i == len(records):
                records.append((packed, np.empty(num_rows, packed.rows.dtype)))
            packed.rows.take(group.rows, out=records[i][1][done:stop], mode="clip")  # "raise" would copy twice
        done = stop
    order = np.empty(num_rows, np.int64)
    order[arrived] = np.arange(num_rows)
    fields: dict[str, AnyArray | list[Any]] = dict(wide)
    for packed, rows in records:
        for name, scalars in unpack_records(packed, rows.take(order)).items():
            fields[name] = scalars.astype(decoders.dtype_of(scalars), copy=False)
    fields |= {name: values.take(order, axis=0) for name, values in narrow.items()}
    for name, values in lists.items():
        values.extend([None] * (num_rows - len(values)))
        fields[name] = list(map(values.__getitem__, order.tolist()))
    return Rows(ids, fields)


def _take(column: BytesColumn | ObjectColumn, name: str, group: ChunkRows) -> list[Any]:
    try:
        return column.take(group.rows)
    except UnicodeDecodeError as exc:
        raise DecodeError(
            f"field {name!r} of chunk {group.chunk}: text that is not UTF-8 ({exc}); read it raw with decode=None, or "
            "leave it out with columns="
        ) from exc


def _array(arrays: dict[str, AnyArray], name: str, like: AnyArray, num_rows: int, decoders: FieldDecoders) -> AnyArray:
    if name not in arrays:
        arrays[name] = np.empty((num_rows, *like.shape[1:]), decoders.dtype_of(like))
    return arrays[name]


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """What happens to gathered rows. ``transform`` maps a sample to a sample; ``collate`` a list of samples to a batch.

    ``with_ids`` adds ``__id__``, a (B,) int64 tensor of sample ids; to each sample where there is a ``collate``.

    ``pad`` adds ``__valid__``, a (B,) bool tensor that is False for rows that only fill the last batch up.
    """

    decode: DecodeChoice = "auto"
    transform: Callable[..., Sample] | None = None
    collate: Callable[[list[Sample]], Batch] | None = None
    with_ids: bool = False
    pad: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.decode is not None and self.decode != "auto" and not isinstance(self.decode, Mapping):
            raise ConfigError(f"decode={self.decode!r} is unknown; use 'auto', None, or a mapping like {{'jpg': fn}}")
        for name in ("transform", "collate"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ConfigError(f"{name}={value!r} cannot be called; pass a function, or None")


@dataclass(frozen=True, slots=True)
class BatchMaker:
    """Makes batches of gathered rows: has them decoded and transformed, in ``parts`` or so at once, then collates.

    That is done by the threads of ``pool``, or by ``workers``, which are processes.
    """

    options: BatchOptions
    decoders: FieldDecoders
    manifest: Manifest
    pool: DecodeThreads
    workers: WorkerPool | None
    parts: int
    counters: Counters
    stopping: threading.Event

    def start(self, rows: Rows, epoch: int, num_rows: int, num_valid: int) -> PendingBatch:
        """Begin to make a batch of the first ``num_rows`` of ``rows``, of which the first ``num_valid`` count.

        A batch without rows is made of one, for its fields, types and shapes, and handed out empty.
        """
        return PendingBatch(self, rows, epoch, num_rows, num_valid)

    def is_stopped(self) -> bool:
        """Whether nobody waits for batches any more."""
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
        """Put a process's results in their places."""
        for name, values in results.values.items():
            self._results.values[name][start:stop] = values
        self._results.samples[start:stop] = results.samples
        self._maker.counters.add(decode_s=busy_s)

    def _explain(self, error: RowError) -> Exception:
        """What a user sees of it: our own errors name the sample; those of a transform keep their type, with a note."""
        where, cause = self._describe(error.row), error.cause
        if error.step != "transform" and isinstance(cause, DecodeError | ConfigError):
            kind = DecodeError if isinstance(cause, DecodeError) else ConfigError
            explained: Exception = kind(f"{where}: {cause}")
            explained.__cause__ = cause
            return explained
        cause.add_note(f"in {'transform=' if error.step == 'transform' else 'decoding'} of {where}")
        return cause

    def _describe(self, row: int) -> str:
        sample_id = int(self._rows.ids[row])
        shard, number = self._maker.manifest.shard_of(sample_id)
        key = self._rows.fields.get(KEY)
        named = f", key {key[row]!r}" if key is not None else ""
        return f"sample {sample_id} (number {number} of {shard}{named})"

    def result(self) -> Batch:
        """The batch. Raises what decoding, the transform or the collation raised; LoaderClosedError if cancelled."""
        failed = self._wait()
        if failed is not None:
            raise self._explain(failed)
        options, values = self._maker.options, self._results.values
        if options.transform is None and options.collate is None:
            images = {name for name, decoder in self._task.encoded.items() if decoder.is_image}
            return self._finish({n: _collate(of_field, is_image=n in images) for n, of_field in values.items()})
        samples = self._results.samples or [
            {name: of_field[row] for name, of_field in values.items()} for row in range(len(self._rows.ids))
        ]
        if options.collate is None:
            return self._finish(collate_samples(samples))
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
        """The first row's error, in the order of rows."""
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


def _collate(values: AnyArray | list[Any], *, is_image: bool) -> Any:
    if isinstance(values, list):
        return collate_values(values, is_image=is_image)
    tensor = torch.from_numpy(values)
    return tensor.permute(0, 3, 1, 2) if is_image else tensor
