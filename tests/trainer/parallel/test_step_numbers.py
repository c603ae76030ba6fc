"""Numbers that modules tell of a step: the largest, the least or the mean over modules and steps, in its records."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainers import Line, make_trainer
from torch import nn

from penstock.trainer import Observer, TrainerConfigError, World
from penstock.trainer.parallel.step_numbers import StepNumbers


class Telling(nn.Module):
    def __init__(self, *told: Any) -> None:
        super().__init__()
        self.told = list(told)

    def describe_step(self) -> Any:
        return self.told.pop(0)


def test_names_say_how_modules_and_steps_are_put_together() -> None:
    nothing = torch.tensor(math.nan)
    first = Telling({"load_max": 2.0, "load_min": torch.tensor([0.5]), "depth": 1}, {"load_max": nothing, "depth": 4})
    second = Telling({"load_max": nothing, "load_min": 0.75, "depth": nothing, "none": nothing}, {"load_max": 3.0})
    numbers = StepNumbers(nn.ModuleList([first, nn.Linear(2, 2), second]))
    numbers.gather()
    numbers.gather()
    assert numbers.take() == {"load_max": 3.0, "load_min": 0.5, "depth": 2.5}
    assert numbers.take() == {}


@pytest.mark.parametrize(
    ("told", "error"),
    [
        ([1.0], r"0 \(Telling\): describe_step\(\) returned a list; return a mapping of names to numbers"),
        ({"x": "much"}, "returned 'much' for 'x'"),
        ({"x": torch.ones(2)}, r"returned tensor\(\[1., 1.\]\) for 'x'"),
    ],
)
def test_other_results_are_refused_by_name(told: Any, error: str) -> None:
    with pytest.raises(TrainerConfigError, match=error):
        StepNumbers(nn.ModuleList([Telling(told)])).gather()


def test_records_have_them_behind_numbers_of_the_same_name(world: World, tmp_path: Path) -> None:
    class TellingLine(Line):
        steps = 0

        def describe_step(self) -> dict[str, float]:
            self.steps += 1
            return {"steps_max": self.steps, "loss": -1.0}

    class Notes(Observer):
        def __init__(self) -> None:
            self.found: list[tuple[Any, bool]] = []

        def record(self, kind: str, step: int, values: Any) -> None:
            if kind == "train":
                self.found.append((values["steps_max"], values["loss"] > 0))

        def close(self) -> None:
            pass

    notes = Notes()
    with make_trainer(world, str(tmp_path), model=TellingLine(), observers=[notes], report={"every": 2}) as trainer:
        trainer.train()
    assert notes.found == [(2.0, True), (4.0, True)]
