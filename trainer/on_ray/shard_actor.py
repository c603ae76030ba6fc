"""The actor of a shard: it holds the state machines, knows the time, and comes back as it was.

Ray starts it anew when it dies, with the same arguments. Each kind of call has one thread: requests of workers, copies
of other shards, and writing a checkpoint. So two shards that copy to each other never wait in a circle.
"""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ...storage.errors import PenstockError, StorageError
from ...storage.ray_cluster import import_ray
from ...storage.resolve import open_store
from ...storage.store import Store
from ..checkpoint.remote.layout import StoredFile, list_stored
from ..errors import CheckpointError, NotJoinedError, ServerRefusedError, ShardUnreachableError
from ..server.checkpoints import read_buckets, read_saved, write_shard
from ..server.messages import REQUESTS, Header, Join, Joined, Leave, Pulled, Reply, Request, count_bytes
from ..server.moving import MOST_BYTES
from ..server.parcels import Parcels
from ..server.placement import Placement
from ..server.replicas import Copied, Copy, ReplicatedShard
from ..server.shard import ServerConfig
from .calls import Refused, find_actor, wait_for

THREADS = {"copies": 1, "writing": 1}
"""Ray's concurrency groups, besides the default one of one thread."""
_COPY_S = 20.0
_RECOVERY_S = 20.0
_TRIES = 10


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """All that a shard is started with, and started anew.

    ``weights`` are those of all shards at that time, and ``place`` the path or URL of checkpoints.
    """

    name: str
    config: ServerConfig
    weights: Mapping[str, float]
    replicas: int
    place: str
    storage_options: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Filling:
    """All that a shard must hear before it answers for buckets.

    ``weights`` and ``elsewhere`` are the placement, ``peers`` all shards that there are, also those that hold nothing
    but copies any more, ``awaited`` the buckets that will be brought, ``notices`` who takes part, and ``step`` the
    checkpoint that the run goes on from.
    """

    weights: Mapping[str, float]
    elsewhere: Mapping[int, str] = field(default_factory=dict)
    peers: Collection[str] = ()
    awaited: frozenset[int] = frozenset()
    notices: Sequence[Request] = ()
    step: int | None = None


