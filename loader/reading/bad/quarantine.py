"""Chunks that cannot be read: reported and replaced by others, up to a limit.

A bad chunk is replaced by the next chunk of the manifest that can be read, so every rank, every world size and every
resume delivers the same samples. The replacing samples keep their own ids, and are of the same selection.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from ....storage import DecryptionError, NotFoundError, ObjectChangedError
from ...columns import Block, IntArray
from ...errors import DatasetError, FormatError
from ...order.selecting.selection import Selection
from ...order.spans import ChunkRows
from ..chunk_source import AvoidedError, ChunkSource
from .file import Quarantined
from .samples import BadSamples

DATA_ERRORS = (FormatError, DecryptionError, NotFoundError, ObjectChangedError)
_KEPT_BLOCKS = 4


class BadChunkWarning(UserWarning):
    """A chunk could not be read; samples of another chunk replace its own."""


@dataclass(frozen=True, slots=True)
class BadChunk:
    """A chunk that could not be read, and the chunk whose samples replace its own (both as manifest ordinals)."""

    chunk: int
    shard: str
    offset: int
    samples: int
    error: str
    replaced_by: int


class ReplacesChunks(Protocol):
    """A ``Quarantine``, or that of one source of a mixture."""

    def replace(self, group: ChunkRows, error: BaseException, epoch: int | None = None) -> tuple[ChunkRows, Block]: ...


class Quarantine:
    """Replaces the rows of up to ``limit`` bad chunks. Used by the assembler thread; ``records`` by any.

    Without a limit, ``bad`` counts their samples against its own. Chunks that are avoided count for nothing.
    """

    def __init__(
        self, source: ChunkSource, limit: int | None, selection: Selection | None = None, bad: BadSamples | None = None
    ) -> None:
        self._source = source
        self._bad = bad
        self._selection = selection
        self._limit = limit
        self._records: dict[int, BadChunk] = {}
        self._avoided: dict[int, BadChunk] = {}
        self._blocks: OrderedDict[int, Block] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def records(self) -> list[BadChunk]:
        with self._lock:
            return list(self._records.values())

    def replace(self, group: ChunkRows, error: BaseException, epoch: int | None = None) -> tuple[ChunkRows, Block]:
        """Rows of another chunk for those of one that failed with ``error``; raises ``error`` if it is not the data's.

        Without an ``epoch`` their samples are not counted: they have been.

        Raises:
            DatasetError: more chunks, or samples, are bad than the limit allows; names the latest.
        """
        is_avoided = isinstance(error, AvoidedError)
        if not isinstance(error, DATA_ERRORS) or (self._limit == 0 and not is_avoided):
            raise error
        ids: IntArray = group.rows + self._source.manifest.first_ids[group.chunk]
        if self._bad is not None and epoch is not None:
            self._count(group.chunk, ids, error, epoch)
        known = self._records.get(group.chunk) or self._avoided.get(group.chunk)
        if known is None:
            if not is_avoided and self._limit is not None and len(self._records) >= self._limit:
                raise DatasetError(
                    f"more than max_bad_chunks={self._limit} chunks cannot be read; the last one: {error}. "
                    "`penstock verify` lists all that are bad"
                ) from error
            known = self._record(group.chunk, error)
        block = self._load(known.replaced_by)
        rows: IntArray = group.rows % block.samples
        if self._selection is not None:
            own = self._selection.rows_of(known.replaced_by)
            rows = own[group.rows % len(own)]
        return ChunkRows(known.replaced_by, rows, group.targets, ids), block

    def _count(self, chunk: int, ids: IntArray, error: BaseException, epoch: int) -> None:
        assert self._bad is not None
        if isinstance(error, AvoidedError):
            self._bad.note_avoided(epoch, ids.tolist())
            return
        ref = self._source.manifest.chunk(chunk)
        entry = Quarantined(
            kind="chunk",
            id=int(self._source.manifest.first_ids[chunk]),
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
        self._bad.tell(entry, ids.tolist())

    def _record(self, chunk: int, error: BaseException) -> BadChunk:
        manifest = self._source.manifest
        bad = manifest.chunk(chunk)
        for step in range(1, manifest.num_chunks):
            other = (chunk + step) % manifest.num_chunks
            if other in self._records or (self._selection is not None and not self._selection.counts[other]):
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
            after = "replaced" if self._bad is None else self._bad.after
            warnings.warn(f"{error}; its {bad.samples} samples are {after}", BadChunkWarning, stacklevel=2)
            return record
        raise DatasetError(f"no chunk of the data set can be read; the last one: {error}") from error

    def _load(self, chunk: int) -> Block:
        if chunk not in self._blocks:
            self._blocks[chunk] = self._source.load(chunk)
            while len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(chunk)
        return self._blocks[chunk]
