"""The rates and groups of the optimizer: who sets them, and what is said of others who do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch_ranks import run_ranks
from small_trainers import Line, make_trainer
from torch import nn
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau

from penstock.trainer import Callbacks, NoteRecord, StepRecord, TrainerConfigError, World
from penstock.trainer.parallel.precision import local_part


class Meddling(Callbacks):
    """Calls what it is given with the trainer, once, after a few steps."""

    def __init__(self, meddle: Callable[[Any], None]) -> None:
        self.trainer: Any = None
        self._meddle = meddle

    def on_step(self, record: StepRecord) -> None:
        if record.step == 2:
            self._meddle(self.trainer)


def train(world: World, folder: Path, meddle: Callable[[Any], None], **options: Any) -> Any:
    observer = Meddling(meddle)
    with make_trainer(world, str(folder), observers=[observer], steps=6, **options) as trainer:
        observer.trainer = trainer
        trainer.train()
        return trainer


def halve(trainer: Any) -> None:
    trainer.optimizer.param_groups[0]["lr"] *= 0.5


def halve_where_nothing_improves(trainer: Any) -> None:
    plateau = ReduceLROnPlateau(trainer.optimizer, factor=0.5, patience=0)
    for _ in range(2):
        plateau.step(1.0)


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["number", "tensor"])
@pytest.mark.parametrize("meddle", [halve, halve_where_nothing_improves])
def test_a_rate_that_something_else_sets_is_refused_since_it_would_have_no_effect(
    world: World, tmp_path: Path, meddle: Callable[[Any], None], kind: Any
) -> None:
    with pytest.raises(TrainerConfigError, match=r"group 0 is 0.05, and the schedule had set 0.1.*schedule.shape"):
        train(world, tmp_path, meddle, optimizer=lambda them: torch.optim.SGD(them, lr=kind(0.1)))


def test_a_scheduler_of_torchs_is_refused_since_its_first_rate_would_stay(world: World, tmp_path: Path) -> None:
    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        LinearLR(optimizer, start_factor=0.01)
        return optimizer

    with pytest.raises(TrainerConfigError, match=r"SGD has a scheduler of torch's.*give schedule.shape"):
        make_trainer(world, str(tmp_path), optimizer=make)


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})


def test_an_optimizer_without_a_rate_is_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(TrainerConfigError, match="optimizer=WithoutRate has no rate 'lr' in group 0"):
        make_trainer(world, str(tmp_path), optimizer=WithoutRate)


def test_a_group_that_is_added_later_is_refused(world: World, tmp_path: Path) -> None:
    def add(trainer: Any) -> None:
        trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

    with pytest.raises(TrainerConfigError, match="SGD has 2 parameter groups, and 1 when the trainer was made"):
        train(world, tmp_path, add)


@pytest.mark.parametrize("zero", [0, 2])
def test_a_weight_that_is_unfrozen_and_not_the_optimizers_is_named(world: World, tmp_path: Path, zero: int) -> None:
    model = nn.Sequential(Line().requires_grad_(False), nn.Linear(2, 1))

    def unfreeze(trainer: Any) -> None:
        trainer.parallel.inner[0].requires_grad_(True)

    with pytest.raises(TrainerConfigError, match=r"0.line.weight, 0.line.bias were frozen.*AdamW\(model.parameters"):
        train(world, tmp_path / "lacking", unfreeze, model=model, parallel={"zero": zero})
    model = nn.Sequential(Line().requires_grad_(False), nn.Linear(2, 1))
    everything = torch.optim.SGD(model.parameters(), lr=0.1)
    train(world, tmp_path / "all", unfreeze, model=model, parallel={"zero": zero}, optimizer=everything)
    assert local_part(model[0].line.bias).any(), "unfrozen, and not trained"


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["number", "tensor"])
def test_another_trainer_goes_on_with_the_rate_that_the_optimizer_was_made_with(
    world: World, tmp_path: Path, kind: Any
) -> None:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=kind(0.1))
    for folder in ("first", "second"):
        options: dict[str, Any] = {"optimizer": optimizer, "schedule": {"shape": "linear"}, "steps": 2}
        with make_trainer(world, str(tmp_path / folder), model=model, **options) as trainer:
            trainer.train()
            assert trainer.schedule.rate == pytest.approx(0.05)


def test_a_model_that_lies_in_shards_already_is_refused(world: World, tmp_path: Path) -> None:
    model = Line()
    make_trainer(world, str(tmp_path), model=model, parallel={"zero": 2}).close()
    for zero in (0, 2):
        with pytest.raises(TrainerConfigError, match=r"model=\w*Line lies in shards already.*build it anew"):
            make_trainer(world, str(tmp_path), model=model, parallel={"zero": zero})


def test_a_rate_that_is_a_tensor_resumes_as_it_is_given(world: World, tmp_path: Path) -> None:
    for rate, steps in ((0.1, 2), (0.05, 4)):
        options: dict[str, Any] = {"steps": steps, "checkpoint": {"every_steps": 2}, "schedule": {"warmup_steps": 2}}
        given = torch.tensor(rate)
        options["optimizer"] = lambda them, given=given: torch.optim.Adam(them, lr=given, foreach=False)
        with make_trainer(world, str(tmp_path), **options) as trainer:
            assert float(trainer.optimizer.param_groups[0]["lr"]) == pytest.approx(rate)
            trainer.train()
            assert trainer.schedule.rate == pytest.approx(rate)


def cut_off(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return model(batch["x"]).square().sum().detach().requires_grad_(), len(batch["x"])


def of_another_model(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    model(batch["x"])
    return nn.Linear(2, 2)(batch["x"]).square().sum(), len(batch["x"])


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("loss", [cut_off, of_another_model])
def test_a_loss_that_does_not_depend_on_the_model_is_refused_since_nothing_would_be_trained(
    world: World, tmp_path: Path, loss: Any, zero: int
) -> None:
    with pytest.raises(TrainerConfigError, match="no parameter of the optimizer got a gradient in the first step"):
        make_trainer(world, str(tmp_path), loss=loss, parallel={"zero": zero}).train()


def notes_of_a_resumed_run(world: World, folder: Path, rate: float, steps: int, **schedule: Any) -> list[str]:
    notes: list[str] = []

    class Noting(Callbacks):
        def on_note(self, record: NoteRecord) -> None:
            notes.append(record.note)

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=rate)

    options: dict[str, Any] = {"checkpoint": {"every_steps": 2}, "schedule": schedule, "observers": [Noting()]}
    with make_trainer(world, str(folder), optimizer=optimizer, steps=steps, **options) as trainer:
        trainer.train()
    return notes


@pytest.mark.slow
def test_a_resumed_run_says_which_rates_and_schedule_the_checkpoint_had(world: World, tmp_path: Path) -> None:
    def resume(*given: Any, **schedule: Any) -> list[str]:
        return [note for note in notes_of_a_resumed_run(world, tmp_path, *given, **schedule) if "schedule" in note]

    assert resume(0.1, 2) == []
    assert resume(0.1, 4) == [], "a constant rate does not look at the run's length"
    assert resume(0.2, 6) == ["schedule: lr=[0.2]; the checkpoint had [0.1]"]
    assert resume(0.2, 8, shape="cosine") == ["schedule: shape='cosine'; the checkpoint had 'constant'"]
    assert resume(0.2, 9, shape="cosine") == ["schedule: updates=9; the checkpoint had 8"]


def test_a_resumed_run_says_which_seed_the_checkpoint_had(world: World, tmp_path: Path) -> None:
    def resume(steps: int, seed: int) -> list[str]:
        with make_trainer(world, str(tmp_path), steps=steps, seed=seed, checkpoint={"every_steps": 2}) as trainer:
            trainer.train()
        records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        return [one["note"] for one in records if one["kind"] == "note" and "seed" in one["note"]]

    assert resume(2, 1) == []
    assert resume(4, 1) == []
    assert resume(6, 7) == ["seed=7; the checkpoint had 1"]


class MaskedAtFirst:
    """A loss whose first batch is masked whole on ``rank``: its sum is a number."""

    def __init__(self, rank: int) -> None:
        self._rank, self._calls = rank, 0

    def __call__(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        self._calls += 1
        losses = model(batch["x"]).square()
        if self._calls == 1 and (dist.get_rank() if dist.is_initialized() else 0) == self._rank:
            return torch.zeros((), requires_grad=True), len(losses)
        return losses.sum(), len(losses)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_first_batch_that_is_masked_whole_trains_nothing_and_the_next_ones_do(
    world: World, tmp_path: Path, zero: int
) -> None:
    options: dict[str, Any] = {"loss": MaskedAtFirst(0), "parallel": {"zero": zero}}
    with make_trainer(world, str(tmp_path), **options) as trainer:
        trainer.train()
        assert trainer.progress.step == 4
        weight = local_part(trainer.parallel.inner.line.weight)
    assert not torch.equal(weight, Line().line.weight)


def train_alone(world: World, folder: str) -> int:
    with make_trainer(world, folder, loss=MaskedAtFirst(1), average_every=2) as trainer:
        trainer.train()
        return int(trainer.progress.step)


def test_so_does_one_on_a_rank_that_exchanges_no_gradients(tmp_path: Path) -> None:
    assert run_ranks(train_alone, 2, str(tmp_path)) == [4, 4]
