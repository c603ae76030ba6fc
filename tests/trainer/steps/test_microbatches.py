"""Batches cut into microbatches, by hand and to what fits: nothing but memory and rounding may notice."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from microbatch_cases import ROWS, LimitedLoss, loader, make, train
from torch import nn

from penstock.trainer import DistributedTrainer, TrainerConfig, World
from penstock.trainer.options import build_config
from penstock.trainer.steps.microbatches import find_largest


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors of some rows are computed faster without others, and rounded alike wherever this runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def notes(folder: Path) -> list[str]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["note"] for line in lines if line["kind"] == "note"]


@given(limit=st.integers(0, 70), most=st.integers(1, 64))
def test_the_largest_that_fits_is_found_in_few_tries(limit: int, most: int) -> None:
    asked: list[int] = []

    def fits(number: int) -> bool:
        asked.append(number)
        return number <= limit

    assert find_largest(fits, most) == min(limit, most)
    assert len(asked) == len(set(asked)) <= 13
    assert all(1 <= number <= most for number in asked)
    assert limit == 0 or min(asked) >= min(most, limit) // 2


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"step": {"accumulate": 2}},
        {"step": {"on_nan": "skip", "clip_norm": 0.1}},
        {"activation": {"every": 1}},
        pytest.param({"compile": {"enabled": True, "backend": "eager"}}, marks=pytest.mark.slow),
        {"average_every": 2},
    ],
    ids=["plain", "accumulate", "skip and clip", "recompute", "compile", "local sgd"],
)
def test_the_largest_that_fits_trains_bit_for_bit_as_the_same_size_given(
    world: World, tmp_path: Path, options: dict[str, Any]
) -> None:
    step = options.pop("step", {})
    adaptive, given_by_hand = LimitedLoss(limit=5), LimitedLoss(limit=5)
    found, trainer = train(world, tmp_path / "found", adaptive, step={**step, "adaptive_batch": True}, **options)
    wanted, _ = train(world, tmp_path / "given", given_by_hand, step={**step, "microbatch": 5}, **options)
    assert same(found, wanted)
    assert adaptive.refused > 0
    assert given_by_hand.refused == 0
    assert max(adaptive.rows) <= 5
    assert trainer.state_dict()["microbatches"]["rows"] == 5
    told = notes(tmp_path / "found")[-1]
    assert "microbatches of 5 rows fit, 6 do not; batches have 16 rows. Batch norms (norm)" in told


@pytest.mark.slow
def test_cut_batches_have_the_gradient_of_whole_ones(world: World, tmp_path: Path) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.line = nn.Linear(4, 1).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.line(x.double())

    weights = {}
    for microbatch in (None, 1, 3, 5, 100):
        with DistributedTrainer(
            Plain(),
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            loader(),
            build_config(
                TrainerConfig,
                {
                    "steps": 9,
                    "output_dir": str(tmp_path / str(microbatch)),
                    "precision": {"dtype": "fp32"},
                    "report": {"quiet": True},
                    "step": {"microbatch": microbatch},
                },
            ),
            loss=LimitedLoss(limit=microbatch or ROWS),
            world=world,
        ) as trainer:
            trainer.train()
            weights[microbatch] = trainer.parallel.inner.line.weight.detach().clone()
    assert torch.equal(weights[100], weights[None])
    for microbatch in (1, 3, 5):
        torch.testing.assert_close(weights[microbatch], weights[None], rtol=1e-12, atol=0)


def test_the_search_leaves_model_optimizer_random_numbers_and_position_as_they_were(
    world: World, tmp_path: Path
) -> None:
    loss = LimitedLoss(limit=5)
    with make(world, tmp_path, loss, step={"adaptive_batch": True}) as trainer:
        inner, batches = trainer.parallel.inner, trainer._feed.take(0)
        kept = dict(inner.named_buffers())
        inner.out.weight.grad = torch.ones_like(inner.out.weight)
        before = (
            {name: value.clone() for name, value in [*inner.named_parameters(), *kept.items()]},
            torch.get_rng_state(),
            str(np.random.get_state()),
            random.getstate(),
            trainer._feed.state_dict(),
            trainer.steps.state_dict(),
        )
        parts = trainer._microbatches.make(batches, lambda text: None)
        assert [len(part["x"]) for part in parts] == [4, 4, 4, 4]
        assert loss.refused > 0
        after = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
        assert same({name: value.detach() for name, value in after.items()}, before[0])
        assert all(buffer is kept[name] for name, buffer in inner.named_buffers())
        gradients = {name: one.grad for name, one in inner.named_parameters() if one.grad is not None}
        assert list(gradients) == ["out.weight"]
        assert torch.equal(gradients["out.weight"], torch.ones_like(inner.out.weight))
        assert torch.equal(torch.get_rng_state(), before[1])
        assert str(np.random.get_state()) == before[2]
        assert random.getstate() == before[3]
        assert (trainer._feed.state_dict(), trainer.steps.state_dict()) == before[4:]
        assert not trainer.optimizer.state


@pytest.mark.slow
def test_what_was_found_is_kept_by_a_resumed_run_and_found_again_on_other_memory(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"step": {"adaptive_batch": True}, "checkpoint": {"every_steps": 3}}
    unbroken, _ = train(world, tmp_path / "unbroken", LimitedLoss(limit=5), **options)
    train(world, tmp_path / "run", LimitedLoss(limit=5), **{**options, "steps": 3})
    resumed = LimitedLoss(limit=5)
    found, _ = train(world, tmp_path / "run", resumed, **options)
    assert same(found, unbroken | {"calls": found["calls"]})
    assert resumed.refused == 0, "what was known was tried again"
    monkeypatch.setattr("penstock.trainer.parts.describe_memory", lambda *given: "another device")
    elsewhere = LimitedLoss(limit=7)
    _, trainer = train(world, tmp_path / "run", elsewhere, **{**options, "steps": 9})
    assert trainer.state_dict()["microbatches"] == {
        "rows": 7,
        "tried": 16,
        "memory": ["another device"],
        "alone": False,
    }
    assert elsewhere.refused > 0


def test_batches_that_become_larger_than_was_tried_are_tried(world: World, tmp_path: Path) -> None:
    class Growing:
        def __iter__(self) -> Any:
            return iter([{"x": torch.ones(rows, 4), "y": torch.ones(rows)} for rows in (4, 16, 12, 16)])

    loss = LimitedLoss(limit=8)
    _, trainer = train(world, tmp_path, loss, batches=Growing(), steps=4, step={"adaptive_batch": True})
    assert trainer.state_dict()["microbatches"]["rows"] == 8
    assert max(loss.rows) == 8


class GradientLoss(LimitedLoss):
    """A loss for whose device so many rows are too many while gradients are kept."""

    def __init__(self, beside_gradients: int) -> None:
        super().__init__()
        self.beside_gradients = beside_gradients

    def __call__(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        if len(batch["x"]) > self.beside_gradients and any(one.grad is not None for one in model.parameters()):
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().__call__(model, batch)


@pytest.mark.slow
def test_what_fitted_alone_is_tried_again_where_gradients_of_others_are_kept(world: World, tmp_path: Path) -> None:
    class Growing:
        def __iter__(self) -> Any:
            return iter([{"x": torch.ones(rows, 4), "y": torch.ones(rows)} for rows in (16, 12, 32, 16)])

    loss, step = GradientLoss(8), {"adaptive_batch": True, "microbatch": 16}
    _, trainer = train(world, tmp_path / "growing", loss, batches=Growing(), steps=4, step=step)
    assert loss.rows[:2] == [0, 16]
    assert trainer.state_dict()["microbatches"]["rows"] == 8
    found = []
    for steps, accumulate in ((2, 1), (3, 2)):
        step = {"adaptive_batch": True, "accumulate": accumulate}
        options = {"step": step, "steps": steps, "checkpoint": {"every_steps": 1}}
        _, trainer = train(world, tmp_path / "run", GradientLoss(8), **options)
        found.append(trainer.state_dict()["microbatches"]["rows"])
    assert found == [16, 8]


def test_the_search_goes_no_further_than_microbatch_says(world: World, tmp_path: Path) -> None:
    loss = LimitedLoss()
    _, trainer = train(world, tmp_path, loss, step={"adaptive_batch": True, "microbatch": 6})
    assert trainer.state_dict()["microbatches"]["rows"] == 6
    assert max(loss.rows) == 6


@pytest.mark.parametrize(
    "words",
    [
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA error: out of memory",
    ],
)
def test_memory_that_a_library_lacks_is_memory_too(world: World, tmp_path: Path, words: str) -> None:
    loss = LimitedLoss(5, RuntimeError(words))
    _, trainer = train(world, tmp_path, loss, step={"adaptive_batch": True})
    assert trainer.state_dict()["microbatches"]["rows"] == 5


@pytest.mark.parametrize("is_short", [True, False])
def test_an_engine_that_cudnn_does_not_find_is_memory_where_the_allocator_had_none(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_short: bool
) -> None:
    loss = LimitedLoss(5, RuntimeError("GET was unable to find an engine to execute this computation"))
    monkeypatch.setattr("penstock.trainer.steps.probe._count_refusals", lambda device: loss.refused if is_short else 3)
    if is_short:
        _, trainer = train(world, tmp_path, loss, step={"adaptive_batch": True})
        assert trainer.state_dict()["microbatches"]["rows"] == 5
    else:
        with pytest.raises(RuntimeError, match="unable to find an engine"):
            train(world, tmp_path, loss, step={"adaptive_batch": True})
