"""The Llama recipe: packed documents do not see each other, and ranks train what one process trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch_ranks import run_ranks
from tied_model import whole_state

from penstock import DistributedDataLoader, Packing
from penstock.loader import pack
from penstock.trainer import ArrayLoader, DistributedTrainer, TrainerConfig, TrainerConfigError, World, build_on_meta
from penstock.trainer.options import build_config
from penstock.trainer.recipes.llama import Llama, next_token_loss, shift
from penstock.trainer.recipes.llama_config import LlamaConfig, read_llama_config
from penstock.trainer.report.flops import copy_without_data, count_flops

SMALL = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
GROUPED: dict[str, Any] = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2}


def make_model(**values: Any) -> Llama:
    torch.manual_seed(4)
    return Llama(LlamaConfig(**GROUPED, initializer_range=0.3, **values))


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
def test_a_packed_document_gets_the_scores_that_it_gets_alone(device: str) -> None:
    model, lengths = make_model().to(device), (5, 7, 1, 3)
    tokens = torch.randint(0, 50, (1, 20), device=device)
    positions = torch.cat([torch.arange(n) for n in (*lengths, 4)])[None].to(device)
    numbers = [torch.full((n,), i) for i, n in zip((0, 1, 2, 3, -1), (*lengths, 4), strict=True)]
    packed, start = model(tokens, positions, torch.cat(numbers)[None].to(device)), 0
    assert packed.isfinite().all(), "padding, too"
    for length in lengths:
        alone = model(tokens[:, start : start + length])
        assert torch.allclose(packed[:, start : start + length], alone, atol=1e-5)
        start += length


@pytest.mark.slow
def test_the_loss_of_the_loaders_packed_batches_is_the_sum_of_each_documents_own(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 20, (40,), generator=generator).tolist()
    documents = [torch.randint(0, 49, (n,), generator=generator) for n in lengths]
    pack([{"tokens": one.numpy()} for one in documents], tmp_path / "data", format="parquet", progress=False)
    model = make_model()
    total, count = 0.0, 0
    with (
        DistributedDataLoader(
            str(tmp_path / "data"), batch_size=3, last_batch="pad", packing=Packing(seq_len=24, eos=49)
        ) as loader,
        torch.no_grad(),
    ):
        for batch in loader:
            one, its = next_token_loss(model, batch)
            total, count = total + float(one), count + int(its)
    alone = 0.0
    with torch.no_grad():
        for one in documents:
            ended = torch.cat([one, torch.tensor([49])])[None]
            rest = {"position_ids": torch.arange(ended.shape[1])[None], "document_ids": torch.zeros_like(ended)}
            mask = torch.ones_like(ended, dtype=torch.bool)
            alone += float(next_token_loss(model, {"tokens": ended, "loss_mask": mask, **rest})[0])
    assert count == sum(lengths)
    assert total == pytest.approx(alone, rel=1e-5)


def packed_rows() -> dict[str, torch.Tensor]:
    """Ten packed sequences of 13 tokens, with documents of one to six tokens and some padding."""
    generator = torch.Generator().manual_seed(3)
    starts = torch.rand(10, 13, generator=generator) < 0.3
    starts[:, 0] = True
    documents = starts.cumsum(1) - 1
    index = torch.arange(13).expand(10, 13)
    positions = index - torch.where(starts, index, 0).cummax(1).values
    documents[4, 9:] = -1
    mask = ~starts & (documents >= 0)
    tokens = torch.randint(0, 50, (10, 13), generator=generator)
    return {"tokens": tokens, "position_ids": positions, "document_ids": documents, "loss_mask": mask}


def train(world: World, folder: str, *, meta: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    config = LlamaConfig(**GROUPED, tie_word_embeddings=True)
    model = build_on_meta(Llama, config) if meta else Llama(config)
    loader = ArrayLoader(
        packed_rows(), global_batch_size=5, last_batch="partial", rank=world.rank, world_size=world.world_size
    )
    values = {"steps": 6, "output_dir": folder, "precision": {"dtype": "fp32"}, "report": {"quiet": True}, **options}
    with DistributedTrainer(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
        loader,
        build_config(TrainerConfig, values),
        loss=next_token_loss,
        world=world,
    ) as trainer:
        trainer.train()
        return whole_state(trainer.parallel.inner)


WAYS: dict[str, dict[str, Any]] = {
    **{f"zero{zero}": {"parallel": {"zero": zero}, "step": {"accumulate": 1, "clip_norm": 0.5}} for zero in range(4)},
    **{f"accumulated{zero}": {"parallel": {"zero": zero}, "step": {"accumulate": 2}} for zero in (0, 3)},
    "recomputed": {"parallel": {"zero": 3, "blocks": ["Block"]}, "activation": {"every": 1}},
    "compiled": {"parallel": {"zero": 2}, "compile": {"enabled": True, "backend": "aot_eager"}},
    **{f"meta{zero}": {"parallel": {"zero": zero}, "meta": True} for zero in (0, 3)},
}


def train_all_ways(world: World, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    return {name: train(world, f"{folder}/{name}", **options) for name, options in WAYS.items()}


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = run_ranks(
        train_all_ways, 2, str(tmp_path_factory.mktemp("ranks")), timeout_s=270
    )[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_two_ranks_train_what_one_process_trains_in_every_way(
    of_two_ranks: dict[str, dict[str, torch.Tensor]], world: World, tmp_path: Path, name: str
) -> None:
    alike = {key: value for key, value in WAYS[name].items() if key in ("step", "meta")}
    expected, found = train(world, str(tmp_path), **alike), of_two_ranks[name]
    assert found.keys() == expected.keys()
    assert "lm_head.weight" in found
    worst = max(float((found[key] - expected[key]).abs().max()) for key in expected)
    assert worst <= 1e-5


@pytest.mark.slow
def test_the_flops_of_grouped_heads_and_gates_are_those_of_the_formula() -> None:
    batch = {name: rows[:2] for name, rows in packed_rows().items()}
    width, kept, inner, layers, length, vocabulary = 16, 8, 24, 2, 12, 50
    weights = layers * (2 * width * width + 2 * width * kept + 3 * width * inner) + width * vocabulary
    attention = layers * 2 * length * width
    model = copy_without_data(make_model())
    assert count_flops(model, next_token_loss, batch) == 3 * 2 * (weights + attention) * length


def test_longer_sequences_than_the_model_is_for_are_refused() -> None:
    model = make_model(max_position_embeddings=8)
    with pytest.raises(TrainerConfigError, match="sequences of 9 tokens are longer than max_position_embeddings=8"):
        model(torch.zeros(1, 9, dtype=torch.long))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": 18}, "hidden_size=18 is not a multiple of num_attention_heads=4; use hidden_size=16"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
        ({"head_dim": 5}, "head_dim=5 is odd"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"vocab_size": 2.5}, "vocab_size=2.5 is no whole number"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type='yarn'; known is 'llama3'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor=None is no number"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainerConfigError) as caught:
        LlamaConfig(**{**GROUPED, **values})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "is of Qwen3ForCausalLM (model_type='qwen3')"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "is of LlamaForSequenceClassification"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"num_key_value_heads": 3}, "config.json: num_key_value_heads=3"),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
    ],
)
def test_a_config_json_of_another_model_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    given = json.loads(LlamaConfig(**GROUPED).to_json_string()) | changes
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in given.items() if value is not None}))
    with pytest.raises(TrainerConfigError) as caught:
        read_llama_config(str(tmp_path))
    assert words in str(caught.value)


def test_a_config_json_that_is_not_there_or_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainerConfigError, match=r"config\.json cannot be read: No such file"):
        read_llama_config(str(tmp_path))
    for text, words in (("{", "is no JSON"), ("[]", "is no table")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(TrainerConfigError, match=words):
            read_llama_config(str(tmp_path))


def test_a_config_json_is_read_as_it_was_written_with_what_else_it_says(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 16
    config = LlamaConfig(**GROUPED, head_dim=6, rope_theta=5e5, rope_scaling=scaling, extra={"eos_token_id": 3})
    (tmp_path / "config.json").write_text(config.to_json_string())
    assert read_llama_config(str(tmp_path)) == config
    given = json.loads(config.to_json_string())  # as newer versions of transformers write it
    given["rope_parameters"] = {**given.pop("rope_scaling"), "rope_theta": given.pop("rope_theta")}
    (tmp_path / "config.json").write_text(json.dumps(given | {"dtype": "bfloat16"}))
    assert read_llama_config(str(tmp_path)) == config


def test_shifted_batches_have_the_loss_of_whole_ones() -> None:
    draw = np.random.default_rng(0)
    rows = [
        {
            "tokens": draw.integers(0, 9, 9),
            "position_ids": np.arange(9),
            "document_ids": np.zeros(9, dtype=np.int32),
            "loss_mask": draw.random(9) > 0.3,
            "__valid__": number < 2,
        }
        for number in range(3)
    ]
    whole = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
    model = Llama(LlamaConfig(vocab_size=9, hidden_size=8, num_attention_heads=2, num_hidden_layers=1))
    expected, count = next_token_loss(model, whole)
    found, shifted_count = next_token_loss(model, shift(rows))
    assert torch.equal(found, expected)
    assert count == shifted_count
