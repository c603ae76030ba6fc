"""Modules keep the modes that the user set; which end of a metric is good is never guessed wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainers import Line, make_trainer, rows
from torch import nn

from penstock.trainer import Evaluation, TrainerConfigError, World
from penstock.trainer.evaluation.evaluate import good_end


class Stemmed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5))
        self.head = nn.Sequential(nn.BatchNorm1d(2), Line())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stem(x))


def measure(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    assert not any(module.training for module in model.modules())
    return {"loss": (model(batch["x"]).sum(), len(batch["x"]))}


@pytest.mark.parametrize("zero", [0, 3])
def test_a_stem_in_evaluation_mode_stays_there(world: World, tmp_path: Path, zero: int) -> None:
    model = Stemmed()
    model.stem.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    evaluation = Evaluation(batches=rows(world, "pad"), metrics=measure)
    options = {"evaluation": evaluation, "evaluate": {"every": 2}, "parallel": {"zero": zero}}
    with make_trainer(world, str(tmp_path), model=model, **options) as trainer:
        trainer.train()
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert int(model.stem[0].num_batches_tracked) == 0
    assert torch.equal(model.stem[0].running_mean, torch.zeros(2))
    assert int(model.head[0].num_batches_tracked) == 4


class Adapted(nn.Module):
    """A linear layer with an adapter, of which something is in the frozen weights while it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Line().requires_grad_(False)
        self.adapter = nn.Parameter(torch.zeros(2))
        self.merges: list[bool] = []
        self.is_merged = False

    def train(self, mode: bool = True) -> Adapted:
        super().train(mode)
        if self.is_merged == mode:
            self.merges.append(not mode)
            self.is_merged = not mode
            with torch.no_grad():
                self.line.line.bias.add_(torch.sign(self.adapter), alpha=-1.0 if mode else 1.0)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) if self.is_merged else self.line(x) + self.adapter


