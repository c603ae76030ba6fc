"""Train a small GPT on documents that are packed into sequences, and resume in mid-epoch after a stop.

    python examples/packed_text.py                         on the Python library's own text
    torchrun --nproc-per-node=2 examples/packed_text.py    the same, on two ranks

Documents are tokenised and packed as they are read, and attention stays inside each of them: its mask comes
from ``document_ids``, the angles of rotations from ``position_ids``; the loss counts where ``loss_mask`` says.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from penstock import DistributedDataLoader, Packing

SEQ_LEN, EOS, VOCABULARY = 256, 256, 257


def encode(texts: list[str]) -> list[list[int]]:
    """A token is a byte here; the path of a tokenizer.json would do as well."""
    return [list(text.encode()) for text in texts]


def write_documents(folder: Path) -> None:
    """The functions of some modules of the standard library, as rows of parquet files."""
    for number, path in enumerate(islice(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")), 24)):
        documents = [text for text in path.read_text("utf-8", "replace").split("\n\n\n") if text]
        pq.write_table(pa.table({"text": documents}), folder / f"{number:03d}.parquet", row_group_size=64)


class Attention(nn.Module):
    """Causal attention inside each document, of two heads."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        # (B, T, 3W) -> three of (B, heads, T, W / heads)
        query, key, value = self.queries_keys_values(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = rotate(query, position_ids), rotate(key, position_ids)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.project(attended.transpose(1, 2).flatten(2))


def rotate(x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (Su et al. 2021) of (B, heads, T, D) by the place of each token in its document."""
    half = x.shape[-1] // 2
    angles = position_ids[:, None, :, None] / 10_000 ** (torch.arange(half, device=x.device) / half)
    first, second = x.chunk(2, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()), -1)


class SmallGPT(nn.Module):
    """Tokens (B, T) to scores (B, T, vocabulary)."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.attend = nn.ModuleList([Attention(width) for _ in range(layers)])
        self.feed = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2 * layers)])
        self.scores = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor, document_ids: torch.Tensor) -> torch.Tensor:
        same = document_ids[:, :, None] == document_ids[:, None, :]
        mask = (same & torch.ones_like(same).tril())[:, None]  # (B, 1, T, T); on a GPU, a mask of FlexAttention
        x = self.tokens(tokens)
        for number, (attend, feed) in enumerate(zip(self.attend, self.feed, strict=True)):
            x = x + attend(self.norms[2 * number](x), position_ids, mask)
            x = x + feed(self.norms[2 * number + 1](x))
        return self.scores(x)


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    if "RANK" in os.environ:
        dist.init_process_group()
    model: nn.Module = SmallGPT()
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with tempfile.TemporaryDirectory() as folder:
        write_documents(Path(folder))
        state = train(folder, options, model, optimizer)
        say(f"the loader is gone; its state: {json.dumps(state)[:100]}...")
        train(folder, options, model, optimizer, state)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(
    folder: str,
    options: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train for some steps. Returns the loader's state, from which any number of ranks can resume."""
    packing = Packing(seq_len=SEQ_LEN, field="text", tokenizer=encode, eos=EOS)
    with DistributedDataLoader(folder, global_batch_size=8, packing=packing) as loader:
        if state is not None:
            loader.load_state_dict(state)
        done = 0
        while done < options.steps:
            for batch in islice(loader, options.steps - done):
                scores = model(batch["tokens"], batch["position_ids"], batch["document_ids"])
                counts = batch["loss_mask"][:, 1:]
                loss = F.cross_entropy(scores[:, :-1][counts], batch["tokens"][:, 1:][counts])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                done += 1
        full = loader.metrics().packing_efficiency
        say(f"epoch {loader.epoch}, step {done}: loss {loss.item():.3f}; {full:.1%} of the tokens are not padding")
        return loader.state_dict()


def say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="before the stop, and again after it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
