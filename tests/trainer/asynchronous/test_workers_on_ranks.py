"""Ranks of a launcher as workers: shards in rank 0's process, called over TCP by those who have the run's key."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ray_runs import HERE, RECIPE, counts
from served_runs import recipe_of
from server_cluster import few_buckets
from started_process import started_process
from torch.testing._internal.distributed.fake_pg import FakeStore

from penstock.trainer.asynchronous import tcp_services
from penstock.trainer.asynchronous.evaluating import Reader, evaluate
from penstock.trainer.asynchronous.local_cluster import LocalCluster
from penstock.trainer.asynchronous.member import WorkerOptions
from penstock.trainer.asynchronous.setup import build_model, make_schema, prepare_run
from penstock.trainer.asynchronous.tcp_services import ServicesHost, TcpServices
from penstock.trainer.asynchronous.worker import run_worker
from penstock.trainer.errors import LeaseError, ShardUnreachableError, StallError
from penstock.trainer.recipes.recipe import Recipe
from penstock.trainer.server.client import ClientConfig
from penstock.trainer.server.services import Services


@contextmanager
def torchrun(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    folder.mkdir(exist_ok=True)
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    command += ["-m", "penstock.trainer", str(recipe), "--shards=2", f"--trainer.output_dir={folder / 'run'}"]
    command += ["--trainer.checkpoint.every_steps=20", *options]
    environment = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    with (
        (folder / "log").open("a") as log,
        started_process(command, env=environment, cwd=HERE, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        yield process


@pytest.mark.full
def test_ranks_train_every_batch_once_and_go_on_after_a_stop(tmp_path: Path) -> None:
    saved = tmp_path / "run" / "checkpoints" / "servers"
    with torchrun(tmp_path) as process:
        while not list(saved.rglob("*.index*")):
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    assert 0 < sum(counts(tmp_path)) < 480
    with torchrun(tmp_path) as process:
        assert process.wait(240) == 0, (tmp_path / "log").read_text()
    assert counts(tmp_path) == [2.0] * 240


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with few_buckets(64):
        yield


@pytest.fixture
def host() -> Iterator[ServicesHost]:
    made = ServicesHost("127.0.0.1")
    yield made
    made.close()


def cluster_of(folder: Path) -> LocalCluster:
    return LocalCluster(prepare_run(recipe_of(folder), 2), shards=2, silence_s=30)


def train_two(recipe: Recipe, cluster: LocalCluster, second: Services) -> dict[str, torch.Tensor]:
    """Train with two workers, the second of which has services of its own."""
    options = WorkerOptions(pause_s=0.001, seeds_steps=False)
    ways: list[tuple[str, Services]] = [("worker-000", cluster), ("worker-001", second)]
    threads = [threading.Thread(target=run_worker, args=(recipe, *one, options)) for one in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert cluster.coordinator.is_done
    model = build_model(recipe)
    Reader(cluster, cluster.begin("reader of a test"), make_schema(model), ClientConfig()).load(model)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.slow
def test_a_worker_over_tcp_trains_as_one_that_calls_directly_bit_for_bit(tmp_path: Path, host: ServicesHost) -> None:
    recipe = recipe_of(tmp_path)
    near, cluster = cluster_of(tmp_path), cluster_of(tmp_path)
    expected = train_two(recipe, near, near)
    with host.serve(cluster):
        found = train_two(recipe, cluster, TcpServices(host.address, host.key))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert cluster.coordinator.numbers["worker-001"]["batches_sum"] == 6


def test_errors_come_as_what_they_are_and_only_services_can_be_called(tmp_path: Path, host: ServicesHost) -> None:
    services = TcpServices(host.address, host.key)
    with host.serve(cluster_of(tmp_path)):
        services.begin("a")
        with pytest.raises(LeaseError, match="was silent for"):
            services.renew("a", 7)
        assert not services.is_stopping("a")
        for name in ("place", "__init__", "ask"):
            with pytest.raises(ShardUnreachableError, match="a run has no"):
                services._ask(name)


class Trap:
    """Something whose unpickling is seen."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.putenv, ("PENSTOCK_TRAP", "1")