class Whole(nn.Module):
    """Layers in a model that calls ``train`` itself, or not; one of them stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Adapted(), Adapted(), nn.Dropout(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Calling(Whole):
    def train(self, mode: bool = True) -> Calling:
        for module in self.children():
            module.train(mode)  # and no mode of its own
        return self


@pytest.mark.parametrize("kind", [Whole, Calling])
@pytest.mark.parametrize("zero", [0, 2])
def test_what_a_module_does_when_it_is_evaluated_is_taken_back(
    world: World, tmp_path: Path, zero: int, kind: type[nn.Module]
) -> None:
    def train(evaluates: bool) -> tuple[Any, list[torch.Tensor]]:
        model: Any = kind()
        model.layers[1].eval()
        found: dict[str, Any] = {"parallel": {"zero": zero}}
        if evaluates:
            evaluation = Evaluation(batches=rows(world, "pad"), metrics=lambda *_: {"loss": (torch.tensor(0.0), 1)})
            found |= {"evaluation": evaluation, "evaluate": {"every": 2}}
        with make_trainer(world, str(tmp_path / f"{evaluates}"), model=model, **found) as trainer:
            trainer.train()
        return model, [getattr(one, "full_tensor", lambda one=one: one)() for one in model.parameters()]

    (model, found), (_, expected) = train(True), train(False)
    assert model.layers[0].merges == [True, False] * 2
    assert model.layers[1].is_merged
    assert kind is Calling or model.layers[1].merges == [True], "it was called in vain"
    assert [module.training for module in model.layers] == [True, False, True]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_model_that_comes_in_evaluation_mode_is_trained(world: World, tmp_path: Path) -> None:
    model = Stemmed().eval()
    with make_trainer(world, str(tmp_path), model=model) as trainer:
        trainer.train()
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("metric", "end"),
    [
        ("loss", "min"),
        ("val/loss", "min"),
        ("eval_perplexity", "min"),
        ("top1", "max"),
        ("val-accuracy", "max"),
        ("number", None),
        ("glossary", None),
        ("loss_of_accuracy", None),
    ],
)
def test_the_good_end_of_a_metric_is_known_by_its_words(metric: str, end: str | None) -> None:
    assert good_end(metric) == end


def falling(values: list[float]) -> Any:
    left = iter(values)
    return lambda model, batch: {"loss": (torch.tensor(next(left)), 1), "reward": (torch.tensor(0.0), 1)}


def test_the_lowest_loss_is_the_best_without_being_told(world: World, tmp_path: Path) -> None:
    batches = [{"x": torch.ones(1, 2)}]
    evaluation = Evaluation(batches=batches, metrics=falling([3.0, 1.0, 2.0, 4.0]))
    options = {"evaluate": {"every": 1, "best": "loss"}, "checkpoint": {"keep_best": 1, "keep_last": 1}}
    with make_trainer(world, str(tmp_path), evaluation=evaluation, **options) as trainer:
        summary = trainer.train()
    assert (summary.best, summary.best_step) == (1.0, 2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-2", "step-4"]


def kept_after(world: World, folder: Path, metric: str, values: list[float], steps: int, **checkpoint: Any) -> Any:
    """The summary, and the steps that have a checkpoint, of a run whose metrics have such values."""
    left = iter(values)

    def measure(model: nn.Module, batch: Any) -> dict[str, Any]:
        value = torch.tensor(next(left))
        return {"loss": (value, 1), "accuracy": (value, 1)}

    evaluation = Evaluation(batches=[{"x": torch.ones(1, 2)}], metrics=measure)
    options: dict[str, Any] = {"evaluate": {"every": 1, "best": metric}, "checkpoint": {"keep_last": 1, **checkpoint}}
    with make_trainer(world, str(folder), evaluation=evaluation, steps=steps, **options) as trainer:
        summary = trainer.train()
    return summary, sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("broken_at", [None, 1, 2, 3])
def test_as_many_of_the_best_are_kept_as_were_asked_for(world: World, tmp_path: Path, broken_at: int | None) -> None:
    values = [3.0, 1.0, 2.0, 4.0]
    if broken_at is not None:
        kept_after(world, tmp_path, "loss", values[:broken_at], broken_at, keep_best=2)
    summary, kept = kept_after(world, tmp_path, "loss", values[broken_at or 0 :], 4, keep_best=2)
    assert (summary.best, summary.best_step) == (1.0, 2)
    assert kept == [2, 3, 4]


@pytest.mark.slow
def test_of_more_metrics_than_are_kept_the_best_stay(world: World, tmp_path: Path) -> None:
    values = [0.1, 0.5, 0.3, 0.5, 0.4, 0.2, 0.6, 0.0]
    assert kept_after(world, tmp_path, "accuracy", values, 8, keep_best=3)[1] == [2, 4, 7, 8]


@pytest.mark.slow
def test_another_metric_or_direction_forgets_what_was_the_best_by_the_one_before(world: World, tmp_path: Path) -> None:
    summary, kept = kept_after(world, tmp_path, "loss", [5.0, 6.0], 2, keep_best=1)
    assert (summary.best_step, kept) == (1, [1, 2])
    summary, kept = kept_after(world, tmp_path, "accuracy", [0.5, 0.25], 4, keep_best=1)
    assert (summary.best, summary.best_step, kept) == (0.5, 3, [3, 4])
    told = (tmp_path / "metrics.jsonl").read_text()
    assert "evaluate.best is now 'accuracy' (high is good): the best by 'loss' (low is good), 5.0 of step 1, is" in told
    summary, kept = kept_after(world, tmp_path, "accuracy", [0.625, 0.75], 6, keep_best=1, best="min")
    assert (summary.best, summary.best_step, kept) == (0.625, 5, [5, 6])
    summary, kept = kept_after(world, tmp_path, "accuracy", [0.7, 0.5], 8, keep_best=1, best="min")
    assert (summary.best, summary.best_step, kept) == (0.5, 8, [8])


@pytest.mark.slow
def test_patience_begins_anew_with_another_metric(world: World, tmp_path: Path) -> None:
    saves = {"every_steps": 1}
    assert evaluate_until(world, tmp_path, [3.0, 4.0, 5.0], steps=9, checkpoint=saves).steps == 3
    other = {"best": "reward", "checkpoint": {**saves, "best": "max"}}  # which is 0 each time
    assert evaluate_until(world, tmp_path, [1.0, 1.0, 1.0], steps=9, **other).steps == 6


def test_a_metric_of_unknown_direction_is_refused_at_once(world: World, tmp_path: Path) -> None:
    evaluation = Evaluation(batches=[{"x": torch.ones(1, 2)}], metrics=falling([1.0]))
    with pytest.raises(TrainerConfigError, match=r"evaluate\.best='reward'.*checkpoint\.best='max' or 'min'"):
        make_trainer(world, str(tmp_path), evaluation=evaluation, evaluate={"best": "reward"})


def evaluate_until(world: World, folder: Path, losses: list[float], best: str = "loss", **options: Any) -> Any:
    evaluation = Evaluation(batches=[{"x": torch.ones(1, 2)}], metrics=falling(losses))
    evaluate = {"every": 1, "best": best, "patience": 2}
    with make_trainer(world, str(folder), evaluation=evaluation, evaluate=evaluate, **options) as trainer:
        return trainer.train()


def test_training_ends_when_patience_does_and_says_so(world: World, tmp_path: Path) -> None:
    summary = evaluate_until(world, tmp_path, [3.0, 1.0, 2.0, float("nan"), 0.5], steps=9)
    assert (summary.steps, summary.best_step) == (4, 2)
    assert "loss was not better than 1.0 (step 2) in 2 evaluations" in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_patience_counts_over_restarts_and_starts_anew_with_each_better_one(world: World, tmp_path: Path) -> None:
    options = {"checkpoint": {"every_steps": 1}}
    assert evaluate_until(world, tmp_path, [3.0, 4.0], steps=2, **options).steps == 2
    summary = evaluate_until(world, tmp_path, [2.0, 5.0, 5.0, 1.0], steps=9, **options)
    assert (summary.steps, summary.best, summary.best_step) == (5, 2.0, 3)
    assert evaluate_until(world, tmp_path, [], steps=9, **options).steps == 5, "a run whose patience ended stays ended"


def test_patience_without_a_metric_is_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(TrainerConfigError, match=r"evaluate\.patience=3.*evaluate\.best"):
        make_trainer(world, str(tmp_path), evaluate={"patience": 3})
