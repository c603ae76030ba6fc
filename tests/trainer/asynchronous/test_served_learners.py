"""Learners that exchange over a parameter server: exact where they are synchronous, and no batch is lost or doubled."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from served_runs import Net, make_batches, recipe_of, squares
from server_cluster import few_buckets

from penstock.storage.resolve import open_store
from penstock.trainer import DistributedTrainer, TrainerConfig, World, open_world, seed_all
from penstock.trainer.asynchronous import member
from penstock.trainer.asynchronous.evaluating import Reader
from penstock.trainer.asynchronous.leading import run_learner
from penstock.trainer.asynchronous.local_cluster import LocalCluster
from penstock.trainer.asynchronous.member import WorkerOptions
from penstock.trainer.asynchronous.saved_runs import load, resume_setup, save
from penstock.trainer.asynchronous.setup import build_model, make_schema, prepare_run
from penstock.trainer.errors import TrainerConfigError
from penstock.trainer.options import build_config
from penstock.trainer.ranks.world import close_world
from penstock.trainer.recipes.recipe import Recipe
from penstock.trainer.server.checkpoints import find_newest
from penstock.trainer.server.client import ClientConfig

ADAMW = {"use": "torch.optim:AdamW", "args": {"lr": 0.02}}
AVERAGE = {"rate": 1.0, "momentum": 0.0}
QUICK = WorkerOptions(pause_s=0.002, silence_s=30.0)


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with few_buckets(64):
        yield


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A world of one rank, for learners that are threads of this process."""
    yield open_world(device="cpu")
    close_world()


def learned(
    folder: Path,
    diloco: Mapping[str, Any],
    *,
    trainer: Mapping[str, Any] | None = None,
    parallel: Mapping[str, Any] | None = None,
    **options: Any,
) -> Recipe:
    tables = {
        "parallel": {"mode": "diloco", "diloco": {"over": "server", **diloco}, **(parallel or {})},
        "checkpoint": {"every_steps": 0},
        **(trainer or {}),
    }
    return recipe_of(folder, trainer=tables, **{"optimizer": ADAMW, **options})


def train(recipe: Recipe, world: World, learners: int = 1, shards: int = 2) -> LocalCluster:
    """Train with learners that are threads; returns the cluster that they trained on."""
    cluster = LocalCluster(prepare_run(recipe, learners), shards=shards, silence_s=30.0)
    run_on(cluster, recipe, world, learners)
    return cluster


