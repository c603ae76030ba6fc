"""A folder on the node's own disk for what one process fetches, which outlives neither it nor, for long, its death."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from ....storage.files import try_flock

PREFIX = "penstock-checkpoint-"


class Staging:
    """A new folder below the system's temporary one, locked until ``close`` deletes it.

    Folders of killed processes are deleted first: the kernel has released their locks.
    """

    def __init__(self) -> None:
        root = Path(tempfile.gettempdir())
        remove_dead(root)
        while True:
            self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
            try:
                self._fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # another process had taken it for a dead one's
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if self.folder.exists():
                break
            os.close(self._fd)  # the same, just before the lock

    def close(self) -> None:
        """Delete the folder; closing twice is allowed."""
        if self._fd >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def remove_dead(root: Path) -> None:
    """Delete the folders of processes that are dead; those of other users stay."""
    for folder in root.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.geteuid():
                continue
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if try_flock(fd, 0.0):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)
