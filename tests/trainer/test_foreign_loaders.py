"""Loaders that are not penstock's: samplers hear of the epoch, each rank's state comes back, epochs end together."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch_ranks import Ranks, run_ranks
from small_trainers import Line, add_up, make_trainer, rows, square
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from penstock.trainer import Evaluation, TrainerError, World

AT_ONCE_S = 200.0  # on a busy machine
PATIENCE_S = 1000.0  # who waited for a stall would be much later


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((2,), float(index)), "number": torch.tensor(float(index))}


class Streamed(IterableDataset[dict[str, torch.Tensor]]):
    """As many samples as the rank's number plus two, in an order by the epoch it was told."""

    def __init__(self, rank: int) -> None:
        self.rank, self.epochs = rank, []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(self.rank + 2):
            yield {"x": torch.full((2,), float(number)), "number": torch.tensor(float(number))}


class Noting:
    """A loss that notes the numbers that it sees."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def __call__(self, model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        self.seen.append(batch["number"].tolist())
        return square(model, batch)


def shuffle_by_epoch(world: World, folder: str) -> list[list[float]]:
    sampler: DistributedSampler[Any] = DistributedSampler(
        Numbers(), num_replicas=world.world_size, rank=world.rank, shuffle=True
    )
    loss = Noting()
    loader = DataLoader(Numbers(), batch_size=6, sampler=sampler)
    with make_trainer(world, folder, loader, loss=loss, steps=None, epochs=4) as trainer:
        trainer.train()
    return loss.seen


def test_each_epoch_of_a_distributed_sampler_has_an_order_of_its_own(tmp_path: Path) -> None:
    ranks = run_ranks(shuffle_by_epoch, 2, str(tmp_path))
    orders = [tuple(one + other) for one, other in zip(*ranks, strict=True)]
    assert len(set(orders)) == 4
    assert all(sorted(order) == list(map(float, range(12))) for order in orders)


def test_a_dataset_hears_of_the_epoch(world: World, tmp_path: Path) -> None:
    streamed = Streamed(0)
    with make_trainer(world, str(tmp_path), DataLoader(streamed, batch_size=1), steps=None, epochs=3) as trainer:
        trainer.train()
    assert streamed.epochs == [0, 1, 2]


def end_apart(world: World, folder: str, accumulate: int) -> Any:
    loss = Noting()
    loader = DataLoader(Streamed(world.rank), batch_size=1)
    options = {"steps": None, "epochs": 3, "schedule": {"shape": "constant"}, "step": {"accumulate": accumulate}}
    with make_trainer(world, folder, loader, loss=loss, **options) as trainer:
        summary = trainer.train()
        return loss.seen, summary.steps, summary.epochs


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_iterables_without_a_length_end_an_epoch_together(tmp_path: Path, accumulate: int) -> None:
    """Rank r has r + 2 batches: two steps of one, or one of two."""
    for seen, steps, epochs in run_ranks(end_apart, 3, str(tmp_path), accumulate):
        assert epochs == 3
        assert steps == 3 * (2 if accumulate == 1 else 1)
        assert seen == [[0.0], [1.0]] * 3
    notes = (tmp_path / "metrics.jsonl").read_text()
    assert "have different lengths" in notes


class TooLong:
    """Rank 1 has three of the four batches that each rank says to have."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(4 - (self.rank == 1)):
            yield {"x": torch.full((2, 2), 0.1), "number": torch.tensor([float(number)] * 2)}


def meet_in_other_epochs(world: World, folder: str, zero: int) -> tuple[str, int]:
    with make_trainer(world, folder, TooLong(world.rank), steps=9, parallel={"zero": zero}) as trainer:
        with pytest.raises(TrainerError) as caught:
            trainer.train()
        return str(caught.value), trainer.progress.step


@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_whose_epochs_come_apart_stop_before_a_weight_changes(tmp_path: Path, zero: int) -> None:
    answers = run_ranks(meet_in_other_epochs, 3, str(tmp_path), zero)
    assert {step for _, step in answers} == {3}
    assert all("are in epochs [0, 1, 0]" in told and "len(loader)" in told for told, _ in answers)


def end_first(world: World, folder: str, options: dict[str, Any]) -> tuple[str, int]:
    loader = TooLong(world.rank)
    if options.get("evaluation"):
        options = {**options, "evaluation": Evaluation(batches=rows(world), metrics=add_up)}
    with make_trainer(world, folder, loader, steps=None, stall_timeout_s=PATIENCE_S, **options) as trainer:
        with pytest.raises(TrainerError) as caught:
            trainer.train()
        assert trainer.progress.step == 3 // options.get("step", {}).get("accumulate", 1)
    with (Path(folder) / "told").open("a") as file:
        file.write(f"{caught.value}\n")
    os._exit(3)  # as a process that fails


