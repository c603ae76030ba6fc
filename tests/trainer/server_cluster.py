"""Shards of a server in one process, a call with faults to them, and a naive twin of what they should hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.trainer.errors import ServerError, ShardUnreachableError
from penstock.trainer.server import placement as placement_module
from penstock.trainer.server.client import ClientConfig, ServerClient
from penstock.trainer.server.messages import Header, Join, Reply, Request
from penstock.trainer.server.moving import Transition
from penstock.trainer.server.optimizers import Sgd
from penstock.trainer.server.parcels import Parcels
from penstock.trainer.server.placement import Placement
from penstock.trainer.server.policies import Asp
from penstock.trainer.server.replicas import Copied, Copy, ReplicatedShard
from penstock.trainer.server.schema import Schema, TableSpec, TensorSpec
from penstock.trainer.server.shard import ServerConfig, Shard

SCHEMA = Schema(
    [TensorSpec(name="w", shape=(3, 4), piece=5), TensorSpec(name="b", shape=(2,), piece=5)],
    [TableSpec(name="t", width=2)],
)
FAULTS = ("none", "drop request", "drop reply", "duplicate", "late", "kill before", "kill after", "checkpoint")
COPY_FAULTS = ("none", "drop request", "drop reply", "duplicate", "late")


@contextmanager
def few_buckets(count: int = 16) -> Iterator[None]:
    """Have fewer buckets, so that a shard is made in no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement_module, "BUCKETS", count)
        placement_module._unit_logs.cache_clear()
        yield
    placement_module._unit_logs.cache_clear()


def adding(**changes: object) -> ServerConfig:
    """Servers that add up what is pushed."""
    values = {
        "run": "r",
        "schema": SCHEMA,
        "policy": Asp(),
        "dense": Sgd(rate=-1),
        "rows": Sgd(rate=-1),
        "reduction": "sum",
    }
    return ServerConfig(**{**values, **changes})  # type: ignore[arg-type]


