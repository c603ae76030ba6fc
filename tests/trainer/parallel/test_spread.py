"""Replicas that lie on several ranks, by tensor and by context parallelism, through the trainer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks as run_program
from launch_ranks import run_ranks
from safetensors.torch import load_file
from spread_cases import LAYOUTS, REFUSED, make_mixture, make_model, make_trainer, refuse_all, run_links, whole_weights

from penstock.trainer import World, export_run

WORDS = {
    "scores in parts": r"the 2 ranks of a replica, of parallel\.tp=2, have losses from .* gather it, as by",
    "norms of parts": r"the gradients of model\.layers\.0\.input_layernorm\.weight, .* differ between the 2 ranks",
    "norms of parts, sharded": r"the gradients of model\.layers\.0\.input_layernorm\.weight, .* differ between",
    "odd sequences": r"cuts sequences after 'model\.embed_tokens' .* one of 7 tokens has no 2 equal parts; make them 8",
    "no room for a whole": r"the first loss with parallel\.tp=2 raised RuntimeError: .* parallel\.plan cuts what",
    "other losses": r"the loss takes scores that are cut by classes, of which F\.cross_entropy alone",
    "whole sequences": r"parallel\.cp=2 trains on parts of sequences, and the batch has no '__positions__'",
    "no attention": r"parallel\.cp=2: forward called F\.scaled_dot_product_attention nowhere",
    "mask of a part": r"got a mask of shape \(4, 4\), over this rank's part .* make it of all 8 keys",
    "weights of attention": r"a MultiheadAttention with need_weights=True computes attention within a part",
}


def test_a_run_goes_on_over_tensor_context_and_data_parallel_layouts_and_is_exported(tmp_path: Path) -> None:
    found = run_ranks(run_links, 2, str(tmp_path), timeout_s=300)[0]
    worst = max(float((found["weights"][name] - one).abs().max()) for name, one in found["expected"].items())
    assert worst < 1e-5
    assert len(found["metrics"]) == len(LAYOUTS)
    for metrics, expected in zip(found["metrics"], found["expected metrics"], strict=True):
        assert metrics == pytest.approx(expected, abs=1e-5)
    export_run(tmp_path / "run", tmp_path / "export", format="hf")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == found["weights"].keys() | {"lm_head.weight"}
    assert all(torch.equal(exported[name], one) for name, one in found["weights"].items())


def test_what_does_not_fit_together_is_named_in_the_first_step(tmp_path: Path) -> None:
    for found in run_ranks(refuse_all, 2, str(tmp_path), timeout_s=300):
        assert found.keys() == REFUSED.keys() == WORDS.keys()
        for name, words in WORDS.items():
            assert re.search(words, found[name], re.DOTALL), (name, found[name])


ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here"),
]
PARTS = {"pp": 2, "microbatches": 6}


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([{"tp": 2}, {"tp": 2, "zero": 3}, {"cp": 2}, {"cp": 2, "zero": 2}], marks=ON_CUDA, id="tp and cp"),
        pytest.param(
            [PARTS, {**PARTS, "zero": 2}, {**PARTS, "schedule": "Interleaved1F1B"}, {**PARTS, "schedule": "DualPipeV"}],
            marks=ON_CUDA,
            id="pp",
        ),
        pytest.param([{"ep": 2}, {"ep": 2, "zero": 3}], marks=ON_CUDA, id="ep"),
    ],
)
def test_two_ranks_on_cuda_train_what_one_process_trains(
    world: World, tmp_path: Path, layouts: Sequence[Mapping[str, Any]]
) -> None:
    """On a GPU each where there are two; else on one."""
    done = run_program(Path(__file__).with_name("spread_run.py"), 2, str(tmp_path / "gpus"), json.dumps(layouts))
    assert done.returncode == 0, done.stderr[-4000:]
    model = make_mixture if "ep" in layouts[0] else make_model
    with make_trainer(str(tmp_path / "alone"), world, 4, {}, model=model) as alone:
        alone.train()
    expected = whole_weights(alone.parallel.inner)
    told = next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    found = json.loads(told.removeprefix("FOUND"))
    assert len(found) == len(layouts)
    for weights in found:
        assert weights.keys() >= expected.keys()
        for name, one in expected.items():
            torch.testing.assert_close(torch.tensor(weights[name]), one, rtol=1e-3, atol=1e-3)
