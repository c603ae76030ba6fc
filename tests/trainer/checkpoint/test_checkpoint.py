"""Checkpoints: what was saved comes back, on other ranks and other sharding; what is damaged or half never does."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from saved_nets import assert_same, build, build_net, step_once, whole_state
from started_threads import started_threads
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.staging import DefaultStager

from penstock.storage import MemoryStore
from penstock.trainer import (
    CheckpointConfig,
    CheckpointError,
    CheckpointMismatchError,
    TrainerConfigError,
    World,
    export_safetensors,
)
from penstock.trainer.checkpoint import checkpointer
from penstock.trainer.checkpoint.checkpointer import Checkpointer
from penstock.trainer.checkpoint.folder import list_steps, publish_folder
from penstock.trainer.checkpoint.retention import choose_kept
from penstock.trainer.checkpoint.safetensors_file import write_safetensors
from penstock.trainer.checkpoint.traffic import CountedFile


def _continue_elsewhere(world: World, folder: str, zero: int) -> Any:
    net, optimizer = build(zero)
    with Checkpointer(CheckpointConfig(folder=folder), world) as checkpoints:
        checkpoints.check_room(net)
        found = checkpoints.load_newest(net, optimizer)
        own = {name: value.tolist() for name, value in checkpoints.load_rank_state().items()}
        loaded = whole_state(net, optimizer) if found else {}
        step = found[0] if found else 0
        step_once(net, optimizer, seed=step)
        saved = whole_state(net, optimizer)
        owed = torch.tensor([float(world.rank)])
        checkpoints.save(step + 1, net, optimizer, {"loader": {"position": 10 * step}}, rank_state={"owed": owed})
        step_once(net, optimizer, seed=99)  # after the copy: must not reach the checkpoint
    return found, own, loaded, saved


def test_state_survives_other_world_sizes_and_zero_stages(tmp_path: Path) -> None:
    before = None
    for step, (ranks, zero) in enumerate([(3, 0), (2, 2), (4, 3), (2, 1), (2, 0)]):
        results = run_ranks(_continue_elsewhere, ranks, str(tmp_path), zero)
        found, own, loaded, saved = results[0]
        assert all(result[0] == found for result in results)
        if before is None:
            assert found is None
        else:
            assert found == (step, {"loader": {"position": 10 * (step - 1)}})
            assert_same(loaded, before)
        # Only the last pair of worlds is of one size, so only there the ranks' own tensors come back, each to its rank.
        owns = [result[1] for result in results]
        assert owns == ([{"owed": [0.0]}, {"owed": [1.0]}] if step == 4 else [{}] * ranks)
        before = saved
    assert own == {"owed": [0.0]}
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-3", "step-4", "step-5"]


@pytest.mark.parametrize("is_remote", [False, True])
def test_the_writing_thread_asks_no_device_for_a_stream(
    alone: World, tmp_path: Path, bucket: MemoryStore, monkeypatch: pytest.MonkeyPatch, is_remote: bool
) -> None:
    """A new thread's current device is that of another rank."""

    def refuse(*given: Any, **options: Any) -> None:
        raise AssertionError("a stream of the current device is asked for")

    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", refuse)
    net, optimizer = build()
    step_once(net, optimizer, 1)  # else torch makes the optimizer's state, for which it looks at the device
    with Checkpointer(CheckpointConfig(folder=bucket.url if is_remote else tmp_path), alone) as checkpoints:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        checkpoints.save(1, net, optimizer, {}, blocking=True)


