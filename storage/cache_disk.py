"""The cache's folder: checksummed entries, locks that die with their process, and a size limit that holds on average.

Layout below ``folder/uid-N/v1``::

    entries/ab/<hash>   content, then a trailer: magic, length, xxh3 of the content
    locks/<stripe>      empty files for flock; never deleted, because a deleted lock file locks nobody out
    temporary/*         entries being written, each under its writer's flock
    used                8 bytes: the approximate size of all entries; every sweep corrects it

Eviction is least recently used, by the files' mtime, which a hit renews. A sweep looks at every entry but frees a tenth
of the limit, so its cost is spread over many writes.
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

import xxhash

from .errors import AccessDeniedError, CacheFullError
from .files import lock_file, replacing, try_flock, write_all

_LOG = logging.getLogger(__name__)
_TRAILER = struct.Struct("<8sQQ")
_MAGIC = b"penstck1"
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
    """One user's cache below a folder. Mutable state in memory: when writing may resume; the rest is in files."""

    def __init__(self, folder: Path, limit_bytes: int | None) -> None:
        if limit_bytes is not None and limit_bytes < 1:
            raise ValueError(f"a cache of {limit_bytes} bytes: the limit has to be 1 or more, or None")
        self._folder = folder
        self._paused_until = 0.0
        self._warned = False
        self._lock = threading.Lock()
        root = folder / f"uid-{os.geteuid()}"
        self._entries = root / "v1" / "entries"
        self._locks = root / "v1" / "locks"
        self._temporary = root / "v1" / "temporary"
        self._used = root / "v1" / "used"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            root.mkdir(mode=0o700, exist_ok=True)
            _check_owner(root)
            for part in (self._entries, self._locks, self._temporary):
                part.mkdir(parents=True, exist_ok=True)
            self._clean_temporary()
            self.limit_bytes = limit_bytes or self._choose_limit()
            if not self._used.exists():
                self.sweep(self.limit_bytes)
        except OSError as exc:
            if exc.errno not in _FULL or not self._locks.is_dir():
                raise CacheFullError(
                    f"the cache folder {folder} can't be used ({exc.strerror}); "
                    "give cache_dir= a folder that this user may write, on a disk with room, or no cache_dir"
                ) from exc
            self.limit_bytes = limit_bytes or 1
            self._pause(exc)

    def read(self, name: str) -> tuple[memoryview | None, bool]:
        """(content or None, whether there was a corrupt entry, which is now gone)."""
        path = self._path(name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None, False
        try:
            status = os.fstat(fd)
            data = _read_entry(fd, status.st_size)
            if data is None:
                self.discard(name)
                return None, True
            if time.time() - status.st_mtime > RENEW_S:
                with suppress(OSError):
                    os.utime(fd)
            return data, False
        except OSError as exc:
            _LOG.warning("the cache in %s can't be read (%s); reading past it", self._folder, exc.strerror)
            return None, False
        finally:
            os.close(fd)

    def write(self, name: str, data: memoryview) -> bool:
        """Write an entry; returns False if that failed, which does not fail the run."""
        size = data.nbytes + _TRAILER.size
        if size > self.limit_bytes * KEEP_SHARE or time.monotonic() < self._paused_until:
            return False
        for attempt in (1, 2):
            try:
                self._write_entry(name, data)
                self._account(size)
                return True
            except FileNotFoundError:
                return False  # the folder was deleted meanwhile; the next read fetches again
            except OSError as exc:
                if attempt == 2 or exc.errno not in _FULL or not self._make_room(size):
                    self._pause(exc)
                    return False
        return False

    def discard(self, name: str) -> None:
        """Delete an entry, if it is there."""
        path = Path(self._path(name))
        with suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self._account(-size)

    def lock(self, name: str, *, wait_s: float = LOCK_WAIT_S) -> AbstractContextManager[bool]:
        """Hold the lock of an entry; yields False if another process held it for ``wait_s``, or if locking failed."""
        return lock_file(self._locks / f"{int(name[:8], 16) % STRIPES:03x}", wait_s=wait_s)

    def sweep(self, target_bytes: int) -> int:
        """Delete the least recently used entries until at most ``target_bytes`` are left; returns the bytes freed.

        One process sweeps at a time; a second one returns at once.
        """
        fd = os.open(self._locks / "sweep", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not try_flock(fd, 0):
                return 0
            entries: list[tuple[float, int, str]] = []
            for shelf in os.scandir(self._entries):
                for entry in os.scandir(shelf.path):
                    with suppress(FileNotFoundError):
                        status = entry.stat()
                        entries.append((status.st_mtime, status.st_size, entry.path))
            total = before = sum(size for _, size, _ in entries)
            for _, size, path in sorted(entries):
                if total <= target_bytes:
                    break
                with suppress(FileNotFoundError):
                    os.unlink(path)  # noqa: PTH108 - one of maybe millions
                total -= size
            self._account(0, total=total)
            return before - total
        finally:
            os.close(fd)

    @property
    def used_bytes(self) -> int:
        """The approximate size of all entries in bytes."""
        try:
            return int(_USED.unpack(self._used.read_bytes())[0])
        except (OSError, struct.error):
            return 0

    def _path(self, name: str) -> str:
        return f"{self._entries}/{name[:2]}/{name}"

    def _write_entry(self, name: str, data: memoryview) -> None:
        path = self._path(name)
        with suppress(FileExistsError):
            os.mkdir(os.path.dirname(path))  # noqa: PTH102, PTH120 - 2 microseconds, not 20
        with replacing(path, mode=0o600, temporary_folder=self._temporary) as fd:
            try_flock(fd, 0)  # shows that the writer is alive
            write_all(fd, data)
            write_all(fd, _TRAILER.pack(_MAGIC, data.nbytes, xxhash.xxh3_64_intdigest(data)))

    def _account(self, change: int, *, total: int | None = None) -> None:
        """Add to the bytes used, or set them; sweep if they exceed the limit."""
        try:
            fd = os.open(self._used, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        try:
            if not try_flock(fd, ACCOUNT_WAIT_S):
                return  # the holder is suspended, or there are no locks here; a sweep corrects the number
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
            "the cache in %s can't be written (%s): the run goes on and reads from the store; "
            "free disk space or lower cache_limit=",
            self._folder,
            exc.strerror,
        )

    def _choose_limit(self) -> int:
        space = os.statvfs(self._entries)
        return max(1, int((space.f_bavail * space.f_frsize + self.used_bytes) * 0.9))

    def _clean_temporary(self) -> None:
        """Delete what killed writers left: files that nobody has locked."""
        for entry in os.scandir(self._temporary):
            with suppress(OSError):
                fd = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    if try_flock(fd, 0):
                        Path(entry.path).unlink()
                finally:
                    os.close(fd)


def _check_owner(root: Path) -> None:
    status = root.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or mode & 0o077:
        raise AccessDeniedError(
            f"the cache folder {root} is not this user's alone (owner {status.st_uid}, mode {mode:o}); "
            "what others can write can't be trusted: remove it, or give another cache_dir="
        )


def _read_entry(fd: int, file_bytes: int) -> memoryview | None:
    """The content of an entry; None if it is not what was written."""
    size = file_bytes - _TRAILER.size
    if size < 0:
        return None
    parts: list[bytes] = []
    got = 0
    while got < file_bytes:
        part = os.pread(fd, min(file_bytes - got, 1 << 30), got)
        if not part:
            return None
        parts.append(part)
        got += len(part)
    raw = memoryview(parts[0] if len(parts) == 1 else b"".join(parts))
    magic, length, digest = _TRAILER.unpack(raw[size:])
    data = raw[:size]
    if magic != _MAGIC or length != size or digest != xxhash.xxh3_64_intdigest(data):
        return None
    return data
