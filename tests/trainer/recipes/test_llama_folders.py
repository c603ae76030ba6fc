"""Folders of Hugging Face: what transformers writes is read, and what is exported is read by transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import ranks_environment

from penstock.trainer import ArrayLoader, DistributedTrainer, TrainerConfig, World, export_run
from penstock.trainer.options import build_config
from penstock.trainer.recipes.llama import Llama, next_token_loss
from penstock.trainer.recipes.llama_config import LlamaConfig, read_llama_config

pytestmark = pytest.mark.slow
CASES = ("plain", "grouped", "tied", "wide", "stretched", "sharded")


def run_transformers(*arguments: str) -> None:
    program = Path(__file__).with_name("transformers_llamas.py")
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        env=ranks_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of transformers for each case, and beside it some tokens and their logits."""
    if find_spec("transformers") is None:
        pytest.skip("install penstock[integrations]")
    folder = tmp_path_factory.mktemp("theirs")
    run_transformers("write", str(folder))
    return folder


def train(world: World, model: Llama, output: Path, *, rate: float = 0.0, **options: Any) -> Llama:
    """One step on random rows, saved; with a rate of 0 the weights stay."""
    generator = torch.Generator().manual_seed(5)
    rows = {
        "tokens": torch.randint(0, model.config.vocab_size, (4, 9), generator=generator),
        "position_ids": torch.arange(9).expand(4, 9),
        "document_ids": torch.zeros(4, 9, dtype=torch.long),
        "loss_mask": torch.ones(4, 9, dtype=torch.bool),
    }
    values = {"steps": 1, "output_dir": str(output), "precision": {"dtype": "fp32"}, "report": {"quiet": True}}
    values |= {"checkpoint": {"every_steps": 1}, **options}
    with DistributedTrainer(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=rate),
        ArrayLoader(rows, global_batch_size=4, rank=world.rank, world_size=world.world_size),
        build_config(TrainerConfig, values),
        loss=next_token_loss,
        world=world,
    ) as trainer:
        trainer.train()
    return model


def score(model: Llama, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens)


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float(expected.abs().max()) > 1
    assert float((found - expected).abs().max()) <= 1e-5


def files_of(folder: Path) -> Sequence[str]:
    return [path.name for path in sorted(folder.glob("model*"))]


def test_both_ways_logits_are_those_of_transformers(theirs: Path, world: World, tmp_path: Path) -> None:
    for name in CASES:
        known = torch.load(theirs / f"{name}.pt")
        model = Llama(read_llama_config(str(theirs / name)))
        train(world, model, tmp_path / "runs" / name, init_from=str(theirs / name))
        assert_equal(score(model, known["tokens"]), known["logits"])
        limit = 30_000 if name == "sharded" else 5_000_000_000
        export_run(tmp_path / "runs" / name, tmp_path / "ours" / name, format="hf", max_shard_bytes=limit)
    assert len(files_of(theirs / "sharded")) > 2
    assert len(files_of(tmp_path / "ours/sharded")) > 2
    assert json.loads((tmp_path / "ours/sharded/config.json").read_text())["eos_token_id"] == 7
    run_transformers("read", str(tmp_path / "ours"))
    for name in CASES:
        again = torch.load(tmp_path / "ours" / f"{name}.pt")
        assert_equal(again["logits"], torch.load(theirs / f"{name}.pt")["logits"])


def test_a_model_of_ones_own_is_exported_and_trained_further_by_its_folder(world: World, tmp_path: Path) -> None:
    torch.manual_seed(3)
    shape = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    made = Llama(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.5))
    train(world, made, tmp_path / "run", rate=0.1)
    export_run(tmp_path / "run", tmp_path / "ours" / "own", format="hf")
    again = Llama(read_llama_config(str(tmp_path / "ours/own")))
    train(world, again, tmp_path / "more", init_from=str(tmp_path / "ours/own"), parallel={"zero": 3})
    tokens = torch.arange(20).view(2, 10)
    if find_spec("transformers") is not None:
        run_transformers("read", str(tmp_path / "ours"))
        known = torch.load(tmp_path / "ours/own.pt")
        assert_equal(score(made, known["tokens"]), known["logits"])
    assert torch.equal(score(again, tokens), score(made, tokens))
    (tmp_path / "run/config.json").write_text('{"model_type": "of its own"}')  # what users put there comes first
    export_run(tmp_path / "run", tmp_path / "other", format="hf")
    assert json.loads((tmp_path / "other/config.json").read_text()) == {"model_type": "of its own"}


def test_a_config_that_cannot_be_written_stops_no_training_and_is_noted(world: World, tmp_path: Path) -> None:
    class Broken(LlamaConfig):
        def to_json_string(self) -> str:
            raise ValueError("no text of it")

    train(world, Llama(Broken(vocab_size=20, hidden_size=8, num_attention_heads=2)), tmp_path)
    assert "config.json of the model cannot be written to" in (tmp_path / "metrics.jsonl").read_text()