def test_stagers_that_forget_after_one_use_are_made_anew(
    alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of torch 2.11 and 2.12 do."""
    stage = DefaultStager.stage

    def stage_and_forget(self: DefaultStager, *given: Any, **options: Any) -> Any:
        staged = stage(self, *given, **options)
        self._state_dict_stager.close()
        return staged

    monkeypatch.setattr(DefaultStager, "stage", stage_and_forget)
    monkeypatch.setattr(checkpointer, "_STAGERS_STAY", False)
    net, optimizer = build()
    with Checkpointer(CheckpointConfig(folder=tmp_path), alone) as checkpoints:
        for step in (1, 2, 3):
            step_once(net, optimizer, step)
            checkpoints.save(step, net, optimizer, {}, blocking=True)
        assert list_steps(tmp_path)[0] == 3


@pytest.mark.slow
def test_the_last_and_the_best_are_kept(alone: World, tmp_path: Path) -> None:
    net, optimizer = build()
    config = CheckpointConfig(folder=tmp_path, keep_last=2, keep_best=1, best="max")
    with Checkpointer(config, alone) as checkpoints:
        for step, metric in [(1, 0.1), (2, 0.9), (3, 0.3), (4, None), (5, float("nan"))]:
            checkpoints.save(step, net, optimizer, {}, metric=metric)
    assert list_steps(tmp_path) == [5, 4, 2]


def test_of_equal_metrics_the_later_checkpoint_is_the_best() -> None:
    assert choose_kept({1: 0.5, 2: 0.5, 3: None, 4: 0.1}, keep_last=1, keep_best=1, best="max") == {2, 4}
    assert choose_kept({1: 0.5, 2: 0.7, 3: 0.6}, keep_last=1, keep_best=1, best="min") == {1, 3}


@pytest.fixture
def disk_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What is synced (a file or a folder, by its inode), renamed and deleted (by path), in this order."""
    steps: list[tuple[str, Any]] = []
    fsync, rmtree = os.fsync, shutil.rmtree

    def note_fsync(fd: int) -> None:
        steps.append(("sync", os.fstat(fd).st_ino))
        fsync(fd)

    def noting(move: Any) -> Any:
        def note(source: Any, target: Any, **more: Any) -> None:
            steps.append(("rename", Path(target)))
            move(source, target, **more)

        return note

    def note_rmtree(path: Any, *given: Any, **more: Any) -> None:
        steps.append(("delete", Path(path)))
        rmtree(path, *given, **more)

    monkeypatch.setattr(os, "fsync", note_fsync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, noting(getattr(os, name)))
    monkeypatch.setattr(shutil, "rmtree", note_rmtree)
    return steps


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_folder_is_on_disk_before_it_gets_its_name_and_then_the_name_is_and_nothing_is_deleted(
    tmp_path: Path, disk_steps: list[tuple[str, Any]], is_replaced: bool
) -> None:
    written, final, replaced = (tmp_path / name for name in ("step-1.tmp", "step-1", "step-1.replaced.tmp"))
    written.mkdir()
    own, above = written.stat().st_ino, tmp_path.stat().st_ino
    if is_replaced:
        final.mkdir()
    publish_folder(written, final)
    named = [("sync", own), ("rename", final), ("sync", above)]
    assert disk_steps == ([named[0], ("rename", replaced), *named[1:]] if is_replaced else named)


def test_all_of_a_save_is_on_disk_before_it_counts_and_then_that_it_counts(
    alone: World, tmp_path: Path, disk_steps: list[tuple[str, Any]]
) -> None:
    net, optimizer = build()
    with Checkpointer(CheckpointConfig(folder=tmp_path), alone) as checkpoints:
        disk_steps.clear()
        checkpoints.save(1, net, optimizer, {}, blocking=True)
    folder = tmp_path / "step-1"
    counts_at = disk_steps.index(("rename", folder))
    before, after = disk_steps[:counts_at], disk_steps[counts_at + 1 :]
    files = list(folder.iterdir())
    assert {path.name for path in files} == {"__0_0.distcp", ".metadata", "extra.json", "manifest.json"}
    for path in files:
        assert ("sync", path.stat().st_ino) in before, path.name
    last_name = max(at for at, (what, path) in enumerate(before) if what == "rename" and path.parent != tmp_path)
    assert ("sync", folder.stat().st_ino) in before[last_name:]
    assert ("sync", tmp_path.stat().st_ino) in after


def test_saving_the_same_step_twice_writes_once(alone: World, tmp_path: Path) -> None:
    net, optimizer = build()
    with Checkpointer(CheckpointConfig(folder=tmp_path), alone) as checkpoints:
        checkpoints.save(1, net, optimizer, {}, blocking=True)
        written = (tmp_path / "step-1").stat().st_ino
        checkpoints.save(1, net, optimizer, {}, blocking=True)
        assert (tmp_path / "step-1").stat().st_ino == written
        checkpoints.save(1, net, optimizer, {}, blocking=True, metric=0.5)
        assert (tmp_path / "step-1").stat().st_ino != written


def test_a_checkpoint_of_another_model_is_refused_by_key_and_shape(alone: World, tmp_path: Path) -> None:
    net, optimizer = build()
    with Checkpointer(CheckpointConfig(folder=tmp_path), alone) as checkpoints:
        checkpoints.save(1, net, optimizer, {}, blocking=True)
        wider, its_optimizer = build(width=7)
        untouched = whole_state(wider, its_optimizer)
        with pytest.raises(
            CheckpointMismatchError, match=r"another model: 0\.bias has shape \(6,\) there and \(7,\) here.*and \d more"
        ):
            checkpoints.load_newest(wider, its_optimizer)
        assert_same(whole_state(wider, its_optimizer), untouched)
        longer = nn.Sequential(*build_net(), nn.Linear(3, 2, bias=False))
        with pytest.raises(CheckpointMismatchError, match=r"4\.weight is not in the checkpoint"):
            checkpoints.load_newest(longer, torch.optim.AdamW(longer.parameters()))
        with pytest.raises(
            CheckpointMismatchError, match=r"another optimizer: 0\.bias\.exp_avg is in the checkpoint only"
        ):
            checkpoints.load_newest(net, torch.optim.SGD(net.parameters(), momentum=0.9))


def test_an_optimizer_that_has_not_stepped_is_saved_without_a_step(alone: World, tmp_path: Path) -> None:
    net, optimizer = build()
    with Checkpointer(CheckpointConfig(folder=tmp_path), alone) as checkpoints:
        checkpoints.save(0, net, optimizer, {}, blocking=True)
        assert not optimizer.state
        step_once(net, optimizer, 1)
        wanted = whole_state(net, optimizer)
        other_net, other_optimizer = build()
        assert checkpoints.load_newest(other_net, other_optimizer) == (0, {})
        step_once(other_net, other_optimizer, 1)
        assert_same(whole_state(other_net, other_optimizer), wanted)


def test_a_parameter_that_had_no_gradient_yet_resumes_as_fresh(alone: World, tmp_path: Path) -> None:
    def build_part_used() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3)})
        return net, torch.optim.Adam(net.parameters())

    def step(net: Any, optimizer: torch.optim.Optimizer, *names: str) -> None:
        optimizer.zero_grad()
        sum(net[name](torch.ones(1, 3)).square().sum() for name in names).backward()
        optimizer.step()

    net, optimizer = build_part_used()
    step(net, optimizer, "used")
    with Checkpointer(CheckpointConfig(folder=tmp_path), alone) as checkpoints:
        checkpoints.save(1, net, optimizer, {}, blocking=True)
        other_net, other_optimizer = build_part_used()
        checkpoints.load_newest(other_net, other_optimizer)
    for one_net, one_optimizer in ((net, optimizer), (other_net, other_optimizer)):
        step(one_net, one_optimizer, "used", "unused")
    assert_same(whole_state(other_net, other_optimizer), whole_state(net, optimizer))