class ParameterShard:
    """A shard as an actor. Errors of ours are returned as ``Refused``; see ``ReplicatedShard`` for who may call what.

    Until it is filled it only listens to who joins and leaves. All mutable state besides the shard's: whether it is
    filled, and what it has heard by then, snapshots that a save waits for, counters, who waited last, and peers.
    """

    def __init__(self, settings: ShardSettings) -> None:
        torch.set_num_threads(1)
        self._settings = settings
        self._start = time.time_ns()
        self._peers: dict[str, Any] = {}
        self._shard = ReplicatedShard(
            settings.name,
            settings.config,
            Placement(settings.weights),
            replicas=settings.replicas,
            send=self._send,
            start=self._start,
        )
        self._taken: dict[str, list[tuple[int, bytes]]] = {}
        self._sequences: dict[str, dict[int, Mapping[str, tuple[int, int]]]] = {}
        self._requests = self._bytes_in = self._bytes_out = 0
        self._waiting: dict[str, tuple[str, ...]] = {}
        self._is_filled = False
        self._heard: list[Request] = []

    def fill(self, token: str, filling: Filling) -> str | Refused:
        """Hold the buckets of this shard, and answer for them; returns where they are from, in words."""
        try:
            self._check(token)
            if self._is_filled:
                return ""
            placement = Placement(filling.weights, filling.elsewhere)
            self._shard.place(Placement(filling.weights))
            held = placement.buckets_of(self._settings.name) if self._settings.name in placement.shards else set()
            origins = self._find_buckets(set(held), filling)
            for notice in (*filling.notices, *self._heard):
                with suppress(NotJoinedError):  # what was heard first may be out of date
                    self._shard.own.handle(notice, time.time())
            self._heard = []
            self._is_filled = True
        except PenstockError as exc:
            return Refused.of(exc)
        return " and ".join(origins)

    def _find_buckets(self, wanted: set[int], filling: Filling) -> list[str]:
        """Hold buckets: from copies, a checkpoint, or empty; returns which, in words."""
        settings, own = self._settings, self._shard.own
        left = wanted & set(settings.config.schema.buckets().tolist())
        is_restart = bool(import_ray().get_runtime_context().was_current_actor_reconstructed)
        step, origins = filling.step, []
        store = open_store(settings.place, storage_options=settings.storage_options)
        try:
            if is_restart:
                if settings.replicas == 2:
                    before = len(left)
                    left -= self._adopt_copies(filling.peers, left)
                    origins += ["copies"] if len(left) < before else []
                step = next(iter(list_stored(store)), step)
            left -= filling.awaited
            if left and step is not None:
                left -= self._read(store, step, left)
                origins.append(f"the checkpoint of step {step}")
        finally:
            store.close()
        own.hold_empty(left)
        if not is_restart:  # the workers of a run before are gone
            header = self._header()
            for worker in list(own.members):
                own.handle(Leave(header=header, worker=worker), time.time())
        return origins

    def _read(self, store: Store, step: int, wanted: set[int]) -> set[int]:
        """Hold the buckets of a checkpoint, and return which it has; the driver may be replacing it just now."""
        for attempt in range(_TRIES):
            try:
                found = list(read_buckets(store, read_saved(store, step), wanted))
                break
            except (StorageError, CheckpointError):
                if attempt + 1 == _TRIES:
                    raise
                time.sleep(0.5)
        return {self._shard.own.adopt(data, place=place) for place, data in found}

    def _adopt_copies(self, names: Collection[str], wanted: set[int]) -> set[int]:
        """Ask the other shards for copies, also those that just start; returns the buckets that they had.

        Raises:
            ShardUnreachableError: one gave no answer: it may have what is newer than a checkpoint.
        """
        copies: dict[str, dict[int, bytes]] = {}
        deadline = time.monotonic() + _RECOVERY_S
        peers = [peer for peer in names if peer != self._settings.name]
        while peers and time.monotonic() < deadline:
            for peer in list(peers):
                try:
                    reply = find_actor(peer).copies_of.remote(self._settings.name, self._settings.config.token)
                    copies[peer] = wait_for(reply, peer, timeout_s=_COPY_S)
                except ShardUnreachableError:
                    time.sleep(0.2)
                    continue
                peers.remove(peer)
        if peers:
            raise ShardUnreachableError(f"{self._settings.name} waits for the copies that {', '.join(peers)} may have")
        return self._shard.adopt_copies(copies, wanted)

    def _header(self) -> Header:
        config = self._settings.config
        return Header(run=config.run, schema=config.schema.digest, worker=self._settings.name, token=config.token)

    def _send(self, peer: str, message: Copy) -> Copied:
        if peer not in self._peers:
            self._peers[peer] = find_actor(peer)
        try:
            copied: Copied = wait_for(self._peers[peer].copy.remote(message), peer, timeout_s=_COPY_S)
        except ShardUnreachableError:
            self._peers.pop(peer)  # another one may get its name
            raise
        return copied

    # Of the thread for requests

    def handle(self, request: object) -> Reply | Refused:
        """Answer a worker's request."""
        if not isinstance(request, REQUESTS):
            return Refused.of(ServerRefusedError(f"{self._settings.name}: a {type(request).__name__} is no request"))
        try:
            if not self._is_filled:
                return self._listen(request)
            reply = self._shard.handle(request, time.time())
        except PenstockError as exc:
            return Refused.of(exc)
        self._requests += 1
        self._bytes_in += count_bytes(request)
        self._bytes_out += count_bytes(reply)
        if isinstance(reply, Pulled):
            if reply.waiting_for:
                self._waiting[request.header.worker] = reply.waiting_for
            else:
                self._waiting.pop(request.header.worker, None)
        return reply

    def _listen(self, request: Request) -> Reply:
        """Remember who joins and leaves.

        Raises:
            ShardUnreachableError: it is another request.
        """
        self._check(request.header.token)
        if not isinstance(request, Join | Leave):
            self._refuse_if_empty()
        self._heard.append(request)
        return Joined(clock=request.clock) if isinstance(request, Join) else None

    def _refuse_if_empty(self) -> None:
        if not self._is_filled:
            raise ShardUnreachableError(f"{self._settings.name} starts, and has not its buckets yet")

    def tick(self, token: str, restarted: Collection[str] = ()) -> dict[str, Any] | Refused:
        """Close rounds, make copies that shards which ``restarted`` lost, and tell the shard's numbers."""
        try:
            self._check(token)
            for peer in restarted:
                self._shard.forget_copies_on(peer)
            if self._is_filled:
                self._shard.tick(time.time())
        except PenstockError as exc:
            return Refused.of(exc)
        return self._numbers()

    def _numbers(self) -> dict[str, Any]:
        own = self._shard.own
        return {
            "pid": os.getpid(),
            "start": self._start,
            "is_filled": self._is_filled,
            "buckets": len(own.buckets),
            "values": own.num_values,
            "rows": own.num_rows,
            "held_bytes": own.num_bytes,
            "version": own.version,
            "clocks": own.clocks,
            "members": {worker: incarnation for worker, (incarnation, _) in own.members.items()},
            "waiting": {worker: names for worker, names in self._waiting.items() if worker in own.members},
            "requests": self._requests,
            "bytes_in": self._bytes_in,
            "bytes_out": self._bytes_out,
        }

    def take(self, token: str, save: str) -> list[int] | Refused:
        """Keep the snapshots of all buckets as they are now, for ``write``; returns their numbers."""
        try:
            self._check(token)
            self._refuse_if_empty()
            own = self._shard.own
            self._taken = {save: [(number, own.snapshot(number)) for number in own.buckets]}
            self._sequences = {save: {number: own.sequences(number) for number in own.buckets}}
        except PenstockError as exc:
            return Refused.of(exc)
        return list(own.buckets)

    def confirm(self, token: str, save: str) -> Refused | None:
        """Note that the checkpoint of a save is complete: workers need not keep what is in it."""
        try:
            self._check(token)
        except PenstockError as exc:
            return Refused.of(exc)
        for number, sequences in self._sequences.pop(save, {}).items():
            if number in self._shard.own.buckets:
                self._shard.own.confirm(number, sequences)
        return None

    def depart(self, token: str, numbers: Sequence[int]) -> Parcels | Refused:
        """Hold the first of these buckets no more, and return them."""
        try:
            self._check(token)
            self._refuse_if_empty()
            return self._shard.depart(numbers, most_bytes=MOST_BYTES)
        except PenstockError as exc:
            return Refused.of(exc)

    def arrive(self, token: str, parcels: Parcels) -> Refused | None:
        """Hold buckets from now on."""
        try:
            self._check(token)
            self._refuse_if_empty()
            self._shard.arrive(parcels, time.time())
        except PenstockError as exc:
            return Refused.of(exc)
        return None

    def forget(self, token: str, numbers: Collection[int]) -> Refused | None:
        """Let go of buckets that have arrived elsewhere."""
        try:
            self._check(token)
        except PenstockError as exc:
            return Refused.of(exc)
        self._shard.forget(numbers)
        return None

    def place(self, token: str, weights: Mapping[str, float]) -> Refused | None:
        """Have copies made from now on by new weights, since a shard is lost."""
        try:
            self._check(token)
        except PenstockError as exc:
            return Refused.of(exc)
        self._shard.place(Placement(weights))
        return None

    def settle(self, token: str, weights: Mapping[str, float]) -> int | Refused:
        """Place some copies by new weights; returns how many are left to do."""
        try:
            self._check(token)
            self._refuse_if_empty()
            return self._shard.settle(Placement(weights), time.time())
        except PenstockError as exc:
            return Refused.of(exc)

    # Of the thread for writing

    def write(self, token: str, step: int, save: str) -> dict[str, StoredFile] | Refused:
        """Write what ``take`` kept to the place of checkpoints."""
        settings = self._settings
        try:
            self._check(token)
            taken = self._taken.pop(save, None)
            if taken is None:
                raise ShardUnreachableError(f"{settings.name} started anew since the save began")
            store = open_store(settings.place, storage_options=settings.storage_options)
            try:
                return write_shard(store, step, save, settings.name, taken)
            finally:
                store.close()
        except PenstockError as exc:
            return Refused.of(exc)

    # Of the thread for copies

    def copy(self, message: Copy) -> Copied | Refused:
        """Apply changes to the copies of another shard's buckets."""
        try:
            return self._shard.copy(message)
        except PenstockError as exc:
            return Refused.of(exc)

    def copies_of(self, source: str, token: str) -> dict[int, bytes] | Refused:
        """The copies of a shard's buckets, for that shard to start with."""
        try:
            self._check(token)
        except PenstockError as exc:
            return Refused.of(exc)
        return self._shard.copies_of(source)

    def _check(self, token: str) -> None:
        if not hmac.compare_digest(token.encode(), self._settings.config.token.encode()):
            raise ServerRefusedError(f"{self._settings.name}: the caller has not the token of the run")


def make_actor_class() -> Any:
    """The class as Ray wants it, with a thread for each kind of call."""
    ray = import_ray()

    class _ParameterShard(ParameterShard):
        copy = ray.method(concurrency_group="copies")(ParameterShard.copy)
        copies_of = ray.method(concurrency_group="copies")(ParameterShard.copies_of)
        write = ray.method(concurrency_group="writing")(ParameterShard.write)

    return ray.remote(concurrency_groups=THREADS, max_restarts=-1, max_task_retries=0)(_ParameterShard)
