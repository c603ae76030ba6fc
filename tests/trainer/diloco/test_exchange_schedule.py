"""Turns of fragments, how a model is cut into them, and options of learners that cannot be."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_cases import Pair, open_trainer, train
from torch import nn

from penstock.trainer import DilocoConfig, ParallelConfig, TrainerConfig, TrainerConfigError, World
from penstock.trainer.diloco.outer import OuterOptimizer
from penstock.trainer.diloco.schedule import ExchangeSchedule, cut_fragments
from penstock.trainer.options import build_config
from penstock.trainer.ranks.mesh import MeshSizes


@given(st.integers(1, 40), st.integers(1, 40))
def test_every_fragment_has_one_turn_in_as_many_steps_and_the_last_has_the_last(every: int, fragments: int) -> None:
    if fragments > every:
        return
    schedule = ExchangeSchedule(every=every, fragments=fragments, overlap=0)
    for round_ in range(3):
        turns = [schedule.starting_after(every * round_ + step) for step in range(1, every + 1)]
        assert [turn for turn in turns if turn is not None] == list(range(fragments))
        assert turns[-1] == fragments - 1
        at = [step for step, turn in enumerate(turns) if turn is not None]
        gaps = [later - one for one, later in itertools.pairwise(at)]
        assert all(abs(gap - every / fragments) < 1 for gap in gaps)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.data())
def test_fragments_are_consecutive_and_the_largest_is_as_small_as_can_be(sizes: list[int], data: st.DataObject) -> None:
    fragments = data.draw(st.integers(1, len(sizes)))
    found = cut_fragments(sizes, fragments)
    assert [index for part in found for index in part] == list(range(len(sizes)))
    assert len(found) == fragments
    assert all(found)
    assert max(sum(sizes[index] for index in part) for part in found) == smallest(tuple(sizes), fragments)


def smallest(sizes: tuple[int, ...], fragments: int) -> int:
    """The smallest largest sum, by trying all cuts."""
    if fragments == 1:
        return sum(sizes)
    cuts = range(1, len(sizes) - fragments + 2)
    return min(max(sum(sizes[:cut]), smallest(sizes[cut:], fragments - 1)) for cut in cuts)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_outer_steps_are_those_of_torch_s_sgd_whether_by_fragments_or_whole(momentum: float) -> None:
    config = DilocoConfig(rate=0.7, momentum=momentum)
    torch.manual_seed(0)
    model = Pair()
    named = dict(model.named_parameters())
    whole, cut = OuterOptimizer(named, config), OuterOptimizer(named, config)
    theirs = [one.detach().clone().requires_grad_() for one in named.values()]
    reference = torch.optim.SGD(theirs, lr=0.7, momentum=momentum, nesterov=momentum > 0)
    for _ in range(3):
        gradients = [torch.randn_like(one) for one in theirs]
        for one, gradient in zip(theirs, gradients, strict=True):
            one.grad = gradient
        reference.step()
        whole.step(list(named), torch.cat([one.flatten() for one in gradients]))
        for names, part in ((list(named)[:2], gradients[:2]), (list(named)[2:], gradients[2:])):
            cut.step(names, torch.cat([one.flatten() for one in part]))
        for name, expected in zip(named, theirs, strict=True):
            assert torch.equal(whole.weights[name], cut.weights[name])
            torch.testing.assert_close(whole.weights[name], expected.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learners": 0}, "parallel.diloco.learners=0 is out of range"),
        ({"every": 0}, "parallel.diloco.every=0 is out of range"),
        ({"rate": 0.0}, "parallel.diloco.rate=0.0 is out of range; give a number above 0"),
        ({"momentum": 1.0}, "parallel.diloco.momentum=1.0 would never forget"),
        ({"alpha": 1.0}, "parallel.diloco.alpha=1.0 would take nothing from other learners"),
        ({"every": 4, "fragments": 5}, "parallel.diloco.fragments=5 are exchanged one a step at most"),
        ({"every": 9, "fragments": 3, "overlap": 3}, "parallel.diloco.overlap=3 must be less than the 3 steps"),
        ({"codec": "int4"}, "parallel.diloco.codec='int4': must be 'fp32', 'bf16' or 'int8'"),
    ],
)
def test_exchanges_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainerConfigError, match=re.escape(message)):
        DilocoConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average_every": 4}, "average_every=4 with parallel.mode='diloco': it is local SGD"),
        ({"compression": {"scheme": "int8"}}, "compression.scheme='int8' with parallel.mode='diloco'"),
        ({"shares": "auto"}, "shares='auto' with parallel.mode='diloco'"),
        ({"parallel": {"mode": "diloco", "tp": 2}}, "parallel.mode='diloco' with parallel.tp=2"),
        ({"parallel": {"diloco": {"every": 5}}}, "parallel.diloco says how learners train apart"),
        ({"parallel": {"mode": "parameters"}}, "parallel.mode='parameters': must be 'allreduce'"),
    ],
)
def test_options_that_contradict_learners_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainerConfigError, match=re.escape(message)):
        build_config(TrainerConfig, {"steps": 1, "parallel": {"mode": "diloco"}, **options})


def test_learners_are_nodes_ranks_or_as_many_as_are_given() -> None:
    by_default = ParallelConfig(mode="diloco")
    assert by_default.fill(4) == MeshSizes(dp=4, learners=4)
    assert by_default.fill(4, num_nodes=2) == MeshSizes(dp=4, learners=2)
    assert ParallelConfig(mode="diloco", diloco=DilocoConfig(learners=2)).fill(6) == MeshSizes(dp=6, learners=2)
    with pytest.raises(TrainerConfigError, match=r"parallel\.diloco\.learners=4 divides the ranks .* there are 6"):
        ParallelConfig(mode="diloco", diloco=DilocoConfig(learners=4)).fill(6)


def test_more_fragments_than_parameters_are_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(TrainerConfigError, match=r"parallel\.diloco\.fragments=5 is more than the 4 parameters"):
        open_trainer(world, str(tmp_path), {"fragments": 5})


@pytest.mark.slow
def test_one_learner_may_look_ahead_and_resumes_bit_equal(world: World, tmp_path: Path) -> None:
    diloco = {"every": 3, "fragments": 2, "rate": 0.5, "momentum": 0.5, "overlap": 0, "alpha": 0.5}
    saved = {"checkpoint": {"every_steps": 2, "folder": "saved"}}
    whole = train(world, str(tmp_path / "whole"), diloco, **saved)
    train(world, str(tmp_path / "cut"), diloco, **saved, steps=5)
    found = train(world, str(tmp_path / "cut"), diloco, **saved)
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    plain = train(world, str(tmp_path / "plain"))
    assert any(not torch.equal(plain[name], whole[name]) for name in whole)
    wide = train(world, str(tmp_path / "wide"), diloco, model=Wide())
    assert wide["phases"].is_complex()


class Wide(nn.Module):
    """Weights of several formats."""

    def __init__(self) -> None:
        super().__init__()
        self.long = nn.Parameter(torch.ones(4, 2, dtype=torch.float64))
        self.phases = nn.Parameter(torch.ones(4, 2, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * (x.double() @ self.long + (x @ self.phases.real)).float()