@pytest.mark.parametrize(
    "options",
    [
        {"epochs": 1},
        {"epochs": 3, "evaluation": True},
        {"epochs": 1, "parallel": {"zero": 3}, "evaluation": True, "model": nn.Sequential(Line(), nn.BatchNorm1d(2))},
        {"epochs": 3, "parallel": {"zero": 2}, "step": {"accumulate": 2}},
    ],
    ids=["last epoch", "evaluation", "sharded", "accumulated"],
)
def test_a_rank_whose_loader_ends_first_says_so_at_once(tmp_path: Path, options: dict[str, Any]) -> None:
    """Its next collective would not be a step's, and the others would wait for it in theirs."""
    outcomes = Ranks(end_first, 2, str(tmp_path), options).join(AT_ONCE_S)
    assert [outcome.exit_code for outcome in outcomes] == [3, 3], outcomes
    told = (tmp_path / "told").read_text()
    assert "the loader of rank 1 gave 3 batches and len(loader) says 4, and rank 0 has one more" in told


def end_early_together(world: World, folder: str) -> int:
    options: dict[str, Any] = {"steps": None, "epochs": 2, "stall_timeout_s": PATIENCE_S}
    with make_trainer(world, folder, TooLong(1), **options) as trainer:
        return trainer.train().steps


def test_loaders_that_all_end_before_their_length_train(tmp_path: Path) -> None:
    assert run_ranks(end_early_together, 2, str(tmp_path), timeout_s=AT_ONCE_S) == [6, 6]


class OwnPosition:
    """A loader whose position is its rank's own: it skips ahead by the rank's number."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.at < 8 * (self.rank + 1):
            self.at += self.rank + 1
            yield {"x": torch.full((1, 2), 0.1), "number": torch.tensor([float(self.at)])}
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def keep_own_positions(world: World, folder: str, steps: int) -> Any:
    loss = Noting()
    options = {"steps": steps, "checkpoint": {"every_steps": 2}}
    try:
        with make_trainer(world, folder, OwnPosition(world.rank), loss=loss, **options) as trainer:
            trainer.train()
    except ValueError as exc:
        return str(exc)
    return loss.seen


def test_each_ranks_own_loader_state_comes_back(tmp_path: Path) -> None:
    run_ranks(keep_own_positions, 3, str(tmp_path), 4)
    for rank, seen in enumerate(run_ranks(keep_own_positions, 3, str(tmp_path), 7)):
        assert seen == [[float(step * (rank + 1))] for step in (5, 6, 7)]
    for told in run_ranks(keep_own_positions, 2, str(tmp_path), 9):
        assert "loader=OwnPosition" in told
        assert "3 ranks" in told
        assert "2 now" in told


class Drawing:
    """A loader that draws from the global generators, and can continue."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.at < 9:
            self.at += 1
            drawn = [float(torch.rand(())), float(np.random.rand()), random.random()]
            yield {"x": torch.tensor([drawn[:2]]), "number": torch.tensor(drawn, dtype=torch.float64)}
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.slow
def test_a_resumed_run_draws_what_an_unbroken_one_draws(world: World, tmp_path: Path) -> None:
    found = []
    for folder, stops in (("whole", (9,)), ("parts", (4, 9))):
        loss = Noting()
        for steps in stops:
            options = {"steps": steps, "checkpoint": {"every_steps": 2}}
            with make_trainer(world, str(tmp_path / folder), Drawing(), loss=loss, **options) as trainer:
                trainer.train()
            torch.rand(7), np.random.rand(7), random.random()
        found.append(loss.seen)
    assert found[0] == found[1]
    assert len({tuple(drawn) for drawn in found[0]}) == 9


class Sleeping(TooLong):
    """Rank 1's third batch does not come."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number, batch in enumerate(super().__iter__()):
            time.sleep(600 * (number == 2 and self.rank == 1))
            yield batch


def wait_for_a_batch(world: World, folder: str, options: dict[str, Any]) -> None:
    model = nn.Sequential(Line(), nn.BatchNorm1d(2, affine=False))
    with make_trainer(world, folder, Sleeping(world.rank), model, stall_timeout_s=10.0, **options) as trainer:
        trainer.train()


@pytest.mark.parametrize("options", [{"parallel": {"zero": 2}}, {"step": {"microbatch": 2}}], ids=["buffers", "rows"])
def test_a_rank_that_waits_for_anothers_batch_is_not_blamed(tmp_path: Path, options: dict[str, Any]) -> None:
    Ranks(wait_for_a_batch, 2, str(tmp_path), options).join(AT_ONCE_S)
    told = (tmp_path / "stalls" / "stall-rank-0.txt").read_text().splitlines()[0]
    assert "training stops: rank 1 is stalled in fetch (step=2" in told
    assert "rank 0 is stalled" not in told