def run_on(
    cluster: LocalCluster,
    recipe: Recipe,
    world: World,
    learners: int,
    note: Callable[[str], None] = lambda text: None,
) -> None:
    """Train on a cluster until the run is over, or is asked to stop."""
    cluster.coordinator.expected = learners
    errors: list[BaseException] = []

    def live(name: str) -> None:
        try:
            run_learner(recipe, name, cluster, world, QUICK, note=note)
        except BaseException as exc:  # noqa: BLE001 - raised below
            errors.append(exc)
            cluster.ask(lambda one, now: one.stop())

    threads = [threading.Thread(target=live, args=(f"worker-{index:03d}",)) for index in range(learners)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(timeout=60.0)
    assert not any(one.is_alive() for one in threads)
    if errors:
        raise errors[0]


def read_model(recipe: Recipe, cluster: LocalCluster) -> dict[str, torch.Tensor]:
    model = build_model(recipe)
    Reader(cluster, cluster.begin("reader of a test"), make_schema(model), ClientConfig()).load(model)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_plainly(folder: Path, batches: int, world: World, **options: Any) -> dict[str, torch.Tensor]:
    seed_all(0)
    values = {
        "epochs": 1,
        "output_dir": str(folder),
        "precision": {"dtype": "fp32"},
        "report": {"quiet": True},
        "checkpoint": {"every_steps": 0},
        **options,
    }
    config = build_config(TrainerConfig, values)
    with DistributedTrainer(
        Net(), partial(torch.optim.AdamW, lr=0.02), make_batches(batches), config, loss=squares, world=world
    ) as trainer:
        trainer.train()
        return {name: one.detach().clone() for name, one in trainer.parallel.inner.named_parameters()}


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("every", [1, 4, 5])
def test_one_learner_that_averages_is_plain_training_bit_for_bit(tmp_path: Path, world: World, every: int) -> None:
    options: dict[str, Any] = {
        "epochs": 2,
        "schedule": {"shape": "cosine", "warmup_steps": 3},
        "step": {"clip_norm": 0.5},
    }
    recipe = learned(tmp_path, {"every": every, **AVERAGE}, trainer=options)
    cluster = train(recipe, world)
    expected = train_plainly(tmp_path / "plain", 12, world, **options)
    found = read_model(recipe, cluster)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert cluster.coordinator.consumed == 24


def train_naively(
    learners: int, batches: int, *, every: int, rate: float, momentum: float, epochs: int = 1
) -> dict[str, torch.Tensor]:
    """Train as synchronous learners do, by loops: a round has a lease for each of them, in the order of their names."""
    seed_all(0)
    common = Net()
    nesterov: dict[str, Any] = {"momentum": momentum, "nesterov": True} if momentum else {}
    outer = torch.optim.SGD(common.parameters(), lr=rate, **nesterov)
    models = [Net() for _ in range(learners)]
    inner = [torch.optim.AdamW(one.parameters(), lr=0.02) for one in models]
    data = make_batches(batches)
    for _ in range(epochs):
        leases = [data[first : first + every] for first in range(0, batches, every)]
        for first in range(0, len(leases), learners):
            changes: list[tuple[float, list[torch.Tensor]]] = []
            for learner, lease in enumerate(leases[first : first + learners]):
                models[learner].load_state_dict(common.state_dict())
                for batch in lease:
                    loss, count = squares(models[learner], batch)
                    inner[learner].zero_grad()
                    (loss * (1.0 / count)).backward()  # type: ignore[no-untyped-call]
                    inner[learner].step()
                pairs = zip(common.parameters(), models[learner].parameters(), strict=True)
                change = [old.detach() - new.detach() for old, new in pairs]
                changes.append((float(sum(len(batch["y"]) for batch in lease)), change))
            total = sum(weight for weight, _ in changes)
            for number, parameter in enumerate(common.parameters()):
                parameter.grad = torch.stack([change[number] * (weight / total) for weight, change in changes]).sum(0)
            outer.step()
    return {name: one.detach() for name, one in common.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("learners", [2, 3])
@pytest.mark.parametrize("outer", [{"rate": 0.7, "momentum": 0.9}, AVERAGE])
def test_synchronous_learners_train_as_a_naive_loop(
    tmp_path: Path, world: World, learners: int, outer: Mapping[str, float]
) -> None:
    recipe = learned(tmp_path, {"every": 3, **outer}, batches=20, trainer={"epochs": 2})  # the last lease has two
    cluster = train(recipe, world, learners)
    expected = train_naively(learners, 20, every=3, epochs=2, **outer)
    found = read_model(recipe, cluster)
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=0, atol=2e-6)
    assert cluster.coordinator.consumed == 40


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", ["bsp", "ssp(1)", "asp", "quorum(2, 0.01)"])
@pytest.mark.parametrize(
    "way", [{}, {"fragments": 3}, {"overlap": 2, "alpha": 0.5}, {"fragments": 2, "overlap": 1, "alpha": 0.25}]
)
def test_every_policy_and_way_trains_on_each_batch_once(
    tmp_path: Path, world: World, policy: str, way: Mapping[str, float]
) -> None:
    recipe = learned(tmp_path, {"every": 6, **way}, batches=20, policy=policy, trainer={"epochs": 2})
    cluster = train(recipe, world, 3)
    assert cluster.coordinator.consumed == 40
    assert cluster.coordinator.is_done
    assert all(torch.isfinite(one).all() for one in read_model(recipe, cluster).values())


@pytest.mark.parametrize("way", [{"every": 5, "fragments": 2}, {"every": 7, "fragments": 4}])
def test_fragments_of_one_learner_are_plain_training_but_for_rounding(
    tmp_path: Path, world: World, way: Mapping[str, int]
) -> None:
    recipe = learned(tmp_path, {**way, **AVERAGE}, policy="asp")
    found = read_model(recipe, train(recipe, world))
    for name, one in train_plainly(tmp_path / "plain", 12, world).items():
        torch.testing.assert_close(found[name], one, rtol=0, atol=1e-6)


def tally(folder: Path, way: Mapping[str, Any], *, loss: str = "count_apart", **server: Any) -> Recipe:
    """Learners that lower a number for each batch by 1, of which servers take half: there are two."""
    return learned(
        folder,
        {**AVERAGE, **way},
        batches=20,
        model="Tallies",
        model_args={"batches": 20},
        loss=loss,
        optimizer={"use": "torch.optim:SGD", "args": {"lr": 1.0}},
        trainer={"epochs": 2},
        **server,
    )


def counts_of(recipe: Recipe, cluster: LocalCluster) -> list[float]:
    return [float(one.detach()) for one in read_model(recipe, cluster).values()]


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", ["asp", "ssp(1)"])
@pytest.mark.parametrize(
    "way", [{"every": 1}, {"every": 3}, {"every": 6, "fragments": 3}, {"every": 4, "fragments": 4}]
)
def test_each_batch_counts_once_in_what_servers_hold(
    tmp_path: Path, world: World, policy: str, way: Mapping[str, Any]
) -> None:
    recipe = tally(tmp_path, way, policy=policy)
    assert counts_of(recipe, train(recipe, world, 2)) == [-1.0] * 20


class Death(BaseException):
    """The end of a learner, at any call to its run."""


class Mortal:
    """Services of a learner that dies at one of its calls, before or after the call was made."""

    def __init__(self, cluster: LocalCluster, lives: int, is_after: bool) -> None:
        self._cluster, self._left, self._is_after = cluster, lives, is_after
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._cluster, name)

        def made(*args: Any) -> Any:
            with self._lock:
                self._left -= 1
                left = self._left
            if left < 0 or (left == 0 and not self._is_after):
                raise Death
            found = call(*args)
            if left == 0:
                raise Death
            return found

        return made


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(8))
def test_a_batch_counts_once_though_learners_die_at_any_call(tmp_path: Path, world: World, seed: int) -> None:
    draws = Random(seed)
    way = {"every": draws.randint(1, 6)} if seed % 4 else {"every": 6, "fragments": 3}
    recipe = tally(tmp_path, way, policy=draws.choice(["asp", "ssp(1)", "ssp(4)"]), silence_s=0.3)
    cluster = LocalCluster(prepare_run(recipe, 2), shards=2, silence_s=0.3)
    options = WorkerOptions(pause_s=0.001, silence_s=0.3)

    def live(number: int) -> None:
        services: Any = Mortal(cluster, draws.randint(5, 250), draws.random() < 0.5)
        with suppress(Death):
            run_learner(recipe, f"worker-{number % 3}", services, world, options)

    learners = [threading.Thread(target=live, args=(number,)) for number in range(6)]
    for thread in learners:
        thread.start()
        time.sleep(0.05)
    learners.append(threading.Thread(target=run_learner, args=(recipe, "survivor", cluster, world, options)))
    learners[-1].start()
    for thread in learners:
        thread.join(60)
        assert not thread.is_alive()
    assert cluster.coordinator.is_done
    assert cluster.coordinator.consumed == 40
    counts = counts_of(recipe, cluster)
    if "fragments" not in way:  # of these the last steps of a learner that died may be lost, or count again
        assert counts == [-1.0] * 20


