"""The watchdog on real ranks: a stall, a stop, a death and an error of one are named by all others, in time."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch_ranks import Outcome, Ranks, run_ranks
from started_threads import started_threads

from penstock.loader import RankStoppedError
from penstock.trainer import EXIT_STALLED, StallError, TrainerConfigError, World
from penstock.trainer.watch.watchdog import Watchdog, is_collective_error

STALL_TIMEOUT_S = 10.0
IN_TIME_S = 3 * STALL_TIMEOUT_S  # on a busy machine; the process group by itself would wait for two minutes


def _train_until(world: World, folder: str, event: str, victim: int) -> str:
    with Watchdog(world, STALL_TIMEOUT_S, report_folder=folder) as watchdog:
        for step in range(5):
            watchdog.phase("fetch", step=step, shard=f"train-{step}.tar")
            if step == 3 and world.rank == victim:
                time.sleep(2.0)  # so that a heartbeat reports this phase
                Path(folder, "event").write_text(str(time.time()))
                if event == "sleep":
                    time.sleep(600)
                elif event == "raise":
                    raise ValueError("a sample without a label")
                elif event != "none":
                    os.kill(os.getpid(), getattr(signal, event.removesuffix(" the idle")))
            while event.endswith("the idle") and step == 3:  # the others are in no collective, and hear of it by phase
                time.sleep(0.02)
                watchdog.phase("forward", step=step)
            watchdog.phase("backward", step=step)
            dist.all_reduce(torch.ones(4))
    return "done"


def _read_report(folder: Path, rank: int) -> str:
    return (folder / f"stall-rank-{rank}.txt").read_text()


def _train_where_nothing_can_be_printed(world: World, folder: str) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(full, descriptor)
    with suppress(OSError):
        print("what waits to be written, unless each line is written at once")
    _train_until(world, folder, "sleep", 1)


def test_a_stall_ends_all_ranks_though_the_disk_of_their_output_is_full(tmp_path: Path) -> None:
    outcomes = Ranks(_train_where_nothing_can_be_printed, 2, str(tmp_path)).join(120.0)
    assert outcomes[1].exit_code == EXIT_STALLED
    assert _ended_by_the_watchdog(outcomes[0], "rank 1 is stalled in fetch"), outcomes[0]
    assert "rank 1 is stalled in fetch" in _read_report(tmp_path, 0)


CASES = {
    "stall": ("sleep", 1, False, r"rank 1 is stalled in fetch \(step=3, shard=train-3\.tar\) for \d\.\d s"),
    "stopped": (
        "SIGSTOP",
        2,
        False,
        r"rank 2 has sent no heartbeat for \d\.\d s .*last seen in fetch \(step=3, shard=",
    ),
    "killed": ("SIGKILL", 2, False, r"rank 2 has sent no heartbeat for \d\.\d s .*last seen in fetch \(step=3, shard="),
    "raised": (
        "raise",
        0,
        False,
        r"rank 0 failed in fetch \(step=3, .*\)(?: after \d+ s)?: ValueError: a sample without a label",
    ),
    "first stopped": ("SIGSTOP", 0, True, r"rank 0's node has not answered .*last seen in fetch \(step=3, shard="),
    "first stopped, none in a collective": (
        "SIGSTOP the idle",
        0,
        True,
        r"rank 0's node has not answered .*last seen in fetch \(step=3, shard=",
    ),
    "first killed": ("SIGKILL", 0, True, r"rank 0's node is gone .*last seen in fetch \(step=3, shard="),
}


def test_whatever_befalls_a_rank_all_others_name_it_and_stop_in_time(tmp_path: Path) -> None:
    launched: dict[str, Ranks] = {}
    for name, (event, victim, host_in_rank0, _) in CASES.items():
        (tmp_path / name).mkdir()
        launched[name] = Ranks(_train_until, 3, str(tmp_path / name), event, victim, host_in_rank0=host_in_rank0)
    with ThreadPoolExecutor(len(CASES)) as pool:  # all at once, for when each rank ends is measured
        joined = {
            name: pool.submit(
                launched[name].join, 120.0, expect={0, 1, 2} - ({victim} if "SIGSTOP" in event else set())
            )
            for name, (event, victim, _, _) in CASES.items()
        }
    for name, (event, victim, _, pattern) in CASES.items():
        others = {0, 1, 2} - {victim}
        outcomes = joined[name].result()
        happened_at = float((tmp_path / name / "event").read_text())
        for rank in others:
            assert re.search(pattern, _read_report(tmp_path / name, rank)), (name, _read_report(tmp_path / name, rank))
            assert _ended_by_the_watchdog(outcomes[rank], pattern), (name, rank, outcomes[rank])
            assert outcomes[rank].ended_at - happened_at < IN_TIME_S, (name, rank)
        if event == "sleep":
            assert outcomes[victim].exit_code == EXIT_STALLED
            assert "in _train_until" in _read_report(tmp_path / name, victim)


def _lose_a_rank(world: World, folder: str) -> str:
    with Watchdog(world, 600.0, report_folder=folder) as watchdog:
        watchdog.phase("backward", step=1)
        dist.all_reduce(torch.ones(4))
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(4))
    return "done"


def test_a_killed_rank_ends_the_others_in_seconds_however_patient_they_are_with_a_stall(tmp_path: Path) -> None:
    outcomes = Ranks(_lose_a_rank, 3, str(tmp_path)).join(200.0, expect={0, 1, 2})  # a stall would take 420 s
    assert outcomes[1].exit_code == -signal.SIGKILL
    silent = r"rank 1 has (sent no heartbeat|not been heard of) for \d+\.\d s"
    for rank in (0, 2):
        assert re.search(silent, _read_report(tmp_path, rank)), _read_report(tmp_path, rank)
        assert _ended_by_the_watchdog(outcomes[rank], silent), outcomes[rank]


def _stop_before_watching(world: World, folder: str) -> str:
    dist.barrier()  # the others may still need the store to join the group
    if world.rank == 0:
        Path(folder, "event").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(2.0)
    with Watchdog(world, STALL_TIMEOUT_S, report_folder=folder):
        return "watched"


def test_ranks_that_begin_to_watch_when_the_store_is_gone_end_in_time_and_say_so(tmp_path: Path) -> None:
    outcomes = Ranks(_stop_before_watching, 3, str(tmp_path), host_in_rank0=True).join(120.0, expect={1, 2})
    happened_at = float((tmp_path / "event").read_text())
    for rank in (1, 2):
        assert outcomes[rank].exit_code == EXIT_STALLED, outcomes[rank]
        assert outcomes[rank].ended_at - happened_at < IN_TIME_S
        assert "rank 0's node has not answered for" in _read_report(tmp_path, rank)


def _end_before_watching(world: World) -> str:
    dist.barrier()
    if world.rank == 0:
        time.sleep(4.0)
        os._exit(0)
    with Watchdog(world, 60.0):
        return "watched"


def test_a_store_that_ends_while_ranks_begin_to_watch_is_a_stall_that_says_so() -> None:
    outcomes = Ranks(_end_before_watching, 3, host_in_rank0=True).join(120.0, expect={1, 2})
    for rank in (1, 2):
        trace = getattr(outcomes[rank].value, "trace", "")
        assert "StallError: the key-value store" in trace, outcomes[rank]
        assert "on rank 0's node is gone (DistNetworkError): rank 0 or its node is dead or stopped" in trace


def _ended_by_the_watchdog(outcome: Outcome, pattern: str) -> bool:
    """With its code, or by a StallError that says the same as the report; what the report says is for the caller."""
    if outcome.exit_code == EXIT_STALLED:
        return True
    trace = getattr(outcome.value, "trace", "")
    return "StallError" in trace and re.search(pattern, trace) is not None


def _save_slowly(world: World) -> str:
    """Rank 0 writes for twice the time-out, in small pieces; the others wait for it."""
    with Watchdog(world, 4.0) as watchdog:
        written = 0
        watchdog.phase("checkpoint", step=1, progress=lambda: written)
        until_s = time.monotonic() + (8.0 if world.rank == 0 else 0.0)
        while time.monotonic() < until_s:
            time.sleep(0.2)
            written += 1
        dist.all_reduce(torch.ones(4))
        watchdog.phase("forward", step=1)
        dist.all_reduce(torch.ones(4))
    return "done"


def test_a_slow_save_that_makes_progress_is_no_stall_however_long_it_takes() -> None:
    assert run_ranks(_save_slowly, 3) == ["done"] * 3


def _save_and_hang(world: World, folder: str) -> str:
    with Watchdog(world, STALL_TIMEOUT_S, report_folder=folder) as watchdog:
        watchdog.phase("checkpoint", step=1, progress=lambda: 7)
        time.sleep(600.0 if world.rank == 0 else 0.0)
        dist.all_reduce(torch.ones(4))
    return "done"


def test_a_save_without_progress_is_a_stall(tmp_path: Path) -> None:
    outcomes = Ranks(_save_and_hang, 2, str(tmp_path)).join(120.0)
    stalled = r"rank 0 is stalled in checkpoint \(step=1\) for \d+\.\d s"
    for rank in (0, 1):
        assert re.search(stalled, _read_report(tmp_path, rank)), _read_report(tmp_path, rank)
        assert _ended_by_the_watchdog(outcomes[rank], stalled), outcomes[rank]
    assert outcomes[0].exit_code == EXIT_STALLED


def _count_steps(world: World, folder: str) -> str:
    stopped = Path(folder, "stop")
    with Watchdog(world, 5.0, report_folder=folder) as watchdog:
        go_on, step = torch.ones(1), 0
        while go_on.item():
            step += 1
            watchdog.phase("fetch", step=step)
            time.sleep(0.02)
            watchdog.phase("backward", step=step)
            go_on = torch.tensor([float(not (world.rank == 0 and stopped.exists()))])
            dist.all_reduce(go_on, op=dist.ReduceOp.MIN)
            if step == 3:
                Path(folder, f"running-{world.rank}").touch()
    return "done"


def test_a_job_that_is_suspended_and_continued_goes_on(tmp_path: Path) -> None:
    ranks = Ranks(_count_steps, 3, str(tmp_path))
    deadline_s = time.monotonic() + 60.0
    while len(list(tmp_path.glob("running-*"))) < 3:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    pids = [process.pid for process in ranks.processes]
    for pid in pids:
        os.kill(int(pid or 0), signal.SIGSTOP)
    time.sleep(9.0)
    for pid in reversed(pids):  # rank 0 last, and not all at the same moment
        os.kill(int(pid or 0), signal.SIGCONT)
        time.sleep(0.3)
    time.sleep(4.0)
    (tmp_path / "stop").touch()
    outcomes = ranks.join(60.0)
    assert [outcome.value for outcome in outcomes] == ["done"] * 3, [
        path.read_text()[:400] for path in tmp_path.glob("stall-*")
    ]


def _train_in_peace(world: World) -> list[str]:
    with Watchdog(world, 4.0) as watchdog:
        for step in range(4):
            watchdog.phase("fetch", step=step)
            if step == 2:
                watchdog.phase("compile", timeout_s=60.0)
                time.sleep(5.0 if world.rank == 1 else 0.0)  # longer than the time-out, shorter than this phase's own
            watchdog.phase("backward", step=step)
            dist.all_reduce(torch.ones(4))
        time.sleep(0.1 * world.rank)  # rank 0 is done first, and waits until the others are
    watchdog.close()
    return [thread.name for thread in started_threads() if thread.name.startswith("penstock")]


@pytest.mark.parametrize("host_in_rank0", [False, True])
def test_ranks_that_work_are_left_alone_and_no_thread_stays(host_in_rank0: bool) -> None:
    assert run_ranks(_train_in_peace, 3, host_in_rank0=host_in_rank0) == [[], [], []]


def _close_midway(world: World) -> Any:
    watchdog = Watchdog(world, 600.0)
    watchdog.phase("fetch", step=1)
    began = time.monotonic()
    watchdog.close()
    return time.monotonic() - began, threading.active_count()


def test_closing_midway_is_quick_and_leaves_nothing() -> None:
    for closed_in_s, threads in run_ranks(_close_midway, 2):
        assert closed_in_s < 60.0
        assert threads == 1


def test_errors_of_collectives_are_told_from_others() -> None:
    assert is_collective_error(RuntimeError("[.../gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"))
    assert is_collective_error(dist.DistNetworkError("gone"))
    assert is_collective_error(RankStoppedError(1, "ChecksumError", "wrong bytes"))
    wrapped = StallError("no")
    wrapped.__cause__ = dist.DistBackendError("NCCL")
    assert is_collective_error(wrapped)
    assert not is_collective_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_a_timeout_that_is_none_is_refused() -> None:
    world = World(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_rank=0,
        num_nodes=1,
        device=torch.device("cpu"),
        backend="gloo",
    )
    with pytest.raises(TrainerConfigError, match="stall_timeout_s=0 must be more than 0"):
        Watchdog(world, 0)
