"""Atomic writes, durable folders and file locks: what every room needs of a file system.

New files get the permissions that the process's umask allows. The kernel applies it; reading it here would mean setting
it, for all threads at once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .memory.buffers import BUFFERS, LEAST_BYTES
from .store import byte_view

# A killed writer leaves at most one file whose name starts like this.
TEMPORARY_PREFIX = ".penstock-put-"
NEW_FILE_MODE = 0o666
# Linux reads and writes at most 2 GiB less a page per call.
_MOST_BYTES = 1 << 30
_POLL_S = (0.001, 0.02)
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})

AnyPath = str | os.PathLike[str]


def in_home(path: AnyPath) -> str:
    """A path whose leading ``~`` or ``~user`` is that user's home, as a shell has it; unchanged where there is none."""
    return os.path.expanduser(path)  # noqa: PTH111 - Path's raises for a name that only looks like a user's


@contextmanager
def replacing(
    path: AnyPath,
    *,
    durable: bool = False,
    mode: int = NEW_FILE_MODE,
    temporary_folder: AnyPath | None = None,
    dir_fd: int | None = None,
) -> Iterator[int]:
    """Yield the descriptor of a new file that becomes ``path`` when the block ends, and is deleted if it raises.

    Readers see the old file or the new one, never a part. ``durable`` syncs the file and its folder, so that the new
    file survives a power loss. It is created beside ``path``, or in a ``temporary_folder`` on the same file system.
    With ``dir_fd`` relative paths begin at that open folder.

    Raises:
        OSError: the file cannot be created, written or renamed.
    """
    path = os.fspath(path)
    folder = os.path.dirname(path)  # noqa: PTH120 - on the path of every small write
    temporary = os.path.join(temporary_folder or folder, TEMPORARY_PREFIX + secrets.token_hex(8))  # noqa: PTH118
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    except OSError as exc:
        raise _of(exc, path) from exc
    try:
        yield fd
        if durable:
            os.fsync(fd)
        # While it is open, so that a lock on it holds until then.
        os.replace(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=dir_fd)
        raise
    finally:
        os.close(fd)
    if durable:
        sync_folder(folder or ".", dir_fd=dir_fd)


def _of(error: OSError, path: AnyPath) -> OSError:
    """The error with the name that the user knows, not that of the temporary file, or none."""
    return OSError(error.errno, error.strerror, os.fspath(path))


def write_whole(path: AnyPath, data: bytes | bytearray | memoryview, *, durable: bool = False) -> None:
    """Write a file atomically; see ``replacing``."""
    with replacing(path, durable=durable) as fd:
        try:
            write_all(fd, data)
        except OSError as exc:
            raise _of(exc, path) from exc


def write_output(path: AnyPath, data: bytes) -> None:
    """Write a file that a user named: atomically, but in place if it is a device, a pipe or open, as /dev/stdout.

    Raises:
        OSError: it cannot be written.
    """
    if _is_special(path):
        with open(path, "wb", buffering=0) as file:  # noqa: PTH123 - as ``replacing``
            write_all(file.fileno(), data)
    else:
        write_whole(path, data)


def check_output(path: AnyPath) -> None:
    """Raise OSError where ``write_output`` would; an existing file stays as it is."""
    if os.path.isdir(path):  # noqa: PTH112
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not _is_special(path):
        with suppress(_TriedOnly), replacing(path):
            raise _TriedOnly


class _TriedOnly(Exception):  # noqa: N818 - no error
    """Ends ``replacing`` before it replaces."""


def _is_special(path: AnyPath) -> bool:
    """Return whether a path is neither a file nor a folder, or links to a descriptor: writing would replace it."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or _is_descriptor(os.fspath(path))


def _is_descriptor(path: str) -> bool:
    """Return whether an existing path leads to a file through /proc, as /dev/stdout and /dev/fd/1 do."""
    while not (folder := os.path.realpath(os.path.dirname(path))).startswith("/proc/"):  # noqa: PTH120
        if not os.path.islink(path):  # noqa: PTH114
            return False
        path = os.path.join(folder, os.readlink(path))  # noqa: PTH115, PTH118
    return True


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write all bytes of ``data``, whatever its item type."""
    rest = byte_view(data)
    while rest:
        rest = rest[os.write(fd, rest[:_MOST_BYTES]) :]


def read_at(fd: int, start: int, nbytes: int) -> memoryview:
    """Bytes of a file, read-only; fewer where it ends. No lock of Python is held while the kernel copies."""
    if nbytes < LEAST_BYTES:
        whole = os.pread(fd, nbytes, start)
        if len(whole) == nbytes or not whole:
            return memoryview(whole)
    buffer, got = BUFFERS.take(nbytes), 0
    while got < nbytes and (count := os.preadv(fd, [buffer[got : got + _MOST_BYTES]], start + got)):
        got += count
    return buffer[:got].toreadonly()


def sync_folder(folder: AnyPath, *, dir_fd: int | None = None) -> None:
    """Make the names in a folder survive a power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def locked_folder(folder: AnyPath) -> Iterator[None]:
    """Hold an exclusive lock on a folder itself, which leaves no file behind; waits as long as it takes.

    Raises:
        OSError: there is no such folder, or its file system has no locks.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)  # which releases the lock


@contextmanager
def lock_file(path: AnyPath, *, wait_s: float, dir_fd: int | None = None) -> Iterator[bool]:
    """Hold an exclusive lock on a file, which is created if missing and never deleted.

    Yields False if another process or thread held the lock for ``wait_s``, or if locking is impossible: no such folder,
    no permission, a link in place of the file, a file system without locks. The kernel releases the lock however the
    process ends.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=dir_fd)
    except OSError:
        yield False
        return
    _LOCKS.add(fd)
    try:
        yield try_flock(fd, wait_s)
    finally:
        if fd in _LOCKS:
            _LOCKS.discard(fd)
            os.close(fd)  # which releases the lock


def try_flock(fd: int, wait_s: float) -> bool:
    """Take an exclusive flock; returns False if another holds it for ``wait_s``, or the file system has no locks."""
    return bool(ask_flock(fd, wait_s))


def ask_flock(fd: int, wait_s: float) -> bool | None:
    """As ``try_flock``, but None where the file system has no locks.

    It polls instead of blocking in the kernel, because the process that holds the lock may be suspended.
    """
    until, pause_s = time.monotonic() + wait_s, _POLL_S[0]
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
        except OSError as exc:
            return None if exc.errno in _NO_LOCKS else False
        time.sleep(pause_s)
        pause_s = min(_POLL_S[1], pause_s * 1.5)


_LOCKS: set[int] = set()


def _let_go_in_child() -> None:
    """A lock belongs to all copies of its descriptor: a forked child's would hold it after the parent let go."""
    while _LOCKS:
        with suppress(OSError):
            os.close(_LOCKS.pop())


os.register_at_fork(after_in_child=_let_go_in_child)
