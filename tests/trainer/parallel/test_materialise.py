"""Models built on the meta device: the same initial weights everywhere, and nothing that was never written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch_ranks import run_ranks
from small_trainers import make_trainer, rows
from tied_model import Scaled, Tied, initialise_scaled, whole_state
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from penstock.trainer import Llama, LlamaConfig, TrainerConfigError, World, build_on_meta


def start(world: World, folder: str, zero: int, **options: Any) -> tuple[Any, Any]:
    """The state before training, and after it."""
    torch.manual_seed(world.rank)  # of no consequence
    model = build_on_meta(Tied, Scaled)
    with make_trainer(
        world,
        folder,
        rows(world, "drop"),
        model,
        initialise=initialise_scaled,
        parallel={"zero": zero},
        **options,
    ) as trainer:
        before = whole_state(trainer.parallel.inner)
        trainer.train()
        return before, whole_state(trainer.parallel.inner)


def start_all(world: World, folder: str) -> list[Any]:
    return [start(world, f"{folder}/{zero}", zero) for zero in range(4)]


def test_initial_weights_know_neither_ranks_nor_zero_stage(tmp_path: Path) -> None:
    alone = run_ranks(start, 1, str(tmp_path / "alone"), 0)[0][0]
    assert torch.equal(alone["first.weight"], alone["last.weight"])
    assert not torch.equal(alone["blocks.0.weight"], alone["blocks.1.weight"])
    assert alone["norm.running_var"].tolist() == [1, 1]
    for ranks in (1, 3):
        for stages in run_ranks(start_all, ranks, str(tmp_path / f"{ranks}")):
            for before, after in stages:
                assert before.keys() == alone.keys()
                assert all(torch.equal(before[name], alone[name]) for name in alone)
                assert torch.equal(after["first.weight"], after["last.weight"])
                assert not torch.equal(after["first.weight"], before["first.weight"])


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=False) for _ in range(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


def watch_memory(world: World, folder: str) -> int:
    """The most bytes of weights that a rank held while they were made."""
    model, held = build_on_meta(Stack), []

    def look(name: str, module: nn.Module) -> None:
        made = [one for one in model.parameters() if not one.is_meta]
        held.append(sum(getattr(one, "_local_tensor", one).nbytes for one in made))

    make_trainer(world, folder, model=model, initialise=look, parallel={"zero": 3}).close()
    assert len(held) == 1 + 1 + 8  # the model, the list and its items
    return max(held)


def test_no_rank_holds_more_than_its_shards_and_one_block(tmp_path: Path) -> None:
    block = 6 * 6 * 4
    assert run_ranks(watch_memory, 3, str(tmp_path)) == [7 * block // 3 + block] * 3


def watch_spread_memory(world: World, folder: str, layout: dict[str, Any]) -> int:
    """The same of a layout; what pipelines, cuts and shards leave of it is checked by ``test_layouts_begin_alike``."""
    model, held = build_on_meta(Stack), []

    def look(name: str, module: nn.Module) -> None:
        made = [one for one in model.parameters() if not one.is_meta]
        held.append(sum(getattr(one, "_local_tensor", one).nbytes for one in made))

    plan = {"plan": {"layers.*": "colwise_gathered"}} if "tp" in layout else {}
    whole = rows(world, rank=0, world_size=1)
    make_trainer(world, folder, whole, model, initialise=look, parallel={**layout, **plan}).close()
    return max(held)


@pytest.mark.parametrize(
    ("layout", "blocks"),
    [({"tp": 2}, 7 / 2 + 1), ({"pp": 2, "microbatches": 2}, 4 + 1), ({"tp": 2, "zero": 3}, 7 / 2 + 1)],
)
def test_no_rank_holds_more_than_its_part_and_one_block(tmp_path: Path, layout: dict[str, Any], blocks: float) -> None:
    assert max(run_ranks(watch_spread_memory, 2, str(tmp_path), layout)) == blocks * 6 * 6 * 4


def begin(world: World, folder: str, layouts: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """The weights and buffers with which a model on the meta device begins in each layout, whole, on each rank."""
    found = []
    for number, layout in enumerate(layouts):
        torch.manual_seed(world.rank)  # of no consequence
        config = LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4
        )
        options = {"parallel": layout, "precision": {"dtype": "fp32"}}
        with make_trainer(
            world, f"{folder}/{number}", rows(world, rank=0, world_size=1), build_on_meta(Llama, config), **options
        ) as trainer:
            whole = StateDictOptions(full_state_dict=True)
            own = get_model_state_dict(trainer.parallel.inner, options=whole)
        everywhere: list[Any] = [None] * world.world_size
        dist.all_gather_object(everywhere, {name: one.clone() for name, one in own.items()})
        found.append({name: one for state in everywhere for name, one in state.items()})
    return found


def test_layouts_begin_alike(tmp_path: Path) -> None:
    alone = run_ranks(begin, 1, str(tmp_path / "alone"), [{}])[0][0]
    stages = {"pp": 2, "microbatches": 2}
    for ranks, layouts in ((2, [{"tp": 2}, stages, {**stages, "zero": 1}]), (4, [{"tp": 2, **stages}])):
        for found in run_ranks(begin, ranks, str(tmp_path / str(ranks)), layouts):
            for layout, weights in zip(layouts, found, strict=True):
                assert weights.keys() == alone.keys(), layout
                assert all(torch.equal(weights[name], alone[name]) for name in alone), layout


def refuse(world: World, folder: Path, model: nn.Module, initialise: Any = None) -> str:
    with pytest.raises(TrainerConfigError) as caught:
        make_trainer(world, str(folder), model=model, initialise=initialise, parallel={"zero": 3})
    return str(caught.value)


class Halfway(nn.Linear):
    """Its reset_parameters leaves a parameter out."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.gain = nn.Parameter(torch.ones(2))


