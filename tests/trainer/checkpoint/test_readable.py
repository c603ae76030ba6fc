"""What is saved can be read back, or is refused by name before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import Line, rows, square

from penstock.trainer import CheckpointError, DistributedTrainer, TrainerConfig, World
from penstock.trainer.options import build_config


class Extra(Line):
    """Counts its forwards in an extra state whose form changes with use."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = {"calls": 0, "history": []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["calls"] += 1
        self.seen["history"].append(torch.full((2,), float(self.seen["calls"])))
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class WithState(torch.optim.SGD):
    """Keeps more state than SGD does."""

    def __init__(self, parameters: Any, keep: Callable[[dict[Any, Any], Any], None]) -> None:
        super().__init__(parameters, lr=0.1)
        self._keep = keep

    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self._keep(self.state, parameter)


def make(world: World, folder: str, model: Any, steps: int, optimizer: Any = torch.optim.SGD, zero: int = 0) -> Any:
    values = {
        "steps": steps,
        "output_dir": folder,
        "precision": {"dtype": "fp32"},
        "checkpoint": {"every_steps": 1},
        "parallel": {"zero": zero},
        "report": {"quiet": True},
    }
    return DistributedTrainer(
        model, optimizer, rows(world), build_config(TrainerConfig, values), loss=square, world=world
    )


def resume_extra_state(world: World, folder: str, zero: int) -> Any:
    with make(world, folder, Extra(), 3, zero=zero) as trainer:
        trainer.train()
    with make(world, folder, model := Extra(), 3, zero=zero):
        return {"calls": model.seen["calls"], "history": [one.tolist() for one in model.seen["history"]]}


@pytest.mark.parametrize("zero", [0, 3])
def test_the_extra_state_of_modules_comes_back_whatever_its_form(tmp_path: Path, zero: int) -> None:
    wanted = {"calls": 3, "history": [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]}
    assert run_ranks(resume_extra_state, 2, str(tmp_path), zero) == [wanted] * 2


def test_extra_state_that_cannot_be_pickled_is_refused_by_module(world: World, tmp_path: Path) -> None:
    class Odd(Line):
        def get_extra_state(self) -> Any:
            return lambda: None

    with (
        make(world, str(tmp_path), torch.nn.Sequential(Line(), Odd()), 3) as trainer,
        pytest.raises(CheckpointError, match="get_extra_state of 1 returns what cannot be pickled"),
    ):
        trainer.train()


class Chosen(torch.nn.Module):
    """A frozen part and a trained one, of which its state dict gives what ``keeps`` says, after ``prefix``."""

    def __init__(self, keeps: str, prefix: str = "") -> None:
        super().__init__()
        self.frozen, self.trained, self.keeps, self.prefix = Line(), Line(), keeps, prefix
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(self.frozen(x))

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        whole = super().state_dict(*args, **options)
        return {self.prefix + name: one for name, one in whole.items() if name.startswith(self.keeps)}


@pytest.mark.parametrize("zero", [0, 3])
def test_a_state_dict_may_leave_out_what_is_frozen(world: World, tmp_path: Path, zero: int) -> None:
    found = []
    for folder, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        with make(world, str(tmp_path / folder), Chosen("trained"), steps, zero=zero) as trainer:
            trainer.train()
            weight = next(trainer.parallel.inner.trained.parameters())  # type: ignore[operator,union-attr]
            found.append(getattr(weight, "full_tensor", lambda weight=weight: weight)().tolist())
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize(
    ("keeps", "prefix", "message"),
    [
        ("frozen", "", r"state_dict\(\) leaves out trained.line.weight, trained.line.bias, which training changes"),
        ("", "net.", r"state_dict\(\) has names that are not those of its modules \(.*'net'"),
    ],
)
def test_a_state_dict_that_lacks_what_is_trained_is_refused_at_the_first_save(
    world: World, tmp_path: Path, keeps: str, prefix: str, message: str
) -> None:
    with (
        make(world, str(tmp_path), Chosen(keeps, prefix), 3) as trainer,
        pytest.raises(CheckpointError, match=message),
    ):
        trainer.train()
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def keep_list(state: dict[Any, Any], parameter: Any) -> None:
    state[parameter]["history"] = [torch.ones(1)]


def keep_dict(state: dict[Any, Any], parameter: Any) -> None:
    state[parameter]["by_name"] = {"x": torch.ones(1)}


def keep_by_text(state: dict[Any, Any], parameter: Any) -> None:
    state["global"] = {"n": torch.ones(1)}


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (keep_list, r"optimizer=WithState keeps a list as 'history' of line\.(weight|bias)"),
        (keep_dict, r"optimizer=WithState keeps a dict as 'by_name' of line\."),
        (keep_by_text, r"optimizer=WithState keeps state by 'global', which is none of its parameters"),
    ],
)
def test_optimizer_state_that_could_not_be_read_back_is_refused_before_anything_is_written(
    world: World, tmp_path: Path, keep: Any, message: str
) -> None:
    with (
        make(world, str(tmp_path), Line(), 3, lambda parameters: WithState(parameters, keep)) as trainer,
        pytest.raises(CheckpointError, match=message),
    ):
        trainer.train()
    assert not list((tmp_path / "checkpoints").glob("step-*"))
