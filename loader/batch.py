"""From chunks to batches: rows are gathered by whole columns, decoded by threads into their slots, and collated.

A batch is a dict of field name to tensor, or to a list where values have no common shape.
"""

from __future__ import annotations

import inspect
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .collate import collate_samples, collate_values
from .decode import DecodeChoice, FieldDecoder, field_decoder
from .errors import ConfigError, DecodeError, LoaderClosedError
from .formats.shard import AnyArray, ArrayColumn, Block, BytesColumn, IntArray, Records
from .manifest import Manifest
from .metrics import Counters
from .randomness import sample_rng
from .records import unpack_records
from .spans import ChunkRows

IDS, VALID, KEY = "__id__", "__valid__", "__key__"

Sample = dict[str, Any]
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
        """The dtype in which numbers are handed out: torch computes little with unsigned ones, so they are widened."""
        wide = self.choice is not None and values.dtype.kind == "u" and values.dtype.itemsize > 1
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
                if isinstance(column, BytesColumn) and decoders.of(name, column) is not None and not column.text:
                    values.extend(column.views(group.rows))
                else:
                    values.extend(column.take(group.rows))
                continue
            source = column.values
            if source.itemsize * math.prod(source.shape[1:]) >= _WIDE_ROW_BYTES:
                out = _array(wide, name, source, num_rows, decoders)
                for target, row in zip(group.targets.tolist(), group.rows.tolist(), strict=True):
                    out[target] = source[row]
            else:
                _array(narrow, name, source, num_rows, decoders)[done:stop] = source.take(group.rows, axis=0)
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
    """Makes batches of gathered rows: decodes and transforms on a pool of ``threads`` threads, then collates."""

    options: BatchOptions
    decoders: FieldDecoders
    manifest: Manifest
    pool: ThreadPoolExecutor
    threads: int
    counters: Counters
    stopping: threading.Event

    def start(self, rows: Rows, epoch: int, num_valid: int) -> PendingBatch:
        """Begin to make a batch of ``rows``, of which the first ``num_valid`` count."""
        return PendingBatch(self, rows, epoch, num_valid)


class PendingBatch:
    """A batch in the making. ``result`` waits for it; called once, by one thread."""

    def __init__(self, maker: BatchMaker, rows: Rows, epoch: int, num_valid: int) -> None:
        self._maker = maker
        self._rows = rows
        self._epoch = epoch
        self._num_valid = num_valid
        self._values: dict[str, Any] = {}
        self._samples: list[Sample] = []
        self._decoding: list[tuple[str, FieldDecoder, list[Any]]] = []
        self._futures: list[Future[None]] = []
        self._prepare()

    def _prepare(self) -> None:
        maker, count = self._maker, len(self._rows.ids)
        settled = maker.decoders.settled
        for name, values in self._rows.fields.items():
            decoder = settled.get(name)
            if decoder is None or not isinstance(values, list):
                self._values[name] = values
            else:
                self._decoding.append((name, decoder, values))
                self._values[name] = (
                    [None] * count if decoder.slot is None else np.empty((count, *decoder.slot[0]), decoder.slot[1])
                )
        if maker.options.transform is not None:
            self._samples = [{} for _ in range(count)]
        if self._decoding or maker.options.transform is not None:
            size = max(1, -(-count // (2 * maker.threads)))
            self._futures = [
                maker.pool.submit(self._work, start, min(start + size, count)) for start in range(0, count, size)
            ]

    def _work(self, start: int, stop: int) -> None:
        """Decode and transform some of the rows; on a thread of the pool."""
        started = time.perf_counter()
        for i in range(start, stop):
            if self._maker.stopping.is_set():
                raise CancelledError
            for name, decoder, values in self._decoding:
                self._decode(i, name, decoder, values[i])
            if self._maker.options.transform is not None:
                self._samples[i] = self._transform(i, self._maker.options.transform)
        self._maker.counters.add(decode_s=time.perf_counter() - started)

    def _decode(self, i: int, name: str, decoder: FieldDecoder, data: Any) -> None:
        out = self._values[name]
        if data is None:
            if decoder.slot is not None:
                raise DecodeError(f"{self._describe(i)}: has no field {name!r}, which is decoded into a tensor")
            return
        rng = self._rng(i) if decoder.takes_rng else None
        try:
            if decoder.slot is not None:
                decoder.decode_into(data, out[i], rng)
            else:
                out[i] = decoder(data, rng)
        except DecodeError as exc:
            raise DecodeError(f"{self._describe(i)}: {exc}") from exc

    def _transform(self, i: int, transform: Callable[..., Sample]) -> Sample:
        try:
            sample = self._sample(i)
            changed = transform(sample, rng=self._rng(i)) if _takes_rng(transform) else transform(sample)
        except Exception as exc:
            exc.add_note(f"in transform= of {self._describe(i)}")
            raise
        if not isinstance(changed, dict):
            raise ConfigError(
                f"transform= returned {type(changed).__name__} for {self._describe(i)}; it must return a dict"
            )
        return changed

    def _rng(self, i: int) -> np.random.Generator:
        return sample_rng(self._maker.options.seed, self._epoch, int(self._rows.ids[i]))

    def _sample(self, i: int) -> Sample:
        return {name: values[i] for name, values in self._values.items()}

    def _describe(self, i: int) -> str:
        sample_id = int(self._rows.ids[i])
        shard, row = self._maker.manifest.shard_of(sample_id)
        key = self._rows.fields.get(KEY)
        named = f", key {key[i]!r}" if key is not None else ""
        return f"sample {sample_id} (number {row} of {shard}{named})"

    def result(self) -> Batch:
        """The batch. Raises what decoding, the transform or the collation raised; LoaderClosedError if cancelled."""
        try:
            for future in self._futures:
                future.result()
        except CancelledError as exc:
            raise LoaderClosedError("the loader was closed while a batch was being decoded") from exc
        options = self._maker.options
        if options.transform is None and options.collate is None:
            images = {name for name, decoder, _ in self._decoding if decoder.is_image}
            batch = {name: _collate(values, is_image=name in images) for name, values in self._values.items()}
            return {**batch, **self._extras()}
        samples = self._samples or [self._sample(i) for i in range(len(self._rows.ids))]
        if options.collate is None:
            return {**collate_samples(samples), **self._extras()}
        for name, values in self._extras().items():
            for sample, value in zip(samples, values.tolist(), strict=True):
                sample[name] = value
        return options.collate(samples)

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


def _takes_rng(function: Callable[..., Any]) -> bool:
    try:
        return "rng" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins without a signature
        return False
