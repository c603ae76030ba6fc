"""Shards and a coordinator in this process, called directly by workers that are threads of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from ..errors import ShardUnreachableError, TrainerConfigError
from ..server.coordinator import Coordinator, Identity
from ..server.leases import Lease
from ..server.messages import Reply, Request
from ..server.moving import MOST_BYTES, Transition
from ..server.parcels import Parcels, pack, unpack
from ..server.placement import Placement
from ..server.services import Begun, Task
from ..server.shard import Shard
from .setup import Setup

Answer = TypeVar("Answer")


class LocalCluster:
    """The ``Services`` of a run in one process. What shards have taken is as safe as the process is.

    It is the ``Carrier`` of buckets that move, too. All mutable state: the shards and the coordinator, each under a
    lock of its own; of a call that takes both, the coordinator's comes first.

    Raises:
        TrainerConfigError: there is no shard.
    """

    def __init__(self, setup: Setup, *, shards: int, silence_s: float) -> None:
        if shards < 1:
            raise TrainerConfigError(f"--shards={shards} must be 1 or more")
        weights = {f"shard-{index}": 1.0 for index in range(shards)}
        placement = Placement(weights)
        self._config = setup.server
        self.shards = {
            name: Shard(name, setup.server, placement.buckets_of(name), is_replicated=True) for name in weights
        }
        identity = Identity(run=setup.server.run, schema=setup.server.schema.digest, token=setup.server.token)
        self.coordinator = Coordinator(setup.plan, identity, shards=weights, silence_s=silence_s)
        self._locks = {name: threading.Lock() for name in weights}
        self._lock = threading.Lock()

    def call(self, shard: str, request: Request) -> Reply:
        with self._open(shard) as held:
            return held.handle(request, time.time())

    @contextmanager
    def _open(self, name: str) -> Iterator[Shard]:
        """Use a shard, alone.

        Raises:
            ShardUnreachableError: there is none of this name any more.
        """
        with self._locks[name]:
            held = self.shards.get(name)
            if held is None:
                raise ShardUnreachableError(f"{name} has left this run")
            yield held

    def start(self, shard: str, request: Request) -> Callable[[], Reply]:
        reply = self.call(shard, request)
        return lambda: reply

    def placement(self) -> Placement:
        return self.coordinator.placement

    def begin(self, worker: str) -> Begun:
        return self.ask(lambda one, now: one.begin(worker, now))

    def leave(self, worker: str, incarnation: int) -> None:
        self.ask(lambda one, now: one.leave(worker, incarnation, now))

    def lease(self, worker: str, incarnation: int, after: int) -> Lease | None:
        return self.ask(lambda one, now: one.lease(worker, incarnation, after, now))

    def consume(self, worker: str, incarnation: int, lease: int, upto: int) -> int:
        return self.ask(lambda one, now: one.consume(worker, incarnation, lease, upto, now))

    def renew(self, worker: str, incarnation: int) -> None:
        self.ask(lambda one, now: one.renew(worker, incarnation, now))

    def report(self, worker: str, numbers: Mapping[str, float]) -> None:
        self.ask(lambda one, now: one.report(worker, numbers))

    def task(self, worker: str, incarnation: int) -> Task | None:
        return self.ask(lambda one, now: one.task(worker, incarnation, now))

    def proceed(self, worker: str, incarnation: int, task: Task) -> None:
        self.ask(lambda one, now: one.proceed(worker, incarnation, task, now))

    def finish(self, worker: str, incarnation: int, task: Task, metrics: Mapping[str, float]) -> None:
        self.ask(lambda one, now: one.finish(worker, incarnation, task, metrics, now))

    def is_stopping(self, worker: str | None = None) -> bool:
        return self.coordinator.is_stopping if worker is None else self.coordinator.is_leaving(worker)

    def ask(self, question: Callable[[Coordinator, float], Answer]) -> Answer:
        """Ask the coordinator at this moment, and tell the shards what they must hear before the answer is known."""
        with self._lock:
            try:
                return question(self.coordinator, time.time())
            finally:
                for notice in self.coordinator.take_notices():
                    for name in list(self.shards):
                        self.call(name, notice)

    def tick(self) -> None:
        """Forget silent workers, and close rounds whose time is over; to be called from time to time."""
        self.ask(lambda one, now: one.forget_silent(now))
        if self._config.policy.merges == "by quorum":
            for name in list(self.shards):
                with self._open(name) as held:
                    held.tick(time.time())

    # Shards that come and go

    def place(self, weights: Mapping[str, float]) -> int:
        """Have shards of these names and weights, and move their buckets to them; returns how many moved.

        Workers train on meanwhile. For one thread, which also saves.

        Raises:
            TrainerConfigError: there is no shard, or a weight is no positive number.
        """
        Placement(weights)
        with self._lock:
            new = sorted(weights.keys() - self.shards.keys())
            for name in new:
                self._locks[name] = threading.Lock()
                self.shards[name] = Shard(name, self._config, is_replicated=True)
            self.coordinator.place(weights, time.time())
            for notice in self.coordinator.recall_notices():
                for name in new:
                    self.call(name, notice)
        used = frozenset(self._config.schema.buckets().tolist())
        transition = Transition(self.coordinator.placement, used, self)
        while not transition.is_done:
            transition.step()
        with self._lock:
            for name in self.shards.keys() - weights.keys():
                del self.shards[name]
        return transition.moved

    def depart(self, source: str, numbers: Collection[int]) -> Parcels:
        with self._open(source) as held:
            return pack(held, numbers, most_bytes=MOST_BYTES)

    def note(self, numbers: Collection[int]) -> None:
        self.ask(lambda one, now: one.arrived(numbers, now))

    def arrive(self, target: str, parcels: Parcels) -> None:
        with self._open(target) as held:
            unpack(held, parcels, time.time())

    def forget(self, source: str, numbers: Collection[int]) -> None:
        pass

    def settle(self, shard: str, placement: Placement) -> int:
        return 0

    def snapshots(self, shard: str) -> Iterator[tuple[int, bytes]]:
        """Take the snapshots of a shard's buckets that hold something, each at a moment of its own."""
        held = self.shards[shard]
        for number in sorted(held.buckets):
            with self._locks[shard]:
                data = b"" if held.buckets[number].is_empty else held.snapshot(number)
            if data:
                yield number, data

    def adopt(self, data: bytes, *, place: str) -> None:
        """Hold the bucket of a snapshot, where it is placed; ``place`` is where it came from."""
        first = next(iter(self.shards.values()))
        number = first.adopt(data, place=place)
        target = self.shards[self.coordinator.placement.shard_of(number)]
        if target is not first:
            target.adopt(first.release(number), place=place)
