"""A small GPT on real text: the sources of Python's standard library, as tokens of a byte-level BPE trained on them."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ..arrays import ArrayLoader
from ..batches import VALID
from ..errors import TrainerConfigError


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm and around a shortcut (Radford et al. 2019)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attend = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        # (B, T, 3W) -> three of (B, heads, T, W / heads)
        parts = self.queries_keys_values(self.norm_attend(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        added: torch.Tensor = x + self.feed(self.norm_feed(x))
        return added


class SmallGPT(nn.Module):
    """A decoder; tokens are (B, T) int64, scores are (B * T, vocabulary)."""

    def __init__(
        self, vocabulary: int = 2048, length: int = 128, width: int = 128, heads: int = 4, layers: int = 4
    ) -> None:
        super().__init__()
        if width % heads:
            raise TrainerConfigError(
                f"width={width} is not a multiple of heads={heads}; use width={width // heads * heads}"
            )
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        self.scores.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.scores(self.norm(x).flatten(0, 1))
        return scores


def load_sources(
    split: str = "train",
    *,
    vocabulary: int = 2048,
    length: int = 128,
    max_bytes: int = 4_000_000,
    cache_dir: str | None = None,
    **loader: Any,
) -> ArrayLoader:
    """Windows of ``length + 1`` tokens; a tenth of them is held out. ``loader`` goes to ``ArrayLoader``.

    The tokens are made once, by rank 0, and kept in ``cache_dir``.
    """
    if split not in ("train", "test"):
        raise TrainerConfigError(f"split={split!r} is not known; use 'train' or 'test'")
    folder = Path(cache_dir or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "penstock" / "recipes")
    key = hashlib.sha256(f"{sys.version}{vocabulary}{max_bytes}".encode()).hexdigest()[:16]
    path = folder / f"stdlib-{key}.npy"
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first and not path.exists():
        _save_whole(path, tokenize(read_sources(max_bytes), vocabulary))
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    windows = len(tokens) // (length + 1)
    table = tokens[: windows * (length + 1)].reshape(windows, length + 1)
    held_out = np.arange(windows) // 10 % 10 == 9  # ten windows in a row, all over the text
    rows = table[held_out if split == "test" else ~held_out]
    return ArrayLoader({"tokens": rows.astype(np.int64)}, **loader)


def read_sources(max_bytes: int) -> list[str]:
    """The standard library's modules in the order of their names, until there are ``max_bytes`` of text."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts, total = [], 0
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        texts.append(text)
        total += len(text)
        if total >= max_bytes:
            break
    if not texts:
        raise TrainerConfigError(f"no Python sources below {root}; train on another text")
    return texts


def tokenize(texts: list[str], vocabulary: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Train a byte-level BPE on the texts and give them as one line of uint16 tokens."""
    if not 256 <= vocabulary <= 65536:
        raise TrainerConfigError(f"vocabulary={vocabulary} is out of range; a byte-level BPE has 256 to 65536 tokens")
    try:
        from tokenizers import ByteLevelBPETokenizer
    except ImportError as exc:
        raise TrainerConfigError("the recipe trains a tokenizer with tokenizers; install penstock[demo]") from exc
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=vocabulary, show_progress=False)
    encoded = tokenizer.encode_batch(texts)
    return np.concatenate([np.asarray(each.ids, dtype=np.uint16) for each in encoded])


def next_token_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The sum of the losses of all next tokens, and their number."""
    targets = _targets(batch)
    total = F.cross_entropy(model(batch["tokens"][:, :-1]).float(), targets, ignore_index=-1, reduction="sum")
    return total, int((targets >= 0).sum())


def measure(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Loss and accuracy of the next token."""
    targets = _targets(batch)
    scores = model(batch["tokens"][:, :-1]).float()
    count = (targets >= 0).sum()
    total = F.cross_entropy(scores, targets, ignore_index=-1, reduction="sum")
    return {"loss": (total, count), "accuracy": ((scores.argmax(1) == targets).sum(), count)}


def _targets(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    targets = batch["tokens"][:, 1:]
    if VALID in batch:
        targets = targets.masked_fill(~batch[VALID][:, None], -1)
    return targets.flatten()


def _save_whole(path: Path, tokens: np.ndarray[Any, np.dtype[np.uint16]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with written.open("wb") as file:
        np.save(file, tokens)
    written.rename(path)
