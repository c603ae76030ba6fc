"""The actor of a shard: it holds the state machines, knows the time, and comes back as it was.

Ray starts it anew when it dies, with the same arguments. Each kind of call has one thread: requests of workers, copies
of other shards, and writing a checkpoint. So two shards that copy to each other never wait in a circle.
"""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...storage.errors import PenstockError, StorageError
from ...storage.ray_cluster import import_ray
from ...storage.resolve import open_store
from ...storage.store import Store
from ..checkpoint.remote.layout import StoredFile, list_stored
from ..errors import CheckpointError, ServerRefusedError, ShardUnreachableError
from ..server.checkpoints import read_buckets, read_saved, write_shard
from ..server.messages import REQUESTS, Header, Leave, Pulled, Reply, count_bytes
from ..server.placement import Placement
from ..server.replicas import Copied, Copy, ReplicatedShard
from ..server.shard import ServerConfig
from .calls import Refused, find_actor, wait_for

THREADS = {"copies": 1, "writing": 1}
"""Ray's concurrency groups, besides the default one of one thread."""
_COPY_S = 20.0
_RECOVERY_S = 60.0
_TRIES = 10


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """All that a shard is started with, and started anew.

    ``weights`` are those of all shards, ``place`` the path or URL of checkpoints, and ``step`` the one to begin with.
    """

    name: str
    config: ServerConfig
    weights: Mapping[str, float]
    replicas: int
    place: str
    storage_options: Mapping[str, Any] | None = None
    step: int | None = None


class ParameterShard:
    """A shard as an actor. Errors of ours are returned as ``Refused``; see ``ReplicatedShard`` for who may call what.

    All mutable state besides the shard's: snapshots that a save waits for, counters, who waited last, and peers.
    """

    def __init__(self, settings: ShardSettings) -> None:
        torch.set_num_threads(1)
        self._settings = settings
        self._placement = Placement(settings.weights)
        self._start = time.time_ns()
        self._peers: dict[str, Any] = {}
        self._shard = ReplicatedShard(
            settings.name,
            settings.config,
            self._placement,
            replicas=settings.replicas,
            send=self._send,
            start=self._start,
        )
        self._taken: dict[str, list[tuple[int, bytes]]] = {}
        self._sequences: dict[str, dict[int, Mapping[str, tuple[int, int]]]] = {}
        self._requests = self._bytes_in = self._bytes_out = 0
        self._waiting: dict[str, tuple[str, ...]] = {}
        self._restored_from = self._fill(set(self._placement.buckets_of(settings.name)))

    def _fill(self, wanted: set[int]) -> str:
        """Hold the buckets of this shard: from copies, a checkpoint, or empty; returns which, in words."""
        settings, own = self._settings, self._shard.own
        left = wanted & set(settings.config.schema.buckets().tolist())
        is_restart = bool(import_ray().get_runtime_context().was_current_actor_reconstructed)
        step, origins = settings.step, []
        store = open_store(settings.place, storage_options=settings.storage_options)
        try:
            if is_restart:
                if settings.replicas == 2:
                    before = len(left)
                    left -= self._adopt_copies()
                    origins += ["copies"] if len(left) < before else []
                step = next(iter(list_stored(store)), step)
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
        return " and ".join(origins)

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

    def _adopt_copies(self) -> set[int]:
        """Ask the other shards for copies, also those that just start; returns the buckets that they had."""
        found: set[int] = set()
        deadline = time.monotonic() + _RECOVERY_S
        peers = [peer for peer in self._settings.weights if peer != self._settings.name]
        while peers and time.monotonic() < deadline:
            for peer in list(peers):
                try:
                    reply = find_actor(peer).copies_of.remote(self._settings.name, self._settings.config.token)
                    copies = wait_for(reply, peer, timeout_s=_COPY_S)
                except ShardUnreachableError:
                    time.sleep(0.2)
                    continue
                peers.remove(peer)
                found.update(self._shard.adopt_copies(peer, copies))
        return found

    def _header(self) -> Header:
        config = self._settings.config
        return Header(run=config.run, schema=config.schema.digest, worker=self._settings.name, token=config.token)

    def _send(self, peer: str, message: Copy) -> Copied:
        if peer not in self._peers:
            self._peers[peer] = find_actor(peer)
        copied: Copied = wait_for(self._peers[peer].copy.remote(message), peer, timeout_s=_COPY_S)
        return copied

    # Of the thread for requests

    def handle(self, request: object) -> Reply | Refused:
        """Answer a worker's request."""
        if not isinstance(request, REQUESTS):
            return Refused.of(ServerRefusedError(f"{self._settings.name}: a {type(request).__name__} is no request"))
        try:
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

    def tick(self, token: str, restarted: Collection[str] = ()) -> dict[str, Any] | Refused:
        """Close rounds, make copies that shards which ``restarted`` lost, and tell the shard's numbers."""
        try:
            self._check(token)
            for peer in restarted:
                self._shard.forget_copies_on(peer)
            self._shard.tick(time.time())
        except PenstockError as exc:
            return Refused.of(exc)
        return self._numbers()

    def _numbers(self) -> dict[str, Any]:
        own = self._shard.own
        return {
            "pid": os.getpid(),
            "start": self._start,
            "restored_from": self._restored_from,
            "buckets": len(own.buckets),
            "values": own.num_values,
            "rows": own.num_rows,
            "version": own.version,
            "clocks": own.clocks,
            "members": {worker: incarnation for worker, (incarnation, _) in own.members.items()},
            "waiting": {worker: names for worker, names in self._waiting.items() if worker in own.members},
            "requests": self._requests,
            "bytes_in": self._bytes_in,
            "bytes_out": self._bytes_out,
        }

    def take(self, token: str, save: str) -> Refused | None:
        """Keep the snapshots of all buckets as they are now, for ``write``."""
        try:
            self._check(token)
            own = self._shard.own
            self._taken = {save: [(number, own.snapshot(number)) for number in own.buckets]}
            self._sequences = {save: {number: own.sequences(number) for number in own.buckets}}
        except PenstockError as exc:
            return Refused.of(exc)
        return None

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
