"""The driver's shards, as actors that are called directly: filled, killed at any call, given up, and moved between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from server_cluster import adding, few_buckets

from penstock.storage import open_store
from penstock.trainer.errors import ShardUnreachableError
from penstock.trainer.on_ray import coordinator_actor, shard_actor
from penstock.trainer.on_ray import fleet as fleet_module
from penstock.trainer.on_ray import services as services_module
from penstock.trainer.on_ray.calls import Refused
from penstock.trainer.on_ray.coordinator_actor import CoordinatorSettings, RunCoordinator
from penstock.trainer.on_ray.fleet import Fleet
from penstock.trainer.on_ray.services import RayServices
from penstock.trainer.on_ray.shard_actor import Filling, ParameterShard, ShardSettings
from penstock.trainer.server.checkpoints import complete
from penstock.trainer.server.client import ClientConfig, ServerClient
from penstock.trainer.server.coordinator import Coordinator, Identity
from penstock.trainer.server.messages import Header, Reply, Request, count_bytes
from penstock.trainer.server.refused import raise_refused
from penstock.trainer.server.schema import Schema, TensorSpec
from penstock.trainer.server.services import DataPlan

V = {"w": torch.arange(12.0).view(3, 4) - 5, "b": torch.tensor([3.0, -7.0])}
IDS, ROWS = np.array([4, 90, 17, 31, 5, 77], np.int64), torch.arange(12.0).view(6, 2)


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with few_buckets():
        yield


class FakeRay:
    """Actors that are objects of this process. Calls fail as ``faults`` say; one that is killed starts anew at once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.actors: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self.faults: Callable[[], str] = lambda: "none"
        self.is_new = True
        self.is_dead: set[str] = set()
        self.notice: Callable[[str], None] = lambda name: None
        context = SimpleNamespace(get_runtime_context=lambda: self)
        patch.setattr(shard_actor, "import_ray", lambda: context)
        for module in (shard_actor, fleet_module):
            patch.setattr(module, "wait_for", lambda reply, name, timeout_s: raise_refused(reply()))
        patch.setattr(shard_actor, "find_actor", self.handle)
        patch.setattr(shard_actor, "make_actor_class", lambda: SimpleNamespace(options=self._options))
        patch.setattr(shard_actor.time, "sleep", lambda seconds: None)
        patch.setattr(shard_actor, "_RECOVERY_S", 0.05)

    @property
    def was_current_actor_reconstructed(self) -> bool:
        return not self.is_new

    def _options(self, *, name: str, **_: Any) -> Any:
        def remote(settings: Any) -> Any:
            self.is_dead.discard(name)
            self.settings[name], self.actors[name] = settings, ParameterShard(settings)
            return self.handle(name)

        return SimpleNamespace(remote=remote)

    def handle(self, name: str) -> Any:
        return Handle(self, name)

    def kill(self, actor: Any, no_restart: bool) -> None:
        self.is_dead.add(actor.name)

    def restart(self, name: str) -> None:
        self.is_new = False
        self.actors[name] = ParameterShard(self.settings[name])
        faults, self.faults = self.faults, lambda: "none"
        self.notice(name)
        self.faults = faults


class Handle:
    def __init__(self, ray: FakeRay, name: str) -> None:
        self.ray, self.name = ray, name

    def __getattr__(self, method: str) -> Any:
        def call(*values: Any) -> Any:
            ray = self.ray
            fault = ray.faults() if method not in ("copy", "copies_of") else "none"
            if self.name in ray.is_dead or fault == "drop request":
                raise ShardUnreachableError(f"{self.name} is gone")
            if fault == "kill before":
                ray.restart(self.name)
                raise ShardUnreachableError(fault)
            reply = getattr(ray.actors[self.name], method)(*values)
            if fault == "kill after":
                ray.restart(self.name)
            if fault in ("kill after", "drop reply"):
                raise ShardUnreachableError(fault)
            return reply

        return SimpleNamespace(remote=lambda *values: lambda: call(*values))