def continued(folder: Path, world: World, *, keeps_state: bool) -> tuple[Recipe, LocalCluster, list[str]]:
    """Train for an epoch, save, and train for another on other shards, of which notes are."""
    notes: list[str] = []
    (folder / "store").mkdir(parents=True)
    with closing(open_store(str(folder / "store"))) as store:
        for number in range(2):
            trainer = {"epochs": number + 1, "checkpoint": {"every_steps": 1}}
            recipe = learned(folder, {"every": 3}, trainer=trainer)
            saved = find_newest(store, notes.append)
            setup = resume_setup(recipe, 2, saved)
            cluster = LocalCluster(setup, shards=2 + number, silence_s=30.0)
            if saved is not None:
                load(cluster, store, saved)
            if number and not keeps_state:
                shutil.rmtree(folder / "learners")
            run_on(cluster, recipe, world, 2, note=notes.append if number else lambda text: None)
            save(cluster, setup, store, keep=1)
    return recipe, cluster, notes


@pytest.mark.slow
def test_learners_go_on_with_their_inner_optimizers_where_they_ended(tmp_path: Path, world: World) -> None:
    straight = learned(tmp_path / "straight", {"every": 3}, trainer={"epochs": 2})
    expected = read_model(straight, train(straight, world, 2))
    recipe, cluster, notes = continued(tmp_path / "kept", world, keeps_state=True)
    found = read_model(recipe, cluster)
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    assert sorted(notes) == [
        f"worker-00{number} goes on with the inner optimizer of its last exchange" for number in (0, 1)
    ]
    recipe, cluster, notes = continued(tmp_path / "lost", world, keeps_state=False)
    found = read_model(recipe, cluster)
    assert not all(torch.equal(found[name], one) for name, one in expected.items())
    assert notes == []


