"""Training on a parameter server in one process: exact where it waits, and each batch's gradients once in any case."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import served_runs
import torch
from launch_ranks import run_ranks
from safetensors.torch import load_file
from served_runs import IDS, make_batches, recipe_of, squares, train_ranks
from server_cluster import few_buckets

from penstock.storage.resolve import open_store
from penstock.trainer import ArrayLoader
from penstock.trainer.__main__ import main
from penstock.trainer.asynchronous.evaluating import Reader
from penstock.trainer.asynchronous.local_cluster import LocalCluster
from penstock.trainer.asynchronous.local_run import train_locally
from penstock.trainer.asynchronous.member import WorkerOptions
from penstock.trainer.asynchronous.saved_runs import checkpoint_place, held, save
from penstock.trainer.asynchronous.setup import build_model, make_schema, prepare_run
from penstock.trainer.asynchronous.worker import run_worker
from penstock.trainer.errors import (
    CheckpointMismatchError,
    CheckpointTakenError,
    NonFiniteLossError,
    TrainerConfigError,
)
from penstock.trainer.recipes.recipe import Recipe
from penstock.trainer.server.client import ClientConfig
from penstock.trainer.server.messages import Request

ADAMW = {"use": "torch.optim:AdamW", "args": {"lr": 0.02}}
MOMENTUM = {"use": "torch.optim:SGD", "args": {"lr": 0.05, "momentum": 0.9, "nesterov": True}}
ADAGRAD = {"use": "torch.optim:Adagrad", "args": {"lr": 0.05}}


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with few_buckets(64):
        yield


@pytest.fixture(autouse=True)
def clusters(monkeypatch: pytest.MonkeyPatch) -> list[LocalCluster]:
    """The clusters that a test has made."""
    made: list[LocalCluster] = []
    begin = LocalCluster.__init__

    def keep(self: LocalCluster, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(LocalCluster, "__init__", keep)
    return made


def read_model(recipe: Recipe, cluster: LocalCluster) -> dict[str, torch.Tensor]:
    model = build_model(recipe)
    begun = cluster.begin("reader of a test")
    Reader(cluster, begun, make_schema(model), ClientConfig()).load(model)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def read_rows(recipe: Recipe, cluster: LocalCluster) -> torch.Tensor:
    model = build_model(recipe)
    begun = cluster.begin("reader of a test")
    Reader(cluster, begun, make_schema(model), ClientConfig()).load(model)
    with torch.no_grad():
        rows: torch.Tensor = model.table(torch.arange(IDS))
        return rows


def train_together(recipe: Recipe, workers: int, batches: int, epochs: int = 1) -> dict[str, torch.Tensor]:
    """Train as DDP does, in one process: a mean of gradients over the batches of a step."""
    model = build_model(recipe)
    optimizer = recipe.optimizer.make(model.parameters())
    data = make_batches(batches) * epochs
    for first in range(0, len(data), workers):
        total: list[torch.Tensor] = []
        for batch in data[first : first + workers]:
            loss, count = squares(model, batch)
            gradients = torch.autograd.grad(loss * (1.0 / count), list(model.parameters()))
            shares = [gradient / workers for gradient in gradients]
            total = shares if not total else [one + share for one, share in zip(total, shares, strict=True)]
        for parameter, gradient in zip(model.parameters(), total, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAMW, ADAGRAD])
@pytest.mark.parametrize(("workers", "policy"), [(1, "bsp"), (2, "bsp"), (4, "bsp"), (2, "ssp(0)")])
def test_synchronous_workers_train_as_one_process_bit_for_bit(
    tmp_path: Path, clusters: list[LocalCluster], workers: int, policy: str, optimizer: Mapping[str, Any]
) -> None:
    recipe = recipe_of(tmp_path, policy=policy, optimizer=optimizer, trainer={"epochs": 2})
    summary = train_locally(recipe, workers=workers, shards=2)
    expected = train_together(recipe, workers, 12, epochs=2)
    found = read_model(recipe, clusters[0])
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert summary.steps == 24 // workers
    assert summary.epochs == 2


@pytest.mark.slow
def test_synchronous_workers_train_as_ranks_do_bit_for_bit(tmp_path: Path, clusters: list[LocalCluster]) -> None:
    ranks = run_ranks(train_ranks, 2, str(tmp_path / "ranks"), 2, 12)
    recipe = recipe_of(tmp_path, optimizer=ADAMW)
    train_locally(recipe, workers=2, shards=2)
    found = read_model(recipe, clusters[0])
    assert all(torch.equal(found[name], ranks[0][name]) for name in found)


@pytest.mark.parametrize("policy", ["bsp", "ssp(1)", "ssp(4)", "asp", "quorum(2, 0.01)"])
def test_each_batch_counts_once_under_every_policy(tmp_path: Path, clusters: list[LocalCluster], policy: str) -> None:
    recipe = tally(tmp_path, policy=policy, lease=3)
    train_locally(recipe, workers=3, shards=2)
    clusters[0].tick()
    if policy.startswith("quorum"):
        time.sleep(0.05)
        clusters[0].tick()
    counts = read_model(recipe, clusters[0])["counts"]
    if clusters[0].shards["shard-0"].config.policy.merges == "no":
        assert counts.tolist() == [-2.0] * 20
    else:  # a step's mean counts each of its batches by its share
        assert counts.lt(0).all()
        assert float(-counts.sum()) == pytest.approx(sum(1 for _ in range(0, 40, 3)), abs=14)


def tally(folder: Path, trainer: Mapping[str, Any] | None = None, **server: object) -> Recipe:
    return recipe_of(
        folder,
        batches=20,
        model="Tally",
        model_args={"batches": 20},
        loss="count_once",
        optimizer={"use": "torch.optim:SGD", "args": {"lr": 1.0}},
        trainer={"epochs": 2, **(trainer or {})},
        **server,
    )


class Death(BaseException):
    """The end of a worker, at any call to its run."""


class Mortal:
    """Services of a worker that dies at one of its calls, before or after the call was made."""

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
@pytest.mark.parametrize("seed", range(8))
def test_each_batch_counts_once_though_workers_die_at_any_call(
    tmp_path: Path, clusters: list[LocalCluster], seed: int
) -> None:
    draws = Random(seed)
    recipe = tally(tmp_path, policy=draws.choice(["asp", "ssp(1)", "ssp(4)"]), lease=draws.randint(1, 5), silence_s=0.3)
    setup = prepare_run(recipe, 2)
    cluster = LocalCluster(setup, shards=2, silence_s=0.3)
    options = WorkerOptions(pause_s=0.001, silence_s=0.3, seeds_steps=False)

    def live(number: int) -> None:
        services = Mortal(cluster, draws.randint(5, 120), draws.random() < 0.5)
        with suppress(Death):
            run_worker(recipe, f"worker-{number % 3}", services, options)  # type: ignore[arg-type]

    deaths = [threading.Thread(target=live, args=(number,)) for number in range(6)]
    for thread in deaths:
        thread.start()
        time.sleep(0.05)
    last = threading.Thread(target=run_worker, args=(recipe, "survivor", cluster, options))
    last.start()
    for thread in (*deaths, last):
        thread.join(60)
        assert not thread.is_alive()
    assert cluster.coordinator.is_done
    assert read_model(recipe, cluster)["counts"].tolist() == [-2.0] * 20


@pytest.mark.parametrize(("workers", "looks_up"), [(1, True), (1, False), (2, True)])
@pytest.mark.parametrize("optimizer", [{"use": "torch.optim:SGD", "args": {"lr": 0.1}}, ADAGRAD])
def test_a_table_on_servers_is_an_embedding_of_one_process(
    tmp_path: Path, clusters: list[LocalCluster], workers: int, looks_up: bool, optimizer: Mapping[str, Any]
) -> None:
    served = recipe_of(tmp_path, model="TableNet", model_args={"looks_up": looks_up}, optimizer=optimizer)
    train_locally(served, workers=workers, shards=2)
    plain = recipe_of(tmp_path, model="TableNet", model_args={"is_served": False}, optimizer=optimizer)
    expected = train_together(plain, workers, 12)
    found = read_rows(served, clusters[0])
    error = (found - expected["table.weight"]).abs().max()
    assert float(error) <= (0 if workers == 1 else 1e-6)  # the order of adding differs
    assert not torch.equal(found, build_model(plain).table.weight)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 3])
def test_no_worker_computes_further_ahead_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    begun: dict[str, int] = {}
    spreads: list[int] = []
    draws, all_are_there = Random(staleness), threading.Barrier(3)

    def slow(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        name = threading.current_thread().name
        if name not in begun:
            all_are_there.wait(60)
        elif len(begun) == 3:
            spreads.append(begun[name] - min(begun.values()))
        begun[name] = begun.get(name, 0) + 1
        time.sleep(draws.random() * (0.03 if name.endswith("0") else 0.004))
        return squares(model, batch)

    monkeypatch.setattr(served_runs, "slow", slow, raising=False)
    recipe = recipe_of(tmp_path, batches=120, loss="slow", policy=f"ssp({staleness})", lease=20)
    train_locally(recipe, workers=3, shards=2)
    assert max(spreads) <= staleness + 1  # who is waited for may be computing


def test_records_and_evaluations_are_those_of_the_trainer(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, evaluates=True, policy="ssp(2)", lease=2, trainer={"epochs": 2})
    summary = train_locally(recipe, workers=2, shards=1)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_kind.setdefault(record["kind"], []).append(record)
    assert len(by_kind["evaluate"]) == 2
    assert by_kind["evaluate"][-1]["loss"] == summary.metrics["loss"]
    assert by_kind["end"][0]["samples"] == 2 * 12 * 6
    assert {"loss", "samples_per_s", "staleness", "rate", "waited_share"} <= by_kind["train"][0].keys()
    assert records[0]["kind"] == "start"
    assert records[0]["policy"] == "ssp(2)"


def test_steps_end_a_run_and_rates_follow_the_schedule(tmp_path: Path, clusters: list[LocalCluster]) -> None:
    trainer = {"epochs": None, "steps": 10, "schedule": {"shape": "linear", "warmup_steps": 4}}
    recipe = recipe_of(tmp_path, trainer=trainer)
    rates: list[float] = []
    call = LocalCluster.call

    def listen(self: LocalCluster, shard: str, request: Request) -> Any:
        if getattr(request, "rate", None) is not None:
            rates.append(request.rate)  # type: ignore[union-attr]
        return call(self, shard, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalCluster, "call", listen)
        assert train_locally(recipe, workers=2, shards=1).steps == 10
    expected = [0.05 * (step + 1) / 4 for step in range(4)] + [0.05 * (1 - step / 6) for step in range(6)]
    assert sorted(set(rates)) == pytest.approx(sorted(set(expected)))
    assert clusters[0].coordinator.consumed == 20


def count_tally(recipe: Recipe, cluster: LocalCluster) -> list[float]:
    return read_model(recipe, cluster)["counts"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_run_goes_on_from_a_checkpoint_that_was_taken_while_it_trained(
    tmp_path: Path, clusters: list[LocalCluster], seed: int
) -> None:
    draws = Random(seed)
    recipe = tally(tmp_path, policy=draws.choice(["asp", "ssp(2)"]), lease=draws.randint(1, 4))
    setup = prepare_run(recipe, 2)
    with closing(open_store(checkpoint_place(recipe))) as store:
        cluster = LocalCluster(setup, shards=2, silence_s=30)
        options = WorkerOptions(pause_s=0.001, seeds_steps=False)
        threads = [
            threading.Thread(target=run_worker, args=(recipe, f"worker-{number}", cluster, options))
            for number in range(2)
        ]
        for thread in threads:
            thread.start()
        while cluster.coordinator.consumed < draws.randint(3, 12):
            time.sleep(0.001)
        save(cluster, setup, store, keep=2)
        cluster.coordinator.stop()
        for thread in threads:
            thread.join(60)
    again = tally(tmp_path, policy="asp", lease=9, trainer={"checkpoint": {"every_steps": 3}})
    summary = train_locally(again, workers=3, shards=1)
    assert summary.samples > 0
    assert count_tally(recipe, clusters[-1]) == [-2.0] * 20
    assert clusters[-1].coordinator.plan.span == recipe.trainer.server.lease
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {"resume", "checkpoint", "end"} <= set(kinds)


def test_a_run_that_has_ended_has_nothing_left_to_do_and_exports_what_it_learnt(
    tmp_path: Path, clusters: list[LocalCluster]
) -> None:
    trainer = {"checkpoint": {"every_steps": 100}, "export": "last.safetensors"}
    recipe = recipe_of(tmp_path, policy="asp", trainer=trainer)
    train_locally(recipe, workers=2, shards=2)
    first = read_model(recipe, clusters[0])
    train_locally(recipe, workers=2, shards=1)
    second = read_model(recipe, clusters[1])
    assert all(torch.equal(first[name], second[name]) for name in first)
    exported = load_file(tmp_path / "last.safetensors")
    assert all(torch.equal(first[name], exported[name]) for name in first)


def test_a_second_run_on_one_folder_is_refused_and_a_later_one_is_not(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, trainer={"checkpoint": {"every_steps": 4}})
    with (
        closing(open_store(checkpoint_place(recipe))) as store,
        held(recipe, store, pytest.fail),
        pytest.raises(CheckpointTakenError, match="belongs to another run that has not ended"),
    ):
        train_locally(recipe, workers=1, shards=1)
    assert train_locally(recipe, workers=1, shards=1).steps == 12


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer = {"checkpoint": {"every_steps": 100}}
    train_locally(recipe_of(tmp_path, trainer=trainer), workers=1, shards=1)
    with pytest.raises(CheckpointMismatchError, match="is of another model"):
        train_locally(recipe_of(tmp_path, model="TableNet", trainer=trainer), workers=1, shards=1)


def test_bf16_trains(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, evaluates=True, policy="asp", push="bf16", trainer={"precision": {"dtype": "bf16"}})
    assert train_locally(recipe, workers=2, shards=2).metrics["loss"] < 3


def nan_loss(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    total, count = squares(model, batch)
    return total * (float("nan") if int(batch["place"]) == 5 else 1.0), count


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_runs, "nan_loss", nan_loss, raising=False)
    with pytest.raises(NonFiniteLossError, match="batch 5 of epoch 0"):
        train_locally(recipe_of(tmp_path, loss="nan_loss"), workers=2, shards=1)


class Normed(served_runs.Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, torch.nn.BatchNorm1d(7))


class Buffered(served_runs.Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        self.seen += 1
        return super().forward(batch)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": {"use": "torch.optim:RMSprop", "args": {"lr": 0.1}}}, "RMSprop, of which servers have no twin"),
        ({"optimizer": {"use": "torch.optim:Adam", "args": {"lr": 0.1, "weight_decay": 0.1}}}, "use torch.optim:AdamW"),
        ({"optimizer": {"use": "torch.optim:AdamW", "args": {"lr": 0.1, "amsgrad": True}}}, "optimizer.args.amsgrad"),
        ({"model": "Normed"}, "BatchNorm1d, whose running statistics"),
        ({"model": "Buffered"}, "changes the buffer 'seen'"),
        ({"replicas": 2}, "server.replicas=2"),
        ({"trainer": {"parallel": {"mode": "parameter_server", "zero": 1}}}, "parallel.zero=1 has no part"),
        ({"trainer": {"parallel": {"mode": "parameter_server", "tp": 2}}}, "parallel.tp=2 has no part"),
        ({"trainer": {"step": {"accumulate": 2}}}, "step.accumulate=2 has no part"),
        ({"trainer": {"precision": {"dtype": "fp16"}}}, "use precision.dtype='bf16'"),
        ({"trainer": {"average_every": 4}}, "average_every=4 has no part"),
        ({"trainer": {"ema": {"decay": 0.9}}}, "ema is set, and has no part"),
        ({"trainer": {"parallel": {"mode": "allreduce"}}}, r"\[trainer.server\] is for parallel.mode"),
        ({"policy": "ssp(-1)"}, "staleness=-1 must be 0 or more"),
        ({"policy": "sometimes"}, "policy='sometimes' must be"),
        ({"push": "int4"}, "server.push"),
        ({"trainer": {"schedule": {"warmup_steps": 100}}}, "warmup_steps=100 is more than"),
    ],
)
def test_what_cannot_be_trained_so_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(served_runs, "Normed", Normed, raising=False)
    monkeypatch.setattr(served_runs, "Buffered", Buffered, raising=False)
    with pytest.raises(TrainerConfigError, match=words):
        train_locally(recipe_of(tmp_path, **{"policy": "asp", **changes}), workers=1, shards=1)


def test_batches_in_memory_are_sought_by_number() -> None:
    arrays = {"x": torch.arange(23)}
    loader, plain = (ArrayLoader(arrays, batch_size=5, rank=0, world_size=1) for _ in range(2))
    expected = [[batch["x"].tolist() for batch in plain] for _ in range(2)]
    for epoch, place in [(1, 2), (0, 3), (0, 0), (1, 1)]:
        loader.seek(epoch, place)
        assert next(iter(loader))["x"].tolist() == expected[epoch][place]
    with pytest.raises(TrainerConfigError, match="has 4 batches"):
        loader.seek(0, 4)


@pytest.mark.slow
def test_a_command_refuses_workers_without_servers_and_beside_the_ranks_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["clicks", "--workers=2"]) == 2
    assert "--workers and --shards are of parallel.mode='parameter_server'" in capfd.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    for option in ("--workers=3", "--ray"):
        assert main(["clicks", "--trainer.parallel.mode=parameter_server", option]) == 2
        assert f"leave {option} out, or start one process" in capfd.readouterr().err


def test_numbers_of_workers_and_shards_are_checked(tmp_path: Path) -> None:
    for numbers in ({"workers": 0, "shards": 1}, {"workers": 1, "shards": 0}):
        with pytest.raises(TrainerConfigError, match="must be 1 or more"):
            train_locally(recipe_of(tmp_path), **numbers)
