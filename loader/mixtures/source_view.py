"""What a pipeline lends its assembler, seen by one source of a mixture: chunks and samples have its own numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..columns import Block
from ..order.spans import SourceOrder
from ..pipeline.assembler import Equipment, ReadsChunks
from ..sources.kinds import Kind
from ..sources.sources import Sources


class ReaderOfSource:
    """A reader of all sources' chunks, asked by the numbers that they have in one source."""

    def __init__(self, reader: ReadsChunks, first_chunk: int) -> None:
        self._reader = reader
        self._first = first_chunk

    @property
    def has_room(self) -> bool:
        return self._reader.has_room

    @property
    def needs_requests(self) -> bool:
        return self._reader.needs_requests

    @property
    def keeps_unused(self) -> bool:
        return self._reader.keeps_unused

    def request(self, chunks: Sequence[int], *, at_once: bool = False) -> None:
        self._reader.request([self._first + chunk for chunk in chunks], at_once=at_once)

    def release(self, chunks: Sequence[int]) -> None:
        self._reader.release([self._first + chunk for chunk in chunks])

    def take(self, chunks: Sequence[int]) -> Iterator[tuple[int, Block | BaseException]]:
        for chunk, block in self._reader.take([self._first + chunk for chunk in chunks]):
            yield chunk - self._first, block


def see_source(equipment: Equipment, sources: Sources, kind: Kind, number: int, order: SourceOrder) -> Equipment:
    """The equipment for one source, whose samples errors name with its own; its rows draw by the seed of its order."""
    chunks = Sources([sources[number]], is_mixed=True).chunks
    maker = replace(kind.maker(equipment.maker), manifest=chunks.manifest, seed=order.order.seed)
    return replace(
        equipment,
        source=chunks,
        reader=ReaderOfSource(equipment.reader, sources.first_chunks[number]),
        maker=maker,
    )
