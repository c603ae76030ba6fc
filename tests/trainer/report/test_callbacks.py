"""What observers hear of, in typed calls and in flat values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainers import Line, add_up, make_trainer, rows, square
from torch import nn

from penstock.trainer import (
    Callbacks,
    CheckpointRecord,
    EndRecord,
    Evaluation,
    EvaluationRecord,
    FailureRecord,
    NoteRecord,
    ReportConfig,
    ResumeRecord,
    StartRecord,
    StepRecord,
    TemporaryObserverError,
    TrainerConfigError,
    TrainRecord,
    World,
)


class Everything(Callbacks):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_start(self, record: StartRecord) -> None:
        self.heard.append(record)

    on_resume = on_step = on_train = on_evaluate = on_checkpoint = on_note = on_start  # type: ignore[assignment]
    on_end = on_failure = on_start  # type: ignore[assignment]


def train(world: World, folder: Path, observer: Any, **options: Any) -> None:
    evaluation = Evaluation(batches=rows(world, "pad"), metrics=add_up)
    options = {"evaluation": evaluation, "evaluate": {"every": 2}, "checkpoint": {"every_steps": 2}, **options}
    with make_trainer(world, str(folder), observers=[observer], **options) as trainer:
        trainer.train()


def test_callbacks_hear_of_the_error_that_ends_a_run(world: World, tmp_path: Path) -> None:
    def fail(model: Any, batch: Any) -> Any:
        raise ValueError("no label")

    heard = Everything()
    with (
        pytest.raises(ValueError, match="no label"),
        make_trainer(world, str(tmp_path), rows(world), loss=fail, steps=2, observers=[heard]) as trainer,
    ):
        trainer.train()
    assert [type(one) for one in heard.heard] == [StartRecord, FailureRecord]
    assert heard.heard[-1].error == "ValueError: no label"


def test_callbacks_hear_typed_records_of_a_run_and_of_the_one_that_resumes_it(world: World, tmp_path: Path) -> None:
    first, second = Everything(), Everything()
    train(world, tmp_path, first, steps=2)
    train(world, tmp_path, second, steps=4, report={"every": 2, "quiet": True})
    assert [type(one).__name__ for one in first.heard if not isinstance(one, NoteRecord)] == [
        "StartRecord",
        *("StepRecord", "TrainRecord", "StepRecord", "TrainRecord"),
        *("EvaluationRecord", "CheckpointRecord", "EndRecord"),
    ]
    resumed = [one for one in second.heard if not isinstance(one, NoteRecord)]
    assert [(type(one).__name__, one.step) for one in resumed] == [
        *(("ResumeRecord", 2), ("StartRecord", 2), ("StepRecord", 3), ("StepRecord", 4), ("TrainRecord", 4)),
        *(("EvaluationRecord", 4), ("CheckpointRecord", 4), ("EndRecord", 4)),
    ]
    start = next(one for one in second.heard if isinstance(one, StartRecord))
    assert (start.world_size, start.device, start.parameters, start.total_steps) == (1, "cpu", 6, 4)
    steps = [one for one in second.heard if isinstance(one, StepRecord)]
    averages = next(one for one in second.heard if isinstance(one, TrainRecord))
    assert averages.steps == 2
    assert averages.loss == pytest.approx(
        sum(one.loss * one.samples for one in steps) / sum(one.samples for one in steps)
    )
    assert steps[0].outcome == "updated"
    evaluated = next(one for one in second.heard if isinstance(one, EvaluationRecord))
    assert evaluated.values["number"] == pytest.approx(12.0)
    assert evaluated.seconds > 0
    assert next(one for one in second.heard if isinstance(one, CheckpointRecord)).state == "being written"
    assert next(one for one in second.heard if isinstance(one, EndRecord)).samples == 23
    assert isinstance(resumed[0], ResumeRecord)
    assert resumed[0].world_size == 1


class Moody(Callbacks):
    def __init__(self) -> None:
        self.heard = 0

    def on_step(self, record: StepRecord) -> None:
        self.heard += 1
        if record.step == 2:
            raise TemporaryObserverError("busy at step 2")


def test_an_observer_that_is_only_busy_stays_and_the_others_hear_of_it(world: World, tmp_path: Path) -> None:
    observer = Moody()
    train(world, tmp_path, observer, steps=4)
    assert observer.heard == 4
    assert (tmp_path / "metrics.jsonl").read_text().count("busy at step 2") == 1


def read(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def words(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """A loss that counts five tokens a row."""
    total, count = square(model, batch)
    return total, 5 * count


def test_a_record_has_speeds_phases_and_memory_and_no_number_that_was_not_measured(
    world: World, tmp_path: Path
) -> None:
    report = {"every": 2, "quiet": True}
    with make_trainer(world, str(tmp_path / "a"), loss=words, report=report) as trainer:
        trainer.train()
    with make_trainer(world, str(tmp_path / "b")) as trainer:
        trainer.train()
    for record in read(tmp_path / "a"):
        assert record["tokens_per_s"] == pytest.approx(5 * record["samples_per_s"])
        phases = [record[f"seconds_{name}"] for name in ("fetch", "forward", "backward", "optimizer")]
        assert min(phases) > 0
        assert sum(phases) <= record["seconds"]
        assert record["host_memory_peak_bytes"] >= record["host_memory_bytes"] > 2**20
        assert record["gradient_norm_max"] >= record["gradient_norm"] > 0
        assert "mfu" not in record
    plain = read(tmp_path / "b")[0]
    assert not {"tokens_per_s", "mfu", "flops_per_s", "device_memory_bytes"} & plain.keys()


class Noisy(Line):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(nn.functional.dropout(x, 0.5, self.training))


def reading(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """A loss that reads its count on the host, as many do."""
    total, _ = square(model, batch)
    return total, int((batch["x"][:, 0] > -1).sum())


def test_flops_are_counted_without_a_trace_on_training(world: World, tmp_path: Path) -> None:
    found = []
    for name, counts in (("with", True), ("without", False)):
        report = {"every": 1, "quiet": True, "count_flops": counts, **({"peak_flops": 1e9} if counts else {})}
        with make_trainer(world, str(tmp_path / name), model=Noisy(), loss=reading, report=report) as trainer:
            trainer.train()
            found.append(torch.cat([one.detach().flatten() for one in trainer.parallel.inner.parameters()]))
    assert torch.equal(*found)
    for record in read(tmp_path / "with"):
        # A 2 x 2 layer, forward and the gradient of its weight; none of its input is needed.
        assert record["flops_per_s"] == pytest.approx(16 * record["samples_per_s"])
        assert record["mfu"] == pytest.approx(record["flops_per_s"] / 1e9)


class Stack(nn.Module):
    """Blocks that can be sharded, compiled and recomputed one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"activation": {"every": 1}},
        {"compile": {"enabled": True, "backend": "eager"}},
        {"parallel": {"zero": 3}, "step": {"accumulate": 2}},
    ],
)
def test_a_model_costs_the_same_however_it_is_run(world: World, tmp_path: Path, options: Any) -> None:
    report = {"every": 1, "quiet": True, "count_flops": True}
    with make_trainer(world, str(tmp_path), model=Stack(), report=report, steps=2, **options) as trainer:
        trainer.train()
    # Three forwards, three gradients of weights, and two of inputs: none for the first block's.
    for record in read(tmp_path):
        assert record["flops_per_s"] == pytest.approx(8 * 8 * record["samples_per_s"])


class Routed(Line):
    """What it computes depends on the values of its inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) if x.sum().item() < 1e9 else x


def test_flops_that_depend_on_values_are_not_made_up(world: World, tmp_path: Path) -> None:
    report = {"every": 1, "quiet": True, "count_flops": True, "peak_flops": 1e9}
    with make_trainer(world, str(tmp_path), model=Routed(), report=report) as trainer:
        assert trainer.train().steps == 4
    assert all("mfu" not in record for record in read(tmp_path))
    assert "forward reads values of tensors" in (tmp_path / "metrics.jsonl").read_text()
    assert "give report.flops_per_sample" in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peak_flops": 1e12}, "set report.count_flops"),
        ({"count_flops": True, "flops_per_token": 6e9}, "both say what a step computes"),
        ({"flops_per_sample": 0.0}, "report.flops_per_sample=0.0 is out of range"),
        ({"wandb": ""}, "report.wandb='' names nothing"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: Any, message: str) -> None:
    with pytest.raises(TrainerConfigError, match=message):
        ReportConfig(**options)
