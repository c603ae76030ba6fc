"""Parameters that only some ranks use in a step: right at every zero stage, or refused by name."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import make_trainer, rows
from torch import nn
from torch.distributed.fsdp import FSDPModule

from penstock.trainer import TrainerError, World


class Expert(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        nn.init.constant_(self.line.weight, 0.1 * (number + 1))
        nn.init.zeros_(self.line.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.line(x))


class Layer(nn.Module):
    """Each row goes to one of three experts by its number; an expert without rows does not run."""

    def __init__(self, experts: list[nn.Module] | nn.ModuleList) -> None:
        super().__init__()
        self.experts = experts if isinstance(experts, nn.ModuleList) else nn.ModuleList(experts)
        self.never = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        for number, expert in enumerate(self.experts):
            chosen = choice == number
            if chosen.any():
                out[chosen] = expert(x[chosen]).to(out.dtype)
        return out


class Routed(nn.Module):
    """Experts inside layers, which a ModuleList holds; ``flat``: experts that the list itself holds."""

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.flat = flat
        experts = nn.ModuleList(Expert(number) for number in range(3))
        self.layers = experts if flat else nn.ModuleList([Layer(experts), Layer([Expert(n) for n in range(3)])])
        self.head = nn.Linear(2, 2)
        nn.init.constant_(self.head.weight, 0.3)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        if self.flat:
            return self.head(Layer.forward(Wrapped(self.layers), x, choice))  # type: ignore[arg-type]
        for layer in self.layers:
            x = layer(x, choice)
        return self.head(x)


class Wrapped:
    def __init__(self, experts: nn.ModuleList) -> None:
        self.experts = experts


def route(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Experts 0 and 1 by single rows, so that ranks differ; expert 2 from row 13 on: in some steps nobody runs it."""
    number = batch["number"].long()
    choice = torch.where(number > 12, 2, number % 2)
    return model(batch["x"], choice).float().square().sum(), len(number)


def train(world: World, zero: int, accumulate: int, flat: bool = False) -> Any:
    torch.manual_seed(0)
    options = {
        "parallel": {"zero": zero, "unused_parameters": zero == 0},
        "step": {"accumulate": accumulate},
        "steps": 6,
        "schedule": {"shape": "constant"},
    }
    with tempfile.TemporaryDirectory() as folder:
        loader = rows(world, "drop", 4, shuffle=False)
        trainer = make_trainer(world, folder, loader, Routed(flat), loss=route, **options)
        trainer.optimizer.param_groups[0]["weight_decay"] = 0.5
        with trainer:
            try:
                trainer.train()
            except TrainerError as exc:
                return str(exc)
            found = {}
            for name, parameter in trainer.parallel.inner.named_parameters():
                whole = parameter.full_tensor() if zero else parameter
                found[name] = whole.detach().flatten().tolist()
            return found


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="before torch 2.13 this is refused"
)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_experts_that_only_some_ranks_use_train_as_on_one(zero: int, accumulate: int) -> None:
    expected = run_ranks(train, 4, 0, accumulate)[0]
    for found in run_ranks(train, 4, zero, accumulate):
        assert found.keys() == expected.keys()
        for name in expected:
            assert found[name] == pytest.approx(expected[name], abs=1e-6), name


def test_an_older_torch_refuses_what_it_would_mix_up(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before torch 2.13 ``fully_shard`` could not add zeros; another rank's use is what ``drop_unused`` is told."""
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
    with make_trainer(world, str(tmp_path), model=Routed(), parallel={"zero": 3}) as trainer:
        usage = trainer.parallel.usage
        names = [name for name, _ in trainer.parallel.inner.named_parameters()]
        usage.drop_unused([0.0] * len(names))
        with pytest.raises(TrainerError, match=rf"{names[0]} has a gradient on another rank.*torch to 2\.13"):
            usage.drop_unused([1.0] * len(names))


def test_sharded_modules_that_only_some_ranks_run_are_refused_by_name() -> None:
    for told in run_ranks(train, 4, 3, 1, True):
        assert "layers." in told
        assert "(Expert)" in told
        assert "parallel.blocks" in told
        assert "parallel.unused_parameters=True" in told


class Early(nn.Module):
    """Uses ``aside`` for batches whose first row has a small number."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Expert(0)
        self.aside = Expert(1)

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return self.line(x) + (self.aside(x) if number[0] < 3 else 0.0)


def early(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return model(batch["x"], batch["number"]).float().square().sum(), len(batch["x"])


def train_early(world: World, unused_parameters: bool) -> Any:
    """Each step's first microbatch uses all parameters, and its second does not."""
    torch.manual_seed(0)
    options = {"parallel": {"unused_parameters": unused_parameters}, "step": {"accumulate": 2}, "steps": 3}
    batches = [{"x": torch.full((2, 2), 0.5 + k), "number": torch.full((2,), float(4 * (k % 2)))} for k in range(6)]
    mine = [{key: one[world.rank :: world.world_size] for key, one in batch.items()} for batch in batches]
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(world, folder, mine, Early(), loss=early, **options)
        with trainer:
            before = [one.detach().clone() for one in trainer.parallel.inner.parameters()]
            try:
                trainer.train()
            except TrainerError as exc:
                return str(exc), all(map(torch.equal, before, trainer.parallel.inner.parameters()))
            return [one.detach().flatten().tolist() for one in trainer.parallel.inner.parameters()]


def test_a_parameter_that_only_an_early_microbatch_uses_is_named_before_a_weight_changes() -> None:
    for told, unchanged in run_ranks(train_early, 2, False):
        assert "aside.line.weight, aside.line.bias got no gradient in a step's last microbatch" in told
        assert "parallel.unused_parameters=True" in told
        assert unchanged


def test_with_unused_parameters_it_trains_as_on_one_rank() -> None:
    expected = run_ranks(train_early, 1, False)[0]
    for found in run_ranks(train_early, 2, True):
        for mine, right in zip(found, expected, strict=True):
            assert mine == pytest.approx(right, abs=1e-6)
