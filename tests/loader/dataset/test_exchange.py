from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from started_process import started_process
from torchrun import run_ranks

from penstock.loader.dataset import exchange
from penstock.loader.dataset.exchange import DEAD_AFTER_S, Exchange, RemoteError
from penstock.loader.errors import DatasetError, FormatError, RankStoppedError
from penstock.storage import NotFoundError
from penstock.storage.memory_store import MemoryStore

WORKER = Path(__file__).with_name("exchange_worker.py")


MODES = ("fine", "alone", "crossed", "failing")


def write_data(folder: Path, put_shards: Callable[..., list[int]], *modes: str) -> Path:
    """A data set for each mode, in a folder of its name."""
    store = MemoryStore()
    put_shards(store, 40)
    for mode in modes:
        (folder / mode).mkdir()
        for info in store.list():
            (folder / mode / info.key).write_bytes(store.get(info.key))
    return folder


@pytest.fixture(scope="module")
def reports(
    put_shards: Callable[..., list[int]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[int, dict[str, Any]]]:
    """What each of two ranks reports of each mode: one launch of torchrun."""
    folder = write_data(tmp_path_factory.mktemp("exchange"), put_shards, *MODES)
    (folder / "failing" / "part-035.parquet").write_bytes(b"PAR1 is no footer")
    run = run_ranks(2, WORKER, folder, *MODES, timeout_s=200)
    assert run.returncode == 0, run.stderr[-3000:]
    return {
        mode: {rank: json.loads((folder / f"{mode}.{rank}.json").read_text()) for rank in range(2)} for mode in MODES
    }


@pytest.mark.slow
def test_one_rank_builds_and_all_get_one_manifest(reports: Any) -> None:
    found = reports["fine"]
    assert sorted(report["built"] for report in found.values()) == [0, 40]
    assert found[0]["fingerprints"] == found[1]["fingerprints"]
    assert found[0]["samples"] == found[1]["samples"]


@pytest.mark.slow
def test_a_rank_may_open_a_data_set_that_the_others_do_not_open_yet(reports: Any) -> None:
    found = reports["alone"]
    assert [found[rank]["built"] for rank in (0, 1)] == [40, 0]
    assert found[0]["fingerprints"] == found[1]["fingerprints"]


@pytest.mark.slow
def test_ranks_may_open_two_data_sets_in_opposite_orders(reports: Any) -> None:
    found = reports["crossed"]
    assert sum(report["built"] for report in found.values()) == 41
    assert len(found[0]["fingerprints"]) == 2
    assert found[0]["fingerprints"] == found[1]["fingerprints"]


@pytest.mark.slow
def test_the_builders_error_is_raised_on_all_ranks_with_its_cause(reports: Any) -> None:
    found = reports["failing"]
    assert {report["error"] for report in found.values()} == {"FormatError"}
    messages = [report["message"] for report in found.values()]
    assert all("part-035.parquet" in message for message in messages)
    builder = next(rank for rank, report in found.items() if report["built"])
    assert f"(on rank {builder})" in found[1 - builder]["message"]
    assert "(on rank" not in found[builder]["message"]


@contextmanager
def start_ranks(folder: Path, mode: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks without torchrun's agent, which would end the survivor before it could say anything."""
    shared = os.environ | {"WORLD_SIZE": "2", "PORT_FILE": str(folder / "port")}
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                started_process([sys.executable, WORKER, str(folder), mode], env=shared | {"RANK": str(rank)})
            )
            for rank in range(2)
        ]


@pytest.mark.parametrize(
    ("killed", "message"),
    [
        (1, r"rank 1 \(.* process \d+\) died while it built the index"),
        # It hosts the key-value store, whose end may be noticed first.
        (0, r"rank 0 \(.* died while it built the index|\(rank 0, or torchrun's agent\) has probably ended"),
    ],
)
def test_a_killed_builder_is_named_by_the_others_in_seconds(
    put_shards: Callable[..., list[int]], tmp_path: Path, killed: int, message: str
) -> None:
    mode = f"killed {killed}"
    with start_ranks(write_data(tmp_path, put_shards, mode), mode) as ranks:
        for rank in ranks:
            rank.wait(timeout=120)
        assert ranks[killed].returncode == -signal.SIGKILL
    report = json.loads((tmp_path / f"{mode}.{1 - killed}.json").read_text())
    assert report["error"] == "DatasetError"
    assert re.search(message, report["message"])
    assert report["seconds"] < DEAD_AFTER_S


