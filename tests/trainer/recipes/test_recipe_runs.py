"""What a recipe builds: refused before the first step where it is wrong, and trained where it is right."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from recipe_tables import put, tables

import penstock
from penstock.cli import run
from penstock.cli.audit import AuditArguments
from penstock.loader import audit, pack
from penstock.trainer import RecipeError
from penstock.trainer.__main__ import main
from penstock.trainer.recipes.recipe import build_recipe, format_toml, read_tables


def few_batches() -> list[dict[str, torch.Tensor]]:
    return [{"png": torch.zeros(2, 3, 8, 8), "cls": torch.zeros(2, dtype=torch.long)}]


def small_text(section: str) -> list[str]:
    source = f"--{section}.prepare.args.source.args"
    return [f"{source}.max_bytes=300_000", f"--{section}.args.global_batch_size=4"]


def few_rows(section: str) -> list[str]:
    return [f"--{section}.prepare.args.source.args.rows=6000"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("digits", ["--trainer.epochs=1", "--model.args.width=8"]),
        (
            "gpt",
            ["--trainer.steps=2", "--trainer.evaluate.every=2", *small_text("data"), *small_text("evaluation.data")],
        ),
        (
            "llama",
            ["--trainer.steps=2", "--trainer.evaluate.every=2", *small_text("data"), *small_text("evaluation.data")],
        ),
        ("clicks", ["--trainer.epochs=1", *few_rows("data"), *few_rows("evaluation.data")]),
    ],
)
def test_a_shipped_recipe_trains_from_the_command_line_on_shards_that_it_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    quiet = ["--trainer.report.quiet=true", "--trainer.checkpoint.every_steps=0", "--trainer.checkpoint.keep_best=0"]
    quiet.append("--trainer.schedule.warmup_steps=0")  # a run as short as this has no room for the recipe's
    assert main([name, *words, *quiet]) == 0
    packed = {path: path.stat().st_mtime_ns for path in Path("runs", name, "data").rglob("*.*")}
    assert {path.parent.name for path in packed} >= {"train", "test"}
    assert main([name, *words, *quiet]) == 0
    assert {path: path.stat().st_mtime_ns for path in Path("runs", name, "data").rglob("*.*")} == packed
    lines = [json.loads(line) for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()]
    assert [lines[-1]["kind"], lines[-1]["accuracy"] > 0] == ["end", True]
    first, again = (line for line in lines if line["kind"] == "end")
    assert {**first, "time": 0, "seconds": 0} == {**again, "time": 0, "seconds": 0}
    assert run(["audit", f"runs/{name}/audit"]) == 0  # the logs of both runs


def test_the_help_of_the_audit_names_the_logs_of_a_shipped_recipe() -> None:
    folder = read_tables("digits")["data"]["args"]["audit_dir"]
    assert f"penstock audit {folder}\n" in (AuditArguments.__doc__ or "")


@pytest.mark.slow
def test_the_mixture_of_the_page_trains_and_its_audit_is_exact(
    digit_shards: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(penstock.__file__).parent / "docs" / "recipes.md"
    (recipe,) = [
        text for text in re.findall(r"```toml\n(.*?)```", page.read_text(), re.S) if "penstock:Mixture" in text
    ]
    monkeypatch.chdir(tmp_path)
    Path("mixed.toml").write_text(recipe)
    Path("my_project").mkdir()
    own = "from penstock.trainer.recipes.digits import DigitsNet as Net\n"
    own += "from penstock.trainer.recipes.digits import cross_entropy as cross_entropy\n"
    Path("my_project/models.py").write_text(own)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("shards").mkdir()
    Path("shards/scanned").symlink_to(digit_shards["train"])
    Path("shards/drawn").symlink_to(digit_shards["test"])
    assert main(["mixed.toml", "--trainer.report.quiet=true", "--model.args.width=4"]) == 0
    assert run(["audit", "runs/mixed/audit"]) == 0
    report = audit("runs/mixed/audit")
    assert report.mixture is not None
    assert {source.name for source in report.mixture.sources} == {"scanned", "drawn"}


@pytest.mark.parametrize(
    ("model", "message"),
    [("torch.nn:Identity", "has no parameters"), ("torch.nn:Flatten", "has no parameters")],
)
def test_a_model_without_parameters_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "recipe.toml"
    wrong = tables()
    wrong["model"] = {"use": model}
    del wrong["evaluation"]
    wrong["data"] = {"use": f"{__name__}:few_batches"}
    path.write_text(format_toml(wrong))
    assert main([str(path)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "penstock-run").exists()


def few_tokens() -> list[dict[str, torch.Tensor]]:
    return [{"tokens": torch.arange(18).reshape(2, 9)}]


@pytest.mark.slow
def test_a_model_on_the_meta_device_trains_once_its_weights_are_initialised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    gpt = "penstock.trainer.recipes.gpt"
    size = {"vocabulary": 32, "length": 8, "width": 8, "heads": 2, "layers": 2}
    recipe = tables()
    del recipe["evaluation"]
    recipe["model"] = {"use": f"{gpt}:SmallGPT", "args": size, "meta": True}
    recipe["loss"] = {"use": f"{gpt}:next_token_loss"}
    recipe["data"] = {"use": f"{__name__}:few_tokens"}
    recipe["trainer"]["parallel"] = {"zero": 3}
    path = tmp_path / "recipe.toml"
    path.write_text(format_toml(recipe))
    assert main([str(path)]) == 2
    assert "tokens.weight (a constructor gives it its value, by normal_)" in capsys.readouterr().err
    recipe["model"]["init"] = {"use": f"{gpt}:init_weights"}
    path.write_text(format_toml(recipe))
    assert main([str(path)]) == 0


def bare_loss(model: Any, batch: Any) -> Any:
    return model(batch["png"].float()[:, :1]).sum()


def loss_without_gradient(model: Any, batch: Any) -> Any:
    return model(batch["png"].float()[:, :1]).sum().detach(), 1


def losses(model: Any, batch: Any) -> Any:
    return model(batch["png"].float()[:, :1]).sum(1), 1


def bare_metric(model: Any, batch: Any) -> Any:
    return 0.5


def no_optimizer(parameters: Any) -> Any:
    return None


@pytest.fixture(scope="module")
def digit_shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Few images of the digits' size, in as many classes."""
    folder = tmp_path_factory.mktemp("digits")
    for split in ("train", "test"):
        images = (cv2.imencode(".png", np.full((8, 8), n, np.uint8))[1].tobytes() for n in range(200))
        samples = [{"__key__": f"{n:03d}", "png": image, "cls": n % 10} for n, image in enumerate(images)]
        pack(samples, folder / split, format="tar", progress=False)
    return {split: str(folder / split) for split in ("train", "test")}


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"use": "builtins:dict"}}, ["model is a dict", "torch.nn.Module"]),
        ({"model.args.width": -4}, ["model.use=", "model.args={'width': -4}", "raised", "line "]),
        ({"optimizer.args.lr": -1.0}, ["optimizer.args={'lr': -1.0}", "Invalid learning rate"]),
        ({"optimizer": {"use": f"{__name__}:no_optimizer"}}, ["returned a NoneType", "torch.optim.Optimizer"]),
        ({"data": {"use": "builtins:int"}}, ["loader=0 cannot be iterated"]),
        ({"data.args.global_batch_size": 0}, ["global_batch_size=0", "at least 1"]),
        ({"loss.use": f"{__name__}:bare_loss"}, ["loss function returned a Tensor", "count of samples"]),
        ({"loss.use": f"{__name__}:loss_without_gradient"}, ["without a gradient"]),
        ({"loss.use": f"{__name__}:losses"}, ["a tensor of shape (64,)", "losses.sum()"]),
        (
            {"evaluation.use": f"{__name__}:bare_metric", "trainer.evaluate": {"every": 1}},
            ["returned 0.5", "(sum, count)"],
        ),
        ({"trainer.checkpoint": {"every_steps": -1}}, ["checkpoint.every_steps=-1", "or more"]),
        ({"trainer.checkpoint": {"every_steps": 1, "folder": "/proc/run"}}, ["cannot be written to /proc/run"]),
    ],
)
def test_what_a_recipe_builds_is_refused_with_what_is_wrong_and_no_step_is_made(
    tmp_path: Path,
    digit_shards: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    words: list[str],
) -> None:
    wrong = tables()
    wrong["data"]["args"]["source"] = digit_shards["train"]
    wrong["evaluation"]["data"]["args"]["source"] = digit_shards["test"]
    wrong["trainer"]["output_dir"] = str(tmp_path / "run")
    for path, value in changes.items():
        put(path, value)(wrong)
    (tmp_path / "recipe.toml").write_text(format_toml(wrong))
    assert main([str(tmp_path / "recipe.toml")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    for word in words:
        assert word in said
    assert not list(tmp_path.glob("run/checkpoints/step-*"))
    assert not torch.distributed.is_initialized()


def test_a_module_that_cannot_be_imported_for_an_error_in_it_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models_with_an_error.py").write_text("import torch\n\nwidth = height\n")
    monkeypatch.syspath_prepend(tmp_path)
    wrong = tables()
    wrong["model"] = {"use": "models_with_an_error:Net"}
    with pytest.raises(RecipeError, match=r"model\.use='models_with_an_error:Net'.*'height'.*_error\.py, line 3"):
        build_recipe(wrong).check()


def train(folder: Path, *words: str) -> int:
    fixed = ["--trainer.report.quiet=true", "--trainer.checkpoint.every_steps=2", f"--trainer.output_dir={folder}/run"]
    fixed.append("--trainer.schedule.warmup_steps=0")
    return main(["digits", "--trainer.steps=2", "--model.args.width=4", *fixed, *words])


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path) == 0
    capsys.readouterr()
    assert train(tmp_path, "--model.args.width=8", "--trainer.steps=4") == 2
    said = capsys.readouterr().err
    assert "another model: features.0.bias has shape (4,) there and (8,) here" in said
    assert f"{tmp_path}/run/checkpoints" in said
    assert sorted(path.name for path in tmp_path.glob("run/checkpoints/step-*")) == ["step-2"]


@pytest.mark.slow
def test_a_disk_too_full_for_a_checkpoint_is_told_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=100))
    assert train(tmp_path) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}/run/checkpoints has 0.0 MB free" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def nan_loss(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
    return model(batch["png"].float()[:, :1]).sum() * torch.nan, 2


