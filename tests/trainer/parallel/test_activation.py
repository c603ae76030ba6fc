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