@pytest.mark.parametrize("size", [0, 1, 9 << 20])
def test_what_is_published_arrives_whatever_its_size(size: int) -> None:
    store, data = dist.HashStore(), os.urandom(size)
    with Exchange(store, "t", 0) as builder, Exchange(store, "t", 1) as other:
        assert (builder.builds, other.builds) == (True, False)
        builder.publish({"url": "s3://b/x", "key": None}, data)
        assert other.wait() == {"url": "s3://b/x", "key": None}
        assert other.receive() == data
    with Exchange(store, "t", 2) as late:
        assert late.wait()["url"] == "s3://b/x"
        assert late.receive() == data


@pytest.mark.slow
def test_a_silent_builder_is_named_by_those_who_wait_for_it() -> None:
    store = dist.HashStore()
    assert store.add("t/arrived", 1) == 1
    store.set("t/beat", json.dumps([0, 4, "elsewhere process 1"]))
    with Exchange(store, "t", 5, dead_after_s=1.0) as other:
        assert not other.builds
        with pytest.raises(DatasetError, match=r"rank 4 \(elsewhere process 1\).* no sign of life for \d+ s"):
            other.wait()


def test_a_builder_that_died_before_its_first_heartbeat_is_not_waited_for_forever() -> None:
    store = dist.HashStore()
    assert store.add("t/arrived", 1) == 1
    with Exchange(store, "t", 5, dead_after_s=0.5) as other, pytest.raises(DatasetError, match="no sign of life"):
        other.wait()


@pytest.mark.slow
def test_a_builder_that_shows_its_heartbeat_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BEAT_S", 0.05)
    store = dist.HashStore()
    with Exchange(store, "t", 0) as builder, Exchange(store, "t", 1, dead_after_s=5) as other:
        timer = threading.Timer(7, builder.publish, ({"url": "x"}, b"data"))
        timer.start()
        assert other.wait() == {"url": "x"}
        timer.join()


def test_those_who_wait_and_those_who_come_later_get_the_builders_error() -> None:
    store = dist.HashStore()
    builder = Exchange(store, "t", 3)
    builder.__enter__()

    def fail() -> None:
        error = NotFoundError("no bucket b")
        builder.__exit__(NotFoundError, error, None)

    timer = threading.Timer(0.2, fail)
    timer.start()
    for rank in (1, 2):
        with pytest.raises(NotFoundError, match=r"no bucket b \(on rank 3\)"), Exchange(store, "t", rank) as other:
            other.wait()
        timer.join()


def test_a_store_that_has_ended_is_said_so() -> None:
    class EndedStore:
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("Connection was reset\nby a peer")

    with (
        pytest.raises(DatasetError, match=r"has probably ended \(Connection was reset\)"),
        Exchange(EndedStore(), "t", 0),
    ):
        raise AssertionError("unreachable")


def test_a_store_whose_host_is_cut_off_is_said_so() -> None:
    class LostStore:
        host, port = "10.0.0.1", 29400

        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("Connection timed out\nframe #0")

    with (
        pytest.raises(
            DatasetError, match=r"at 10\.0\.0\.1:29400, .* silent for over 120 s: it is down, or cut off from this"
        ),
        Exchange(LostStore(), "t", 0),
    ):
        raise AssertionError("unreachable")


def test_no_thread_is_left_after_an_exchange() -> None:
    with Exchange(dist.HashStore(), "t", 0):
        assert any(thread.name == "penstock-index-beat" for thread in threading.enumerate())
    assert not any(thread.name == "penstock-index-beat" for thread in threading.enumerate())


def send(error: BaseException, rank: int) -> Exception:
    return RemoteError(**json.loads(json.dumps(asdict(RemoteError.of(error, rank))))).to_exception()


def test_errors_travel_with_their_type_and_place() -> None:
    sent = send(FormatError("a.tar", "broken", offset=512), 3)
    assert isinstance(sent, FormatError)
    assert (str(sent), sent.shard, sent.offset) == ("a.tar at byte 512: broken (on rank 3)", "a.tar", 512)
    other = send(ZeroDivisionError("oh"), 1)
    assert (type(other), str(other)) == (DatasetError, "rank 1 failed: ZeroDivisionError: oh")
    stopped = RankStoppedError(2, "FormatError", "a.tar at byte 512: broken")
    passed_on = send(stopped, 1)
    assert (type(passed_on), str(passed_on)) == (RankStoppedError, str(stopped))
    assert (passed_on.rank, passed_on.kind) == (2, "FormatError")
