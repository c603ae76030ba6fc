from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
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


OF_ALL = np.random.default_rng(5)
Draw = Callable[["Masked", int], float]


DRAWS: dict[str, Draw] = {
    "numpy": lambda module, index: float(np.random.rand()),
    "numpy's pairs": lambda module, index: float(np.random.randn()),  # every other one is kept beside the bits
    "python": lambda module, index: random.random(),
    "python's pairs": lambda module, index: random.gauss(0.0, 1.0),
    "torch": lambda module, index: float(torch.rand(1)),
    "one block in two": lambda module, index: float(np.random.rand()) if index % 2 else 0.5,
    "held": lambda module, index: float(module.own.normal()),
    "held bits": lambda module, index: float(np.random.Generator(module.bits).normal()),
    "held state": lambda module, index: float(module.state.randn()),
    "held python's": lambda module, index: module.python.random(),
    "held torch's": lambda module, index: float(torch.rand(1, generator=module.torch)),
    "held in a list": lambda module, index: float(module.several[index % 2].normal()),
    "held in a dict": lambda module, index: float(module.by_name["mask"].normal()),
}


class Masked(nn.Module):
    def __init__(self, draw: Draw, index: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.draw, self.index = draw, index
        self.own, self.bits, self.state = np.random.default_rng(1), np.random.PCG64(2), np.random.RandomState(3)
        self.python, self.torch = random.Random(4), torch.Generator().manual_seed(5)
        self.several = [np.random.default_rng(6), np.random.default_rng(7)]
        self.by_name = {"mask": np.random.default_rng(8)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + self.b((self.a(x) * self.draw(self, self.index)).tanh())
        return x


class MaskedByAll(Masked):
    """Draws from a generator that its file holds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b((self.a(x) * float(OF_ALL.normal())).tanh())


class Outer(nn.Module):
    def __init__(self, draw: Draw, index: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Masked(draw, index + one) for one in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.inner:
            x = block(x) * (1.0 + np.random.rand())
        return x


def train_masked(world: World, folder: Path, kind: type, draw: Draw, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """The weights, and where generators stand at the end."""
    torch.manual_seed(3)
    OF_ALL.bit_generator.state = np.random.default_rng(5).bit_generator.state
    model = nn.Sequential(nn.Linear(2, 4), nn.ModuleList(kind(draw, one) for one in range(3)), nn.Linear(4, 1))
    model.forward = lambda x: model[2](model[1][2](model[1][1](model[1][0](model[0](x)))))
    with make_trainer(world, str(folder), rows(world, "drop"), model, steps=2, **options) as trainer:
        trainer.train()
        state = trainer.parallel.inner.state_dict()
        ends = (np.random.rand(), random.random(), OF_ALL.random(), float(torch.rand(1)))
        return [getattr(one, "full_tensor", one.clone)() for one in state.values()], ends


DRAWS["all"] = lambda module, index: sum(draw(module, index) for name, draw in DRAWS.items() if name != "all")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("source", "zero"), [*((name, 0) for name in DRAWS), ("all", 1), ("all", 2), ("all", 3)])
def test_recomputed_blocks_draw_what_forward_drew_whatever_they_draw_from(
    world: World, tmp_path: Path, source: str, zero: int
) -> None:
    options = {"parallel": {"zero": zero}, "step": {"accumulate": 2}}
    plain, ends = train_masked(world, tmp_path, Masked, DRAWS[source], **options)
    found = train_masked(world, tmp_path, Masked, DRAWS[source], **options, activation={"every": 1})
    assert all(map(torch.equal, found[0], plain))
    assert found[1] == ends  # what is drawn after a backward is the same, too


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["of the file", "enclosed", "nested", "compiled", "nested, compiled"])
def test_recomputed_blocks_draw_what_forward_drew_wherever_the_generator_is(
    world: World, tmp_path: Path, kind: str, graph_runs: list[int]
) -> None:
    is_compiled = kind.endswith("compiled")  # torch warns of what it cannot compile, which runs as it is then
    model, draw, blocks = Masked, DRAWS["numpy" if is_compiled else "all"], ("Masked",)
    if kind == "of the file":
        model, blocks = MaskedByAll, ("MaskedByAll",)
    elif kind.startswith("nested"):
        model, blocks = Outer, ("Outer", "Masked")
    options = {"compile": {"enabled": True, "backend": "counting"}} if is_compiled else {}
    found = []
    for every in (0, 1):
        if kind == "enclosed":
            generator = np.random.default_rng(9)

            class Enclosing(Masked):
                def forward(self, x: torch.Tensor) -> torch.Tensor:
                    return x + self.b((self.a(x) * float(generator.random())).tanh())  # noqa: B023 - on purpose

            model, blocks = Enclosing, ("Enclosing",)
        activation = {"activation": {"every": 1, "blocks": list(blocks)}} if every else {}
        found.append(train_masked(world, tmp_path, model, draw, **options, **activation))
    assert all(torch.allclose(one, other, atol=1e-7) for one, other in zip(found[0][0], found[1][0], strict=True))