class Run:
    """A fleet with a coordinator and a worker, and the turns of a driver."""

    def __init__(self, patch: pytest.MonkeyPatch, place: Path, replicas: int, shards: int) -> None:
        self.ray = FakeRay(patch)
        weights = {f"shard-{index}": 1.0 for index in range(shards)}
        self.config = adding()
        identity = Identity(run="r", schema=self.config.schema.digest)
        plan = DataPlan(batches=9, units=9, rows=1, span=1, workers=1)
        self.coordinator = Coordinator(plan, identity, shards=weights, silence_s=1e9)
        self.place = place
        place.mkdir()
        self.fleet = Fleet(self.ray, self.config, weights=weights, replicas=replicas, place=str(place), ask=self.ask)
        self.fleet.start(self.fleet.names, weights)
        for name in self.fleet.names:
            self.fleet.fill(name, step=None, notices=())
        header = Header(run="r", schema=self.config.schema.digest, worker="w", incarnation=0)
        self.incarnation = self.coordinator.begin("w", 0.0).incarnation
        self.coordinator.lease("w", self.incarnation, -1, 0.0)
        self.tell()
        self.client = ServerClient(
            header,
            self.config.schema,
            call=self.call,
            placement=lambda: self.coordinator.placement,
            wait=lambda seconds: self.turn(),
            config=ClientConfig(pause=0),
        )
        self.client.join()
        self.client.create({name: torch.zeros_like(one) for name, one in V.items()})
        self.pushes = 0
        self.save()
        if replicas == 2:
            self.ray.notice = self.recover

    def ask(self, name: str, *values: Any) -> Any:
        method = getattr(self.coordinator, name)
        return method() if name == "recall_notices" else method(*values, 0.0)

    def tell(self) -> None:
        for notice in self.coordinator.take_notices():
            for name in self.coordinator.placement.shards:
                self.ray.actors[name].handle(notice)

    def call(self, name: str, request: Request) -> Reply:
        found: Reply = raise_refused(self.ray.handle(name).handle.remote(request)())
        return found

    def turn(self) -> None:
        """Do what the driver does between two looks."""
        for name in list(self.fleet.actors):
            try:
                numbers = raise_refused(self.fleet.actors[name].tick.remote("", [])())
                if not numbers["is_filled"]:
                    self.fleet.fill(name, step=None)
            except ShardUnreachableError:
                continue
        self.fleet.move_on(0.05)

    def recover(self, name: str) -> None:
        """Fill a shard that has started anew, and have copies made that it had: two do not die at once."""
        self.fleet.fill(name, step=None)
        for other, actor in self.fleet.actors.items():
            raise_refused(actor.tick.remote("", [name] if other != name else [])())

    def save(self) -> None:
        taken = self.fleet.call_all("take", "s")
        assert {number for several in taken for number in several} == set(self.config.schema.buckets().tolist())
        files = self.fleet.call_all("write", 1, "s")
        store = open_store(str(self.place))
        complete(store, 1, "s", files, {"run": "r"}, keep=1)
        store.close()
        self.fleet.call_all("confirm", "s")

    def push(self) -> None:
        self.client.pull()
        self.client.push(V, {"t": (IDS, ROWS)})
        self.client.advance()
        self.pushes += 1

    def check(self) -> None:
        self.ray.faults = lambda: "none"
        while self.fleet.is_moving:
            self.turn()
        self.turn()
        self.client.send_clock()
        found = self.client.pull()
        assert all(torch.equal(found[name], self.pushes * one) for name, one in V.items())
        assert torch.equal(self.client.pull_rows("t", IDS), self.pushes * ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_every_push_counts_once_while_shards_join_leave_and_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int, seed: int
) -> None:
    draws = Random(seed)
    run = Run(monkeypatch, tmp_path / "servers", replicas, 2)
    kinds = ["none"] * 12 + ["drop request", "drop reply", "kill before", "kill after"]
    run.ray.faults = lambda: draws.choice(kinds)
    for count in (3, 4, 2, 3):
        if not run.fleet.is_moving:
            run.fleet.begin_move({f"shard-{index}": float(index + 1) for index in range(count)})
        for _ in range(3):
            run.push()
            run.turn()
    run.check()


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_buckets_of_a_shard_that_does_not_come_back_move_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    run = Run(monkeypatch, tmp_path / "servers", replicas, 3)
    run.push()
    run.push()
    run.ray.is_dead.add("shard-1")
    assert run.fleet.give_up("shard-1")
    assert not run.fleet.give_up("shard-1")
    run.push()
    run.check()
    assert run.fleet.names == ["shard-0", "shard-2"]
    assert run.coordinator.placement.shards == ("shard-0", "shard-2")
    assert run.fleet.give_up("shard-0") is (replicas == 1)  # two replicas want two shards