class Cluster:
    """Shards, their replicas or checkpoints, and a call to them that fails as ``faults`` says, a fault a call."""

    def __init__(
        self, config: ServerConfig, shards: int = 2, *, is_replicated: bool = False, sends_at_once: bool = False
    ) -> None:
        self.config, self.is_replicated, self.sends_at_once = config, is_replicated, sends_at_once
        self.placement = Placement({f"shard-{index}": 1 for index in range(shards)})
        self._starts = 0
        self.hosts = {name: self.new_host(name, self.placement.buckets_of(name)) for name in self.placement.weights}
        self.saved: dict[int, bytes] = {}
        self.faults: Iterator[str] = iter(())
        self.copy_faults: Iterator[str] = iter(())
        self.late_copies: list[tuple[str, Copy]] = []
        self.late: list[tuple[str, Request]] = []
        self.clients: list[ServerClient] = []
        self.now, self.waits, self.kills = 0.0, 0, 0
        self._is_waiting = False
        self.transition: Transition | None = None
        self.move_faults: Iterator[str] = iter(())
        self.checkpoint()

    @property
    def shards(self) -> dict[str, Shard]:
        return {name: host.own for name, host in self.hosts.items()}

    def new_host(self, name: str, buckets: frozenset[int] = frozenset()) -> ReplicatedShard:
        self._starts += 1
        return ReplicatedShard(
            name,
            self.config,
            Placement(self.placement.weights),
            replicas=2 if self.is_replicated else 1,
            send=self.send,
            start=self._starts,
            buckets=buckets,
        )

    def send(self, name: str, message: Copy) -> Copied:
        """Bring a shard's changes to another one, with faults of their own."""
        fault = next(self.copy_faults, "none")
        lost = ShardUnreachableError(fault)
        if fault == "drop request":
            raise lost
        if fault == "late":
            self.late_copies.append((name, message))
            raise lost
        reply = self.hosts[name].copy(message)
        if fault == "duplicate":
            self.hosts[name].copy(message)
        if fault == "drop reply":
            raise lost
        if fault == "none" and self.late_copies:
            late, self.late_copies = self.late_copies, []
            for other, one in reversed(late):
                if other in self.hosts:
                    self.hosts[other].copy(one)
        return reply

    def checkpoint(self) -> None:
        if self.transition is not None and self.transition.is_between:
            return  # it would lack buckets
        for shard in self.shards.values():
            for number in shard.buckets:
                self.saved[number] = shard.snapshot(number)
                shard.confirm(number, shard.sequences(number))

    def kill(self, name: str) -> None:
        """Lose a shard, and start it anew from its replica or the last checkpoint."""
        self.kills += 1
        host = self.new_host(name)
        wanted = self.placement.buckets_of(name) if name in self.placement.shards else frozenset()
        awaited = frozenset[int]() if self.transition is None else self.transition.awaited(name)
        copies = {peer: other.copies_of(name) for peer, other in self.hosts.items() if peer != name}
        left = wanted - host.adopt_copies(copies, wanted) - awaited
        for number in left & self.saved.keys():
            host.own.adopt(self.saved[number])
        host.own.hold_empty(left - self.saved.keys())
        self.hosts[name] = host
        if self.is_replicated:
            faults, self.copy_faults = self.copy_faults, iter(())
            for other in self.hosts.values():
                other.forget_copies_on(name)
                other.tick(self.now)
            self.copy_faults = faults

    # Buckets that move

    def begin_move(self, weights: Mapping[str, float]) -> None:
        """Begin to move buckets to other weights; what was begun before is brought to its end."""
        while self.transition is not None:
            self.step_move()
        after = Placement(weights)
        way = {move.bucket: move.source for move in placement_module.moves(self.placement, after)}
        before = self.placement
        self.placement = Placement(weights, way)
        for name in weights.keys() - self.hosts.keys():
            self.hosts[name] = self.new_host(name)
            self.hosts[name].place(after)
            self._introduce(name, before)
        used = frozenset(self.config.schema.buckets().tolist())
        self.transition = Transition(self.placement, used, Mover(self))

    def _introduce(self, name: str, before: Placement) -> None:
        """Tell a new shard who takes part, as a coordinator does."""
        shard = self.hosts[before.shards[0]].own
        for worker, (incarnation, _) in shard.members.items():
            header = Header(
                run=self.config.run, schema=self.config.schema.digest, worker=worker, incarnation=incarnation
            )
            self.hosts[name].handle(Join(header=header, clock=0), self.now)

    def step_move(self) -> None:
        """Move some buckets on, if there are some to move."""
        if self.transition is None:
            return
        with suppress(ShardUnreachableError):
            self.transition.step()
        if self.transition.is_done:
            self.transition = None
            for name in self.hosts.keys() - set(self.placement.weights):
                del self.hosts[name]

    def handle(self, name: str, request: Request) -> Reply:
        return self.hosts[name].handle(request, self.now)

    def call(self, name: str, request: Request) -> Reply:
        fault = next(self.faults, "none")
        self.now += 1
        lost = ShardUnreachableError(fault)
        if name not in self.hosts:
            raise ShardUnreachableError(f"{name} is gone")
        if fault == "drop request":
            raise lost
        if fault == "late":
            self.late.append((name, request))
            raise lost
        if fault == "kill before":
            self.kill(name)
            raise lost
        if fault == "checkpoint":
            self.checkpoint()
        reply = self.handle(name, request)
        if fault == "duplicate":
            self.handle(name, request)
        if fault == "kill after":
            self.kill(name)
        if fault in ("drop reply", "kill after"):
            raise lost
        if fault == "none" and self.late:
            self.deliver_late()
        return reply

    def begin(self, name: str, request: Request) -> Callable[[], Reply]:
        """Call a shard, and tell what came of it later."""
        try:
            reply = self.call(name, request)
        except ServerError as exc:
            error = exc

            def fail() -> Reply:
                raise error

            return fail
        return lambda: reply

    def deliver_late(self) -> None:
        """Deliver what was delayed, the last first; nobody hears the replies."""
        late, self.late = self.late, []
        for name, request in reversed(late):
            with suppress(ServerError):
                if name in self.hosts:
                    self.handle(name, request)

    def wait(self, seconds: float) -> None:
        """Let the other workers live meanwhile."""
        self.waits += 1
        assert self.waits < 5000, "the workers wait for ever"
        self.step_move()
        if not self._is_waiting:
            self._is_waiting = True
            for other in self.clients:
                other.send_clock()
            self._is_waiting = False

    def worker(self, name: str, *, config: ClientConfig | None = None, incarnation: int = 0) -> ServerClient:
        header = Header(run="r", schema=self.config.schema.digest, worker=name, incarnation=incarnation)
        made = ServerClient(
            header,
            self.config.schema,
            call=self.call,
            placement=lambda: self.placement,
            wait=self.wait,
            start=self.begin if self.sends_at_once else None,
            config=config or ClientConfig(pause=0),
        )
        self.clients.append(made)
        return made

    def start(self, workers: int, **values: Tensor) -> list[ServerClient]:
        """Let workers join, and the first give tensors their values (zeros)."""
        made = [self.worker(f"worker-{index}") for index in range(workers)]
        for one in made:
            one.join()
        first = {spec.name: torch.zeros(spec.shape) for spec in self.config.schema.tensors}
        made[0].create({**first, **values})
        self.checkpoint()
        return made

    def tick(self) -> None:
        for host in self.hosts.values():
            host.tick(self.now)

    def tensors(self) -> dict[str, Tensor]:
        """Read all tensors past clients."""
        found = {}
        for spec in self.config.schema.tensors:
            parts = []
            for index in range(spec.pieces):
                number = placement_module.bucket_of_piece(spec.name, index)
                bucket = self.shards[self.placement.shard_of(number)].buckets[number]
                parts.append(bucket.pieces[spec.name, index].values[0])
            found[spec.name] = torch.cat(parts).view(spec.shape)
        return found

    def rows(self, table: str, ids: list[int]) -> Tensor:
        """Read rows past clients."""
        wanted = np.array(ids, np.int64)
        found = self.config.schema.table(table).first_rows(wanted)
        for place, number in enumerate(placement_module.buckets_of_rows(table, wanted).tolist()):
            held = self.shards[self.placement.shard_of(number)].buckets[number].tables.get(table)
            if held is not None and ids[place] in held.ids:
                found[place] = held.values[held.ids.tolist().index(ids[place])]
        return found