class Constructed(nn.Module):
    """What its constructor writes is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        nn.init.ones_(self.one.weight)
        self.two.weight.data = torch.ones(2, 2)


class Plain(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.table = torch.arange(4.0)


class Flags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.register_buffer("on", torch.ones(2, dtype=torch.bool))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: Tied(Scaled), ["middle.scale (Scaled has no reset", "middle.shift (Scaled has no reset"]),
        (lambda: Tied(Halfway), ["middle.gain (Halfway.reset_parameters leaves it out)"]),
        (lambda: Tied(Plain), ["middle.table is a tensor on the meta device that is neither"]),
        (lambda: Tied(Flags), ["middle.on (Flags has no", "middle.count (Flags has no"]),
        (
            lambda: Tied(lambda: nn.Transformer(2, 2, 1, 1, 2, batch_first=True)),
            ["(Transformer._reset_parameters initialises what is b"],
        ),
    ],
)
def test_what_would_stay_unwritten_is_refused_by_name(
    world: World, tmp_path: Path, build: Callable[[], nn.Module], named: list[str]
) -> None:
    with torch.device("meta"):
        model = build()
    told = refuse(world, tmp_path, model)
    assert all(one in told for one in named), told
    assert not any(f"{whole} (" in told for whole in ("first.weight", "blocks.0.weight", "norm.running_mean"))


def test_values_that_only_a_constructor_gives_are_not_lost_silently(world: World, tmp_path: Path) -> None:
    told = refuse(world, tmp_path, build_on_meta(Tied, Constructed))
    assert "middle.one.weight (a constructor gives it its value, by fill_)" in told
    assert "middle.two.weight (a constructor gives it its value)" in told
    assert "bias" not in told

    def write_ones(name: str, module: nn.Module) -> None:
        if name.startswith("middle.") and isinstance(module, nn.Linear):
            module.weight.fill_(1)

    model = build_on_meta(Tied, Constructed)
    with make_trainer(world, str(tmp_path), model=model, initialise=write_ones, parallel={"zero": 1}) as trainer:
        made = whole_state(trainer.parallel.inner)
    assert made["middle.one.weight"].unique().tolist() == made["middle.two.weight"].unique().tolist() == [1]


def test_an_initialiser_that_writes_elsewhere_is_refused(world: World, tmp_path: Path) -> None:
    def write_all(name: str, module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.zero_()

    assert "changes weights outside of it" in refuse(world, tmp_path, build_on_meta(Tied), write_all)


class Rotary(nn.Module):
    """A buffer that is computed, with a second name that is no buffer's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(2.0), persistent=False)
        self.original = self.table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table - self.original