def test_what_cannot_be_configured_says_what_would_do(tmp_path: Path) -> None:
    for folder, cause in (
        ("", "neither a path nor the URL"),
        ("file:///runs/a", "neither a path nor the URL"),
        ("s3:/bucket/run", "neither a path nor the URL"),
        ("s3:///run", "names no bucket"),
        ("https://host/run", "a web server's"),
        ("s3://me:hunter2hunter2@bucket/run", "carries a password"),
    ):
        with pytest.raises(TrainerConfigError, match=cause) as caught:
            CheckpointConfig(folder=folder)
        assert "hunter2" not in str(caught.value)
    for name, value in (("keep_last", 0), ("keep_best", -1), ("every_steps", -1), ("best", "most")):
        with pytest.raises(TrainerConfigError, match=f"{name}={value!r}"):
            CheckpointConfig(folder=tmp_path, **{name: value})


def test_the_background_save_holds_the_state_of_its_step(alone: World, tmp_path: Path) -> None:
    net, optimizer = build()
    step_once(net, optimizer, 1)
    wanted = whole_state(net, optimizer)
    extra = {"loader": [1, 2]}
    with Checkpointer(CheckpointConfig(folder=tmp_path), alone) as checkpoints:
        checkpoints.save(1, net, optimizer, extra)
        extra["loader"].append(3)
        for seed in range(2, 6):
            step_once(net, optimizer, seed)
    assert not [thread for thread in started_threads() if thread.name.startswith("penstock")]
    other_net, other_optimizer = build()
    with Checkpointer(CheckpointConfig(folder=tmp_path), alone) as checkpoints:
        assert checkpoints.load_newest(other_net, other_optimizer) == (1, {"loader": [1, 2]})
    assert_same(whole_state(other_net, other_optimizer), wanted)
    checkpoints.close()


