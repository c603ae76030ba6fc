"""Traces of steps that were asked for: which steps, on which ranks, how many files; and training goes on as without."""

from __future__ import annotations

import gzip
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import make_trainer, rows, square
from together_cases import shared_folder
from torch import nn

from penstock.trainer import ProfileConfig, TrainerConfigError, World


def traces(folder: Path | str) -> list[str]:
    return sorted(path.name for path in Path(folder, "profile").glob("*"))


def count_events(path: Path, name: str) -> int:
    with gzip.open(path, "rt") as file:
        return sum(event.get("name") == name for event in json.load(file)["traceEvents"])


def train(world: World, folder: Path | str, profile: dict[str, Any], **options: Any) -> list[Any]:
    options = {"steps": 8, "profile": {"ranks": "all", **profile}, **options}
    with make_trainer(world, str(folder), **options) as trainer:
        trainer.train()
        return [parameter.flatten().tolist() for parameter in trainer.parallel.inner.parameters()]


@pytest.mark.slow
def test_the_steps_given_are_traced_and_training_is_as_without(world: World, tmp_path: Path) -> None:
    plain = train(world, tmp_path / "plain", {})
    found = train(world, tmp_path / "traced", {"steps": ["0:1", "3:5", "5:6"]})
    assert found == plain
    assert traces(tmp_path / "plain") == []
    names = [f"steps-{ends}-rank-0.json.gz" for ends in ("000000-000001", "000003-000005", "000005-000006")]
    assert traces(tmp_path / "traced") == names
    steps = [count_events(tmp_path / "traced/profile" / name, "Optimizer.step#SGD.step") for name in names]
    assert steps == [1, 2, 1]
    notes = (tmp_path / "traced/metrics.jsonl").read_text()
    assert "the trace of steps 3 to 4 is in" in notes


def test_a_trace_that_the_run_ends_in_has_the_steps_that_were_made(world: World, tmp_path: Path) -> None:
    train(world, tmp_path, {"steps": ["6:20"]})
    assert traces(tmp_path) == ["steps-000006-000008-rank-0.json.gz"]
    train(world, tmp_path / "next", {"steps": ["8:20"]})
    assert traces(tmp_path / "next") == [], "the step that warms up was the last"


def test_old_traces_go(world: World, tmp_path: Path) -> None:
    train(world, tmp_path, {"steps": ["1:2", "3:4", "5:6"], "keep": 2})
    assert traces(tmp_path) == ["steps-000003-000004-rank-0.json.gz", "steps-000005-000006-rank-0.json.gz"]


def test_a_trace_that_cannot_be_written_is_noted_and_training_goes_on(world: World, tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("in the way")
    train(world, tmp_path, {"steps": ["1:3", "5:6"]})
    notes = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any("tracing stops: FileExistsError" in one.get("note", "") for one in notes)
    assert notes[-1]["kind"] == "end"


@pytest.mark.parametrize("written", [None, b"", b'{"traceEvents": [{}, {"na'], ids=["no file", "nothing", "a part"])
def test_a_trace_of_which_the_disk_takes_no_more_is_not_kept(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bytes | None
) -> None:
    """As the profiler leaves its file then, without an error."""

    def export(found: Any, path: str) -> None:
        if written is not None:
            Path(path).write_bytes(written)

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "small"))
    (tmp_path / "small").mkdir()
    train(world, tmp_path / "run", {"steps": ["0:2"]})
    assert traces(tmp_path / "run") == []
    assert list((tmp_path / "small").iterdir()) == []
    notes = (tmp_path / "run/metrics.jsonl").read_text()
    assert f"tracing stops: TrainerError: a trace could not be written to {tmp_path / 'small'}" in notes


def test_a_failing_step_ends_its_trace(world: World, tmp_path: Path) -> None:
    def fail(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(world, tmp_path / "failed", {"steps": ["0:2"]}, loss=fail)
    assert traces(tmp_path / "failed") == []
    train(world, tmp_path / "again", {"steps": ["0:2"]})  # the profiler is free again
    assert len(traces(tmp_path / "again")) == 1


def trace_by_signal(world: World) -> list[str]:
    """Rank 1 alone gets the signal, in its third forward."""
    calls = 0

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        nonlocal calls
        calls += 1
        if world.rank == 1 and calls == 3:
            os.kill(os.getpid(), signal.SIGUSR2)
        return square(model, batch)

    with shared_folder(world) as folder:
        before = signal.getsignal(signal.SIGUSR2)
        with make_trainer(world, folder, rows(world), loss=loss, steps=9, profile={"signal_steps": 2}) as trainer:
            trainer.train()
        assert signal.getsignal(signal.SIGUSR2) is before
        torch.distributed.barrier()
        return traces(folder)


def test_a_signal_to_one_rank_traces_the_same_steps_on_all() -> None:
    """The flag is read before a step and told in it: set in step 2, told in 3, step 4 warms up."""
    for found in run_ranks(trace_by_signal, 2):
        assert found == ["steps-000005-000007-rank-0.json.gz", "steps-000005-000007-rank-1.json.gz"]


def test_a_handler_that_is_there_already_is_left_alone(world: World, tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:

        def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
            signal.raise_signal(signal.SIGUSR2)
            return square(model, batch)

        train(world, tmp_path, {}, loss=loss)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert len(heard) == 8
    assert traces(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": ("5",)}, "profile.steps='5' is no range"),
        ({"steps": ("5:5",)}, "profile.steps='5:5' is no range"),
        ({"steps": ("0:1000",)}, "of 1 to 100 steps"),
        ({"steps": ("5:9", "0:6")}, "steps 5 to 5 are in two ranges"),
        ({"keep": 0}, "profile.keep=0"),
        ({"signal_steps": 101}, "profile.signal_steps=101"),
        ({"ranks": "some"}, "profile.ranks='some'"),
    ],
)
def test_what_cannot_be_traced_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainerConfigError, match=message):
        ProfileConfig(**options)
