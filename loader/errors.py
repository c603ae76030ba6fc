"""The errors of data sets, order and batches."""

from __future__ import annotations

import sys
from types import FrameType

from ..storage.errors import PenstockError


class DatasetError(PenstockError):
    """The objects are no data set: nothing is there, formats are mixed, shards are missing, or there are no samples."""


class FormatError(DatasetError):
    """The shard's bytes are not what its format says.

    The message names the shard, the byte offset where it is known, what was found and what to do. Write or copy the
    shard again; ``penstock verify`` lists all flaws.
    """

    def __init__(self, shard: str, problem: str, *, offset: int | None = None) -> None:
        where = shard if offset is None else f"{shard} at byte {offset}"
        super().__init__(f"{where}: {problem}")
        self.shard = shard
        self.offset = offset
        self.problem = problem

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_format_error, (type(self), self.shard, self.problem, self.offset)


def _rebuild_format_error(kind: type[FormatError], shard: str, problem: str, offset: int | None) -> FormatError:
    return kind(shard, problem, offset=offset)


class ChecksumError(FormatError):
    """The bytes of a chunk do not have the checksum that the manifest holds for them: copy the shard again."""


class MemoryLimitError(DatasetError):
    """A chunk takes more memory than it may, or an allocation failed. Nothing is wrong with the bytes.

    The message names the shard, what the chunk would take, the limit and what to do.
    """


class DecodeError(PenstockError):
    """A sample's field could not be decoded; the message names sample, shard, field and cause.

    ``on_error="replace"`` and ``"skip"`` tolerate such samples.
    """

    field: str | None = None


class SampleNotFoundError(PenstockError, LookupError):
    """No sample has the key or value that was searched for, or ``transform`` drops it."""


class WorkerError(PenstockError, RuntimeError):
    """A worker process could not be started, or died; the message says how, and which samples it was working on."""


class PartitionError(PenstockError, ValueError):
    """Samples, lanes, ranks and batches cannot be divided as requested."""


class ConfigError(PenstockError, ValueError):
    """An argument is invalid; the message names it, its value and what would work."""


class StateMismatchError(PenstockError, ValueError):
    """The state belongs to another data set, seed or order; the message names what differs, here and in the state."""


class ForkedLoaderError(PenstockError, RuntimeError):
    """A loader is used in a process that was forked from the one that made it, without its threads and connections.

    Start processes with ``spawn`` or ``forkserver``, and make a loader in each.
    """


class LoaderClosedError(PenstockError, RuntimeError):
    """The loader was closed: only ``state_dict`` and metrics still work. Make a new one."""


class RankStoppedError(PenstockError, RuntimeError):
    """Another rank's loader failed, so this one stops too; the message names that rank and its error: the first cause.

    ``rank``: its number in the process group; ``kind``: the class of its error.
    """

    is_consequence = True

    def __init__(self, rank: int, kind: str, message: str) -> None:
        super().__init__(f"rank {rank} stopped: {kind}: {message}")
        self.rank = rank
        self.kind = kind
        self.problem = message

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rank, self.kind, self.problem)


def stacklevel_of_user() -> int:
    """Count the frames from the caller to the first one outside this package: the ``stacklevel`` of its warnings."""
    package, level = __name__.partition(".")[0], 1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    return level
