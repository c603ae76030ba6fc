"""One run at a time on a checkpoint folder."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from launch_ranks import Ranks, run_ranks
from small_trainers import make_trainer

from penstock.trainer import CheckpointConfig, CheckpointError, CheckpointTakenError, World
from penstock.trainer.checkpoint.checkpointer import Checkpointer


def hold(world: World, folder: str, how: str) -> None:
    checkpoints = Checkpointer(CheckpointConfig(folder=folder), world)
    child = os.fork() if how == "with a child" else 1
    if child and world.rank == 0:
        Path(folder, "pid").write_text(str(os.getpid()))
    time.sleep(30.0 if child == 0 else 600.0)
    if child == 0:
        os._exit(0)  # a rank's group cannot be closed in a child of it
    checkpoints.close()


def start_holding(folder: Path, ranks: int = 1, how: str = "alone") -> tuple[Ranks, int]:
    """Ranks that hold the folder, and rank 0's pid."""
    folder.mkdir()
    holding = Ranks(hold, ranks, str(folder), how)
    deadline_s = time.monotonic() + 60.0
    while not (folder / "pid").exists() or not (folder / "pid").read_text():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return holding, int((folder / "pid").read_text())


def try_to_open(world: World, folder: str) -> tuple[str, float]:
    began_s = time.monotonic()
    try:
        Checkpointer(CheckpointConfig(folder=folder), world).close()
    except CheckpointError as exc:
        return str(exc), time.monotonic() - began_s
    return "opened", time.monotonic() - began_s


def test_a_second_run_on_a_folder_is_refused_on_every_rank_by_the_name_of_the_first(tmp_path: Path) -> None:
    holding, pid = start_holding(tmp_path / "run", ranks=2)
    (tmp_path / "run" / "step-7.tmp").mkdir()
    for message, seconds in run_ranks(try_to_open, 2, str(tmp_path / "run")):
        assert f"process {pid} on {socket.gethostname()}, started 20" in message
        assert "give another folder" in message
        assert seconds < 15.0, "refused at once"
    assert (tmp_path / "run" / "step-7.tmp").exists(), "a save of the first run was deleted"
    for process in holding.processes:
        process.kill()
    holding.join(20.0)
    assert [message for message, _ in run_ranks(try_to_open, 2, str(tmp_path / "run"))] == ["opened"] * 2


def try_to_train(world: World, folder: str) -> str:
    try:
        make_trainer(world, folder, checkpoint={"every_steps": 2}, stall_timeout_s=30.0).close()
    except CheckpointTakenError as exc:
        return str(exc)
    return "opened"


def test_a_refused_run_leaves_nothing_beside_what_the_first_tells_of_itself(tmp_path: Path) -> None:
    holding, pid = start_holding(tmp_path / "checkpoints")
    found = run_ranks(try_to_train, 2, str(tmp_path))
    assert all(f"process {pid} on" in message for message in found), found
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    for process in holding.processes:
        process.kill()
    holding.join(20.0)


def test_a_killed_run_holds_its_folder_no_longer_though_it_had_forked(world: World, tmp_path: Path) -> None:
    holding, pid = start_holding(tmp_path / "run", how="with a child")
    os.kill(pid, signal.SIGKILL)
    try:
        message, seconds = try_to_open(world, str(tmp_path / "run"))
        assert message == "opened"
        assert seconds < 15.0, "the child must not hold it"
    finally:
        holding.join(0.0)


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
