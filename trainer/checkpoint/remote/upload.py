"""Files on their way up: cut into parts as they are written, several parts at once, nothing on a disk."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from ....storage.errors import StorageError
from ....storage.hashing import xxh3_64
from ....storage.store import Store
from ....storage.threads.daemon_pool import DaemonPool
from ..folder import FileSeal
from ..traffic import COPIED_AHEAD_BYTES, TRAFFIC
from .layout import StoredFile, part_key

PART_BYTES = 32 << 20
# A rank holds this many parts and the one that is being filled: 288 MB.
PARTS_AT_ONCE = 8


class Upload:
    """One rank's files of one save. The saving thread writes; ``close`` waits for the parts that are under way.

    Mutable state: ``files``, the keys sent so far, and the first error, under a lock.
    """

    def __init__(self, store: Store, step: int, save_id: str) -> None:
        self.files: dict[str, StoredFile] = {}
        self._store = store
        self._step = step
        self._save_id = save_id
        self._pool = DaemonPool("penstock-upload", PARTS_AT_ONCE)
        self._places: SimpleQueue[None] = SimpleQueue()
        self._leave(PARTS_AT_ONCE)
        self._lock = threading.Lock()
        self._keys: list[str] = []
        self._error: BaseException | None = None

    def add_file(self, name: str, data: bytes) -> None:
        """Send a small file."""
        with self.create_stream(name) as stream:
            stream.write(data)

    @contextmanager
    def create_stream(self, name: str) -> Iterator[io.RawIOBase]:
        """A stream whose bytes are in the store when the block ends; the file is then one of ``files``.

        Raises:
            StorageError: a part could not be sent.
        """
        stream = _PartStream(self, name.removesuffix(".tmp"))  # torch writes its metadata so, and renames it
        try:
            yield stream
        except RuntimeError as exc:  # torch.save hides the error of a write behind one of its own
            raise self._error or exc from exc
        stream.send_rest()
        self._wait()
        self.files[name] = stream.describe()

    def send(self, name: str, number: int, data: bytes | bytearray) -> None:
        """Send a part as soon as there is a place; the buffer must not be changed any more."""
        self._places.get()
        if self._error is not None:
            self._leave()
            raise self._error
        key = part_key(self._step, self._save_id, name, number)
        self._keys.append(key)
        try:
            self._pool.submit(self._put, key, data)
        except BaseException:  # no thread can be started
            self._leave()
            raise

    def remove(self) -> None:
        """Delete what was sent, if the store can be reached; the rest is deleted as a leftover."""
        self._wait(silent=True)
        if isinstance(self._error, StorageError) and self._error.transient:
            return
        with suppress(StorageError):
            self._store.delete(self._keys)

    def close(self) -> None:
        """End the threads; closing twice is allowed."""
        self._pool.close()

    def rename(self, name: str, final: str) -> None:
        """Give a file its name; its objects keep theirs."""
        self.files[final] = self.files.pop(name)

    def _put(self, key: str, data: bytes | bytearray) -> None:
        try:
            if self._error is None:
                self._store.put(key, data)
                TRAFFIC.add(len(data))
        except BaseException as exc:  # noqa: BLE001 - the writing thread raises it
            with self._lock:
                self._error = self._error or exc
        finally:
            self._leave()

    def _leave(self, places: int = 1) -> None:
        for _ in range(places):
            self._places.put(None)

    def _wait(self, *, silent: bool = False) -> None:
        for _ in range(PARTS_AT_ONCE):
            self._places.get()
        self._leave(PARTS_AT_ONCE)
        if self._error is not None and not silent:
            raise self._error


class _PartStream(io.RawIOBase):
    """Cuts what is written into parts, and keeps the checksum of each and of the whole."""

    def __init__(self, upload: Upload, name: str) -> None:
        super().__init__()
        self._upload = upload
        self._name = name
        self._buffer = bytearray()
        self._size = 0
        self._digest = xxhash.xxh3_64()
        self._parts: list[FileSeal] = []

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self._size += len(view)
        rest = view
        while rest:
            taken = rest[: PART_BYTES - len(self._buffer)]
            self._buffer += taken
            rest = rest[len(taken) :]
            if len(self._buffer) == PART_BYTES:
                self.send_rest()
        return len(view)

    def send_rest(self) -> None:
        if self._buffer:
            data, self._buffer = self._buffer, bytearray()
            number = len(self._parts)
            self._parts.append(FileSeal(size=len(data), xxh3=f"{xxh3_64(data):016x}"))
            self._upload.send(self._name, number, data)

    def describe(self) -> StoredFile:
        return StoredFile(seal=FileSeal(size=self._size, xxh3=self._digest.hexdigest()), parts=tuple(self._parts))


class _UploadFileSystem(FileSystem):
    """The file system that torch's writer of shards writes to."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with self._upload.create_stream(Path(path).name) as stream:
            yield cast(io.IOBase, stream)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: a store has no folders."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return Path(path).name in self._upload.files

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._upload.files.pop(Path(path).name, None)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._upload.rename(Path(path).name, Path(new_path).name)


def open_upload_writer(upload: Upload, name: str) -> FileSystemWriter:
    """torch's writer of shards, into the store; ``name`` is what its metadata calls the checkpoint."""
    writer = FileSystemWriter(name, sync_files=False, per_thread_copy_ahead=COPIED_AHEAD_BYTES)
    writer.fs = _UploadFileSystem(upload)
    return writer
