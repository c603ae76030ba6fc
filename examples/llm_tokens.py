"""Train a small language model on token files, and resume at exactly the next sequence after a stop.

    python examples/llm_tokens.py                                  on the Python library's own text, packed here
    python examples/llm_tokens.py s3://bucket/tokens/ --dtype uint32 --vocabulary 128256
    torchrun --nproc-per-node=8 examples/llm_tokens.py s3://...    the same, on eight ranks

A token file is nothing but integers, one text after the other; Megatron's .bin with its .idx is read too. Sequences
overlap by one token, so that inputs and targets together use every token.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock import DistributedDataLoader, TokensFormat, pack

SEQ_LEN = 129  # 128 inputs, and the targets that are one token further


def read_texts() -> Iterator[str]:
    """Source files of Python's standard library: real text on every machine."""
    for path in islice(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")), 150):
        yield path.read_text("utf-8", "replace") + "\0"


def encode(text: str) -> list[int]:
    """A token is a byte here; any function from text to integers will do."""
    return list(text.encode())


class SmallModel(nn.Module):
    """Tokens (B, T) to scores (B, T, vocabulary)."""

    def __init__(self, vocabulary: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.recurrence = nn.GRU(width, 2 * width, batch_first=True)
        self.scores = nn.Linear(2 * width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrence(self.embedding(tokens))
        return self.scores(hidden)


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    model: nn.Module = SmallModel(options.vocabulary)
    if "RANK" in os.environ:
        dist.init_process_group()
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with tempfile.TemporaryDirectory() as folder:
        if options.url is None:
            pack(read_texts(), f"{folder}/tokens", format="tokens", seq_len=SEQ_LEN, tokenizer=encode)
        url = options.url or f"{folder}/tokens"
        state = train(url, options, model, optimizer)
        say(f"the loader is gone; its state, to be kept in a checkpoint beside the model's: {json.dumps(state)}")
        train(url, options, model, optimizer, state)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(
    url: str,
    options: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train for some steps. Returns the loader's state, from which any number of ranks can resume."""
    with DistributedDataLoader(
        url, batch_size=options.batch_size, format=TokensFormat(seq_len=SEQ_LEN, dtype=options.dtype, overlap=1)
    ) as loader:
        if state is not None:
            loader.load_state_dict(state)
        done = 0
        while done < options.steps:
            for batch in islice(loader, options.steps - done):
                tokens = batch["tokens"].long()  # (B, 129)
                scores = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                done += 1
            say(f"epoch {loader.epoch}, step {done}: loss {loss.item():.3f}")
        return loader.state_dict()


def say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="prefix of the token files; credentials come from the environment")
    parser.add_argument("--dtype", default="uint16", help="of the stored tokens")
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per rank")
    parser.add_argument("--steps", type=int, default=50, help="before the stop, and again after it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
