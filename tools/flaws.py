"""Flaws that ``verify`` finds in a data set."""

from __future__ import annotations

from dataclasses import dataclass

from ..loader.errors import FormatError
from ..loader.formats.shard import ChunkRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """Flaw of a shard. ``offset`` and ``length`` are those of the chunk, None for the shard as a whole."""

    shard: str
    offset: int | None
    length: int | None
    kind: str
    problem: str


def shard_flaw(shard: str, kind: str, problem: str) -> Flaw:
    return Flaw(shard=shard, offset=None, length=None, kind=kind, problem=problem)


def error_flaw(shard: str, error: BaseException, chunk: ChunkRef | None = None) -> Flaw:
    """The flaw that an error tells of; in ``chunk``, if one is given."""
    problem = error.problem if isinstance(error, FormatError) else str(error)
    offset = error.offset if isinstance(error, FormatError) else None
    if offset is None and chunk is not None:
        offset = chunk.offset
    return Flaw(
        shard=shard,
        offset=offset,
        length=chunk.length if chunk else None,
        kind=type(error).__name__,
        problem=problem or type(error).__name__,
    )