@pytest.mark.slow
def test_a_buffer_is_computed_or_assigned_by_the_initialiser(world: World, tmp_path: Path) -> None:
    def copy(name: str, module: nn.Module) -> None:
        if isinstance(module, Rotary):
            module.table.copy_(torch.arange(2.0))

    def assign(name: str, module: nn.Module) -> None:
        if isinstance(module, Rotary):
            module.table = module.original = torch.arange(2.0)

    for initialise in (copy, assign):
        model = build_on_meta(Tied, Rotary)
        with make_trainer(world, str(tmp_path), model=model, initialise=initialise, parallel={"zero": 3}) as trainer:
            trainer.train()
            assert model.middle.original.tolist() == model.middle.table.tolist() == [0, 1]
    assert "middle.table (Rotary has no reset_parameters)" in refuse(world, tmp_path, build_on_meta(Tied, Rotary))


def test_an_initialiser_for_a_model_with_values_is_refused(world: World, tmp_path: Path) -> None:
    assert "initialise= is for models on the meta device" in refuse(world, tmp_path, Tied(), initialise_scaled)


def test_attention_and_embeddings_of_torch_are_initialised_as_their_constructors_do(
    world: World, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        return nn.ModuleDict({"attend": nn.MultiheadAttention(4, 2), "embed": nn.Embedding(5, 4, padding_idx=1)})

    with make_trainer(world, str(tmp_path), model=build_on_meta(build)) as trainer:
        made = whole_state(trainer.parallel.inner)
    assert made["attend.out_proj.bias"].tolist() == made["attend.in_proj_bias"][:4].tolist() == [0] * 4
    assert made["attend.in_proj_weight"].abs().max() <= (6 / 16) ** 0.5
    assert made["embed.weight"][1].tolist() == [0] * 4
    assert made["embed.weight"][0].abs().sum() > 0


def test_an_optimizer_over_meta_parameters_trains_the_real_ones(world: World, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_trainer(world, str(tmp_path), model=model, optimizer=optimizer, parallel={"zero": 2}) as trainer:
        before = whole_state(trainer.parallel.inner)
        trainer.train()
        after = whole_state(trainer.parallel.inner)
    assert all(not torch.equal(before[name], after[name]) for name, _ in model.named_parameters())


class Scored(nn.Module):
    """An embedding and the layer that scores its rows with one weight, which is that of the one or the other."""

    def __init__(self, survivor: str, order: str) -> None:
        super().__init__()
        for name in order.split():
            self.add_module(name, nn.Embedding(500, 64) if name == "table" else nn.Linear(64, 500))
        if survivor == "table":
            self.scores.weight = self.table.weight
        else:
            self.table.weight = self.scores.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(self.table(torch.zeros(len(x), dtype=torch.long)))


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("order", ["table scores", "scores table"])
@pytest.mark.parametrize("survivor", ["table", "scores"])
def test_tied_weights_begin_as_the_module_made_them_whose_they_are(
    world: World, tmp_path: Path, survivor: str, order: str, zero: int
) -> None:
    expected = Scored(survivor, order).table.weight.std()  # 1, or a thirtieth
    with make_trainer(
        world, str(tmp_path), model=build_on_meta(Scored, survivor, order), parallel={"zero": zero}
    ) as trainer:
        found = whole_state(trainer.parallel.inner)
    assert torch.equal(found["table.weight"], found["scores.weight"])
    assert torch.allclose(found["table.weight"].std(), expected, rtol=0.1)
    assert found["scores.bias"].abs().max() > 0
