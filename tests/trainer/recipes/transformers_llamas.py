"""Llamas of transformers: ``write`` makes random ones in folders, ``read`` scores those in folders; a program."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "loader" / "integrations"))
from without_torchvision import hide

hide()
import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

STRETCHED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
CASES = {
    "plain": {},
    "grouped": {"num_key_value_heads": 2},
    "tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "wide": {"head_dim": 24},
    "stretched": {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "llama3", **STRETCHED}},
    "sharded": {"num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 7},
}


def write(folder: Path) -> None:
    for name, values in CASES.items():
        torch.manual_seed(1)
        config = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3} | values
        model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **config))
        for parameter in model.parameters():  # else norms are 1, and logits small
            parameter.data.normal_(std=0.3) if parameter.ndim > 1 else parameter.data.uniform_(0.5, 1.5)
        model.save_pretrained(folder / name, max_shard_size="30KB" if name == "sharded" else "5GB")
        score(folder / name)


def score(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    tokens = torch.randint(0, 97, (2, 64), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.save({"tokens": tokens, "logits": model(tokens).logits}, folder.with_suffix(".pt"))


if __name__ == "__main__":
    place = Path(sys.argv[2])
    if sys.argv[1] == "write":
        write(place)
    else:
        for inside in sorted(path for path in place.iterdir() if path.is_dir()):
            score(inside)
