"""Ranks that index one data set together, through the key-value store of their process group.

The first rank to arrive leads: it lists the data set and says what is to be done. All that have arrived claim parts of
the work from a counter, so a rank that is slow, late or never comes holds nobody up, and no collective is issued. Every
rank shows a heartbeat; the leader watches all, the others watch the leader, and what one finds wrong all are told.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from ...storage import PenstockError
from ..errors import DatasetError, FormatError
from ..formats.shard import ChunkSpan, ShardIndex

BEAT_S = 1.0
DEAD_AFTER_S = 30.0
_POLL_S = (0.002, 0.1)
# The store's server refuses values above 8 MiB.
_PIECE_BYTES = 4 << 20
_PARTS_PER_RANK = 8
_LEADER = 1

_calls: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


def join_exchange(identity: str) -> Exchange | None:
    """The exchange of the ranks that index ``identity``; None outside of a process group of two ranks or more.

    The n-th call of a rank meets the n-th calls of the others.
    """
    distributed = sys.modules.get("torch.distributed")  # imported by whoever initialised it
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    world_size = distributed.get_world_size()
    if world_size < 2:
        return None
    store = distributed.distributed_c10d._get_default_store()
    digest = xxhash.xxh3_64_hexdigest(identity.encode())
    calls = _calls.setdefault(store, {})
    calls[digest] = calls.get(digest, 0) + 1
    return Exchange(store, f"penstock/index/{digest}/{calls[digest]}", distributed.get_rank(), world_size)


class Exchange:
    """One rank's end. Owns a heartbeat thread from entry to exit, which shares only ``_doing`` with the caller."""

    def __init__(
        self, store: Any, namespace: str, rank: int, world_size: int, *, dead_after_s: float = DEAD_AFTER_S
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._rank = rank
        self._world_size = world_size
        self._dead_after_s = dead_after_s
        self._place = ""
        self._doing = "starting"
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._ordinal = 0
        self._seen: dict[int, tuple[str, float]] = {}
        self._watch_again_at = 0.0

    @property
    def leads(self) -> bool:
        return self._ordinal == _LEADER

    def __enter__(self) -> Exchange:
        self._place = _process_place()
        self._ordinal = int(self._call("add", "arrived", 1))
        self._beat()
        self._thread = threading.Thread(target=self._keep_beating, name="penstock-index-beat", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        try:
            if error is not None and not isinstance(error, RemoteError):
                # Set only where none is: the first error is the cause, the others follow from it.
                self._call("compare_set", "error", "", json.dumps(_pack_error(error, self._rank)))
            self._call("set", f"beat/{self._ordinal}", "left")
        except DatasetError:
            if error is None:
                raise
        if isinstance(error, RemoteError):
            raise error.told from None

    # Keys and values ------------------------------------------------------------------------------------------------

    def publish(self, name: str, data: bytes) -> None:
        pieces = [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            self._call("set", f"{name}/{number}", piece)
        self._call("set", name, str(len(pieces)))

    def receive(self, name: str) -> bytes:
        self.wait_for(name)
        count = int(self._call("get", name))
        return b"".join(self._call("get", f"{name}/{number}") for number in range(count))

    def publish_json(self, name: str, value: Any) -> None:
        self.publish(name, zlib.compress(json.dumps(value).encode(), 1))

    def receive_json(self, name: str) -> Any:
        return json.loads(zlib.decompress(self.receive(name)))

    def publish_indexes(self, number: int, indexes: Sequence[ShardIndex]) -> None:
        schemas: list[Any] = []
        shards = []
        for index in indexes:
            schema = dict(index.schema)
            if schema not in schemas:
                schemas.append(schema)
            rows = [(span.offset, span.length, span.samples, span.memory) for span in index.chunks]
            shards.append([schemas.index(schema), rows])
        self.publish_json(f"part/{number}", [schemas, shards])

    def receive_indexes(self, number: int) -> list[ShardIndex]:
        schemas, shards = self.receive_json(f"part/{number}")
        return [ShardIndex([ChunkSpan(*row) for row in rows], schemas[which]) for which, rows in shards]

    # Work -----------------------------------------------------------------------------------------------------------

    def part_size(self, shards: int) -> int:
        """Shards a part: small enough to even out the ranks, large enough for a rank's threads."""
        return max(1, min(64, -(-shards // (self._world_size * _PARTS_PER_RANK))))

    def claims(self, parts: int) -> Iterator[int]:
        """Numbers of parts that are this rank's to do."""
        while True:
            self._raise_told()
            number = int(self._call("add", "claimed", 1)) - 1
            if number >= parts:
                return
            yield number

    def doing(self, what: str) -> None:
        """Say what this rank does now; the others name it should the rank end here."""
        self._doing = what
        self._beat()

    def wait_for(self, name: str) -> None:
        """Wait until a value is there.

        Raises:
            DatasetError: the rank that should send it is dead or silent.
            PenstockError: the error that another rank met.
        """
        pause = _POLL_S[0]
        while not self._call("check", name):
            self._raise_told()
            self._watch()
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S[1])

    # Watching -------------------------------------------------------------------------------------------------------

    def _raise_told(self) -> None:
        if self._call("check", "error"):
            raise RemoteError(_unpack_error(json.loads(self._call("get", "error"))))

    def _watch(self) -> None:
        now = time.monotonic()
        if now < self._watch_again_at:
            return
        last = int(self._call("add", "arrived", 0)) if self.leads else _LEADER
        for ordinal in range(_LEADER, last + 1):
            if ordinal != self._ordinal:
                self._watch_one(ordinal, now)
        # With a thousand ranks a round takes long: the leader is not to do nothing else.
        took_s = time.monotonic() - now
        self._watch_again_at = now + took_s + max(BEAT_S / 2, 2 * took_s)

    def _watch_one(self, ordinal: int, now: float) -> None:
        key = f"beat/{ordinal}"
        beat = self._call("get", key).decode() if self._call("check", key) else ""
        before, since = self._seen.get(ordinal, ("", now))
        if beat == "left" and not self.leads:
            return  # with an error, which the next look finds, or with the value that is waited for
        if beat != before:
            since = now
        self._seen[ordinal] = (beat, since)
        if not beat:
            rank, place, doing = "?", "", "arriving"
        elif beat == "left":
            return
        else:
            _, rank, place, doing = json.loads(beat)
        silent_s = now - since
        if _process_is_gone(place):
            raise DatasetError(f"rank {rank} died ({place}) while {doing}; see its own output for the cause")
        if silent_s > self._dead_after_s:
            raise DatasetError(
                f"rank {rank} ({place}) has shown no sign of life for {silent_s:.0f} s while {doing}; "
                "it is dead, stopped or cut off"
            )

    def _keep_beating(self) -> None:
        while not self._stop.wait(BEAT_S):
            try:
                self._beat()
            except DatasetError:
                return  # the caller's next call meets the same

    def _beat(self) -> None:
        self._call("set", f"beat/{self._ordinal}", json.dumps([time.monotonic(), self._rank, self._place, self._doing]))

    def _call(self, verb: str, name: str, *values: Any) -> Any:
        key = f"{self._namespace}/{name}"
        try:
            return getattr(self._store, verb)([key] if verb == "check" else key, *values)
        except RuntimeError as exc:  # what torch raises for every failure of its stores
            raise DatasetError(
                "the key-value store of the process group does not answer: the process that hosts it "
                f"(rank 0, or torchrun's agent) has probably ended ({str(exc).splitlines()[0]})"
            ) from exc


class RemoteError(Exception):
    """Another rank's error, on its way out of an exchange: it is not told again."""

    def __init__(self, told: PenstockError) -> None:
        super().__init__(str(told))
        self.told = told


def _process_place() -> str:
    try:
        space = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        space = ""
    return f"{socket.gethostname()} {space} process {os.getpid()}"


def _process_is_gone(place: str) -> bool:
    """Whether a process of this host (and its namespace of process ids) has ended; False for those of other hosts."""
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


def _pack_error(error: BaseException, rank: int) -> dict[str, Any]:
    told = {"rank": rank, "type": type(error).__name__, "message": str(error)}
    if isinstance(error, FormatError):
        told |= {"shard": error.shard, "problem": error.problem, "offset": error.offset}
    return told


def _unpack_error(told: dict[str, Any]) -> PenstockError:
    """The other rank's error in its own type, where that is one of ours, saying which rank met it."""
    on_rank = f"(on rank {told['rank']})"
    kinds = {kind.__name__: kind for kind in _descendants(PenstockError)}
    kind = kinds.get(told["type"])
    if kind is None:
        return DatasetError(f"rank {told['rank']} failed: {told['type']}: {told['message']}")
    if issubclass(kind, FormatError):
        return kind(told["shard"], f"{told['problem']} {on_rank}", offset=told["offset"])
    return kind(f"{told['message']} {on_rank}")


def _descendants(kind: type[PenstockError]) -> Iterator[type[PenstockError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _descendants(child)
