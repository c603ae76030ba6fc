"""Exports hold what the checkpoint holds, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import ranks_environment
from safetensors import safe_open
from safetensors.torch import load_file
from small_trainers import make_trainer, rows
from tied_model import Scaled, Tied, whole_state

from penstock.cli import run as run_command
from penstock.trainer import CheckpointError, Evaluation, World, close_world, export_run, open_world

States = list[dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, States]:
    """A run whose second step is the best; the weights after each of its four."""
    folder, states = tmp_path_factory.mktemp("finished"), []

    def score(model: Any, batch: dict[str, torch.Tensor]) -> Any:
        model(batch["x"])
        states.append({name: one for name, one in whole_state(model).items() if name != "middle.shift"})
        return {"accuracy": (torch.tensor([0.0, 0.1, 0.9, 0.2, 0.3][len(states)]), 1)}

    world = open_world(device="cpu")
    evaluation = Evaluation(batches=[next(iter(rows(world)))], metrics=score)
    options = {"evaluate": {"every": 1, "best": "accuracy"}, "checkpoint": {"every_steps": 1, "keep_best": 1}}
    with make_trainer(
        world, str(folder), rows(world, "drop"), Tied(Scaled), evaluation=evaluation, **options
    ) as trainer:
        trainer.train()
    del trainer
    close_world()
    (folder / "config.json").write_text('{"model_type": "tied"}')
    return folder, states


@pytest.fixture
def trained(finished: tuple[Path, States], tmp_path: Path) -> States:
    """A copy of that run in tmp_path/run."""
    folder, states = finished
    shutil.copytree(folder, tmp_path / "run")
    return states


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_the_best_the_newest_or_any_step_is_exported(trained: States, tmp_path: Path) -> None:
    for step, wanted in (("best", trained[1]), ("latest", trained[3]), (3, trained[2])):
        output = tmp_path / f"out-{step}"
        done = export_run(tmp_path / "run", output, step=step)
        assert [path.name for path in output.iterdir()] == ["model.safetensors"] == list(done.files)
        assert_same(load_file(output / "model.safetensors"), wanted)
        with safe_open(output / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt", "step": str(done.step)}
        usual = tmp_path / "usual"
        usual.touch()
        assert (output / "model.safetensors").stat().st_mode == usual.stat().st_mode


@pytest.mark.slow
def test_the_layout_of_hugging_face_is_cut_renamed_and_starts_a_run_again(
    trained: States, world: World, tmp_path: Path
) -> None:
    output = tmp_path / "hf"
    done = export_run(tmp_path / "run", output, format="hf", max_shard_bytes=64, rename=["^=>model."])
    index = json.loads((output / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    for number, file in enumerate(files):
        assert file == f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        part = load_file(output / file)
        assert sum(one.nbytes for one in part.values()) <= 64
        assert {index["weight_map"][name] for name in part} == {file}
        found.update(part)
    assert_same({name.removeprefix("model."): one for name, one in found.items()}, trained[3])
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in found.values())
    assert json.loads((output / "config.json").read_text()) == {"model_type": "tied"}
    export_run(tmp_path / "run/checkpoints/step-4", tmp_path / "again", format="hf")
    assert (tmp_path / "again/config.json").exists()
    (tmp_path / "run/checkpoints").rename(tmp_path / "run/elsewhere")
    export_run(tmp_path / "run/elsewhere", tmp_path / "bare", format="hf")
    assert [path.name for path in (tmp_path / "bare").iterdir()] == ["model.safetensors"]
    assert done.bytes == sum(path.stat().st_size for path in output.iterdir())
    options = {"init_from": str(output), "warm_start": {"rename": ["^model[.]=>"]}}
    with make_trainer(world, str(tmp_path / "next"), model=Tied(Scaled), **options) as trainer:
        begun = whole_state(trainer.parallel.inner)
    assert_same({name: begun[name] for name in trained[3]}, trained[3])


def test_floating_point_is_rounded_where_asked_and_nothing_else(trained: States, tmp_path: Path) -> None:
    export_run(tmp_path / "run", tmp_path / "out", dtype="bf16")
    found = load_file(tmp_path / "out/model.safetensors")
    for name, one in trained[3].items():
        assert torch.equal(found[name], one.bfloat16() if one.is_floating_point() else one)


def test_an_output_that_exists_is_replaced_only_where_asked_and_only_an_export(trained: States, tmp_path: Path) -> None:
    output = tmp_path / "out"
    export_run(tmp_path / "run", output, format="hf", max_shard_bytes=64)
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        export_run(tmp_path / "run", output)
    export_run(tmp_path / "run", output, overwrite=True)
    assert [path.name for path in output.iterdir()] == ["model.safetensors"]
    (output / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match=r"holds thesis\.tex, which no export writes"):
        export_run(tmp_path / "run", output, overwrite=True)
    assert sorted(path.name for path in output.iterdir()) == ["model.safetensors", "thesis.tex"]


def test_a_failure_leaves_nothing_and_the_old_export(
    trained: States, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    export_run(tmp_path / "run", output)
    before = (output / "model.safetensors").read_bytes()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.trainer.weights.export.write_safetensors", fail)
    with pytest.raises(CheckpointError, match=r"cannot be written: .*No space left"):
        export_run(tmp_path / "run", output, overwrite=True)
    monkeypatch.undo()
    assert (output / "model.safetensors").read_bytes() == before
    shard = next((tmp_path / "run/checkpoints/step-4").glob("__*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"step-4 is damaged: __0_0\.distcp has"):
        export_run(tmp_path / "run", tmp_path / "other")
    (tmp_path / "run/checkpoints/step-3/.metadata").write_bytes(b"no pickle")
    assert run_command(["export", str(tmp_path / "run"), "--step", "3", "--output", str(tmp_path / "other")]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


KILLED = """
import os, signal, sys
from pathlib import Path
from penstock.trainer import export_run
partial = Path(sys.argv[2]).with_name(".out.partial")
def advance(count):
    if len(list(partial.glob("*.safetensors"))) > 1:
        os.kill(os.getpid(), signal.SIGKILL)
