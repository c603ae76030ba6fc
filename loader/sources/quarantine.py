"""Unreadable chunks of a mixture: replaced by chunks of the same source, up to one limit for all."""

from __future__ import annotations

from dataclasses import replace

from ..columns import Block
from ..errors import DatasetError
from ..order.spans import ChunkRows
from ..reading.bad.quarantine import DATA_ERRORS, BadChunk, Quarantine
from ..reading.chunk_source import ChunkSource
from .sources import Sources


class QuarantineOfSource:
    """A quarantine of all sources, seen by one of them: chunks and samples have the numbers of its own manifest."""

    def __init__(self, of_all: MixedQuarantine, first_chunk: int, first_id: int) -> None:
        self._of_all = of_all
        self._first_chunk = first_chunk
        self._first_id = first_id

    def replace(self, group: ChunkRows, error: BaseException, epoch: int | None = None) -> tuple[ChunkRows, Block]:
        """As ``Quarantine.replace``."""
        other, block = self._of_all.replace(replace(group, chunk=group.chunk + self._first_chunk), error, epoch)
        return _move(other, -self._first_chunk, -self._first_id), block


class MixedQuarantine:
    """Used by the assembler thread; ``records``, whose chunks are joint numbers, by any."""

    def __init__(self, sources: Sources, chunks: list[ChunkSource], limit: int) -> None:
        self._sources = sources
        self._limit = limit
        self._own = [
            Quarantine(of_source, limit, source.selection) for of_source, source in zip(chunks, sources, strict=True)
        ]

    @property
    def records(self) -> list[BadChunk]:
        manifest = self._sources.manifest
        return [
            replace(
                record,
                chunk=record.chunk + first,
                replaced_by=record.replaced_by + first,
                shard=manifest.chunk(record.chunk + first).shard.key,
            )
            for own, first in zip(self._own, self._sources.first_chunks, strict=True)
            for record in own.records
        ]

    def replace(self, group: ChunkRows, error: BaseException, epoch: int | None = None) -> tuple[ChunkRows, Block]:
        """As ``Quarantine.replace``, of joint chunks; raises ``error`` if it is not the data's.

        Raises:
            DatasetError: more chunks of all sources together are bad than the limit allows.
        """
        if not isinstance(error, DATA_ERRORS):
            raise error
        source, chunk = self._sources.of_chunk(group.chunk)
        is_known = any(record.chunk == chunk for record in self._own[source].records)
        if self._limit and not is_known and len(self.records) >= self._limit:
            raise DatasetError(
                f"more than max_bad_chunks={self._limit} chunks cannot be read; the last one, of source "
                f"{self._sources.names[source]!r}: {error}. `penstock verify` lists all that are bad"
            ) from error
        own, block = self._own[source].replace(ChunkRows(chunk, group.rows, group.targets), error, epoch)
        return _move(own, self._sources.first_chunks[source], self._sources.first_ids[source]), block


def _move(group: ChunkRows, chunks: int, ids: int) -> ChunkRows:
    """The rows of a group that is told in the numbers of other chunks and samples."""
    stands_for = None if group.stands_for is None else group.stands_for + ids
    return replace(group, chunk=group.chunk + chunks, stands_for=stands_for)