@pytest.mark.parametrize("damage", ["cut", "other run"])
def test_a_state_that_cannot_be_used_is_noted_and_the_inner_optimizer_begins_anew(
    tmp_path: Path, world: World, damage: str
) -> None:
    recipe = learned(tmp_path, {"every": 3}, trainer={"checkpoint": {"every_steps": 1}})
    train(recipe, world)
    path = tmp_path / "learners" / "worker-000-0-of-1.safetensors"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:100])
    notes: list[str] = []
    cluster = LocalCluster(prepare_run(recipe, 1), shards=1, silence_s=30.0)
    run_on(cluster, recipe, world, 1, note=notes.append)
    assert len(notes) == 1
    assert str(path) in notes[0]
    assert notes[0].endswith("the inner optimizer begins anew")
    assert cluster.coordinator.is_done


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_pushes_what_it_has_and_goes_on_from_there(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "_BEATS", 3000)  # a learner asks each 10 ms whether it is to stop
    recipe = tally(tmp_path, {"every": 10}, loss="slow_counting:count_apart_slowly", policy="asp")
    (tmp_path / "store").mkdir()
    with closing(open_store(str(tmp_path / "store"))) as store:
        setup = prepare_run(recipe, 2)
        cluster = LocalCluster(setup, shards=2, silence_s=30.0)

        def stop_after_a_push() -> None:
            while not cluster.coordinator.consumed:
                time.sleep(0.01)
            cluster.ask(lambda one, now: one.stop())

        stop = threading.Thread(target=stop_after_a_push)
        stop.start()
        run_on(cluster, recipe, world, 2)
        stop.join()
        assert 0 < cluster.coordinator.consumed < 40
        assert sum(counts_of(recipe, cluster)) == -cluster.coordinator.consumed / 2
        save(cluster, setup, store, keep=1)
        saved = find_newest(store, print)
        assert saved is not None
        again = LocalCluster(resume_setup(recipe, 2, saved), shards=1, silence_s=30.0)
        load(again, store, saved)
        run_on(again, recipe, world, 2)
    assert counts_of(recipe, again) == [-1.0] * 20


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"diloco": {"learners": 2}}, "give --workers 2"),
        ({"diloco": {"codec": "int8"}}, "give server.push='int8'"),
        ({"diloco": {"over": "allreduce", "ranks": 2}}, "is for parallel.diloco.over='server'"),
        ({"server": {"lease": 3}}, "leave server.lease out, and give parallel.diloco.every"),
        ({"step": {"accumulate": 2}}, "step.accumulate=2 has no part in parallel.diloco.over='server'"),
        ({"ema": {"decay": 0.9}}, "ema is set, and has no part in parallel.diloco.over='server'"),
        ({"diloco": {"over": "clouds"}}, "parallel.diloco.over='clouds'"),
        ({"diloco": {"over": "allreduce"}, "server": {"policy": "asp"}}, "is for parallel.mode='parameter_server'"),
    ],
)
def test_options_that_have_no_part_are_refused_by_name(tmp_path: Path, tables: Mapping[str, Any], message: str) -> None:
    diloco = {"over": "server", **tables.get("diloco", {})}
    rest = {name: table for name, table in tables.items() if name != "diloco"}
    values = {"epochs": 1, "parallel": {"mode": "diloco", "diloco": diloco}, **rest}
    with pytest.raises(TrainerConfigError, match=re.escape(message)):
        build_config(TrainerConfig, values)


def test_what_learners_over_servers_cannot_do_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(TrainerConfigError, match=r"use nn\.Embedding"):
        prepare_run(learned(tmp_path, {}, model="TableNet"), 1)
    plan = {"batches": 12, "rows": 6, "span": 3, "workers": 2}
    with pytest.raises(TrainerConfigError, match="and the run began with 3"):
        prepare_run(learned(tmp_path, {"every": 4}), 2, run="a", saved=plan)


def test_learners_begin_with_the_weights_of_a_file_and_what_is_frozen_is_evaluated_and_exported_too(
    tmp_path: Path, world: World
) -> None:
    torch.manual_seed(7)
    given = {name: torch.randn_like(one) for name, one in Net().state_dict().items()}
    save_file(given, tmp_path / "given.safetensors")
    trainer = {
        "init_from": str(tmp_path / "given.safetensors"),
        "export": "last.safetensors",
        "checkpoint": {"every_steps": 100},
    }
    still = {"use": "torch.optim:SGD", "args": {"lr": 0.0}}
    groups = [{"match": "layers.0.*", "freeze": True}]
    recipe = learned(tmp_path, {"every": 4}, evaluates=True, optimizer={**still, "groups": groups}, trainer=trainer)
    cluster = train(recipe, world)
    exported = load_file(tmp_path / "last.safetensors")
    assert all(torch.equal(exported[name], one) for name, one in given.items())
    model = Net()
    model.load_state_dict(given)
    totals = [squares(model, batch) for batch in make_batches(3, seed=1)]
    loss = sum(float(total.detach()) for total, _ in totals) / sum(count for _, count in totals)
    assert cluster.coordinator.metrics["loss"] == pytest.approx(loss)
