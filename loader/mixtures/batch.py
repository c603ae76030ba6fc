"""Batches of samples from sources that are decoded and transformed differently, put together row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..columns import AnyArray, IntArray
from ..decoding.batch import BatchMaker, UnfinishedBatch
from ..decoding.batch_options import Batch
from ..decoding.byte_views import ByteViews
from ..decoding.collate import collate_values
from ..decoding.row_job import RowJob
from ..decoding.row_work import Sample
from ..decoding.rows import Rows
from ..sources.kinds import Kind
from ..sources.sources import Sources


@dataclass(frozen=True, slots=True)
class KindRows:
    """Rows of a span or a batch, apart by kind: ``where`` says in which places the ``rows`` of each kind belong.

    ``epochs`` (rows,) int64: the epoch of each row's source; ``seeds`` (sources,) uint64: those of the sources' orders.
    """

    where: tuple[IntArray, ...]
    rows: tuple[Rows, ...]
    epochs: IntArray
    seeds: AnyArray
    sources: Sources

    @property
    def ids(self) -> IntArray:
        """(rows,) int64: the joint sample ids of all rows."""
        return self._in_order([rows.ids for rows in self.rows])

    @property
    def planned_ids(self) -> IntArray:
        """(rows,) int64: the joint ids that the order asked for, where others take the place of some."""
        return self._in_order([rows.planned_ids for rows in self.rows]) if self.are_replaced else self.ids

    @property
    def are_replaced(self) -> bool:
        """Whether others may have taken the place of some."""
        return any(rows.planned is not None for rows in self.rows)

    def _in_order(self, of_kinds: Sequence[IntArray]) -> IntArray:
        if len(of_kinds) == 1:
            return of_kinds[0]
        of_all = np.empty(len(self.epochs), np.int64)
        for where, of_kind in zip(self.where, of_kinds, strict=True):
            of_all[where] = of_kind
        return of_all

    def cut(self, start: int, stop: int) -> KindRows:
        edges = [np.searchsorted(where, (start, stop)).tolist() for where in self.where]
        return KindRows(
            tuple(where[low:high] - start for where, (low, high) in zip(self.where, edges, strict=True)),
            tuple(rows.cut(low, high) for rows, (low, high) in zip(self.rows, edges, strict=True)),
            self.epochs[start:stop],
            self.seeds,
            self.sources,
        )

    def first(self) -> KindRows:
        """The first row, with values of its own: a transform may change it."""
        one = self.cut(0, 1)
        return replace(one, rows=tuple(rows.pick(range(len(rows.ids))) for rows in one.rows))

    def keys_of(self, kind: int) -> AnyArray:
        """The (rows, 3) uint64 seed, source's epoch and sample id of a kind's rows, for their random numbers."""
        source, own = self.sources.of_ids(self.rows[kind].ids)
        epochs = self.epochs[self.where[kind]]
        return np.stack([self.seeds[source], epochs.view(np.uint64), own.view(np.uint64)], axis=1)


def start_batch(
    maker: BatchMaker, kinds: Sequence[Kind], rows: KindRows, num_rows: int, num_valid: int
) -> UnfinishedBatch:
    """Start a batch of ``num_rows`` of some rows (0: of none, made like one row)."""
    makers = [kind.maker(maker) for kind in kinds]
    if len(kinds) == 1:
        keys = rows.keys_of(0) if _draws(makers[0]) else None
        return makers[0].start(rows.rows[0], 0, num_rows, num_valid, keys)
    parts: list[tuple[IntArray, RowJob]] = []
    for kind, own in enumerate(makers):
        where = rows.where[kind]
        if len(where):
            keys = rows.keys_of(kind) if _draws(own) else None
            parts.append((where, own.work(rows.rows[kind], 0, keys)))
    by_samples = any(own.options.transform is not None for own in makers)
    return MixedBatch(maker, parts, rows.ids, num_rows, num_valid, by_samples=by_samples)


def _draws(maker: BatchMaker) -> bool:
    """Whether rows may need random numbers."""
    return maker.options.transform is not None or any(maker.decoders.settled.values())


@dataclass(frozen=True, slots=True)
class ReadySamples:
    """Samples of a source that are decoded and transformed."""

    samples: list[Sample]
    is_done = True

    def finish(self) -> None:
        pass

    def columns(self) -> dict[str, Any]:
        raise NotImplementedError("a batch that has samples is made of samples")

    def all_samples(self) -> list[Sample]:
        return self.samples

    def cancel(self) -> None:
        pass


class MixedBatch(UnfinishedBatch):
    """A batch of several kinds of rows: those of each ``parts`` and their places. ``ids`` (rows,) are those of all.

    ``by_samples``: it is made of samples, not of whole fields, as one that is collated by a function always is.
    """

    def __init__(
        self,
        maker: BatchMaker,
        parts: Sequence[tuple[IntArray, RowJob | ReadySamples]],
        ids: IntArray,
        num_rows: int,
        num_valid: int,
        *,
        by_samples: bool,
    ) -> None:
        self._maker = maker
        self._parts = parts
        self._ids = ids
        self._num_rows = num_rows
        self._num_valid = num_valid
        self._by_samples = by_samples or maker.options.collate is not None

    def result(self) -> Batch:
        for _, part in self._parts:
            part.finish()
        count, ids = len(self._ids), self._ids
        if self._by_samples:
            samples: list[Sample] = [{}] * count
            for where, part in self._parts:
                for row, sample in zip(where.tolist(), part.all_samples(), strict=True):
                    samples[row] = sample
            return self._maker.join(samples, ids, self._num_rows, self._num_valid).result()
        fields: dict[str, list[tuple[IntArray, Any]]] = {}
        for where, part in self._parts:
            for name, values in part.columns().items():
                fields.setdefault(name, []).append((where, values))
        batch = {name: _merge(parts, count) for name, parts in fields.items()}
        return self._maker.complete(batch, ids, self._num_rows, self._num_valid)

    @property
    def is_done(self) -> bool:
        return all(part.is_done for _, part in self._parts)

    def cancel(self) -> None:
        for _, part in self._parts:
            part.cancel()


def _merge(parts: Sequence[tuple[IntArray, Any]], count: int) -> Any:
    """The values of a field, of all rows in order: what a batch has that is made of their samples."""
    tensors = [values for _, values in parts if isinstance(values, torch.Tensor)]
    are_all = len(tensors) == len(parts) and sum(len(where) for where, _ in parts) == count
    if are_all and len({(values.dtype, values.shape[1:]) for values in tensors}) == 1:
        if len(tensors) == 1:
            return tensors[0]
        joined = torch.cat(tensors)
        order = torch.from_numpy(np.argsort(np.concatenate([where for where, _ in parts]), kind="stable"))
        picked = joined[order]
        is_last = tensors[0].dim() == 4 and tensors[0].is_contiguous(memory_format=torch.channels_last)
        return picked.contiguous(memory_format=torch.channels_last) if is_last else picked
    merged: list[Any] = [None] * count
    for where, values in parts:
        of_rows = values.numpy() if isinstance(values, torch.Tensor) else values
        for row, value in zip(where.tolist(), of_rows, strict=True):
            merged[row] = value
    return ByteViews(merged) if all(isinstance(v, ByteViews) for _, v in parts) else collate_values(merged)
