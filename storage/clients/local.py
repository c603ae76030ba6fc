"""Files of a folder, read with pread: no lock of Python is held while the kernel copies."""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from ..checks import changed_before_write, check_etag, check_inside, check_key, check_length, where
from ..errors import AccessDeniedError, NotFoundError, StorageError, StoreUnavailableError
from ..files import TEMPORARY_PREFIX, locked_folder, read_at, replacing, write_all
from ..memory import libc
from ..memory.file_maps import FileMaps
from ..memory.mapped import can_map, map_range
from ..options import MappedReads
from ..ranges import read_ranges
from ..store import ByteRange, ObjectInfo

OPEN_FILES = 64
# Reading gaps on a local disk is rarely worth it: a system call costs as much as copying about 4 KiB.
LOCAL_GAP_BYTES = 4096

_Identity = tuple[int, int, int, int]
_Infos = list[ObjectInfo]  # inside the class, list is a verb


class _OpenFile:
    """A descriptor that is closed when neither the cache nor a reader refers to it any more."""

    __slots__ = ("fd", "identity")

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.identity = _identify(os.fstat(self.fd))
        except OSError:
            os.close(self.fd)
            self.fd = -1
            raise

    def __del__(self) -> None:
        fd = getattr(self, "fd", -1)  # open() may have failed
        if fd >= 0:
            os.close(fd)


