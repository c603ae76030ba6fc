"""Lock of a prefix in an object store, for one run at a time: an object that names its holder and shows that it lives.

The object is written under a condition, so that of several runs one gets it. Its holder writes it anew every
``BEAT_S``. A run that finds it held waits: an object that changes has a live holder, and the run is refused; one that
has not changed for ``LEASE_S`` is taken over. No clocks are compared. A holder of the same host and boot is looked up
by its pid instead, so that a restart after a kill waits for nothing.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from ....storage.errors import NotFoundError, ObjectChangedError, StorageError
from ....storage.store import Store
from ....storage.threads.interruptible import Event, Thread
from ...errors import CheckpointError, CheckpointTakenError
from ..lock import start_ticks
from ..traffic import TRAFFIC

LOCK_KEY = "lock.json"
BEAT_S = 10.0
LEASE_S = 60.0
# One that is being killed at this moment still looks alive.
_LIVING_OWNER_S = 3.0
_LOOK_S = 0.2
logger = logging.getLogger(__name__)


class StoreLock:
    """Holds the prefix of a store from construction to ``close``, or until its process is dead or still for a lease.

    Mutable state: the object's ETag and number of beats, and who took the lock over, under a lock; the thread.

    Raises:
        CheckpointTakenError: another run holds it; the message names its host, pid and start.
        StorageError: the store cannot be read or written.
    """

    def __init__(self, store: Store, *, beat_s: float = BEAT_S) -> None:
        self.note: str | None = None
        self._store = store
        self._beat_s = beat_s
        self._me = _describe_self()
        self._beats = 0
        self._etag: str | None = None
        self._taken_by: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._closing = Event()
        self._acquire()
        self._thread = Thread(target=self._beat_on, name="penstock-checkpoint-lock")
        self._thread.start()

    def confirm(self) -> None:
        """Show that this run still holds the lock, and begin its lease anew.

        Raises:
            CheckpointError: another run took it over.
            StorageError: the store cannot be read or written.
        """
        with self._lock:
            self._beat()
            if self._taken_by is not None:
                raise CheckpointError(
                    f"{self._store.url} was taken over by another run while this one stood still or could not reach "
                    f"the store: {_name(self._taken_by)}; this run writes nothing more there: end one of them"
                )

    def close(self) -> None:
        """Let go; closing twice is allowed."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        try:
            self.confirm()
            self._store.delete([LOCK_KEY])
        except (CheckpointError, StorageError) as exc:
            logger.debug("the lock of %s stays: %s", self._store.url, exc)

    def _acquire(self) -> None:
        watched: str | None = None
        since_s = began_s = time.monotonic()
        while not self._write(None):
            found = self._read()
            if found is None:
                continue  # let go meanwhile
            owner, etag = found
            now_s = time.monotonic()
            if owner.get("token") == self._me["token"]:  # a retried request that had succeeded
                self._etag = etag
                return
            lives = _is_alive(owner)
            if lives is None:
                lives = watched is not None and etag != watched
                if watched is None:
                    watched, since_s = etag, now_s
                    logger.warning(
                        "%s is held by %s; waiting up to %.0f s to see whether it is alive",
                        *(self._store.url, _name(owner), LEASE_S),
                    )
                is_dead = etag == watched and now_s - since_s >= LEASE_S
            else:
                is_dead = not lives
                lives = lives and now_s - began_s >= _LIVING_OWNER_S
            if lives:
                raise CheckpointTakenError(
                    f"{self._store.url} belongs to another run that has not ended: {_name(owner)}; two runs on one "
                    "folder would delete each other's checkpoints: end that one, close its trainer, or give another "
                    "folder"
                )
            if is_dead and self._write(etag):
                self.note = f"took over {self._store.url} from a dead run: {_name(owner)}"
                return
            time.sleep(_LOOK_S)

    def _beat_on(self) -> None:
        while not self._closing.wait(self._beat_s):
            try:
                with self._lock:
                    self._beat()
            except StorageError as exc:
                logger.debug("the lock of %s is not renewed: %s", self._store.url, exc)

    def _beat(self) -> None:
        """Write the object anew, or see who took it."""
        if self._taken_by is not None or self._write(self._etag):
            return
        found = self._read()
        if found is None:
            if not self._write(None):  # it was deleted by hand
                self._taken_by = (self._read() or ({}, ""))[0]
        elif found[0].get("token") == self._me["token"]:
            self._etag = found[1]
        else:
            self._taken_by = found[0]

    def _write(self, etag: str | None) -> bool:
        self._beats += 1
        body = json.dumps({**self._me, "beats": self._beats}, indent=1).encode()
        try:
            self._etag = self._store.put_if(LOCK_KEY, body, etag=etag).etag
        except ObjectChangedError:
            return False
        return True

    def _read(self) -> tuple[dict[str, Any], str] | None:
        """The owner, as far as it can be read, and the ETag of what was read; None if there is no lock."""
        while True:
            try:
                etag = self._store.head(LOCK_KEY).etag
                data = bytes(self._store.get(LOCK_KEY, etag=etag))
            except NotFoundError:
                return None
            except ObjectChangedError:
                continue
            TRAFFIC.add(len(data))  # waiting for a lease shows that the store answers
            try:
                owner = json.loads(data)
            except ValueError:
                owner = {}
            return (owner if isinstance(owner, dict) else {}), etag or ""


def _describe_self() -> dict[str, Any]:
    return {
        "token": secrets.token_hex(8),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "ticks": start_ticks(os.getpid()),
        "began": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        "processes": _processes(),
    }


def _processes() -> str | None:
    """Identify the scope of pids: the boot and the namespace of pids, as of a container; None if it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + Path("/proc/self/ns/pid").readlink().name
    except OSError:
        return None


def _is_alive(owner: dict[str, Any]) -> bool | None:
    """Return whether the owner lives; None if that cannot be known from here."""
    if owner.get("processes") is None or owner["processes"] != _processes() or owner.get("ticks") is None:
        return None
    return bool(owner["ticks"] == start_ticks(owner["pid"]))


def _name(owner: dict[str, Any]) -> str:
    if "pid" not in owner:
        return "a run that does not say who it is"
    is_own = owner.get("processes") == _processes() and owner["pid"] == os.getpid()
    same = " (this process)" if is_own else ""
    return f"process {owner['pid']}{same} on {owner.get('host')}, started {owner.get('began')}"