def test_a_shard_that_has_not_its_buckets_yet_hears_who_takes_part_and_answers_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(monkeypatch, tmp_path / "servers", 1, 1)
    run.ray.restart("shard-0")
    actor = run.ray.actors["shard-0"]
    run.coordinator.leave("w", run.incarnation, 0.0)
    for notice in run.coordinator.take_notices():
        assert actor.handle(notice) is None
    refused = actor.depart("", [1])
    assert isinstance(refused, Refused)
    assert refused.kind == "ShardUnreachableError"
    run.fleet.fill("shard-0", step=None, notices=())
    assert "w" not in actor._shard.own.members
    assert actor.fill("", shard_actor.Filling(weights={"shard-0": 1.0})) == ""
    assert time.time_ns() > actor._start


def test_what_workers_measure_becomes_weights_of_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(monkeypatch)
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(services_module, "wait_for", lambda reply, name, timeout_s: raise_refused(reply()))
    monkeypatch.setattr(services_module, "find_actor", ray.handle)
    monkeypatch.setattr(services_module.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(coordinator_actor, "find_actor", ray.handle)
    monkeypatch.setattr(coordinator_actor, "wait_for", lambda reply, name, timeout_s: raise_refused(reply()))
    schema = Schema([TensorSpec(name="w", shape=(1 << 21,), piece=1 << 17), TensorSpec(name="b", shape=(2,))])
    config = adding(schema=schema, token="t")
    weights = {"shard-0": 1.0, "shard-1": 1.0}
    for name in weights:
        ray.actors[name] = ParameterShard(
            ShardSettings(name=name, config=config, weights=weights, replicas=1, place=str(tmp_path))
        )
        assert ray.actors[name].fill("t", Filling(weights=weights)) == ""
        handle = ray.actors[name].handle
        seconds = 0.01 if name == "shard-0" else 0.04

        def slowly(request: Request, handle: Any = handle, seconds: float = seconds) -> Any:
            clock.now += seconds * count_bytes(request) / 1e6
            return handle(request)

        ray.actors[name].handle = slowly
    settings = CoordinatorSettings(
        plan=DataPlan(batches=10**6, units=10**6, rows=1, span=1, workers=1),
        identity=Identity(run="r", schema=schema.digest, token="t"),
        weights=weights,
        silence_s=1e9,
        expected=1,
        journal=str(tmp_path / "journal"),
    )
    ray.actors["coordinator"] = RunCoordinator(settings)
    services = RayServices("t")
    begun = services.begin("w")
    lease = services.lease("w", begun.incarnation, -1)
    assert lease is not None
    header = Header(run="r", schema=schema.digest, worker="w", incarnation=begun.incarnation, token="t")
    client = ServerClient(header, schema, call=services.call, placement=services.placement, wait=lambda seconds: None)
    client.join()
    client.create({spec.name: torch.zeros(spec.shape) for spec in schema.tensors})
    for _ in range(3):
        client.push({spec.name: torch.ones(spec.shape) for spec in schema.tensors})
        client.advance()
    services.report("w", {"batches_sum": 3.0})
    services.consume("w", begun.incarnation, lease.number, 1)
    told = ray.actors["coordinator"].tick("t")
    assert told["speeds"] == pytest.approx({"shard-0": 100.0, "shard-1": 25.0}, rel=0.01)
    assert told["weights"] == weights
    assert services.placement().weights == weights
    again = RunCoordinator(settings)  # from its journal
    assert again.where() == ray.actors["coordinator"].where()
    assert isinstance(ray.actors["coordinator"].ask("wrong", "weigh", 1.0), Refused)
    for one in (again, ray.actors["coordinator"]):
        one._file.close()
