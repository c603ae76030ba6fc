"""Count bytes read from and written to checkpoints, so that a watchdog can tell slow from stuck."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter

_PIECE_BYTES = 64 << 20
_SYNC_BYTES = 256 << 20


class Traffic:
    """A counter that only grows; one is enough for a process, and any thread may read it."""

    def __init__(self) -> None:
        self.bytes = 0

    def add(self, count: int) -> None:
        self.bytes += count


TRAFFIC = Traffic()
"""All that this process reads and writes of checkpoints."""


# What is written lies in host memory. Where there is CUDA torch would copy ahead on, and wait for, a stream of the
# thread's current device, which in a new thread is 0: in all ranks' processes, with a context each.
COPIED_AHEAD_BYTES = 0


def open_writer(folder: Path) -> FileSystemWriter:
    writer = FileSystemWriter(folder, per_thread_copy_ahead=COPIED_AHEAD_BYTES)
    writer.fs = _CountedFileSystem()
    return writer


def open_reader(folder: Path) -> FileSystemReader:
    reader = FileSystemReader(folder)
    reader.fs = _CountedFileSystem()
    return reader


class CountedFile(io.FileIO):
    """A file whose traffic is counted in pieces; ``error`` is the first error of a write.

    Written bytes are synced in portions, so that the final sync, which shows no progress, stays short.
    """

    error: OSError | None = None
    _unsynced_bytes = 0

    def write(self, data: Any) -> int:
        try:
            count = self._write_piece(memoryview(data).cast("B")[:_PIECE_BYTES])
        except OSError as exc:
            self.error = self.error or exc
            raise
        TRAFFIC.add(count)
        self._unsynced_bytes += count
        if self._unsynced_bytes >= _SYNC_BYTES:
            os.fdatasync(self.fileno())
            self._unsynced_bytes = 0
        return count

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(memoryview(buffer).cast("B")[:_PIECE_BYTES]) or 0
        TRAFFIC.add(count)
        return count

    def _write_piece(self, piece: memoryview) -> int:
        return super().write(piece) or 0


class _CountedFileSystem(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        raw = CountedFile(path, mode.replace("b", ""))
        try:
            with io.BufferedWriter(raw) if "w" in mode else io.BufferedReader(raw) as stream:
                yield cast(io.IOBase, stream)
        except RuntimeError as exc:  # torch.save hides the error of a write behind one of its own
            raise raw.error or exc from exc
