"""A folder that is this user's alone, below one that may be shared: opened once, without following links."""

from __future__ import annotations

import errno
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from .errors import AccessDeniedError
from .files import lock_file, replacing

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_FOLDER = frozenset({errno.ENOTDIR, errno.ELOOP, errno.EACCES})


class OwnFolder:
    """Made with mode 0700 if it is missing, and held open; paths are relative to it, and links in them not followed.

    Whoever may write to the folder above can put another folder, or a link, in its place. What is done here stays in
    the folder that was checked. Its descriptor is closed with the last reference: a thread that is inside a method has
    one. Every method raises OSError.

    Raises:
        AccessDeniedError: it is a link or a file, it belongs to another user, or others may read or write in it.
        OSError: it cannot be made or opened.
    """

    def __init__(self, path: Path, *, what: str = "cache folder", cure: str = "give another cache_dir=") -> None:
        """``what`` and ``cure`` are for the message of a refusal."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):  # whose it is, is seen below
            path.mkdir(mode=0o700)
        try:
            self._fd = os.open(path, _FLAGS)
        except OSError as exc:
            if exc.errno not in _NO_FOLDER:
                raise
            raise _refusal(path, path.lstat(), what, cure) from exc
        weakref.finalize(self, os.close, self._fd).atexit = False
        status = os.fstat(self._fd)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise _refusal(path, status, what, cure)

    @classmethod
    def nowhere(cls) -> Self:
        """One in which nothing can be opened: what stands in for a folder that is no longer used."""
        folder = cls.__new__(cls)
        folder._fd = -1
        return folder

    def open(self, path: str, flags: int) -> int:
        """A descriptor of a file; a new one has mode 0600."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self._fd)

    def make(self, path: str) -> None:
        """Make a folder unless it exists."""
        with suppress(FileExistsError):
            os.mkdir(path, 0o700, dir_fd=self._fd)

    def stat(self, path: str) -> os.stat_result:
        return os.stat(path, dir_fd=self._fd, follow_symlinks=False)

    def has(self, path: str) -> bool:
        try:
            self.stat(path)
        except OSError:
            return False
        return True

    def delete(self, path: str) -> None:
        os.unlink(path, dir_fd=self._fd)

    def free_bytes(self) -> int:
        """The bytes that are free on its disk."""
        space = os.fstatvfs(self._fd)
        return space.f_bavail * space.f_frsize

    @contextmanager
    def scan(self, path: str = ".") -> Iterator[Iterator[os.DirEntry[str]]]:
        """The entries of a folder; their ``stat`` needs ``follow_symlinks=False``."""
        fd = self.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(fd) as entries:
                yield entries
        finally:
            os.close(fd)

    @contextmanager
    def replacing(self, path: str, *, temporary_folder: str | None = None) -> Iterator[int]:
        """See ``files.replacing``."""
        with replacing(path, mode=0o600, temporary_folder=temporary_folder, dir_fd=self._fd) as fd:
            yield fd

    @contextmanager
    def lock(self, path: str, *, wait_s: float) -> Iterator[bool]:
        """See ``files.lock_file``."""
        with lock_file(path, wait_s=wait_s, dir_fd=self._fd) as is_locked:
            yield is_locked


def _refusal(path: Path, status: os.stat_result, what: str, instead: str) -> AccessDeniedError:
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        found, cure = f"it is a link to {os.readlink(path)}", "remove the link"  # noqa: PTH115 - shown as it is
    elif not stat.S_ISDIR(status.st_mode):
        found, cure = "it is no folder", "remove it"
    elif status.st_uid != os.geteuid():
        found, cure = f"owner {status.st_uid}, mode {mode:o}", "have it removed"
    else:
        found, cure = f"mode {mode:o}", f"`chmod 700 {path}` if you trust what is in it, else remove it"
    return AccessDeniedError(
        f"the {what} {path} is not this user's alone ({found}), and what others can write can't be trusted: "
        f"{cure}, or {instead}"
    )
