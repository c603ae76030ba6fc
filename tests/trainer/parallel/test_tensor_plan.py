"""Plans of tensor parallelism, as far as they are read and refused without ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from penstock.trainer import Llama, LlamaConfig, ParallelConfig, TrainerConfigError
from penstock.trainer.options import build_config
from penstock.trainer.parallel.tensor import TensorPlan
from penstock.trainer.recipes.gpt import SmallGPT

PLAN = {"up": "colwise", "down": "rowwise"}


class Feed(nn.Module):
    def __init__(self, width: int = 8, inner: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.norm = nn.LayerNorm(inner)
        self.down = nn.Linear(inner, width)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.scores = nn.Linear(8, 16, bias=False)
        self.scores.weight = self.tokens.weight


def plan_of(model: nn.Module) -> Mapping[str, str]:
    assert isinstance(model, Feed)
    return PLAN


def plan_with(model: nn.Module, *, style: str) -> Mapping[str, str]:
    return {"up": style}


def fail(model: nn.Module) -> Mapping[str, str]:
    raise ValueError("not today")


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        plan_of,
        {"*": "sequence"},
        {"up": ColwiseParallel()},
        {"use": f"{__name__}:PLAN"},
        {"use": f"{__name__}:plan_of"},
        {"use": f"{__name__}:plan_with", "args": {"style": "colwise"}},
    ],
)
def test_a_plan_is_a_mapping_or_a_function_or_the_import_path_of_one(plan: Any) -> None:
    TensorPlan(Feed(), ParallelConfig(tp=2, plan=plan))


@pytest.mark.parametrize(
    "plan",
    [
        {"use": "penstock.trainer.recipes.llama:plan", "args": {"sequence": sequence, "loss": loss}}
        for sequence in (False, True)
        for loss in (False, True)
    ],
)
def test_the_recipes_have_plans(plan: Any) -> None:
    for tied in (False, True):
        model = Llama(LlamaConfig(tie_word_embeddings=tied, num_key_value_heads=2))
        assert TensorPlan(model, ParallelConfig(tp=2, plan=plan)).cuts_losses == plan["args"]["loss"]
        TensorPlan(model, ParallelConfig(tp=2))
    TensorPlan(SmallGPT(), ParallelConfig(tp=4))


@pytest.mark.parametrize(
    ("model", "tp", "plan", "words"),
    [
        (Feed(), 2, None, r"parallel\.tp=2 cuts the modules that a plan names, and there is none; give"),
        (Feed(), 2, {}, r"parallel\.plan gives \{\}; it must be a mapping"),
        (Feed(), 2, {"dwn": "rowwise"}, r"names 'dwn', which no module of Feed is called; did you mean 'down'\?"),
        (Feed(), 2, {"*.up": "colwise"}, r"names '\*\.up', which no module"),
        (Feed(), 2, {"up": "colwise", "u*": "colwise"}, r"names the module 'up' twice, by 'up' and by 'u\*'"),
        (Feed(), 2, {"up": "columnwise"}, r"has 'columnwise' for 'up', which is no style; did you mean 'colwise'\?"),
        (Feed(), 2, {"up": 3}, r"has a int for 'up', which is no style; known are colwise"),
        (Feed(), 2, {"norm": "colwise"}, r"cuts 'norm' by ColwiseParallel, .* and that is a LayerNorm"),
        (Feed(inner=15), 2, PLAN, r"parallel\.tp=2 does not divide the 15 outputs of 'up'; use a divisor of 15"),
        (Feed(inner=15), 2, {"down": "rowwise"}, r"does not divide the 15 inputs of 'down'"),
        (
            Feed(),
            2,
            {"use": "nowhere:plan"},
            r"parallel\.plan\.use='nowhere:plan': module 'nowhere' cannot be imported",
        ),
        (Feed(), 2, {"use": f"{__name__}:fail"}, r"fail' raised ValueError: not today"),
        (Feed(), 2, {"use": f"{__name__}:plan_with"}, r"plan_with' raised TypeError: .*style"),
        (Feed(), 2, {"use": f"{__name__}:PLAN", "args": {"x": 1}}, r"is no function, and parallel\.plan\.args"),
        (Feed(), 2, {"use": f"{__name__}:PLAN", "up": "colwise"}, r"has other keys than use and args"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), 2, {"": "colwise"}, r"by a parametrization"),
        (Tied(), 2, {"tokens": "embedding"}, r"one weight, which modules share, .* scores\.weight \(not in the plan\)"),
        (Llama(LlamaConfig(vocab_size=65)), 2, None, r"does not divide the 65 rows of 'model\.embed_tokens'"),
        (
            Llama(LlamaConfig(num_key_value_heads=2)),
            4,
            None,
            r"does not divide the 2 heads, 32 wide each, of .*k_proj'",
        ),
        (Llama(LlamaConfig(hidden_size=96, num_attention_heads=3)), 2, None, r"the 3 heads, 32 wide each, of .*q_proj"),
    ],
)
def test_what_cannot_be_cut_is_refused(model: nn.Module, tp: int, plan: Any, words: str) -> None:
    with pytest.raises(TrainerConfigError, match=words):
        TensorPlan(model, ParallelConfig(tp=tp, plan=plan))


def test_a_plan_needs_ranks_and_is_a_table() -> None:
    with pytest.raises(TrainerConfigError, match=r"parallel\.tp=1 cuts none"):
        ParallelConfig(plan=PLAN)
    with pytest.raises(TrainerConfigError, match=r"parallel\.plan='a:b' is a str; give a table\|a function\|none"):
        build_config(ParallelConfig, {"tp": 2, "plan": "a:b"}, "parallel.")
    assert build_config(ParallelConfig, {"tp": 2, "plan": PLAN}).plan == PLAN


def test_a_models_own_plan_may_be_an_attribute() -> None:
    model = Feed()
    model.parallelize_plan = PLAN  # type: ignore[assignment]
    plan = TensorPlan(model, ParallelConfig(tp=2))
    assert not plan.cuts_losses
    assert all(isinstance(one, torch.Tensor) for one in model.parameters())
