"""Bad chunks: their record and warning, the errors that mean one, and what finds another in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ....storage import DecryptionError, NotFoundError, ObjectChangedError
from ...errors import FormatError

if TYPE_CHECKING:
    from ...columns import Block, IntArray
    from ...order.spans import ChunkRows

DATA_ERRORS = (FormatError, DecryptionError, NotFoundError, ObjectChangedError)


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

    def replace(
        self, group: ChunkRows, error: BaseException, epoch: int | IntArray | None = None
    ) -> tuple[ChunkRows, Block]: ...
