"""Checkpoints among damage, kills and full disks: a whole state is left, or what is wrong is said."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch_ranks import Ranks, run_ranks
from saved_nets import assert_same, build, fill, step_once, whole_state
from started_threads import started_threads
from torch import nn

from penstock.trainer import (
    CheckpointConfig,
    CheckpointError,
    World,
)
from penstock.trainer.checkpoint.checkpointer import Checkpointer
from penstock.trainer.checkpoint.folder import (
    FileSeal,
    Manifest,
    encode_manifest,
    list_steps,
    read_manifest,
)
from penstock.trainer.checkpoint.lock import LOCK_NAME


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("damaged", ["__0_0.distcp", ".metadata", "extra.json", "manifest.json", "missing", "cut"])
def test_a_flipped_byte_in_any_file_is_detected_and_passed_over(
    alone: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: str
) -> None:
    net, optimizer = build()
    with Checkpointer(CheckpointConfig(folder=tmp_path), alone) as checkpoints:
        for step in (1, 2):
            step_once(net, optimizer, step)
            checkpoints.save(step, net, optimizer, {"step": step}, blocking=True)
            if step == 1:
                wanted = whole_state(net, optimizer)
    victim = tmp_path / "step-2" / (damaged if "." in damaged else "__0_0.distcp")
    content = bytearray(victim.read_bytes())
    if damaged == "missing":
        victim.unlink()
    elif damaged == "cut":
        victim.write_bytes(content[:-1])
    else:
        content[len(content) // 2] ^= 0x04
        victim.write_bytes(content)
    other_net, other_optimizer = build()
    with caplog.at_level(logging.WARNING), Checkpointer(CheckpointConfig(folder=tmp_path), alone) as checkpoints:
        assert checkpoints.load_newest(other_net, other_optimizer) == (1, {"step": 1})
        assert list(checkpoints.passed_over) == [2]
        assert victim.name in checkpoints.passed_over[2]
        assert_same(whole_state(other_net, other_optimizer), wanted)
        assert "step-2 is damaged and skipped" in caplog.text
        checkpoints.save(2, other_net, other_optimizer, {"step": "again"}, blocking=True)
    with Checkpointer(CheckpointConfig(folder=tmp_path), alone) as checkpoints:
        assert checkpoints.load_newest(other_net, other_optimizer) == (2, {"step": "again"})


def test_when_no_checkpoint_verifies_training_does_not_silently_start_afresh(alone: World, tmp_path: Path) -> None:
    net, optimizer = build()
    with Checkpointer(CheckpointConfig(folder=tmp_path), alone) as checkpoints:
        assert checkpoints.load_newest(net, optimizer) is None
        checkpoints.save(4, net, optimizer, {}, blocking=True)
        (tmp_path / "step-4" / "extra.json").write_text("[]")
        with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints .* extra\.json has checksum"):
            checkpoints.load_newest(net, optimizer)


_CHECKED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir")


def _save_and_die(world: World, folder: str, kill_at: int, step: int) -> int:
    """Load step 1 and save ``step``, dying at the n-th file operation of that; returns how many there were."""
    net, optimizer = build()
    operations = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal operations
        if event in _CHECKED and arguments and str(arguments[0]).startswith(folder):
            operations += 1
            if operations == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    with Checkpointer(CheckpointConfig(folder=folder, keep_last=1), world) as checkpoints:
        assert checkpoints.load_newest(net, optimizer) == (1, {"step": 1})
        sys.addaudithook(count)
        fill(net, 2.0)
        checkpoints.save(step, net, optimizer, {"step": 2}, metric=0.5)
    return operations


@pytest.mark.parametrize("step", [pytest.param(2, id="a new step"), pytest.param(1, id="a step saved again")])
def test_a_kill_at_any_file_operation_of_a_save_leaves_a_whole_state(alone: World, tmp_path: Path, step: int) -> None:
    """The weights, ``extra`` and metric of the two saves differ, so that a mixture would be seen."""
    net, optimizer = build()
    fill(net, 1.0)
    with Checkpointer(CheckpointConfig(folder=tmp_path / "base"), alone) as checkpoints:
        checkpoints.save(1, net, optimizer, {"step": 1})
    shutil.copytree(tmp_path / "base", tmp_path / "0")
    (operations,) = run_ranks(_save_and_die, 1, str(tmp_path / "0"), 0, step)
    assert operations >= 20
    resumed = []
    for first in range(1, operations + 1, 6):
        trials = range(first, min(first + 6, operations + 1))
        for kill_at in trials:
            shutil.copytree(tmp_path / "base", tmp_path / str(kill_at))
        killed = {kill_at: Ranks(_save_and_die, 1, str(tmp_path / str(kill_at)), kill_at, step) for kill_at in trials}
        for kill_at, ranks in killed.items():
            assert ranks.join(60.0)[0].exit_code == -signal.SIGKILL
            with Checkpointer(CheckpointConfig(folder=tmp_path / str(kill_at)), alone) as checkpoints:
                found = checkpoints.load_newest(net, optimizer)
                assert found is not None, f"both are gone after a kill at operation {kill_at}"
                assert found[0] in (1, step)
                assert {float(tensor.detach().flatten()[0]) for tensor in net.parameters()} == {found[1]["step"]}
                metric = read_manifest(tmp_path / str(kill_at) / f"step-{found[0]}").metric
                assert metric == (None if found[1]["step"] == 1 else 0.5)
                assert not checkpoints.passed_over, "a half state was there by its final name"
                assert not list((tmp_path / str(kill_at)).glob("*.tmp"))
                resumed.append(found[1]["step"])
    assert resumed == sorted(resumed), "the save counts from one operation on, and not before"
    assert set(resumed) == {1, 2}


def _load_whole(checkpoints: Checkpointer, net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step of the newest checkpoint, 0 where there is none; nothing damaged may lie there."""
    found = checkpoints.load_newest(net, optimizer)
    assert not checkpoints.passed_over
    if found is None:
        return 0
    step, extra = found
    assert {float(tensor.detach().flatten()[0]) for tensor in net.parameters()} == {float(step)}
    assert extra == {"step": step}
    return step