class LocalStore:
    """Files below a folder. Mutable state: the last open files, under a lock, and those that are mapped.

    ``maps``: whether parts of files may be mapped, to copy from; "views": also to be read in place later.
    """

    def __init__(self, root: str | os.PathLike[str], *, open_files: int = OPEN_FILES, maps: MappedReads = True) -> None:
        self._root = os.path.abspath(root)  # noqa: PTH100 - keeps links as they are; resolve() would not
        self._base = self._root.rstrip("/") + "/"
        self._open_files = open_files
        self._maps = maps
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()
        self._file_maps = FileMaps()

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (partial(LocalStore, maps=self._maps), (self._root,))

    def __repr__(self) -> str:
        return f"LocalStore({self._root!r})"

    @property
    def maps_views(self) -> bool:
        """Return whether mapped values may be read later, when the file may have changed."""
        return self._maps == "views"

    @property
    def url(self) -> str:
        return "file://" + self._root

    def get(self, key: str, byte_range: ByteRange | None = None, *, etag: str | None = None) -> memoryview:
        check_key(self.url, key)
        try:
            file = self._open(key)
            size = file.identity[1]
            if etag is not None:
                check_etag(self.url, key, etag, _etag(file.identity))
            if byte_range is None:
                byte_range = ByteRange(0, size)
            else:
                check_inside(self.url, key, byte_range, size)
            data = read_at(file.fd, byte_range.start, len(byte_range))
            check_length(self.url, key, byte_range, len(byte_range), len(data))
            if etag is not None:  # the file may have been written to in place since it was opened
                check_etag(self.url, key, etag, _etag(_identify(os.fstat(file.fd))))
        except OSError as exc:
            raise _translate(exc, self.url, key) from exc
        return data

    def map(self, key: str, byte_range: ByteRange, *, etag: str) -> memoryview | None:
        """As ``get``, the file's pages themselves; None where that cannot be done safely.

        `penstock.storage.memory.mapped` says when that is. What is written to the file later shows through: ask
        ``check_unchanged`` before they are used, and after.
        """
        check_key(self.url, key)
        try:
            file = self._open(key)
            check_etag(self.url, key, etag, _etag(file.identity))
            check_inside(self.url, key, byte_range, file.identity[1])
            if not self._maps or not can_map(file.identity[3]):
                return None
            try:
                return self._map(file, byte_range.start, len(byte_range))
            finally:
                check_etag(self.url, key, etag, _etag(_identify(os.fstat(file.fd))))
        except OSError as exc:
            raise _translate(exc, self.url, key) from exc

    def limit_pages(self, nbytes: int) -> None:
        """Keep at most this many bytes mapped for later readers, besides those in use."""
        self._file_maps.limit(nbytes)

    def _map(self, file: _OpenFile, start: int, nbytes: int) -> memoryview | None:
        if self.maps_views:  # a write to one must not change another of the same part
            return map_range(file.fd, start, nbytes, private=True)
        return self._file_maps.map(file.fd, file.identity, file.identity[1], start, nbytes)

    def check_unchanged(self, key: str, etag: str) -> None:
        """Raise ObjectChangedError where the file has another ETag, NotFoundError where there is none."""
        path = self._base + key
        if libc.identify(path) == _parts(etag):  # as many times a batch as there are files in it
            return
        try:
            check_etag(self.url, key, etag, _etag(_identify(os.stat(path))))  # noqa: PTH116 - on a path of strings
        except OSError as exc:
            raise _translate(exc, self.url, key) from exc

    def get_ranges(self, key: str, ranges: Sequence[ByteRange], *, etag: str | None = None) -> list[memoryview]:
        return read_ranges(lambda r: self.get(key, r, etag=etag), ranges, gap_bytes=LOCAL_GAP_BYTES)

    def head(self, key: str) -> ObjectInfo:
        check_key(self.url, key)
        try:
            identity = _identify(os.stat(self._base + key))  # noqa: PTH116 - on the path of every small read
        except OSError as exc:
            raise _translate(exc, self.url, key) from exc
        return ObjectInfo(key, identity[1], _etag(identity))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        if folder:
            check_key(self.url, folder)
        if not Path(self._root).is_dir():
            raise NotFoundError(_why_no_folder(self._root))
        found: _Infos = []
        try:
            self._walk(folder + "/" if folder else "", prefix, found, set())
        except OSError as exc:
            raise _translate(exc, self.url, folder) from exc
        found.sort(key=lambda info: info.key)
        return iter(found)

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        check_key(self.url, key)
        path = Path(self._base + key)
        try:
            _make_folder(path.parent)
            with replacing(path, durable=True) as fd:
                write_all(fd, data)
                identity = _identify(os.fstat(fd))
        except OSError as exc:
            raise _translate(exc, self.url, key) from exc
        return ObjectInfo(key, identity[1], _etag(identity))

    def put_if(self, key: str, data: bytes | bytearray | memoryview, *, etag: str | None) -> ObjectInfo:
        check_key(self.url, key)
        folder = Path(self._base + key).parent
        try:
            _make_folder(folder)
            with locked_folder(folder):
                try:
                    found: str | None = self.head(key).etag
                except NotFoundError:
                    found = None
                if found != etag:
                    raise changed_before_write(self.url, key, etag)
                return self.put(key, data)
        except OSError as exc:
            raise _translate(exc, self.url, key) from exc

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(self.url, key)
        for key in keys:
            try:
                os.unlink(self._base + key)  # noqa: PTH108
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as exc:
                raise _translate(exc, self.url, key) from exc

    def close(self) -> None:
        with self._lock:
            self._files.clear()
        self._file_maps.close()

    def _open(self, key: str) -> _OpenFile:
        """Return an open file of what the key names now, not of what it named earlier."""
        path = self._base + key
        identity = _identify(os.stat(path))  # noqa: PTH116 - 1 microsecond; a Path would double it
        with self._lock:
            file = self._files.get(key)
            if file is not None and file.identity == identity:
                self._files.move_to_end(key)
                return file
        file = _OpenFile(path)
        dropped = []  # closed outside the lock
        with self._lock:
            stale = self._files.pop(key, None)
            if stale is not None:
                dropped.append(stale)
            self._files[key] = file
            while len(self._files) > self._open_files:
                dropped.append(self._files.popitem(last=False)[1])
        return file

    def _walk(self, folder: str, prefix: str, found: _Infos, seen: set[tuple[int, int]]) -> None:
        """Add the files below ``folder`` ('' or 'a/b/') whose keys start with ``prefix``; follow links to folders."""
        try:
            status = os.stat(self._base + folder)  # noqa: PTH116
            entries = sorted(os.scandir(self._base + folder), key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return  # an empty prefix, or a folder deleted meanwhile
        if (status.st_dev, status.st_ino) in seen:
            return  # a link back up
        seen = seen | {(status.st_dev, status.st_ino)}
        for entry in entries:
            key = folder + entry.name
            try:
                if entry.is_dir():
                    if (key + "/").startswith(prefix) or prefix.startswith(key + "/"):
                        self._walk(key + "/", prefix, found, seen)
                elif key.startswith(prefix) and not entry.name.startswith(TEMPORARY_PREFIX):
                    identity = _identify(entry.stat())
                    found.append(ObjectInfo(key, identity[1], _etag(identity)))
            except IsADirectoryError:
                continue  # no regular file
            except OSError as exc:
                if exc.errno not in (errno.ENOENT, errno.ELOOP):
                    raise
                # A dangling link is listed, so that a read of it fails, in place of a silent gap.
                if entry.is_symlink() and key.startswith(prefix):
                    found.append(ObjectInfo(key, 0, _etag((0, 0, 0, 0))))


def _why_no_folder(root: str) -> str:
    path = Path(root)
    if path.is_file():
        return f"{root} is a file, no folder; check the path"
    if path.is_symlink():
        return f"{root} is a link to {path.readlink()}, which is not there; restore that, or check the path"
    try:
        alike = sorted(each.name for each in path.parent.iterdir() if each.name.startswith(f"{path.name}."))
    except OSError:
        alike = []
    if not alike:
        return f"there is no folder {root}; check the path"
    named = ", ".join(alike[:3]) + (", ..." if len(alike) > 3 else "")
    return f"there is no file or folder {root}, but {named} beside it; give a file's name with its ending"


def _make_folder(folder: Path) -> None:
    """Make a folder to write into, with those above it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as exc:
        file = next((each for each in (folder, *folder.parents) if os.path.lexists(each) and not each.is_dir()), folder)
        raise StorageError(f"{folder}: {file} is a file, not a folder; give another folder to write to") from exc


def _identify(status: os.stat_result) -> _Identity:
    """(mtime_ns, size, inode, device) of a regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "not a regular file")
    return (status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev)


def _etag(identity: _Identity) -> str:
    return f"{identity[0]:x}-{identity[1]:x}-{identity[2]:x}"


@lru_cache(4096)
def _parts(etag: str) -> tuple[int, ...]:
    """The numbers that ``_etag`` made one of; () of another's."""
    try:
        return tuple(int(part, 16) for part in etag.split("-"))
    except ValueError:
        return ()


def _translate(exc: OSError, url: str, key: str) -> StorageError:
    name = where(url, key)
    if isinstance(exc, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
        return NotFoundError(f"there is no file {name} ({exc.strerror}); check the path")
    if isinstance(exc, PermissionError) or exc.errno == errno.EROFS:
        return AccessDeniedError(f"{name} may not be read or written by uid {os.geteuid()} ({exc.strerror})")
    if exc.errno in {errno.EIO, errno.ESTALE, errno.ETIMEDOUT}:
        return StoreUnavailableError(f"{name}: the disk or network file system failed ({exc.strerror})")
    if exc.errno == errno.EMFILE:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return StorageError(f"{name}: this process may have no more than {most} files open; raise that, by `ulimit -n`")
    return StorageError(f"{name}: {exc.strerror or exc}")
