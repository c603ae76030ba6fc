from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainers import make_trainer, rows
from torch import nn

from penstock.trainer import World

DEPTH = 3
_runs: list[int] = []


@pytest.fixture
def graph_runs() -> Iterator[list[int]]:
    """One entry for each run of a compiled graph by the backend "counting"."""
    if "counting" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(_count, name="counting")
    torch._dynamo.reset()
    _runs.clear()
    yield _runs
    torch._dynamo.reset()


def _count(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        _runs.append(len(graph.graph.nodes))
        return graph.forward(*arguments)

    return run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.line(x).tanh(), 0.25, self.training)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(2, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def train(world: World, folder: Path, zero: int, **options: Any) -> torch.Tensor:
    model = Deep()
    with make_trainer(
        world, str(folder), rows(world, last_batch="drop"), model, steps=1, parallel={"zero": zero}, **options
    ) as trainer:
        trainer.train()
        whole = (p.full_tensor() if zero else p for p in trainer.parallel.inner.parameters())
        return torch.cat([one.detach().flatten() for one in whole])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("every", [1, 2])
def test_blocks_that_recompute_are_compiled_and_their_gradients_are_equal(
    world: World, tmp_path: Path, graph_runs: list[int], zero: int, every: int
) -> None:
    plain = train(world, tmp_path, zero)
    assert not graph_runs
    activation, compiling = {"every": every}, {"enabled": True, "backend": "counting"}
    both = train(world, tmp_path, zero, activation=activation, compile=compiling)
    recomputed = -(-DEPTH // every)
    assert len(graph_runs) == DEPTH + recomputed  # each block in forward, and again in backward
    assert torch.allclose(plain, both, atol=1e-7)


class Counting(nn.Module):
    """Has statistics, some of them assigned anew, and computes with those from before it changes them."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = torch.tanh(self.norm(self.line(x)) - self.mean) ** 2
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        return x + centred


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_recomputed_blocks_change_buffers_once(world: World, tmp_path: Path, zero: int, accumulate: int) -> None:
    found = []
    for every in (0, 1):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(2, 4), Counting(), Counting(), nn.Linear(4, 1))
        options = {"parallel": {"zero": zero}, "step": {"accumulate": accumulate}, "steps": 3}
        if every:
            options["activation"] = {"every": 1, "blocks": ["Counting"]}
        with make_trainer(world, str(tmp_path / str(every)), rows(world, "drop"), model, **options) as trainer:
            trainer.train()
            state = trainer.parallel.inner.state_dict()
            found.append({key: getattr(one, "full_tensor", one.clone)() for key, one in state.items()})
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