def _load_once(world: World, folder: str) -> int:
    with Checkpointer(CheckpointConfig(folder=folder, keep_last=2), world) as checkpoints:
        return _load_whole(checkpoints, *build())


def _save_for_ever(world: World, folder: str) -> None:
    net, optimizer = build()
    checkpoints = Checkpointer(CheckpointConfig(folder=folder, keep_last=2), world)
    step = _load_whole(checkpoints, net, optimizer)
    while True:
        step += 1
        fill(net, float(step))
        checkpoints.save(step, net, optimizer, {"step": step})


def test_kills_of_a_rank_at_odd_moments_never_leave_a_damaged_newest_checkpoint(tmp_path: Path) -> None:
    steps = []
    for trial, delay_s in enumerate((0.0, 0.013, 0.029, 0.041)):
        before = steps[-1] if steps else 0
        ranks = Ranks(_save_for_ever, 2, str(tmp_path))
        deadline = time.monotonic() + 40
        while not any(step > before + 1 for step in list_steps(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(delay_s)
        ranks.processes[trial % 2].kill()
        time.sleep(0.05)
        for process in ranks.processes:
            process.kill()
        outcomes = ranks.join(20.0)
        traces = [getattr(outcome.value, "trace", "") for outcome in outcomes]
        assert not any("AssertionError" in trace for trace in traces), traces
        steps.append(max(list_steps(tmp_path)))
    assert steps == sorted(set(steps))
    assert run_ranks(_load_once, 2, str(tmp_path)) == [steps[-1]] * 2
    assert not list(tmp_path.glob("*.tmp"))


def test_a_folder_that_cannot_be_written_is_refused_before_training(alone: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file" / "inside", Path("/proc/penstock")):
        with pytest.raises(CheckpointError, match=f"cannot be written to {folder}"):
            Checkpointer(CheckpointConfig(folder=folder), alone)
    assert not [thread for thread in started_threads() if thread.name.startswith("penstock")]


def test_a_disk_without_room_for_one_checkpoint_is_refused_before_training(
    alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, _ = build()
    with Checkpointer(CheckpointConfig(folder=tmp_path), alone) as checkpoints:
        checkpoints.check_room(net)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=100))
        with pytest.raises(CheckpointError, match=r"takes about .* MB, but .* has 0\.0 MB free"):
            checkpoints.check_room(net)


def _save_on_a_full_disk(world: World, folder: str) -> Any:
    net, optimizer = build()
    with Checkpointer(CheckpointConfig(folder=folder), world) as checkpoints:
        checkpoints.save(1, net, optimizer, {}, blocking=True)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        checkpoints.save(2, net, optimizer, {})
        try:
            checkpoints.wait()
        except CheckpointError as exc:
            message = str(exc)
        dist.barrier()  # rank 0 tidies up
        left = sorted(path.name for path in Path(folder).glob("step-*"))
        dist.barrier()  # rank 0 begins the next
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        checkpoints.save(3, net, optimizer, {}, blocking=True)
    return message, left


def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_next_may_succeed(tmp_path: Path) -> None:
    for message, left in run_ranks(_save_on_a_full_disk, 2, str(tmp_path)):
        assert message.startswith(f"step 2 could not be saved to {tmp_path}")
        assert "File too large" in message
        assert left == ["step-1"]
    assert list_steps(tmp_path) == [3, 1]


def test_leftovers_of_killed_saves_are_removed_and_foreign_files_stay(alone: World, tmp_path: Path) -> None:
    for name in ("step-7.tmp", "step-3.replaced.tmp", "step-2.removed.tmp", "notes", "my.tmp"):
        (tmp_path / name).mkdir()
    Checkpointer(CheckpointConfig(folder=tmp_path), alone).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK_NAME, "my.tmp", "notes"]


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/elsewhere", "a/b", "..", ""])
def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    files = {name: FileSeal(size=4, xxh3="0" * 16)}
    manifest = Manifest(step=1, world_size=1, metric=None, torch_version="2", files=files)
    (tmp_path / "manifest.json").write_text(encode_manifest(manifest))
    with pytest.raises(CheckpointError, match="which is no file inside a checkpoint"):
        read_manifest(tmp_path)
