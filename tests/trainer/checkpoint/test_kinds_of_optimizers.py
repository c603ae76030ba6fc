"""Optimizers that keep state or settings in ways of their own resume as they were."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainers import Line, make_trainer, rows
from torch import nn

from penstock.trainer import World

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Late(nn.Module):
    """Uses ``late`` for rows from number 13 on, which come with the third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.late = Line(), Line()

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        found = self.line(x)
        return self.late(found) if float(number.min()) > 12 else found


def late(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return model(batch["x"], batch["number"]).square().sum(), len(batch["x"])


class Anchored(torch.optim.Optimizer):
    """Averages towards a point that begins where the weight was at its first gradient, as ScheduleFree does."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    z = state.setdefault("z", parameter.clone())
                    z.sub_(parameter.grad, alpha=group["lr"])
                    parameter.lerp_(z, 0.5)


class Rounded(torch.optim.Optimizer):
    """Keeps its momentum in half precision, where a gradient was ever positive, and as text what it does."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                    state["grows"] = torch.zeros_like(parameter, dtype=torch.bool)
                    state["way"] = "down"
                state["momentum"].mul_(0.9).add_(parameter.grad)
                state["grows"] |= parameter.grad > 0
                assert state["way"] == "down"
                parameter.sub_(state["momentum"].float(), alpha=group["lr"])
                parameter.mul_(1.0 - 0.01 * state["grows"])


class InGroups(torch.optim.Optimizer):
    """Has all its settings in its groups and no defaults."""

    def __init__(self, parameters: Iterable[nn.Parameter], momentum: float = 0.5) -> None:
        settings = {"lr": 0.1, "momentum": momentum, "rows": [1, 2]}
        super().__init__([{"params": list(parameters), **settings}], {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    momentum.mul_(group["momentum"]).add_(parameter.grad)
                    parameter.sub_(momentum, alpha=group["lr"])


def train(world: World, folder: Path, optimizer: Make, steps: int, **options: Any) -> tuple[torch.Tensor, Any]:
    values = {"checkpoint": {"every_steps": 2}, "loss": late, "schedule": {"warmup_steps": 2}, **options}
    loader = rows(world, shuffle=False)
    with make_trainer(world, str(folder), loader, Late(), optimizer=optimizer, steps=steps, **values) as trainer:
        trainer.train()
        weights = [getattr(one, "full_tensor", lambda one=one: one)() for one in trainer.parallel.inner.parameters()]
        return torch.cat([one.detach().flatten() for one in weights]), trainer


def nadam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.NAdam(parameters, lr=0.1)


def dampened(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("optimizer", [nadam, dampened, Anchored, Rounded, InGroups])
def test_a_run_resumes_bit_equal_where_a_parameter_was_not_used_before(
    world: World, tmp_path: Path, optimizer: Make, zero: int
) -> None:
    whole, _ = train(world, tmp_path / "whole", optimizer, 4, parallel={"zero": zero})
    train(world, tmp_path / "parts", optimizer, 2, parallel={"zero": zero})
    parts, _ = train(world, tmp_path / "parts", optimizer, 4, parallel={"zero": zero})
    assert torch.equal(parts, whole)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [nadam, dampened, Anchored])
def test_a_save_before_the_first_step_resumes_as_a_run_that_begins(
    world: World, tmp_path: Path, optimizer: Make
) -> None:
    whole, _ = train(world, tmp_path / "whole", optimizer, 2)
    options: dict[str, Any] = {"optimizer": optimizer, "loss": late, "steps": 2, "schedule": {"warmup_steps": 2}}
    loader = rows(world, shuffle=False)
    with make_trainer(
        world, str(tmp_path / "saved"), loader, Late(), checkpoint={"every_steps": 2}, **options
    ) as trainer:
        trainer._saver.save(0, trainer._gather_state(), blocking=True)
    saved, _ = train(world, tmp_path / "saved", optimizer, 2)
    assert torch.equal(saved, whole)


def test_settings_that_groups_have_beside_the_defaults_are_those_of_now_and_told(world: World, tmp_path: Path) -> None:
    train(world, tmp_path, InGroups, 2)
    _, trainer = train(world, tmp_path, lambda parameters: InGroups(parameters, momentum=0.25), 3)
    assert trainer.optimizer.param_groups[0]["momentum"] == 0.25
    assert trainer._saver.checkpointer.changed_settings == ["optimizer group 0: momentum=0.25; the checkpoint had 0.5"]


def with_tensor(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.1))


def with_number(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.2)


def with_name(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": list(parameters), "name": "all", "made_by": with_name}], lr=0.2)


@pytest.mark.parametrize(("first", "second"), [(with_tensor, with_number), (with_number, with_name)])
def test_settings_that_a_checkpoint_lacks_or_has_in_another_form_are_those_of_now(
    world: World, tmp_path: Path, first: Make, second: Make
) -> None:
    train(world, tmp_path, first, 2)
    _, trainer = train(world, tmp_path, second, 4)
    (group,) = trainer.optimizer.param_groups
    (wanted,) = second([nn.Parameter(torch.ones(1))]).param_groups
    assert {**group, "params": []} == {**wanted, "params": []}
    assert {float(state["step"]) for state in trainer.optimizer.state.values()} == {4.0, 2.0}


@pytest.mark.slow
def test_another_optimizer_that_keeps_the_same_state_is_told(world: World, tmp_path: Path) -> None:
    def notes_of(optimizer: Any, steps: int) -> list[str]:
        train(world, tmp_path, lambda parameters: optimizer(parameters, lr=0.1), steps)
        records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        return [one["note"] for one in records if "optimizer is" in one.get("note", "")]

    assert notes_of(torch.optim.Adam, 2) == notes_of(torch.optim.Adam, 3) == []
    (note,) = notes_of(torch.optim.RAdam, 4)
    assert "the optimizer is RAdam; the checkpoint had Adam" in note


@pytest.mark.slow
@pytest.mark.parametrize("empty", [(0,), (1,), (2,), (0, 2)])
def test_groups_without_parameters_resume_wherever_they_are(
    world: World, tmp_path: Path, empty: tuple[int, ...]
) -> None:
    def grouped(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        them = list(parameters)
        groups: list[dict[str, Any]] = [{"params": them[:1], "weight_decay": 0.5}, {"params": them[1:], "lr": 0.02}]
        for number in empty:
            groups.insert(number, {"params": [], "weight_decay": 0.25})
        return torch.optim.AdamW(groups, lr=0.1)

    whole, _ = train(world, tmp_path / "whole", grouped, 4)
    train(world, tmp_path / "parts", grouped, 2)
    parts, trainer = train(world, tmp_path / "parts", grouped, 4)
    assert torch.equal(parts, whole)
    assert [trainer.optimizer.param_groups[number]["weight_decay"] for number in empty] == [0.25] * len(empty)
