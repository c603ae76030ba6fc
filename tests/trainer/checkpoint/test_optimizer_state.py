"""Saving and resuming leave the optimizer as it is: its weights, its steps, and the settings that were given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import Line, rows, square

from penstock.trainer import CheckpointMismatchError, DistributedTrainer, TrainerConfig, World
from penstock.trainer.options import build_config
from penstock.trainer.run import saver


class Stubborn(torch.optim.Optimizer):
    """Decays weights at a rate of its own, whatever ``lr`` says, and counts its steps in a group and as a plain int."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.param_groups[0]["steps"] = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["seen"] = state.get("seen", 0) + 1
                    parameter.mul_(0.9).sub_(parameter.grad, alpha=0.1 / state["seen"])


def make(
    world: World, folder: str, optimizer: Any, model: torch.nn.Module | None = None, **options: Any
) -> DistributedTrainer:
    values = {
        "steps": 4,
        "output_dir": folder,
        "precision": {"dtype": "fp32"},
        "checkpoint": {"every_steps": 2},
        "report": {"quiet": True},
        **options,
    }
    return DistributedTrainer(
        model or Line(),
        optimizer,
        rows(world, with_ids=True),
        build_config(TrainerConfig, values),
        loss=square,
        world=world,
    )


def weights_of(trainer: DistributedTrainer) -> torch.Tensor:
    return torch.cat(
        [
            (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().flatten()
            for parameter in trainer.parallel.inner.parameters()
        ]
    )


def save_before_the_first_step(world: World, folder: str, zero: int) -> list[list[float]]:
    found = []
    for name, saves in (("plain", False), ("saved", True)):
        with make(world, f"{folder}/{name}", Stubborn, parallel={"zero": zero}) as trainer:
            if saves:
                trainer._saver.save(trainer.progress.step, trainer._gather_state(), blocking=True)
                assert not trainer.optimizer.state
            trainer.train()
            found.append(weights_of(trainer).tolist())
    with make(world, f"{folder}/unsteady", Stubborn, parallel={"zero": zero}) as trainer:
        trainer._saver.save(trainer.progress.step, trainer._gather_state(), blocking=True)
    with make(world, f"{folder}/unsteady", Stubborn, parallel={"zero": zero}) as trainer:
        trainer.train()
        found.append(weights_of(trainer).tolist())
    return found


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_save_before_the_first_step_changes_no_training(tmp_path: Path, zero: int) -> None:
    for plain, saved, resumed in run_ranks(save_before_the_first_step, 2, str(tmp_path), zero):
        assert saved == plain
        assert resumed == plain


def test_an_optimizer_that_ignores_its_rate_resumes_bit_equal(world: World, tmp_path: Path) -> None:
    with make(world, str(tmp_path / "whole"), Stubborn) as whole:
        whole.train()
        expected = weights_of(whole)
    with make(world, str(tmp_path / "parts"), Stubborn, steps=2) as first:
        first.train()
    with make(world, str(tmp_path / "parts"), Stubborn) as second:
        second.train()
        assert torch.equal(weights_of(second), expected)


def adam(**settings: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.1, **settings)


def test_a_resumed_run_takes_the_settings_it_is_given_and_says_what_differs(world: World, tmp_path: Path) -> None:
    with make(world, str(tmp_path), adam(weight_decay=0.5, betas=(0.9, 0.99)), steps=2) as first:
        first.train()
    with make(world, str(tmp_path), adam(weight_decay=0.25, betas=(0.8, 0.99))) as second:
        assert second.optimizer.param_groups[0]["weight_decay"] == 0.25
        assert tuple(second.optimizer.param_groups[0]["betas"]) == (0.8, 0.99)
        assert second._saver.checkpointer is not None
        assert sorted(second._saver.checkpointer.changed_settings) == [
            "optimizer group 0: betas=(0.8, 0.99), where the checkpoint had (0.9, 0.99)",
            "optimizer group 0: weight_decay=0.25, where the checkpoint had 0.5",
        ]
        assert all(float(state["step"]) == 2 for state in second.optimizer.state.values())
    with make(world, str(tmp_path), adam(weight_decay=0.5, betas=(0.9, 0.99))) as same:
        assert same._saver.checkpointer is not None
        assert same._saver.checkpointer.changed_settings == []


class Adapting(torch.optim.Optimizer):
    """Keeps what it has learnt, and how often it stepped, among its settings, as Prodigy and ScheduleFree do."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, decay: float = 0.1, d: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": 1.0, "decay": decay, "d": d, "k": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 1.5
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["decay"] / group["k"]).sub_(parameter.grad, alpha=group["lr"] * group["d"])


def test_what_an_optimizer_learns_among_its_settings_resumes_bit_equal(world: World, tmp_path: Path) -> None:
    with make(world, str(tmp_path / "whole"), Adapting) as whole:
        whole.train()
        expected = weights_of(whole)
    with make(world, str(tmp_path / "parts"), Adapting, steps=2) as first:
        first.train()
    with make(world, str(tmp_path / "parts"), Adapting) as second:
        assert second.optimizer.param_groups[0]["k"] == 2
        assert second._saver.checkpointer is not None
        assert second._saver.checkpointer.changed_settings == []
        second.train()
        assert torch.equal(weights_of(second), expected)


def test_a_setting_that_is_given_anew_replaces_what_was_learnt_and_the_others_stay(
    world: World, tmp_path: Path
) -> None:
    with make(world, str(tmp_path), Adapting, steps=2) as first:
        first.train()
    with make(world, str(tmp_path), lambda parameters: Adapting(parameters, decay=0.2, d=5e-3)) as second:
        group = second.optimizer.param_groups[0]
        assert (group["k"], group["decay"], group["d"]) == (2, 0.2, 5e-3)
        assert second._saver.checkpointer is not None
        assert sorted(second._saver.checkpointer.changed_settings) == [
            "optimizer group 0: d=0.005, where the checkpoint had 0.0225",
            "optimizer group 0: decay=0.2, where the checkpoint had 0.1",
        ]


def test_a_setting_that_a_run_changed_itself_is_what_it_resumes_with(world: World, tmp_path: Path) -> None:
    with make(world, str(tmp_path), adam(weight_decay=0.5), steps=2) as first:
        first.optimizer.param_groups[0]["weight_decay"] = 0.125
        first.train()
    with make(world, str(tmp_path), adam(weight_decay=0.5)) as second:
        assert second.optimizer.param_groups[0]["weight_decay"] == 0.125


def test_a_checkpoint_that_does_not_tell_what_was_given_takes_the_settings_of_now(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(saver, "copy_settings", lambda optimizer: None)  # as releases of before saved
        with make(world, str(tmp_path), Adapting, steps=2) as first:
            first.train()
    with make(world, str(tmp_path), lambda parameters: Adapting(parameters, decay=0.2)) as second:
        group = second.optimizer.param_groups[0]
        assert (group["k"], group["decay"], group["d"]) == (0, 0.2, 1e-2)
        assert second.progress.step == 2
        assert second._saver.checkpointer is not None
        assert len(second._saver.checkpointer.changed_settings) == 3


def test_other_parameter_groups_are_refused_by_name(world: World, tmp_path: Path) -> None:
    with make(world, str(tmp_path), adam(), steps=2) as first:
        first.train()

    def two_groups(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        weight, bias = parameters
        return torch.optim.AdamW([{"params": [weight]}, {"params": [bias], "weight_decay": 0.0}], lr=0.1)

    with pytest.raises(CheckpointMismatchError, match=r"1 parameter group.* 2"):
        make(world, str(tmp_path), two_groups)


def test_parameters_that_are_grouped_otherwise_keep_their_state_and_take_the_groups_that_are_given(
    world: World, tmp_path: Path
) -> None:
    def grouped(first: int) -> Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]:
        def make_groups(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
            them = list(parameters)
            return torch.optim.AdamW([{"params": them[:first]}, {"params": them[first:], "lr": 0.02}], lr=0.1)

        return make_groups

    model = {"model": torch.nn.Sequential(Line(), torch.nn.Linear(2, 1))}
    with make(world, str(tmp_path), grouped(3), **model) as trainer:
        trainer.train()
        expected = [one["exp_avg"].clone() for one in trainer.optimizer.state.values()]
    for first in (1, 2, 3):
        with make(world, str(tmp_path), grouped(first), **model) as trainer:
            assert trainer.progress.step == 4
            found = [trainer.optimizer.state[one]["exp_avg"] for one in trainer.parallel.inner.parameters()]
            assert all(map(torch.equal, found, expected))
            groups = trainer.optimizer.param_groups
            assert [(len(group["params"]), group["lr"]) for group in groups] == [(first, 0.1), (4 - first, 0.02)]