class Mover:
    """A carrier whose calls fail as the cluster's ``move_faults`` say, a fault a call."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def depart(self, source: str, numbers: Collection[int]) -> Parcels:
        few = list(numbers)[:4]
        found: Parcels = self._try(source, lambda host: host.depart(few, most_bytes=1 << 20))
        return found

    def note(self, numbers: Collection[int]) -> None:
        self._cluster.placement = self._cluster.placement.after(set(numbers))

    def arrive(self, target: str, parcels: Parcels) -> None:
        self._try(target, lambda host: host.arrive(parcels, self._cluster.now))

    def forget(self, source: str, numbers: Collection[int]) -> None:
        self._try(source, lambda host: host.forget(numbers))

    def settle(self, shard: str, placement: Placement) -> int:
        left: int = self._try(shard, lambda host: host.settle(placement, self._cluster.now, at_most=3))
        return left

    def _try(self, name: str, call: Callable[[ReplicatedShard], Any]) -> Any:
        cluster, fault = self._cluster, next(self._cluster.move_faults, "none")
        cluster.now += 1
        if fault in ("drop request", "late"):
            raise ShardUnreachableError(fault)
        if fault == "kill before":
            cluster.kill(name)
            raise ShardUnreachableError(fault)
        if fault == "checkpoint":
            cluster.checkpoint()
        found = call(cluster.hosts[name])
        if fault == "duplicate":
            found = call(cluster.hosts[name])
        if fault == "kill after":
            cluster.kill(name)
        if fault in ("drop reply", "kill after"):
            raise ShardUnreachableError(fault)
        return found