def test_nothing_is_unpickled_from_who_has_not_the_key(tmp_path: Path, host: ServicesHost) -> None:
    calls: list[Any] = []
    cluster = cluster_of(tmp_path)
    cluster.begin = calls.append  # type: ignore[assignment, method-assign]
    with host.serve(cluster):
        with pytest.raises(AuthenticationError):
            Client(host.address, authkey=b"wrong")
        with socket.create_connection(host.address) as raw:
            data = pickle.dumps(("begin", (Trap(),)))
            raw.sendall(len(data).to_bytes(4, "big") + data)
            raw.settimeout(10)
            while raw.recv(4096):
                pass
        assert calls == []
        assert TcpServices(host.address, host.key).is_stopping() is False


def test_a_host_that_accepts_and_says_nothing_ends_all_calls_with_the_place_and_what_to_look_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # as a process that is stopped
        address = silent.getsockname()
        services = TcpServices(address, b"key", patience_s=0.3)
        for _ in range(2):
            with pytest.raises(
                StallError, match=rf"rank 0 at 127.0.0.1:{address[1]} has not answered for 0.3 s .*stopped"
            ):
                services.begin("a")
        silent.accept()[0].close()
        silent.settimeout(0.5)
        with pytest.raises(TimeoutError):
            silent.accept()  # the second call waited for nothing


def test_a_host_that_stops_answering_ends_the_calls_of_all_threads(tmp_path: Path, host: ServicesHost) -> None:
    cluster, release = cluster_of(tmp_path), threading.Event()
    services = TcpServices(host.address, host.key, patience_s=0.5)
    with host.serve(cluster):
        services.begin("a")
        cluster.renew = lambda *_: release.wait(60)  # type: ignore[assignment, method-assign]
        with pytest.raises(StallError, match="has not answered"):
            services.renew("a", 1)
        found: list[BaseException] = []

        def ask() -> None:
            try:
                services.is_stopping("a")
            except StallError as exc:
                found.append(exc)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(60)
        release.set()
    assert len(found) == 1


def test_a_run_that_is_prepared_for_longer_than_an_answer_may_take_is_awaited(
    tmp_path: Path, host: ServicesHost
) -> None:
    services = TcpServices(host.address, host.key, patience_s=2.5)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(services.begin("a")))
    thread.start()
    thread.join(4.0)
    assert thread.is_alive()
    with host.serve(cluster_of(tmp_path)):
        thread.join(60)
    assert found[0].plan.batches == 12


def test_another_server_at_the_address_is_unreachable_and_no_rank_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                with suppress(OSError):
                    connection.recv(100)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ShardUnreachableError, match="gave no answer"):
            TcpServices(other.getsockname(), b"key").begin("a")
        thread.join(60)


def test_connections_that_prove_nothing_are_closed_and_hold_up_nobody(
    tmp_path: Path, host: ServicesHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_services, "_PROOF_S", 0.5)
    with host.serve(cluster_of(tmp_path)), ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(host.address)) for _ in range(50)]
        assert TcpServices(host.address, host.key).begin("a").plan.batches == 12
        for one in idle:
            one.settimeout(60)
            while one.recv(4096):
                pass


def test_one_rank_evaluates_alone_beside_others_that_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*_: object) -> None:
        pytest.fail("a collective, to which no other rank comes")

    recipe = recipe_of(tmp_path, evaluates=True)
    torch.manual_seed(0)
    model = build_model(recipe)
    expected = evaluate(recipe, model, torch.device("cpu"))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    for collective in ("all_gather_object", "all_reduce"):
        monkeypatch.setattr(dist, collective, wait)
    try:
        assert evaluate(recipe, model, torch.device("cpu")) == expected
    finally:
        dist.destroy_process_group()
    assert set(expected) == {"loss"}


def test_a_host_that_is_gone_is_unreachable(tmp_path: Path) -> None:
    host = ServicesHost("127.0.0.1")
    services = TcpServices(host.address, host.key)
    with host.serve(cluster_of(tmp_path)):
        services.placement()
    host.close()
    for _ in range(2):
        with pytest.raises(ShardUnreachableError, match="the process of rank 0"):
            services.placement()
