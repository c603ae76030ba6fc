"""Experts spread over ranks train what one process trains, at every zero stage, and load under every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from tied_model import whole_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from penstock.trainer import ArrayLoader, DistributedTrainer, TrainerConfig, TrainerConfigError, World, open_mesh
from penstock.trainer.options import build_config
from penstock.trainer.parallel.checks.limits import updating_alike
from penstock.trainer.recipes.experts import ExpertsConfig
from penstock.trainer.recipes.llama import Llama, next_token_loss
from penstock.trainer.recipes.llama_config import LlamaConfig

SHAPE: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2}


def rows() -> dict[str, torch.Tensor]:
    """Ten sequences of 13 tokens, of which some predict fewer: ranks have uneven counts."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 50, (10, 13), generator=generator)
    mask = torch.rand(10, 13, generator=generator) < torch.linspace(0.2, 1.0, 10)[:, None]
    positions = torch.arange(13).expand(10, 13)
    return {
        "tokens": tokens,
        "position_ids": positions.clone(),
        "document_ids": torch.zeros(10, 13, dtype=torch.long),
        "loss_mask": mask,
    }


@pytest.mark.parametrize(("given", "settled"), [(None, False), (True, True), (False, False)])
def test_what_is_cut_otherwise_is_updated_one_by_one_unless_the_optimizer_says_more(
    world: World, given: bool | None, settled: bool
) -> None:
    """On CUDA optimizers take several parameters at once by default, and torch's operations take no mix."""
    mesh = init_device_mesh("cpu", (1,))
    cut, whole = (
        torch.nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)])),
        torch.nn.Parameter(torch.ones(2)),
    )
    groups = [{"params": [cut, whole]}, {"params": [torch.nn.Parameter(torch.ones(2))]}]
    optimizer = torch.optim.AdamW(groups, foreach=given)
    with updating_alike(optimizer):
        assert [group["foreach"] for group in optimizer.param_groups] == [settled, given]
    assert [group["foreach"] for group in optimizer.param_groups] == [given, given]


