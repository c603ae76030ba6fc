"""Checkpoints: what was saved comes back, on other ranks and other sharding; what is damaged or half never does."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch_ranks import Ranks, run_ranks
from started_threads import started_threads
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock.trainer import (
    CheckpointConfig,
    CheckpointError,
    CheckpointMismatchError,
    TrainerConfigError,
    World,
    export_safetensors,
)
from penstock.trainer.checkpoint.checkpointer import Checkpointer
from penstock.trainer.checkpoint.folder import (
    FileSeal,
    Manifest,
    choose_kept,
    encode_manifest,
    list_steps,
    read_manifest,
)
from penstock.trainer.checkpoint.lock import LOCK_NAME


@pytest.fixture
def alone() -> Iterator[World]:
    """A world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield _world_of_one()
    dist.destroy_process_group()


def _world_of_one() -> World:
    return World(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_rank=0,
        num_nodes=1,
        device=torch.device("cpu"),
        backend="gloo",
    )


def build_net(width: int = 6) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))


def build(zero: int = 0, width: int = 6) -> tuple[nn.Module, torch.optim.Optimizer]:
    net: nn.Module = build_net(width)
    if zero:
        for layer in (net[0], net[3]):
            fully_shard(layer, reshard_after_forward=zero == 3)
        net = fully_shard(net, reshard_after_forward=zero == 3)
    elif dist.get_world_size() > 1:
        net = DistributedDataParallel(net)
    return net, torch.optim.AdamW(net.parameters(), lr=0.05)


def step_once(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    net(torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    optimizer.step()


def whole_state(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = {f"model.{key}": value.clone() for key, value in get_model_state_dict(net, options=options).items()}
    for name, tensors in get_optimizer_state_dict(net, optimizer, options=options).get("state", {}).items():
        state.update({f"{name}.{slot}": value.clone() for slot, value in tensors.items()})
    return state


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(got[key], value), key


# --- other worlds, other sharding ---


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


# --- damage ---


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
        assert "step-2 is damaged and passed over" in caplog.text
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


# --- kills ---

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


def fill(net: nn.Module, value: float) -> None:
    with torch.no_grad():
        for tensor in net.parameters():
            tensor.fill_(value)


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


def _save_for_ever(world: World, folder: str) -> None:
    net, optimizer = build()
    checkpoints = Checkpointer(CheckpointConfig(folder=folder, keep_last=2), world)
    found = checkpoints.load_newest(net, optimizer)
    step = found[0] if found else 0
    if found:
        expected = {float(step)}
        assert {float(tensor.detach().flatten()[0]) for tensor in net.parameters()} == expected
        assert found[1] == {"step": step}
        assert not checkpoints.passed_over
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


# --- what is kept ---


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


def test_saving_the_same_step_twice_writes_once(alone: World, tmp_path: Path) -> None:
    net, optimizer = build()
    with Checkpointer(CheckpointConfig(folder=tmp_path), alone) as checkpoints:
        checkpoints.save(1, net, optimizer, {}, blocking=True)
        written = (tmp_path / "step-1").stat().st_ino
        checkpoints.save(1, net, optimizer, {}, blocking=True)
        assert (tmp_path / "step-1").stat().st_ino == written
        checkpoints.save(1, net, optimizer, {}, blocking=True, metric=0.5)
        assert (tmp_path / "step-1").stat().st_ino != written


# --- another model, another optimizer ---


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


# --- folders that will not do ---


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
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        checkpoints.save(3, net, optimizer, {}, blocking=True)
    return message, left


def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_next_may_succeed(tmp_path: Path) -> None:
    for message, left in run_ranks(_save_on_a_full_disk, 2, str(tmp_path)):
        assert message.startswith(f"step 2 could not be saved to {tmp_path}")
        assert "File too large" in message
        assert left == ["step-1"]
    assert list_steps(tmp_path) == [3, 1]


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


# --- behind training ---


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


def test_leftovers_of_killed_saves_are_removed_and_foreign_files_stay(alone: World, tmp_path: Path) -> None:
    for name in ("step-7.tmp", "step-3.replaced.tmp", "step-2.removed.tmp", "notes", "my.tmp"):
        (tmp_path / name).mkdir()
    Checkpointer(CheckpointConfig(folder=tmp_path), alone).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK_NAME, "my.tmp", "notes"]


# --- export ---


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


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/elsewhere", "a/b", "..", ""])
def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    files = {name: FileSeal(size=4, xxh3="0" * 16)}
    manifest = Manifest(step=1, world_size=1, metric=None, torch_version="2", files=files)
    (tmp_path / "manifest.json").write_text(encode_manifest(manifest))
    with pytest.raises(CheckpointError, match="which is no file inside a checkpoint"):
        read_manifest(tmp_path)
