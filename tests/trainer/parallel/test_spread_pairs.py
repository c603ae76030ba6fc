"""Pairs of ways to spread a model, each of which other tests have alone: the numbers of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from spread_cases import CutArrays
from tied_model import whole_state
from torch import Tensor

from penstock.trainer import ArrayLoader, DistributedTrainer, ExpertsConfig, TrainerConfig, World, open_mesh
from penstock.trainer.options import build_config
from penstock.trainer.recipes.llama import Llama, next_token_loss
from penstock.trainer.recipes.llama_config import LlamaConfig

STEPS, ROWS, LENGTH = 6, 16, 8
EXPERTS = ExpertsConfig(num_experts=4, bias_rate=0.05)


def fields(*, counts_all: bool) -> dict[str, Tensor]:
    """Sequences of two documents, and padding at the end of each second one; without, every token counts."""
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 32, (ROWS, LENGTH + 1), generator=random)
    places = torch.arange(LENGTH).repeat(ROWS, 1)
    documents, targets = places // (LENGTH // 2), tokens[:, 1:].clone()
    if not counts_all:
        documents[1::2, -3:] = -1
        targets[1::2, -4:] = -100
    return {"tokens": tokens[:, :-1].clone(), "position_ids": places, "document_ids": documents, "targets": targets}


def train(
    world: World, folder: str, parallel: Mapping[str, Any], *, experts: bool = False, **options: Any
) -> dict[str, Tensor]:
    """Weights and buffers after some steps, whole."""
    torch.manual_seed(4)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    model = Llama(LlamaConfig(**sizes, **heads, experts=EXPERTS if experts else None))
    values = {
        "steps": STEPS,
        "output_dir": folder,
        "precision": {"dtype": "fp32"},
        "parallel": parallel,
        "report": {"quiet": True},
        **options,
    }
    config = build_config(TrainerConfig, values)
    mesh = open_mesh(config.parallel, world)
    shared: dict[str, Any] = {"global_batch_size": 8, "rank": mesh.replica, "world_size": mesh.replicas}
    rows = fields(counts_all=config.precision.dtype == "bf16")
    if mesh.sizes.cp > 1:
        loader = CutArrays(rows, part=mesh.place["cp"], parts=mesh.sizes.cp, **shared)
    else:
        loader = ArrayLoader(rows, **shared)
    with DistributedTrainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
        loader,
        config,
        loss=next_token_loss,
        world=world,
        mesh=mesh,
    ) as trainer:
        trainer.train()
        return whole_state(trainer.parallel.inner)


def train_all(world: World, folder: str, cases: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
    return {name: train(world, f"{folder}/{name}", **options) for name, options in cases.items()}


def compare(found: Sequence[Mapping[str, Any]], name: str, expected: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest difference of each tensor, of which each rank has all or some."""
    worst: dict[str, float] = {}
    for of_rank in found:
        for key, one in of_rank[name].items():
            if key in expected:
                worst[key] = max(worst.get(key, 0.0), float((one - expected[key]).abs().max()))
    assert worst.keys() == expected.keys()
    return worst


CLIPPED = {"step": {"accumulate": 2, "clip_norm": 0.5}}
MIXTURES: dict[str, dict[str, Any]] = {
    "ep and tp": {"parallel": {"ep": 2, "tp": 2}, **CLIPPED},
    "ep and tp, sharded": {"parallel": {"ep": 2, "tp": 2, "zero": 3}, **CLIPPED},
    "ep and tp of whole sequences": {
        "parallel": {
            "ep": 2,
            "tp": 2,
            "zero": 1,
            "plan": {"use": "penstock.trainer.recipes.llama:plan", "args": {"sequence": False, "loss": False}},
        },
        **CLIPPED,
    },
    "ep and cp": {"parallel": {"ep": 2, "cp": 2}, **CLIPPED},
    "ep and cp, sharded": {"parallel": {"ep": 2, "cp": 2, "zero": 2}, **CLIPPED},
    "stages of cut sequences": {"parallel": {"pp": 2, "tp": 2, "microbatches": 4}, **CLIPPED},
}


@pytest.mark.full
def test_experts_on_replicas_of_several_ranks_train_what_one_process_trains(world: World, tmp_path: Path) -> None:
    cases = {name: {"experts": True, **case} for name, case in MIXTURES.items()}
    found = run_ranks(train_all, 4, str(tmp_path / "ranks"), cases, timeout_s=290)
    expected = train(world, str(tmp_path / "alone"), {}, experts=True, **CLIPPED)
    assert any(float(one.abs().max()) > 0 for name, one in expected.items() if name.endswith("router.bias"))
    for name in cases:
        worst = compare(found, name, expected)
        assert {key: apart for key, apart in worst.items() if apart > 1e-5} == {}, name


@pytest.mark.slow
def test_stages_in_bf16_train_what_one_process_trains_in_bf16(world: World, tmp_path: Path) -> None:
    """Counts and scales are powers of two, so that no product is rounded otherwise."""
    half: dict[str, Any] = {"precision": {"dtype": "bf16"}}
    parallel = {"pp": 2, "microbatches": 4}
    cases: dict[str, dict[str, Any]] = {
        "1F1B": {"parallel": parallel, **half},
        "apart": {"parallel": {**parallel, "schedule": "ZBVZeroBubble"}, **half},
        "sharded": {"parallel": {**parallel, "zero": 3}, **half},
    }
    found = run_ranks(train_all, 2, str(tmp_path / "ranks"), cases, timeout_s=290)
    expected = train(world, str(tmp_path / "alone"), {}, step={"microbatch": 2}, **half)
    in_fp32 = train(world, str(tmp_path / "fp32"), {})
    assert max(float((one - in_fp32[name]).abs().max()) for name, one in expected.items()) > 1e-4
    for name in cases:
        assert max(compare(found, name, expected).values()) <= 1e-5, name


@pytest.mark.full
def test_nodes_that_shard_what_tensor_parallelism_cut_train_what_one_process_trains(
    world: World, tmp_path: Path
) -> None:
    """Two nodes of two replicas each, of two ranks."""
    cases = {f"zero {zero}": {"parallel": {"tp": 2, "zero": zero, "hybrid": True}, **CLIPPED} for zero in (1, 3)}
    found = run_ranks(train_all, 8, str(tmp_path / "ranks"), cases, local_world_size=4, timeout_s=290)
    expected = train(world, str(tmp_path / "alone"), {}, **CLIPPED)
    for name in cases:
        assert max(compare(found, name, expected).values()) <= 1e-5, name
