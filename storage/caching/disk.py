"""The cache's folder: checksummed entries, locks that die with their process, and a size limit that holds on average.

Layout below ``folder/uid-N/v1``::

    entries/ab/<hash>   content, then a trailer: magic, length, xxh3 of the content seeded with the name
    locks/<stripe>      empty files for flock; never deleted, because a deleted lock file excludes no process
    temporary/*         entries being written, each under its writer's flock
    used                8 bytes: the approximate size of all entries; every sweep corrects it

Eviction is least recently used, by the files' mtime, which a hit renews. A sweep looks at every entry but frees a tenth
of the limit, so its cost is spread over many writes.

``uid-N`` is the user's alone and held open; all names are relative to it. The seed binds an entry to its name, so that
a file that was moved or copied to another's place is no entry.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import struct
import threading
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from ..errors import AccessDeniedError, CacheFullError
from ..files import ask_flock, read_at, try_flock, write_all
from ..hashing import xxh3_64
from ..own_folder import OwnFolder

_LOG = logging.getLogger(__name__)
_TRAILER = struct.Struct("<8sQQ")
_MAGIC = b"penstck2"
_OLD_MAGIC = b"penstck1"  # of entries that were not bound to their names: misses
_ENTRIES, _LOCKS, _TEMPORARY, _USED_BYTES = "v1/entries", "v1/locks", "v1/temporary", "v1/used"
_PARTS = ("v1", _ENTRIES, _LOCKS, _TEMPORARY)
_USED = struct.Struct("<q")

STRIPES = 4096
LOCK_WAIT_S = 60.0
ACCOUNT_WAIT_S = 1.0
# A hit renews an entry's mtime at most this often: the system call would be a tenth of a small hit's time.
RENEW_S = 30.0
KEEP_SHARE = 0.9
# After a failed write, writing pauses for this long, so that a full disk is not tried again for every chunk.
PAUSE_S = 30.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class CacheDisk:
    """Cache of one user below a folder.

    Mutable state in memory: the folder that is held, and when writing may resume, both under a lock; the rest is in
    files.
    """

    def __init__(self, folder: Path, limit_bytes: int | None) -> None:
        if limit_bytes is not None and limit_bytes < 1:
            raise ValueError(f"a cache of {limit_bytes} bytes: the limit has to be 1 or more, or None")
        self._folder = folder
        self._paused_until = 0.0
        self._warned = self._is_closed = self._has_warned_of_size = False
        self._lock = threading.Lock()
        self._root = OwnFolder.nowhere()
        try:
            self._root = self._open_root()
            self._clean_temporary()
            self.limit_bytes = limit_bytes or self._choose_limit()
            if not self._root.has(_USED_BYTES):
                self.sweep(self.limit_bytes)
        except OSError as exc:
            if exc.errno not in _FULL or not self._root.has(_LOCKS):
                raise CacheFullError(
                    f"the cache folder {folder} can't be used ({exc.strerror}); "
                    "give cache_dir= a folder that this user may write, on a disk with room, or no cache_dir"
                ) from exc
            self.limit_bytes = limit_bytes or 1
            self._pause(exc)

    def read(self, name: str) -> tuple[memoryview | None, bool]:
        """(content or None, whether there was a corrupt entry, which is now gone)."""
        try:
            fd = self._root.open(_path(name), os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return None, False
        try:
            status = os.fstat(fd)
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            data, magic = _read_entry(fd, status.st_size, name) if is_ours else (None, b"")
            if data is None:
                self.discard(name)
                return None, magic != _OLD_MAGIC
            if time.time() - status.st_mtime > RENEW_S:
                with suppress(OSError):
                    os.utime(fd)
            return data, False
        except OSError as exc:
            _LOG.warning("the cache in %s cannot be read (%s); reading from the store", self._folder, exc.strerror)
            return None, False
        finally:
            os.close(fd)

    def write(self, name: str, data: memoryview) -> bool:
        """Write an entry; returns False if that failed, which does not fail the run."""
        size = data.nbytes + _TRAILER.size
        if size > self.limit_bytes * KEEP_SHARE:
            self._tell_too_large(size)
            return False
        if time.monotonic() < self._paused_until:
            return False
        for attempt in (1, 2):
            try:
                self._write_entry(name, data)
                self._account(size)
                return True
            except OSError as exc:
                if self._is_closed:
                    return False
                if exc.errno == errno.ENOENT:  # deleted while it was in use
                    if attempt == 1 and self._make_again():
                        continue
                    return False
                if attempt == 2 or exc.errno not in _FULL or not self._make_room(size):
                    self._pause(exc)
                    return False
        return False

    def discard(self, name: str) -> None:
        """Delete an entry, if it exists."""
        with suppress(OSError):
            size = self._root.stat(_path(name)).st_size
            self._root.delete(_path(name))
            self._account(-size)

    def lock(self, name: str, *, wait_s: float = LOCK_WAIT_S) -> AbstractContextManager[bool]:
        """Hold the lock of an entry; yields False if another process held it for ``wait_s``, or if locking failed."""
        stripe = int(name[:8], 16) % STRIPES
        return self._root.lock(f"{_LOCKS}/{stripe:03x}", wait_s=wait_s)

    def sweep(self, target_bytes: int) -> int:
        """Delete the least recently used entries until at most ``target_bytes`` are left; returns the bytes freed.

        One process sweeps at a time; a second one returns at once.
        """
        fd = self._root.open(f"{_LOCKS}/sweep", os.O_RDWR | os.O_CREAT)
        try:
            if ask_flock(fd, 0) is False:
                return 0
            entries: list[tuple[float, int, str]] = []
            with self._root.scan(_ENTRIES) as shelves:
                for shelf in shelves:
                    path = f"{_ENTRIES}/{shelf.name}"
                    with self._root.scan(path) as files:
                        for entry in files:
                            with suppress(FileNotFoundError):
                                status = entry.stat(follow_symlinks=False)
                                entries.append((status.st_mtime, status.st_size, f"{path}/{entry.name}"))
            total = before = sum(size for _, size, _ in entries)
            for _, size, path in sorted(entries):
                if total <= target_bytes:
                    break
                with suppress(FileNotFoundError):
                    self._root.delete(path)
                total -= size
            self._account(0, total=total)
            return before - total
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let go of the folder; what a thread still reads or writes afterwards is a miss."""
        with self._lock:
            self._is_closed = True
            self._root = OwnFolder.nowhere()

    @property
    def used_bytes(self) -> int:
        """The approximate size of all entries in bytes."""
        try:
            fd = self._root.open(_USED_BYTES, os.O_RDONLY)
        except OSError:
            return 0
        try:
            return int(_USED.unpack(os.pread(fd, _USED.size, 0))[0])
        except (OSError, struct.error):
            return 0
        finally:
            os.close(fd)

    def _open_root(self) -> OwnFolder:
        root = OwnFolder(self._folder / f"uid-{os.geteuid()}")
        for part in _PARTS:
            root.make(part)
        return root

    def _make_again(self) -> bool:
        """Make the folder that was deleted while the cache was in use; False where that failed, or it was closed."""
        with self._lock:
            if self._is_closed:
                return False
            is_new = not all(map(self._root.has, _PARTS))  # else another thread was first
            if is_new:
                try:
                    self._root = self._open_root()
                except (OSError, AccessDeniedError):  # another's folder, or a link, took its place
                    return False
        if is_new:
            _LOG.warning("the cache folder %s was deleted while it was in use; it was made again", self._folder)
        return True

    def _write_entry(self, name: str, data: memoryview) -> None:
        path = _path(name)
        self._root.make(f"{_ENTRIES}/{name[:2]}")
        with self._root.replacing(path, temporary_folder=_TEMPORARY) as fd:
            try_flock(fd, 0)  # shows that the writer is alive
            write_all(fd, data)
            write_all(fd, _TRAILER.pack(_MAGIC, data.nbytes, _digest(data, name)))

    def _account(self, change: int, *, total: int | None = None) -> None:
        """Add to the bytes used, or set them; sweep if they exceed the limit."""
        try:
            fd = self._root.open(_USED_BYTES, os.O_RDWR | os.O_CREAT)
        except OSError:
            return
        try:
            if ask_flock(fd, ACCOUNT_WAIT_S) is False:
                return  # the holder is suspended; a sweep corrects the number, also one that was lost without locks
            raw = os.pread(fd, _USED.size, 0)
            used = total if total is not None else change + (_USED.unpack(raw)[0] if len(raw) == _USED.size else 0)
            os.pwrite(fd, _USED.pack(max(0, used)), 0)
        except OSError:
            return
        finally:
            os.close(fd)
        if total is None and used > self.limit_bytes:
            with suppress(OSError):
                self.sweep(int(self.limit_bytes * KEEP_SHARE))

    def _make_room(self, size: int) -> bool:
        """Free an eighth of what is used, at least twice ``size``; returns False if nothing could be freed."""
        with suppress(OSError):
            used = self.used_bytes
            return self.sweep(max(0, used - max(used // 8, 2 * size))) > 0
        return False

    def _pause(self, exc: OSError) -> None:
        with self._lock:
            self._paused_until = time.monotonic() + PAUSE_S
            if self._warned:
                return
            self._warned = True
        _LOG.warning(
            "the cache in %s cannot be written (%s): the run continues and reads from the store; "
            "free disk space or lower cache_limit=",
            self._folder,
            exc.strerror,
        )

    def _tell_too_large(self, size: int) -> None:
        with self._lock:
            if self._has_warned_of_size or self._warned:
                return
            self._has_warned_of_size = True
        _LOG.warning(
            "the cache in %s is too small for a range of %s bytes: its limit is %s bytes. Such ranges are read from "
            "the store each time; raise cache_limit=, or free disk space",
            self._folder,
            f"{size:,}",
            f"{self.limit_bytes:,}",
        )

    def _choose_limit(self) -> int:
        return max(1, int((self._root.free_bytes() + self.used_bytes) * 0.9))

    def _clean_temporary(self) -> None:
        """Delete leftovers of killed writers: files that no process has locked."""
        with self._root.scan(_TEMPORARY) as entries:
            names = [entry.name for entry in entries]
        for name in names:
            with suppress(OSError):
                fd = self._root.open(f"{_TEMPORARY}/{name}", os.O_RDONLY)
                try:
                    if try_flock(fd, 0):
                        self._root.delete(f"{_TEMPORARY}/{name}")
                finally:
                    os.close(fd)


def _path(name: str) -> str:
    return f"{_ENTRIES}/{name[:2]}/{name}"


def _digest(data: memoryview, name: str) -> int:
    return xxh3_64(data, seed=int(name[:16], 16))


def _read_entry(fd: int, file_bytes: int, name: str) -> tuple[memoryview | None, bytes]:
    """The content of an entry, None if it is not what was written under this name; and the magic that was found."""
    size = file_bytes - _TRAILER.size
    if size < 0:
        return None, b""
    raw = read_at(fd, 0, file_bytes)
    if len(raw) < file_bytes:
        return None, b""
    magic, length, digest = _TRAILER.unpack(raw[size:])
    data = raw[:size]
    if magic != _MAGIC or length != size or digest != _digest(data, name):
        return None, magic
    return data, magic
