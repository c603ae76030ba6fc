"""Models, batches and losses that pipelines are tested with, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from penstock.trainer.recipes.gpt import SmallGPT
from penstock.trainer.recipes.gpt import next_token_loss as gpt_loss
from penstock.trainer.recipes.llama import Llama
from penstock.trainer.recipes.llama import next_token_loss as llama_loss
from penstock.trainer.recipes.llama_config import LlamaConfig

Batch = dict[str, Tensor]


class Perceptron(nn.Module):
    """Linear layers of other widths each, with what is between them outside of modules."""

    def __init__(self) -> None:
        super().__init__()
        widths = (6, 9, 7, 12, 8, 10, 5, 11, 4)
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in pairwise(widths)])

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            x = layer(x) if at == 0 else layer(torch.tanh(x) * 1.5)
        return x


class Convolutions(nn.Module):
    """Convolutions with batch norms, then flattened outside of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Sequential(nn.ReLU(), nn.Conv2d(4, 5, 3)),
            nn.BatchNorm2d(5),
            nn.Sequential(nn.ReLU(), nn.Conv2d(5, 6, 3)),
            nn.BatchNorm2d(6),
            nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.out = nn.ModuleList([nn.Linear(24, 12), nn.Linear(12, 4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x.reshape(-1, 2, 8, 8)).flatten(1)
        return self.out[1](self.out[0](x).relu())  # type: ignore[no-any-return]


class TwoStreams(nn.Module):
    """Blocks that are called with two tensors, a keyword argument, and what is made of the inputs alone."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, *, rest: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(rest) * scale, rest + self.b(x)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([TwoStreams.Block() for _ in range(8)])
        self.out = nn.Linear(6, 4)
        self.register_buffer("offset", torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        scale = x.mean(1, keepdim=True).tanh() + self.offset
        rest, x = self.first(x), x + 0.0 * self.first(x)
        for block in self.blocks:
            x, rest = block(x, rest=rest, scale=scale)
        return self.out(x + rest)  # type: ignore[no-any-return]


def class_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the rows that count."""
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (losses * batch["counts"]).sum(), batch["counts"].sum()


def _rows(width: int, rows: int) -> Batch:
    made = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=made)
    return {"x": x, "y": torch.randint(0, 4, (rows,), generator=made), "counts": torch.rand(rows, generator=made) > 0.3}


def _tokens(rows: int) -> Batch:
    made = torch.Generator().manual_seed(rows)
    tokens = torch.randint(0, 32, (rows, 13), generator=made)
    documents = torch.arange(13)[None].expand(rows, -1) // 5
    return {
        "tokens": tokens,
        "position_ids": torch.arange(13)[None].expand(rows, -1) % 5,
        "document_ids": documents,
        "loss_mask": torch.rand(rows, 13, generator=made) > 0.2,
    }


def _llama(*, tied: bool = False) -> nn.Module:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
    )
    return Llama(config)


@dataclass(frozen=True)
class Case:
    """A model, its batches by rows, and its loss. ``is_exact``: a pipeline's gradients are equal bit by bit."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Any], tuple[Tensor, Any]]
    is_exact: bool = True

    def model(self) -> nn.Module:
        torch.manual_seed(5)
        return self.make()


CASES = {
    "perceptron": Case(Perceptron, lambda rows: _rows(6, rows), class_loss),
    "convolutions": Case(Convolutions, lambda rows: _rows(128, rows), class_loss),
    "streams": Case(TwoStreams, lambda rows: _rows(6, rows), class_loss),
    "llama": Case(_llama, _tokens, llama_loss),
    "tied llama": Case(lambda: _llama(tied=True), _tokens, llama_loss, is_exact=False),
    "gpt": Case(
        lambda: SmallGPT(vocabulary=32, length=16, width=16, heads=2, layers=6), _tokens, gpt_loss, is_exact=False
    ),
}
