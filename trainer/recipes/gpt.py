"""A small GPT on real text: the sources of Python's standard library, as tokens of a byte-level BPE trained on them."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ..data.batches import VALID
from ..errors import TrainerConfigError
from ..parallel.context import sequence_places

Tokens = np.ndarray[Any, np.dtype[np.uint16]]


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a norm before it and a residual around it (Radford et al. 2019)."""

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
        for name, module in self.named_modules():
            init_weights(name, module)
        self.scores.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(sequence_places(tokens.shape[1], tokens.device))
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.scores(self.norm(x).flatten(0, 1))
        return scores

    parallelize_plan: Mapping[str, str] = {
        "tokens": "embedding",
        "blocks.*.queries_keys_values": "colwise_gathered",
        "blocks.*.project": "rowwise_of_whole",
        "blocks.*.feed.0": "colwise",
        "blocks.*.feed.2": "rowwise",
        "scores": "colwise_gathered",
    }
    """How tensor parallelism cuts the model. Equal parts of the fused matrix are no heads: its columns are computed on
    the ranks, gathered, and each rank attends with all heads. Weights and their products are cut all the same."""


def init_weights(name: str, module: nn.Module) -> None:
    """Initialise one module's own weights, in the constructor or on the meta device: ``[model.init]``."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def read_tokens(split: str, *, tokenizer: str, vocabulary: int, max_bytes: int) -> Iterator[Tokens]:
    """The tokens of one module after another; every tenth module is held out.

    ``tokenizer`` is the file of a byte-level BPE with ``vocabulary`` tokens; if missing, it is trained on the other
    modules and written.
    """
    bpe, texts = open_texts(split, tokenizer=tokenizer, vocabulary=vocabulary, max_bytes=max_bytes)
    for text in texts:
        yield np.asarray(bpe.encode(text).ids, dtype=np.uint16)


def open_texts(split: str, *, tokenizer: str, vocabulary: int, max_bytes: int) -> tuple[Any, list[str]]:
    """The tokenizer, and the modules of a split."""
    if split not in ("train", "test"):
        raise TrainerConfigError(f"split={split!r} is not known; use 'train' or 'test'")
    texts = read_sources(max_bytes)
    parts = {"train": [text for i, text in enumerate(texts) if i % 10 != 9], "test": texts[9::10]}
    return open_tokenizer(Path(tokenizer), vocabulary, parts["train"]), parts[split]


def read_sources(max_bytes: int) -> list[str]:
    """The standard library's modules, ordered by name, up to ``max_bytes`` of text."""
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


def open_tokenizer(path: Path, vocabulary: int, texts: list[str]) -> Any:
    """The byte-level BPE kept at ``path``; if missing, it is trained on the texts and written atomically."""
    if not 256 <= vocabulary <= 65536:
        raise TrainerConfigError(f"vocabulary={vocabulary} is out of range; a byte-level BPE has 256 to 65536 tokens")
    try:
        from tokenizers import ByteLevelBPETokenizer, Tokenizer
    except ImportError as exc:
        raise TrainerConfigError("the recipe trains a tokenizer with tokenizers; install penstock[demo]") from exc
    if not path.exists():
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(texts, vocab_size=vocabulary, show_progress=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        bpe.save(str(fresh))
        fresh.replace(path)
    found = Tokenizer.from_file(str(path))
    if found.get_vocab_size() > vocabulary:
        raise TrainerConfigError(
            f"vocabulary={vocabulary}, and the tokenizer kept at {path} has {found.get_vocab_size()} tokens; delete "
            "it and the token files made with it, or use that number"
        )
    return found


def next_token_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The sum of the losses of all next tokens, and their number."""
    inputs, targets = _split(batch)
    total = F.cross_entropy(model(inputs).float(), targets, ignore_index=-1, reduction="sum")
    return total, int((targets >= 0).sum())


def measure(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Loss and accuracy of the next token."""
    inputs, targets = _split(batch)
    scores = model(inputs).float()
    count = (targets >= 0).sum()
    total = F.cross_entropy(scores, targets, ignore_index=-1, reduction="sum")
    return {"loss": (total, count), "accuracy": ((scores.argmax(1) == targets).sum(), count)}


def _split(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    # (B, T + 1) uint16 -> inputs (B, T) and targets (B * T,), int64; -1 for rows of padding
    tokens = batch["tokens"].long()
    targets = tokens[:, 1:]
    if VALID in batch:
        targets = targets.masked_fill(~batch[VALID][:, None], -1)
    return tokens[:, :-1], targets.flatten()