def test_extra_that_is_no_json_is_refused_at_the_call(alone: World, tmp_path: Path) -> None:
    net, optimizer = build()
    with Checkpointer(CheckpointConfig(folder=tmp_path), alone) as checkpoints:
        with pytest.raises(CheckpointError, match="extra cannot be written as JSON"):
            checkpoints.save(1, net, optimizer, {"scaler": torch.ones(1)})
        assert list_steps(tmp_path) == []


def test_the_export_is_one_safetensors_file_of_the_bare_model(alone: World, tmp_path: Path) -> None:
    safetensors_torch = pytest.importorskip("safetensors.torch", reason="install penstock[safetensors]")
    net, optimizer = build()
    step_once(net, optimizer, 1)
    with Checkpointer(CheckpointConfig(folder=tmp_path / "run"), alone) as checkpoints:
        checkpoints.save(1, net, optimizer, {}, blocking=True)
    export_safetensors(tmp_path / "run" / "step-1", tmp_path / "net.safetensors")
    assert_same(safetensors_torch.load_file(tmp_path / "net.safetensors"), net.state_dict())
    assert json.loads((tmp_path / "run" / "step-1" / "manifest.json").read_bytes())["step"] == 1
    (tmp_path / "run" / "step-1" / "extra.json").write_text("{ }")
    with pytest.raises(CheckpointError, match=r"step-1 is damaged: extra\.json"):
        export_safetensors(tmp_path / "run" / "step-1", tmp_path / "other.safetensors")
    assert not (tmp_path / "other.safetensors").exists()


def test_an_export_that_the_disk_does_not_take_leaves_nothing_and_is_told(
    alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = build()
    with Checkpointer(CheckpointConfig(folder=tmp_path / "run"), alone) as checkpoints:
        checkpoints.save(1, net, optimizer, {}, blocking=True)

    def write_half(file: CountedFile, piece: memoryview) -> int:
        if file.tell():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, piece[: len(piece) // 2])

    write = CountedFile._write_piece
    monkeypatch.setattr(CountedFile, "_write_piece", write_half)
    with pytest.raises(CheckpointError, match=r"net\.safetensors cannot be written: .*No space left.*; make room.*-1"):
        export_safetensors(tmp_path / "run" / "step-1", tmp_path / "net.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_export_is_what_the_package_writes(tmp_path: Path) -> None:
    safetensors_torch = pytest.importorskip("safetensors.torch", reason="install penstock[safetensors]")
    formats = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)
    formats = (*formats, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64)
    formats = (*formats, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2)
    tensors = {f"{form}".removeprefix("torch."): torch.randn(3, 5).mul(9).abs().to(form) for form in formats}
    tensors |= {
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
        "über": torch.ones(1),
        "turned": torch.randn(3, 2).T,
    }
    with pytest.raises(ValueError, match=r"c is of torch\.complex128"):
        write_safetensors({"c": torch.ones(1, dtype=torch.complex128)}, tmp_path / "own", {})
    write_safetensors(tensors, tmp_path / "own", {"format": "pt"})
    safetensors_torch.save_file(
        {name: one.contiguous() for name, one in tensors.items()}, tmp_path / "package", metadata={"format": "pt"}
    )
    found = safetensors_torch.load_file(tmp_path / "own")
    assert_same(found, safetensors_torch.load_file(tmp_path / "package"))
    assert {name: one.dtype for name, one in found.items()} == {name: one.dtype for name, one in tensors.items()}
    assert (tmp_path / "own").stat().st_size == (tmp_path / "package").stat().st_size
