"""Chunks that cannot be read: reported and replaced by others of the same source, up to a limit.

A bad chunk is replaced by the next chunk of its source that can be read, so every rank, every world size and every
resume delivers the same samples. The replacing samples keep their own ids, and are of the same selection.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DatasetError
from ..order.spans import ChunkRows
from ..reading.bad.chunks import DATA_ERRORS, BadChunk, BadChunkWarning
from ..reading.chunk_source import AvoidedError

if TYPE_CHECKING:
    from ..columns import Block, IntArray
    from .sources import OpenSource, Sources

_KEPT_BLOCKS = 4  # a source


class Quarantine:
    """Replaces the rows of up to ``limit`` bad chunks of all sources. Used by the assembler thread; ``records`` by any.

    Chunks have the joint numbers of ``sources``. Without a limit, their samples count as bad samples do, if ``counts``.
    Chunks that are avoided count for nothing.
    """

    def __init__(self, sources: Sources, limit: int | None, *, counts: bool = True) -> None:
        self._sources = sources
        self._limit = limit
        self._counts = counts
        self._records: dict[int, BadChunk] = {}
        self._avoided: dict[int, BadChunk] = {}
        self._blocks: OrderedDict[int, Block] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def records(self) -> list[BadChunk]:
        """List the replaced chunks, source by source."""
        with self._lock:
            records = list(self._records.values())
        return sorted(records, key=lambda record: self._sources.of_chunk(record.chunk)[0])

    def absorb(self, records: Iterable[BadChunk]) -> None:
        """Take over chunks that another process has replaced and warned of."""
        with self._lock:
            self._records |= {record.chunk: record for record in records}

    def apart(self, sources: Sources) -> Quarantine:
        """Make a quarantine for a preview, over its own ``sources``: it counts and reports separately."""
        return Quarantine(sources, self._limit, counts=False)

    def replace(
        self, group: ChunkRows, error: BaseException, epoch: int | IntArray | None = None
    ) -> tuple[ChunkRows, Block]:
        """Replace a chunk's rows, which failed with ``error``, by another chunk's; raise an ``error`` not of the data.

        Without an ``epoch`` of their source, or one a row, their samples are not counted, as they have been already.

        Raises:
            DatasetError: more chunks, or samples, are bad than the limit allows; names the latest.
        """
        is_avoided = isinstance(error, AvoidedError)
        if not isinstance(error, DATA_ERRORS) or (self._limit == 0 and not is_avoided):
            raise error
        number, _ = self._sources.of_chunk(group.chunk)
        source: OpenSource = self._sources[number]
        ids: IntArray = group.rows + self._sources.manifest.first_ids[group.chunk]
        if self._counts and epoch is not None:
            own = ids - self._sources.first_ids[number]
            epochs = np.broadcast_to(epoch, own.shape)
            for each in np.unique(epochs).tolist():
                self._count(number, group.chunk, own[epochs == each], error, each)
        known = self._records.get(group.chunk) or self._avoided.get(group.chunk)
        if known is None:
            if not is_avoided and self._limit is not None and len(self._records) >= self._limit:
                where = f", of source {source.name!r}" if self._sources.is_mixed else ""
                raise DatasetError(
                    f"more than max_bad_chunks={self._limit} chunks cannot be read; the last one{where}: {error}. "
                    "`penstock verify` lists all that are bad"
                ) from error
            known = self._record(number, group.chunk, error)
        block = self._load(known.replaced_by)
        rows: IntArray = group.rows % block.samples
        if source.selection is not None:
            own = source.selection.rows_of(known.replaced_by - self._sources.first_chunks[number])
            rows = own[group.rows % len(own)]
        return ChunkRows(known.replaced_by, rows, group.targets, ids), block

    def _count(self, number: int, chunk: int, ids: IntArray, error: BaseException, epoch: int) -> None:
        from ..reading.bad.file import Quarantined

        source: OpenSource = self._sources[number]
        bad = source.errors.bad
        if bad is None:
            return
        if isinstance(error, AvoidedError):
            bad.note_avoided(epoch, ids.tolist())
            return
        own = chunk - self._sources.first_chunks[number]
        ref = source.manifest.chunk(own)
        entry = Quarantined(
            kind="chunk",
            id=int(source.manifest.first_ids[own]),
            samples=ref.samples,
            shard=ref.shard.key,
            offset=ref.offset,
            number=None,
            key=None,
            field=None,
            step="read",
            reason=str(error),
            epoch=epoch,
        )
        bad.tell(entry, ids.tolist())

    def _record(self, number: int, chunk: int, error: BaseException) -> BadChunk:
        source: OpenSource = self._sources[number]
        first, count = self._sources.first_chunks[number], source.manifest.num_chunks
        bad = self._sources.manifest.chunk(chunk)
        for step in range(1, count):
            other = first + (chunk - first + step) % count
            if other in self._records or not source.chunk_samples[other - first]:
                continue
            try:
                self._load(other)
            except DATA_ERRORS:
                continue
            record = BadChunk(chunk, bad.shard.key, bad.offset, bad.samples, str(error), other)
            if isinstance(error, AvoidedError):
                self._avoided[chunk] = record
                return record
            with self._lock:
                self._records[chunk] = record
            after = "replaced" if source.errors.bad is None else source.errors.bad.after
            warnings.warn(f"{error}; its {bad.samples} samples are {after}", BadChunkWarning, stacklevel=2)
            return record
        raise DatasetError(f"no chunk of the data set can be read; the last one: {error}") from error

    def _load(self, chunk: int) -> Block:
        if chunk not in self._blocks:
            self._blocks[chunk] = self._sources.chunks.load(chunk)
            while len(self._blocks) > _KEPT_BLOCKS * len(self._sources):
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(chunk)
        return self._blocks[chunk]

    def of_source(self, number: int) -> QuarantineOfSource:
        """Make a view of it by the numbers that chunks and samples have in one source."""
        return QuarantineOfSource(self, self._sources.first_chunks[number], self._sources.first_ids[number])


class QuarantineOfSource:
    """A quarantine of all sources, seen by one of them: chunks and samples have the numbers of its own manifest."""

    def __init__(self, of_all: Quarantine, first_chunk: int, first_id: int) -> None:
        self._of_all = of_all
        self._first_chunk = first_chunk
        self._first_id = first_id

    def replace(
        self, group: ChunkRows, error: BaseException, epoch: int | IntArray | None = None
    ) -> tuple[ChunkRows, Block]:
        """Replace rows as ``Quarantine.replace`` does."""
        joint = replace(group, chunk=group.chunk + self._first_chunk)
        other, block = self._of_all.replace(joint, error, epoch)
        stands_for = None if other.stands_for is None else other.stands_for - self._first_id
        return replace(other, chunk=other.chunk - self._first_chunk, stands_for=stands_for), block