class Norms:
    """Keeps the norms of all steps."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def record(self, kind: str, step: int, values: Any) -> None:
        if kind == "train":
            self.found.append(values["gradient_norm"])

    def close(self) -> None:
        pass


def adam(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def momentum(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def train(
    world: World,
    folder: str,
    *,
    steps: int = 6,
    experts: dict[str, Any],
    optimizer: Callable[..., torch.optim.Optimizer] = adam,
    **options: Any,
) -> dict[str, Any]:
    torch.manual_seed(4)
    model = Llama(LlamaConfig(**SHAPE, experts=ExpertsConfig(num_experts=4, bias_rate=0.05, **experts)))
    values = {
        "steps": steps,
        "output_dir": folder,
        "precision": {"dtype": "fp32"},
        "report": {"quiet": True, "every": 1},
        **options,
    }
    config = build_config(TrainerConfig, values)
    mesh = open_mesh(config.parallel, world)
    loader = ArrayLoader(rows(), global_batch_size=5, last_batch="partial", rank=mesh.replica, world_size=mesh.replicas)
    norms = Norms()
    with DistributedTrainer(
        model,
        optimizer,
        loader,
        config,
        loss=next_token_loss,
        observers=[norms],
        world=world,
        mesh=mesh,
    ) as trainer:
        trainer.train()
        return {**whole_state(trainer.parallel.inner), "norms": torch.tensor(norms.found, dtype=torch.float64)}


WAYS: dict[str, dict[str, Any]] = {
    **{
        f"zero{zero}": {
            "experts": {},
            "parallel": {"zero": zero, "ep": 2},
            "step": {"accumulate": 1 + zero % 2, "clip_norm": 0.5},
        }
        for zero in range(4)
    },
    "capacity": {"experts": {"capacity_factor": 1.0, "balance": "none"}, "parallel": {"zero": 2, "ep": 2}},
    "small buckets": {"experts": {}, "parallel": {"ep": 2, "bucket_mb": 1e-6}},
    "loss": {"experts": {"balance": "loss", "num_experts_per_tok": 1}, "parallel": {"ep": 2}},
    "whole": {"experts": {}, "parallel": {"zero": 3}, "step": {"clip_norm": 0.5}},
    "recomputed": {"experts": {}, "parallel": {"zero": 3, "ep": 2}, "activation": {"every": 1}},
}


def train_ways(world: World, folder: str, names: Sequence[str]) -> dict[str, dict[str, torch.Tensor]]:
    return {name: train(world, f"{folder}/{name}", **WAYS[name]) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "names"),
    [(2, [name for name in WAYS if name != "zero2"]), (4, ["zero0", "zero2"])],
    ids=["of two replicas", "of two with two replicas each"],
)
def test_ranks_with_parts_of_the_experts_train_what_one_process_trains(
    world: World, tmp_path: Path, size: int, names: list[str]
) -> None:
    found = run_ranks(train_ways, size, str(tmp_path / "ranks"), names, timeout_s=290)[0]
    worst = {}
    for name in names:
        options = WAYS[name]
        alike = {key: value for key, value in options.items() if key in ("step", "experts")}
        expected = train(world, str(tmp_path / name), **alike)
        assert found[name].keys() == expected.keys()
        assert len(expected["norms"]) == 6
        worst |= {(name, key): float((found[name][key] - expected[key]).abs().max()) for key in expected}
    assert {where: difference for where, difference in worst.items() if difference > 1e-5} == {}


def train_stages(world: World, folder: str) -> dict[str, torch.Tensor]:
    return train(world, folder, experts={}, parallel={"pp": 2, "microbatches": 5}, optimizer=momentum)


@pytest.mark.slow
def test_stages_of_experts_train_what_one_process_trains(world: World, tmp_path: Path) -> None:
    found = run_ranks(train_stages, 2, str(tmp_path / "ranks"), timeout_s=270)
    expected = train(world, str(tmp_path / "alone"), experts={}, optimizer=momentum)
    del expected["norms"]
    seen = set()
    for of_rank in found:
        for name in of_rank.keys() & expected.keys():
            seen.add(name)
            assert float((of_rank[name] - expected[name]).abs().max()) <= 1e-5, name
    assert seen == expected.keys()


def train_half(world: World, folder: str) -> None:
    for name, (zero, _) in MOVES.items():
        options = {"parallel": {"zero": zero, "ep": 2}, "checkpoint": {"every_steps": 3}}
        train(world, f"{folder}/{name}", steps=3, experts={}, **options)


def finish(world: World, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name, (_, zero) in MOVES.items():
        parallel = {"zero": zero, "ep": min(2, world.world_size)}
        found[name] = train(world, f"{folder}/{name}", experts={}, parallel=parallel, checkpoint={"every_steps": 3})
    return found


MOVES = {"apart": (0, 3), "sharded": (3, 0)}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4])
def test_a_run_with_parts_of_experts_continues_under_another_layout(world: World, tmp_path: Path, size: int) -> None:
    run_ranks(train_half, 2, str(tmp_path), timeout_s=270)
    found = finish(world, str(tmp_path)) if size == 1 else run_ranks(finish, size, str(tmp_path), timeout_s=270)[0]
    expected = train(world, str(tmp_path / "whole"), experts={})
    for name in MOVES:
        del found[name]["norms"]
        worst = {key: float((one - expected[key]).abs().max()) for key, one in found[name].items()}
        assert max(worst.values()) <= 1e-5, (name, worst)


def test_impossible_spreads_of_experts_are_refused_by_name(world: World, tmp_path: Path) -> None:
    with pytest.raises(TrainerConfigError, match=r"parallel.ep=2 spreads the experts over replicas, and there are 1"):
        train(world, str(tmp_path), experts={}, parallel={"ep": 2})
    with pytest.raises(TrainerConfigError, match=r"average_every=2 takes each rank .* parallel.ep=2"):
        train(world, str(tmp_path), experts={}, parallel={"ep": 2}, average_every=2)
    with pytest.raises(TrainerConfigError, match=r"parallel.hybrid=True with parallel.ep=2"):
        train(world, str(tmp_path), experts={}, parallel={"ep": 2, "zero": 1, "hybrid": True})
