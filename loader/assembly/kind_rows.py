"""Rows of a span, gathered by kind, and the batches that are made of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..decoding.decode import WIDENED
from ..decoding.gather import LateBytes, gather
from ..decoding.rows import MOST_TOGETHER, TOGETHER_BYTES, Rows, WideRows

if TYPE_CHECKING:
    from ..columns import AnyArray, Block, IntArray
    from ..decoding.batch import BatchMaker, UnfinishedBatch
    from ..decoding.batch_memory import BatchMemory
    from ..decoding.byte_views import Lend
    from ..decoding.mixed_batch import LateJob
    from ..order.spans import ChunkRows, SourceOrder, Span
    from ..sources.kinds import Kind
    from ..sources.sources import Sources

_MAPPED_AT_ONCE = 2 << 20  # bytes, of rows that are copied from mapped files
# Objects are made of what lies in mapped files for so many steps at once, and bytes: few, so that they fit where those
# before were. Each time most of the files are asked for, twice; so of many files, more bytes.
_OBJECTS_AT_ONCE, _OBJECT_BYTES_AT_ONCE, _MOST_OBJECT_BYTES = 16, 8 << 20, 16 << 20
_OBJECT_BYTES_PER_FILE = 256 << 10


@dataclass(frozen=True, slots=True)
class KindRows:
    """Rows of several kinds: ``where`` lists the places, ascending, of the ``rows`` of each kind."""

    where: tuple[IntArray, ...]
    rows: tuple[Rows, ...]

    @property
    def ids(self) -> IntArray:
        """(rows,) int64: the joint sample ids of all rows."""
        return self._in_order([rows.ids for rows in self.rows])

    @property
    def planned(self) -> IntArray | None:
        """(rows,) the ids that the order asked for, where others replace some."""
        are_replaced = any(rows.planned is not None for rows in self.rows)
        return self._in_order([rows.planned_ids for rows in self.rows]) if are_replaced else None

    @property
    def epochs(self) -> IntArray | None:
        epochs = [rows.epochs for rows in self.rows if rows.epochs is not None]
        return self._in_order(epochs) if epochs else None

    def _in_order(self, of_kinds: Sequence[IntArray]) -> IntArray:
        of_all = np.empty(sum(map(len, self.where)), np.int64)
        for where, of_kind in zip(self.where, of_kinds, strict=True):
            of_all[where] = of_kind
        return of_all

    def cut(self, start: int, stop: int) -> KindRows:
        edges = [np.searchsorted(where, (start, stop)).tolist() for where in self.where]
        return KindRows(
            tuple(where[low:high] - start for where, (low, high) in zip(self.where, edges, strict=True)),
            tuple(rows.cut(low, high) for rows, (low, high) in zip(self.rows, edges, strict=True)),
        )

    def pick(self, indices: Sequence[int]) -> KindRows:
        """Pick rows as ``Rows.pick`` does."""
        picked = np.asarray(indices, np.int64)
        where = tuple(np.flatnonzero(np.isin(picked, of_kind)) for of_kind in self.where)
        places = [np.searchsorted(of_kind, picked[own]) for of_kind, own in zip(self.where, where, strict=True)]
        return KindRows(where, tuple(rows.pick(own.tolist()) for rows, own in zip(self.rows, places, strict=True)))


AnyRows = Rows | KindRows


class RowKinds:
    """Gathers the rows of all kinds of sources, and begins batches of them. Used by the assembler thread."""

    def __init__(
        self, sources: Sources, kinds: Sequence[Kind], orders: Sequence[SourceOrder], maker: BatchMaker
    ) -> None:
        self._sources = sources
        self._maker = maker
        makers = [maker] if len(kinds) == 1 else [kind.maker(maker) for kind in kinds]
        if sources.is_mixed:
            seeds = np.array([source.order.seed for source in orders], np.uint64)
            makers = [replace(own, random_keys=partial(_make_keys, sources, seeds)) for own in makers]
        self._makers = makers
        self._kind_of = np.empty(len(sources), np.int64)
        for number, kind in enumerate(kinds):
            self._kind_of[list(kind.sources)] = number

    def gather(
        self,
        span: Span,
        blocks: Iterable[tuple[ChunkRows, Block]],
        lend: Lend | None = None,
        memory: BatchMemory | None = None,
    ) -> AnyRows:
        """Gather the rows of a span, whose chunks' rows come in any order. With ``memory``: see ``gather``."""
        parts, first_ids = span.parts, self._sources.manifest.first_ids
        epochs = span.of_rows(np.array([part.epoch for part in parts])) if self._sources.is_mixed else None
        if len(self._makers) == 1:
            decoders = self._makers[0].decoders
            return gather(blocks, span.num_rows, first_ids, decoders, lend, memory=memory, epochs=epochs)
        kinds = span.of_rows(self._kind_of[[part.source for part in parts]])
        where = tuple(np.flatnonzero(kinds == kind) for kind in range(len(self._makers)))
        # Blocks are held until their kind's turn: those of a span, which the reader holds too.
        apart: list[list[tuple[ChunkRows, Block]]] = [[] for _ in where]
        for group, block in blocks:
            kind = int(self._kind_of[self._sources.of_chunk(group.chunk)[0]])
            apart[kind].append((replace(group, targets=np.searchsorted(where[kind], group.targets)), block))
        gathered = (
            gather(
                of_kind,
                len(own),
                first_ids,
                maker.decoders,
                lend,
                memory=memory,
                epochs=None if epochs is None else epochs[own],
            )
            for of_kind, own, maker in zip(apart, where, self._makers, strict=True)
        )
        return KindRows(where, tuple(gathered))

    def start(
        self, steps: Sequence[tuple[Any, int, int]], epoch: int
    ) -> tuple[Sequence[UnfinishedBatch], Sequence[Future[None]]]:
        """Start a batch of each step's rows, with the numbers of rows that make the batch, and that count.

        The futures are done once the rows need their chunks no longer.
        """
        if len(self._makers) == 1:
            batches, copied = self._makers[0].start_together(steps, epoch)
            return batches, [] if copied is None else [copied]
        from ..decoding.mixed_batch import LateJob, MixedBatch

        parts: list[list[tuple[IntArray, LateJob]]] = [[] for _ in steps]
        futures: list[Future[None]] = []
        for kind, maker in enumerate(self._makers):
            having = [number for number, (rows, _, _) in enumerate(steps) if len(rows.where[kind])]
            jobs, copied = maker.start_jobs([steps[number][0].rows[kind] for number in having], epoch)
            for number, job in zip(having, jobs, strict=True):
                parts[number].append((steps[number][0].where[kind], LateJob(job)))
            futures += [] if copied is None else [copied]
        by_samples = any(maker.options.transform is not None for maker in self._makers)
        mixed: list[UnfinishedBatch] = []
        for part, (rows, num_rows, num_valid) in zip(parts, steps, strict=True):
            ids, planned = rows.ids, rows.planned
            planned = ids if planned is None and self._maker.replacer is not None else planned
            mixed.append(
                MixedBatch(self._maker, part, ids, num_rows, num_valid, by_samples=by_samples, planned=planned)
            )
        return mixed, futures

    def count_bytes(self, rows: AnyRows) -> int:
        """Count the bytes of rows and of their values once decoded."""
        return sum(of_kind.count_bytes(maker.decoders.settled) for of_kind, maker in self._by_kind(rows))

    def stay_in_chunks(self, rows: AnyRows) -> bool:
        """Return whether most of the rows take no memory of their own until they are copied; see ``Rows``."""
        return all(
            of_kind.stay_in_chunks(maker.decoders.settled) for of_kind, maker in self._by_kind(rows) if len(of_kind.ids)
        )

    def keeps_chunks(self, rows: AnyRows) -> bool:
        """Return whether chunks must stay in memory until the rows are copied."""
        return any(of_kind.keeps_chunks for of_kind, _ in self._by_kind(rows))

    def count_together(self, rows: AnyRows, steps: int) -> int:
        """Choose for how many steps at a time the rows of a span are copied together."""
        return min(_count_together(of_kind, steps) for of_kind, _ in self._by_kind(rows))

    def widened_bytes(self) -> int:
        """Compute the most bytes by which a row grows from its chunk to its batch."""
        return max(
            _widened_bytes(source.manifest.schema.get("columns", {}), self._makers[self._kind_of[number]])
            for number, source in enumerate(self._sources)
        )

    def _by_kind(self, rows: AnyRows) -> Iterable[tuple[Rows, BatchMaker]]:
        return zip((rows,) if isinstance(rows, Rows) else rows.rows, self._makers, strict=True)


