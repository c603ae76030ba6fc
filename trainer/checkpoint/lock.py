"""Lock of a checkpoint folder, for one run at a time: it names its holder, and ends with it."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path
from typing import Any

from ...storage.files import try_flock, write_all
from ..errors import CheckpointTakenError

LOCK_NAME = ".penstock-lock"
# A dying process may take seconds to let go. One that is being killed at this moment still looks alive, so that even
# an owner that lives is waited for a little.
_DEAD_OWNER_S = 20.0
_LIVING_OWNER_S = 3.0
_LOOK_S = 0.2


class FolderLock:
    """Holds a folder for this process from construction to ``close``, or until it dies, however that happens.

    The lock is a flock on a file in the folder, which stays; its content names the owner. ``note`` says so where the
    file system has no locks, and then nothing is held.

    Raises:
        CheckpointTakenError: another run holds the folder; the message names its host, pid and start.
    """

    def __init__(self, folder: Path) -> None:
        self.note: str | None = None
        path = folder / LOCK_NAME
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.close = weakref.finalize(self, os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._wait_for(folder, fd)
        except OSError as exc:
            self.note = (
                f"{folder} is on a file system without locks ({exc.strerror or exc}): nothing refuses a second run "
                "there, which would delete this one's checkpoints"
            )
        _HELD.add(self)
        os.ftruncate(fd, 0)
        write_all(fd, json.dumps(_describe_self()).encode())

    def _wait_for(self, folder: Path, fd: int) -> None:
        began_s = time.monotonic()
        while not try_flock(fd, _LOOK_S):
            owner = _read_owner(fd)
            if time.monotonic() - began_s > (_LIVING_OWNER_S if _is_alive(owner) else _DEAD_OWNER_S):
                break
        else:
            return
        self.close()
        who = "another run"
        if owner:
            same = " (this process)" if (owner["host"], owner["pid"]) == (socket.gethostname(), os.getpid()) else ""
            who = f"process {owner['pid']}{same} on {owner['host']}, started {owner['began']}"
        raise CheckpointTakenError(
            f"{folder} belongs to another run that has not ended: {who}; two runs on one folder would delete each "
            "other's checkpoints: end that one, close its trainer, or give another folder"
        )


def _describe_self() -> dict[str, Any]:
    began = time.strftime("%Y-%m-%d %H:%M:%S%z")
    return {"host": socket.gethostname(), "pid": os.getpid(), "ticks": start_ticks(os.getpid()), "began": began}


def _read_owner(fd: int) -> dict[str, Any] | None:
    try:
        owner = json.loads(os.pread(fd, 4096, 0))
        return owner if {"host", "pid", "ticks", "began"} <= owner.keys() else None
    except (OSError, ValueError, AttributeError):
        return None  # it has the lock, and has not written its name yet


def _is_alive(owner: dict[str, Any] | None) -> bool:
    """Return whether the owner certainly lives: a process of this host with that pid and start."""
    if owner is None or owner["host"] != socket.gethostname():
        return False
    return owner["ticks"] is not None and owner["ticks"] == start_ticks(owner["pid"])


def start_ticks(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None for one that is dead, or where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _let_go_in_child() -> None:
    """A forked child inherits the lock, and must not hold it after the parent's death."""
    for lock in list(_HELD):
        lock.close()


_HELD: weakref.WeakSet[FolderLock] = weakref.WeakSet()
os.register_at_fork(after_in_child=_let_go_in_child)
