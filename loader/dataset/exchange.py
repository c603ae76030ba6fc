"""One rank builds an index and the others wait for it, through the key-value store of their process group.

The first rank to arrive builds. There are no collectives, so a rank that is late or never comes delays nobody. Ranks
may open several data sets in any order, because a builder never waits. While it builds it sends heartbeats, so that
the waiting ranks notice and name it if it dies.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from ...storage import PenstockError
from ...storage.store_link import SILENT_S, is_cut_off, limit_silence, place_of
from ...storage.threads.interruptible import Event, Thread
from ..errors import DatasetError, FormatError, RankStoppedError

BEAT_S = 1.0
DEAD_AFTER_S = 30.0
_POLL_S = (0.002, 0.1)
# The store's server refuses values above 8 MiB.
_PIECE_BYTES = 4 << 20

_calls: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


def join_exchange(identity: str) -> Exchange:
    """The exchange of the ranks of a process group that open ``identity``.

    The n-th call on one rank meets the n-th calls on the others.
    """
    distributed = sys.modules["torch.distributed"]  # imported by whoever initialised it
    store = distributed.distributed_c10d._get_default_store()
    limit_silence(store)
    digest = xxhash.xxh3_64_hexdigest(identity.encode())
    calls = _calls.setdefault(store, {})
    calls[digest] = calls.get(digest, 0) + 1
    return Exchange(store, f"penstock/index/{digest}/{calls[digest]}", distributed.get_rank())


class Exchange:
    """One rank's end. The builder's owns a heartbeat thread from entry to exit, which shares only the store."""

    def __init__(self, store: Any, namespace: str, rank: int, *, dead_after_s: float = DEAD_AFTER_S) -> None:
        self._store = store
        self._namespace = namespace
        self._rank = rank
        self._dead_after_s = dead_after_s
        self._stop = Event()
        self._thread: Thread | None = None
        self.builds = False

    def __enter__(self) -> Exchange:
        self.builds = int(self._call("add", "arrived", 1)) == 1
        if self.builds:
            self._beat(0)
            self._thread = Thread(target=self._keep_beating, name="penstock-index-beat")
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is None:
            return
        self._thread.join()
        if error is not None:
            with suppress(DatasetError):  # if the store has failed, the others notice it themselves
                self._call("set", "outcome", json.dumps({"error": asdict(RemoteError.of(error, self._rank))}))

    def publish(self, about: dict[str, Any], data: bytes) -> None:
        """Send what was built to the others; ``about`` is small and JSON-able, and says whether they need the data."""
        pieces = range(0, len(data), _PIECE_BYTES)
        for number, start in enumerate(pieces):
            self._call("set", f"piece/{number}", data[start : start + _PIECE_BYTES])
        self._call("set", "outcome", json.dumps({"about": about, "pieces": len(pieces)}))

    def wait(self) -> dict[str, Any]:
        """Wait until the builder has published; returns its ``about``.

        Raises:
            PenstockError: the builder's error, with its own type if that is one of ours.
            DatasetError: the builder died or was silent for too long, or the store does not answer.
        """
        watch, look_at = _Watch(self._dead_after_s), 0.0
        pause_s = _POLL_S[0]
        while not self._has("outcome"):
            if time.monotonic() >= look_at:
                watch.look(self._call("get", "beat").decode() if self._has("beat") else "")
                look_at = time.monotonic() + BEAT_S / 2
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])
        outcome = self._outcome()
        if "error" in outcome:
            raise RemoteError(**outcome["error"]).to_exception()
        about: dict[str, Any] = outcome["about"]
        return about

    def receive(self) -> bytes:
        """The data that the builder published; called after ``wait``."""
        return b"".join(self._call("get", f"piece/{number}") for number in range(self._outcome()["pieces"]))

    def _outcome(self) -> dict[str, Any]:
        outcome: dict[str, Any] = json.loads(self._call("get", "outcome"))
        return outcome

    def _keep_beating(self) -> None:
        count = 0
        while not self._stop.wait(BEAT_S):
            count += 1
            try:
                self._beat(count)
            except DatasetError:
                return  # the builder's next call raises the same error

    def _beat(self, count: int) -> None:
        self._call("set", "beat", json.dumps([count, self._rank, _process_place()]))

    def _has(self, name: str) -> bool:
        return bool(self._call("check", name))

    def _call(self, verb: str, name: str, *values: Any) -> Any:
        key = f"{self._namespace}/{name}"
        with translated(self._store):
            return getattr(self._store, verb)([key] if verb == "check" else key, *values)


@contextmanager
def translated(store: Any) -> Iterator[None]:
    """Calls of a store, whose failures are DatasetErrors that say where it is and what is wrong with it."""
    try:
        yield
    except RuntimeError as exc:  # what torch raises for every failure of its stores
        place = place_of(store)
        at = f", at {place}," if place else ""
        why = (
            f"its host (rank 0's, or another torchrun agent's) has been silent for over {SILENT_S:.0f} s: it is "
            "down, or cut off from this one"
            if is_cut_off(exc)
            else "the process that hosts it (rank 0, or torchrun's agent) has probably ended"
        )
        raise DatasetError(
            f"the key-value store of the process group{at} does not answer: {why} ({str(exc).splitlines()[0]})"
        ) from exc


class _Watch:
    """Decides from its heartbeats whether the builder is alive."""

    def __init__(self, dead_after_s: float) -> None:
        self._dead_after_s = dead_after_s
        self._beat = ""
        self._since = time.monotonic()

    def look(self, beat: str) -> None:
        """Take the newest heartbeat, '' if there is none yet. Raises DatasetError if the builder is dead."""
        now = time.monotonic()
        if beat != self._beat:
            self._beat, self._since = beat, now
        _, rank, place = json.loads(beat) if beat else (0, "?", "")
        if _process_is_gone(place):
            raise DatasetError(f"rank {rank} ({place}) died while it built the index; see its own output for the cause")
        if now - self._since > self._dead_after_s:
            raise DatasetError(
                f"rank {rank} ({place}), which builds the index, has shown no sign of life for "
                f"{now - self._since:.0f} s; it is dead, stopped or cut off"
            )


@dataclass(frozen=True, slots=True)
class RemoteError:
    """An error in transit, as JSON, from the rank that raised it to the others.

    ``cause``: the rank and the class of the error that stopped the reporting rank, if that is another's.
    """

    rank: int
    kind: str
    message: str
    shard: str | None = None
    offset: int | None = None
    cause: tuple[int, str] | None = None

    @classmethod
    def of(cls, error: BaseException, rank: int) -> RemoteError:
        if isinstance(error, RankStoppedError):
            return cls(rank, type(error).__name__, error.problem, cause=(error.rank, error.kind))
        if isinstance(error, FormatError):
            return cls(rank, type(error).__name__, error.problem, error.shard, error.offset)
        return cls(rank, type(error).__name__, str(error))

    @property
    def text(self) -> str:
        """The message, with the place in a shard."""
        if self.shard is None:
            return self.message
        return str(FormatError(self.shard, self.message, offset=self.offset))

    def to_exception(self) -> PenstockError:
        """The error with its own type, if that is one of ours, and the rank that raised it."""
        if self.cause is not None:
            return RankStoppedError(*self.cause, self.message)
        kind = next((kind for kind in _descendants(PenstockError) if kind.__name__ == self.kind), None)
        if kind is None:
            return DatasetError(f"rank {self.rank} failed: {self.kind}: {self.message}")
        message = f"{self.message} (on rank {self.rank})"
        if issubclass(kind, FormatError):
            return kind(self.shard or "", message, offset=self.offset)
        return kind(message)


def _descendants(kind: type[PenstockError]) -> Iterator[type[PenstockError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _descendants(child)


def _process_place() -> str:
    try:
        space = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        space = ""
    return f"{socket.gethostname()} {space} process {os.getpid()}"


def _process_is_gone(place: str) -> bool:
    """Return whether a process of this host, in its PID namespace, has ended; False for processes of other hosts."""
    where, _, pid = place.rpartition(" ")
    if not where or where != _process_place().rpartition(" ")[0]:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return Path("/proc/self/stat").exists()
    except OSError:
        return False
    return state in "ZX"