def _make_keys(sources: Sources, seeds: AnyArray, rows: Rows) -> AnyArray:
    """Make (rows, 3) uint64 keys of the rows' random numbers: seed, source's epoch and sample id."""
    assert rows.epochs is not None
    source, own = sources.of_ids(rows.ids)
    return np.stack([seeds[source], rows.epochs.astype(np.uint64), own.view(np.uint64)], axis=1)


def _count_together(rows: Rows, steps: int) -> int:
    """Count the steps whose rows are copied together: of mapped files several, since each copy checks the files.

    Wide rows take as many as one call copies, so that threads seldom wait for Python's lock.
    """
    late = rows.late
    places = [each.at for each in late if each.at is not None]
    if files := {file for each in late if isinstance(each, LateBytes) for file in each.mapped()}:
        most = _OBJECTS_AT_ONCE
        most_bytes = min(max(_OBJECT_BYTES_AT_ONCE, len(files) * _OBJECT_BYTES_PER_FILE), _MOST_OBJECT_BYTES)
    elif any(at.files for at in places):
        return max(1, _MAPPED_AT_ONCE * steps // sum(at.nbytes for at in places))
    elif late and all(isinstance(each, WideRows) for each in late):
        most, most_bytes = MOST_TOGETHER, TOGETHER_BYTES
    else:
        return 1
    return min(most, max(1, most_bytes * steps // max(1, sum(each.nbytes for each in late))))


def _widened_bytes(columns: Mapping[str, Any], maker: BatchMaker) -> int:
    widened = 0
    for column in columns.values():
        if "shape" in column and column["type"] in WIDENED:
            stored = np.empty(0, column["type"])
            growth = maker.decoders.dtype_of(stored).itemsize - stored.itemsize
            widened += growth * math.prod(column["shape"])
    return widened
