from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from penstock.loader.dataset.exchange import Exchange, _pack_error, _unpack_error, join_exchange
from penstock.loader.errors import DatasetError, FormatError
from penstock.loader.formats.shard import ChunkSpan, ShardIndex
from penstock.storage import NotFoundError
from penstock.storage.memory import MemoryStore

WORKER = Path(__file__).with_name("exchange_worker.py")


@pytest.fixture
def folder(memory_store: MemoryStore, put_shards: Callable[..., list[int]], tmp_path: Path) -> Path:
    put_shards(memory_store, 40)
    target = tmp_path / "data"
    target.mkdir()
    for info in memory_store.list():
        (target / info.key).write_bytes(memory_store.get(info.key))
    return target


def run_ranks(folder: Path, mode: str) -> dict[int, dict[str, Any]]:
    """Run the worker on two ranks under torchrun; gives the reports of those that lived to write one."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, str(WORKER), str(folder), mode], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    reports = {}
    for rank in range(2):
        path = Path(f"{folder}.{rank}.json")
        if path.exists():
            reports[rank] = json.loads(path.read_text())
    assert reports or mode == "killed", run.stderr[-3000:]
    return reports


def test_ranks_share_the_work_and_get_one_manifest(folder: Path) -> None:
    reports = run_ranks(folder, "fine")
    assert len({report["fingerprint"] for report in reports.values()}) == 1
    assert sum(report["built"] for report in reports.values()) == 40
    assert min(report["built"] for report in reports.values()) > 0


def test_a_rank_may_open_a_data_set_that_the_others_do_not_open_yet(folder: Path) -> None:
    reports = run_ranks(folder, "alone")
    assert [reports[rank]["built"] for rank in (0, 1)] == [40, 0]
    assert reports[0]["fingerprint"] == reports[1]["fingerprint"]
    assert reports[0]["seconds"] < 30


def test_an_error_on_one_rank_is_raised_on_all_with_its_cause(folder: Path) -> None:
    (folder / "part-035.parquet").write_bytes(b"PAR1 is no footer")
    reports = run_ranks(folder, "failing")
    assert {report["error"] for report in reports.values()} == {"FormatError"}
    messages = [report["message"] for report in reports.values()]
    assert all("part-035.parquet" in message for message in messages)
    assert sum("(on rank " in message for message in messages) == 1
    assert max(report["seconds"] for report in reports.values()) < 20


def start_ranks(folder: Path, mode: str) -> list[subprocess.Popen[str]]:
    """Two ranks without torchrun's agent, which would end the survivor before it could say anything."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    return [
        subprocess.Popen([sys.executable, str(WORKER), str(folder), mode], env=shared | {"RANK": str(rank)}, text=True)
        for rank in range(2)
    ]


def test_a_killed_rank_is_named_by_the_others_in_seconds(folder: Path) -> None:
    ranks = start_ranks(folder, "killed")
    for rank in ranks:
        rank.wait(timeout=60)
    report = json.loads(Path(f"{folder}.0.json").read_text())
    assert ranks[1].returncode == -9
    assert report["error"] == "DatasetError"
    assert "rank 1 died" in report["message"]
    assert "indexing shards part-" in report["message"]
    assert report["seconds"] < 15


def test_outside_of_a_process_group_there_is_no_exchange() -> None:
    assert join_exchange("anything") is None


def test_what_is_sent_arrives_whatever_its_size() -> None:
    store = dist.HashStore()
    data = os.urandom(9 << 20)
    indexes = [ShardIndex([ChunkSpan(0, 5, 1, 9)], {"a": [1]}), ShardIndex([], {"a": [1]}), ShardIndex([], {})]
    with Exchange(store, "t", 0, 2) as leader, Exchange(store, "t", 1, 2) as follower:
        assert (leader.leads, follower.leads) == (True, False)
        leader.publish("big", data)
        leader.publish("nothing", b"")
        leader.publish_indexes(3, indexes)
        assert follower.receive("big") == data
        assert follower.receive("nothing") == b""
        assert follower.receive_indexes(3) == indexes


def test_every_part_is_claimed_once() -> None:
    store = dist.HashStore()
    with Exchange(store, "t", 0, 2) as one, Exchange(store, "t", 1, 2) as other:
        first = next(one.claims(5))
        assert sorted([first, *other.claims(5), *one.claims(5)]) == [0, 1, 2, 3, 4]


def test_a_silent_rank_is_named_after_the_time_out() -> None:
    store = dist.HashStore()
    with Exchange(store, "t", 0, 2, dead_after_s=1.5) as leader:
        assert store.add("t/arrived", 1) == 2
        store.set("t/beat/2", json.dumps([0, 7, "elsewhere process 1", "stuck"]))
        with pytest.raises(DatasetError, match=r"rank 7 .*no sign of life for . s while stuck"):
            leader.wait_for("part/0")


def test_a_silent_leader_is_named_by_those_who_wait_for_it() -> None:
    store = dist.HashStore()
    assert store.add("t/arrived", 1) == 1
    store.set("t/beat/1", json.dumps([0, 4, "elsewhere process 1", "listing"]))
    with Exchange(store, "t", 5, 8, dead_after_s=1.0) as follower:
        assert not follower.leads
        with pytest.raises(DatasetError, match=r"rank 4 .*no sign of life for . s while listing"):
            follower.wait_for("plan")


def test_a_waiting_rank_is_told_the_leaders_error() -> None:
    store = dist.HashStore()
    leader = Exchange(store, "t", 0, 2)
    leader.__enter__()

    def fail() -> None:
        time.sleep(0.2)
        error = NotFoundError("no bucket b")
        leader.__exit__(NotFoundError, error, None)

    thread = threading.Thread(target=fail)
    thread.start()
    with pytest.raises(NotFoundError, match=r"no bucket b \(on rank 0\)"), Exchange(store, "t", 1, 2) as follower:
        follower.receive("plan")
    thread.join()


def test_no_thread_is_left_after_an_exchange() -> None:
    with Exchange(dist.HashStore(), "t", 0, 2):
        assert any(thread.name == "penstock-index-beat" for thread in threading.enumerate())
    assert not any(thread.name == "penstock-index-beat" for thread in threading.enumerate())


def test_errors_travel_with_their_type_and_place() -> None:
    told = _unpack_error(json.loads(json.dumps(_pack_error(FormatError("a.tar", "broken", offset=512), 3))))
    assert isinstance(told, FormatError)
    assert str(told) == "a.tar at byte 512: broken (on rank 3)"
    other = _unpack_error(_pack_error(ZeroDivisionError("oh"), 1))
    assert (type(other), str(other)) == (DatasetError, "rank 1 failed: ZeroDivisionError: oh")
