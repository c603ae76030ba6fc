"""One run at a time on a checkpoint folder."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from launch_ranks import Ranks, run_ranks
from small_trainers import make_trainer

from penstock.storage.files import write_whole
from penstock.trainer import CheckpointConfig, CheckpointError, CheckpointTakenError, World
from penstock.trainer.checkpoint.checkpointer import Checkpointer
from penstock.trainer.checkpoint.lock import start_ticks


def hold(world: World, folder: str, how: str) -> None:
    checkpoints = Checkpointer(CheckpointConfig(folder=folder), world)
    child = os.fork() if how == "with a child" else None
    if child == 0:
        time.sleep(300.0)
        os._exit(0)  # a rank's group cannot be closed in a child of it
    if world.rank == 0:
        write_whole(Path(folder, "pids"), f"{os.getpid()} {child or ''}".encode())
    time.sleep(600.0)
    checkpoints.close()


@contextmanager
def holding(folder: Path, ranks: int = 1, how: str = "alone") -> Iterator[list[int]]:
    """The pids of rank 0 of a run that holds the folder, and of its child; all ranks and the child end at the end."""
    folder.mkdir()
    run = Ranks(hold, ranks, str(folder), how)
    pids: list[int] = []
    try:
        deadline_s = time.monotonic() + 120.0
        while not (folder / "pids").exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        pids += map(int, (folder / "pids").read_text().split())
        yield pids
    finally:
        for child in pids[1:]:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        run.join(0.0)


def try_to_open(world: World, folder: str) -> tuple[str, float]:
    began_s = time.monotonic()
    try:
        Checkpointer(CheckpointConfig(folder=folder), world).close()
    except CheckpointError as exc:
        return str(exc), time.monotonic() - began_s
    return "opened", time.monotonic() - began_s


def test_a_second_run_on_a_folder_is_refused_on_every_rank_by_the_name_of_the_first(tmp_path: Path) -> None:
    with holding(tmp_path / "run", ranks=2) as (pid,):
        (tmp_path / "run" / "step-7.tmp").mkdir()
        for message, seconds in run_ranks(try_to_open, 2, str(tmp_path / "run")):
            assert f"process {pid} on {socket.gethostname()}, started 20" in message
            assert "give another folder" in message
            assert seconds < 15.0, "refused at once"
        assert (tmp_path / "run" / "step-7.tmp").exists(), "a save of the first run was deleted"
    assert [message for message, _ in run_ranks(try_to_open, 2, str(tmp_path / "run"))] == ["opened"] * 2


def try_to_train(world: World, folder: str) -> str:
    try:
        make_trainer(world, folder, checkpoint={"every_steps": 2}, stall_timeout_s=30.0).close()
    except CheckpointTakenError as exc:
        return str(exc)
    return "opened"


def test_a_refused_run_leaves_nothing_beside_what_the_first_tells_of_itself(tmp_path: Path) -> None:
    with holding(tmp_path / "checkpoints") as (pid,):
        found = run_ranks(try_to_train, 2, str(tmp_path))
        assert all(f"process {pid} on" in message for message in found), found
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_a_killed_run_holds_its_folder_no_longer_though_it_had_forked(world: World, tmp_path: Path) -> None:
    with holding(tmp_path / "run", how="with a child") as (pid, child):
        os.kill(pid, signal.SIGKILL)
        message, seconds = try_to_open(world, str(tmp_path / "run"))
        assert message == "opened"
        assert seconds < 15.0, "the child must not hold it"
        assert start_ticks(child) is not None, "it has ended, and proves nothing"


@pytest.mark.slow
def test_a_dead_process_that_lets_go_late_is_waited_for(world: World, tmp_path: Path) -> None:
    """As after a kill: the lock is still held, by what the owner's name says is no process."""
    Checkpointer(CheckpointConfig(folder=str(tmp_path)), world).close()
    lock = tmp_path / ".penstock-lock"
    lock.write_text(lock.read_text().replace(f'"pid": {os.getpid()}', '"pid": 4194305'))
    fd = os.open(lock, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    child = os.fork()
    if child == 0:
        time.sleep(2.0)
        os._exit(0)
    os.close(fd)  # the child alone holds it now
    try:
        assert try_to_open(world, str(tmp_path))[0] == "opened"
    finally:
        os.waitpid(child, 0)


@pytest.mark.slow
def test_a_trainer_that_was_not_closed_is_told_from_another_process(world: World, tmp_path: Path) -> None:
    with make_trainer(world, str(tmp_path), checkpoint={"every_steps": 2}) as first:
        with pytest.raises(CheckpointError, match=rf"process {os.getpid()} \(this process\).*close its trainer"):
            make_trainer(world, str(tmp_path), checkpoint={"every_steps": 2})
        first.train()
    make_trainer(world, str(tmp_path), checkpoint={"every_steps": 2}).close()


def test_where_there_are_no_locks_the_run_goes_on_with_a_note(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, how: int) -> Any:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with make_trainer(world, str(tmp_path), checkpoint={"every_steps": 2}) as trainer:
        trainer.train()
    assert (tmp_path / "metrics.jsonl").read_text().count("file system without locks (No locks available)") == 1