def broken_loss(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
    raise ZeroDivisionError("in a loss of one's own")


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Writes a recipe with this loss, under a torchrun that looks for ``tmp_path / "error.json"``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def write(loss: str) -> list[str]:
        recipe = tables()
        del recipe["evaluation"]
        recipe["loss"] = {"use": f"{__name__}:{loss}"}
        recipe["data"] = {"use": f"{__name__}:few_batches"}
        (tmp_path / "recipe.toml").write_text(format_toml(recipe))
        return [str(tmp_path / "recipe.toml")]

    return write


def left_to_torchrun(folder: Path) -> str:
    told = json.loads((folder / "error.json").read_text())["message"]
    assert int(told["extraInfo"]["timestamp"]) > 0
    return str(told["extraInfo"]["py_callstack"])


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_printed_once_and_is_in_torchruns_summary(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], failing: Callable[[str], list[str]]
) -> None:
    assert main(failing("nan_loss")) == 2
    printed = capfd.readouterr().err
    assert printed.count("the loss is not finite") == 1
    assert "watchdog" not in printed
    assert left_to_torchrun(tmp_path).startswith("NonFiniteLossError: step 0: the loss is not finite")


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_what_is_wrong_with_a_recipe_is_printed_by_the_first_rank_of_a_node_and_told_to_torchrun_by_each(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failing: Callable[[str], list[str]],
    rank: str,
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert main(failing("no_such_loss")) == 2
    assert capsys.readouterr().err.count("RecipeError") == (1 if rank == "0" else 0)
    assert "no_such_loss" in left_to_torchrun(tmp_path)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")  # then nobody else prints it
    assert main(failing("no_such_loss")) == 2
    assert "no_such_loss" in capsys.readouterr().err


def test_a_flag_that_is_refused_is_told_to_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: Callable[[str], list[str]]
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        main([*failing("nan_loss"), "--trainer.steps=many"])
    assert "rank 0" in left_to_torchrun(tmp_path)


@pytest.mark.slow
def test_an_error_of_the_users_code_is_in_torchruns_summary_with_its_lines(
    tmp_path: Path, failing: Callable[[str], list[str]]
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-m", "penstock.trainer", *failing("broken_loss")]
    assert subprocess.run(command, check=False, env=environment, capture_output=True, timeout=300).returncode == 1
    assert 'raise ZeroDivisionError("in a loss of one\'s own")' in left_to_torchrun(tmp_path)