export_run(sys.argv[1], sys.argv[2], format="hf", max_shard_bytes=64, advance=advance)
"""


@pytest.mark.slow
def test_a_kill_leaves_no_half_export_and_does_not_hinder_the_next(trained: States, tmp_path: Path) -> None:
    output = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run"), str(output)]
    assert subprocess.run(command, env=ranks_environment(), check=False).returncode == -signal.SIGKILL
    assert not output.exists()
    assert list((tmp_path / ".out.partial").glob("*.safetensors"))
    export_run(tmp_path / "run", output)
    assert [path.name for path in output.iterdir()] == ["model.safetensors"]
    assert not (tmp_path / ".out.partial").exists()


def test_the_command_exports_and_tells_programs_and_people(
    trained: States, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, output = str(tmp_path / "run"), str(tmp_path / "out")
    assert run_command(["export", run, "--step", "best", "--output", output, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["tensors"], told["output"]) == (2, len(trained[1]), output)
    assert told["bytes"] == os.path.getsize(f"{output}/model.safetensors")  # noqa: PTH202
    assert run_command(["export", run, "--output", output, "--overwrite", "--format", "hf"]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    for words, error in (
        (["--output", output], "exists and is not empty"),
        (["--output", f"{output}2", "--step", "9"], "there are those of steps 2, 3, 4"),
        (["--output", f"{output}2", "--step", "first"], "give best, latest or a number"),
        (["--output", f"{output}2", "--max-shard-size", "1GB"], "--format safetensors writes one"),
        (["--output", f"{output}2", "--format", "hf", "--max-shard-size", "big"], "is no size"),
        (["--output", f"{output}2", "--rename", "model."], "write PATTERN=>REPLACEMENT"),
    ):
        assert run_command(["export", run, *words]) == 2
        assert error in capsys.readouterr().err
    assert run_command(["export", str(tmp_path), "--output", f"{output}2"]) == 2
    assert not Path(f"{output}2").exists()
