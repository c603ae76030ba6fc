"""Workers, shards and the coordinator die at random in one process, also while buckets move: the audit is clean."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from server_cluster import Cluster, few_buckets

from penstock import audit
from penstock.loader import pack
from penstock.trainer.asynchronous.evaluating import Reader
from penstock.trainer.asynchronous.member import WorkerOptions
from penstock.trainer.asynchronous.setup import Setup, build_model, make_schema, prepare_run
from penstock.trainer.asynchronous.worker import run_worker
from penstock.trainer.errors import ShardUnreachableError
from penstock.trainer.recipes.recipe import Recipe, build_recipe
from penstock.trainer.server.client import ClientConfig
from penstock.trainer.server.coordinator import Coordinator, Identity
from penstock.trainer.server.messages import Reply, Request
from penstock.trainer.server.placement import Placement

SAMPLES, BATCH, EPOCHS, WIDTH = 240, 4, 2, 5
SILENCE_S = 0.5


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with few_buckets(64):
        yield


class Death(BaseException):
    """The end of a worker."""


class FragileRun:
    """Services over replicated shards and a journaled coordinator, each of which can be killed. One lock for all."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._lock = threading.RLock()
        self.shards = Cluster(setup.server, 2, is_replicated=True)
        self._journal = bytearray()
        self.coordinator = self._new_coordinator()

    def _new_coordinator(self) -> Coordinator:
        server = self._setup.server
        identity = Identity(run=server.run, schema=server.schema.digest)
        weights = {"shard-0": 1.0, "shard-1": 1.0}
        write = self._journal.extend
        made = Coordinator(self._setup.plan, identity, shards=weights, silence_s=SILENCE_S, write=write)
        made.replay(bytes(self._journal), time.time())
        return made

    def _tell(self, name: str | None = None) -> None:
        notices = self.coordinator.take_notices() if name is None else self.coordinator.recall_notices()
        for notice in notices:
            for shard in self.shards.hosts if name is None else [name]:
                self.shards.handle(shard, notice)

    def kill_shard(self, name: str) -> None:
        with self._lock:
            self.shards.now = time.time()
            self.shards.kill(name)
            self._tell(name)

    def kill_coordinator(self) -> None:
        with self._lock:
            self.coordinator = self._new_coordinator()
            self._tell()

    def move(self, weights: dict[str, float]) -> None:
        """Begin to move buckets to these shards, or move some on."""
        with self._lock:
            if self.shards.transition is None and weights != self.shards.placement.weights:
                self.coordinator.place(weights, time.time())
                self.shards.begin_move(weights)
                for name in weights:
                    self._tell(name)
            self.shards.step_move()
            self.coordinator.arrived(self.coordinator.placement.elsewhere.keys() - self.shards.placement.elsewhere, 0.0)

    def call(self, shard: str, request: Request) -> Reply:
        with self._lock:
            if shard not in self.shards.hosts:
                raise ShardUnreachableError(f"{shard} is gone")
            return self.shards.hosts[shard].handle(request, time.time())

    def start(self, shard: str, request: Request) -> Callable[[], Reply]:
        reply = self.call(shard, request)
        return lambda: reply

    def placement(self) -> Placement:
        with self._lock:
            return self.coordinator.placement

    def is_stopping(self, worker: str | None = None) -> bool:
        with self._lock:
            return self.coordinator.is_stopping

    def report(self, worker: str, numbers: dict[str, float]) -> None:
        with self._lock:
            self.coordinator.report(worker, numbers)

    def __getattr__(self, name: str) -> Any:
        def ask(*values: Any) -> Any:
            with self._lock:
                try:
                    return getattr(self.coordinator, name)(*values, time.time())
                finally:
                    self._tell()

        return ask


class Mortal:
    """Services of a worker that dies at one of its calls, before or after the call was made."""

    def __init__(self, run: FragileRun, lives: int, *, is_after: bool) -> None:
        self._run, self._left, self._is_after = run, lives, is_after

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._run, name)

        def made(*args: Any) -> Any:
            self._left -= 1
            left = self._left
            if left < 0 or (left == 0 and not self._is_after):
                raise Death
            found = call(*args)
            if left == 0:
                raise Death
            return found

        return made


def make_recipe(folder: Path) -> Recipe:
    data = str(folder / "data")
    return build_recipe(
        {
            "model": {"use": "audited:Parts", "args": {"width": WIDTH}},
            "optimizer": {"use": "torch.optim:SGD", "args": {"lr": 0.004}},
            "loss": {"use": "audited:squares"},
            "data": {
                "use": "penstock:DistributedDataLoader",
                "args": {"source": data, "batch_size": BATCH, "seed": 0, "audit_dir": str(folder / "logs")},
            },
            "trainer": {
                "epochs": EPOCHS,
                "output_dir": str(folder / "run"),
                "device": "cpu",
                "parallel": {"mode": "parameter_server"},
                "precision": {"dtype": "fp32"},
                "server": {"policy": "ssp(4)", "lease": 4},
            },
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_the_audit_is_clean_and_the_model_learns_though_everything_dies(tmp_path: Path, seed: int) -> None:
    draws, numbers = Random(seed), np.random.default_rng(0)
    rows = [{"__key__": f"{n:04d}", "x.npy": numbers.normal(size=WIDTH).astype(np.float32)} for n in range(SAMPLES)]
    pack(rows, str(tmp_path / "data"), shard_bytes=20_000, progress=False)
    recipe = make_recipe(tmp_path)
    run = FragileRun(prepare_run(recipe, 2))
    options = WorkerOptions(pause_s=0.001, silence_s=SILENCE_S, seeds_steps=False)

    def live(number: int) -> None:
        services = Mortal(run, draws.randint(20, 200), is_after=draws.random() < 0.5)
        with suppress(Death):
            run_worker(recipe, f"worker-{number % 2}", services, options)  # type: ignore[arg-type]

    sets = [{"shard-0": 1.0, "shard-1": 1.0}, {f"shard-{n}": 1.0 for n in range(4)}, {"shard-2": 1.0, "shard-1": 3.0}]
    threads = [threading.Thread(target=live, args=(number,)) for number in range(4)]
    threads.append(threading.Thread(target=run_worker, args=(recipe, "survivor", run, options)))
    for thread in threads:
        thread.start()
    wanted, kills = sets[0], 0
    while not run.coordinator.is_done:
        assert any(thread.is_alive() for thread in threads)
        deed = draws.choice(["shard", "coordinator", "move", "move", "move", "place"])
        if deed == "shard":
            run.kill_shard(draws.choice(sorted(run.shards.hosts)))
        elif deed == "coordinator":
            run.kill_coordinator()
        elif deed == "place":
            wanted = draws.choice(sets)
        run.move(wanted)
        kills += deed in ("shard", "coordinator")
        time.sleep(0.02)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert kills > 5
    report = audit(tmp_path / "logs")
    assert report.is_exact
    assert [(one.missing, one.duplicated) for one in report.epochs] == [(0, 0)] * EPOCHS
    model = build_model(recipe)
    Reader(run, run.begin("reader of a test"), make_schema(model), ClientConfig()).load(model)  # type: ignore[arg-type]
    learnt = torch.stack([parameter.detach() for parameter in model.parameters()]).sum(0)
    assert float((learnt - 1).abs().max()) < 0.2
