"""Click prediction: rows of a parquet file, embeddings of categories and their interactions (Naumov et al. 2019)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ..data.batches import VALID
from ..errors import TrainerConfigError
from ..server.embedding import ServerEmbedding

CATEGORIES = 8
NUMBERS = 4
_BATCH_ROWS = 8192


class ClickNet(nn.Module):
    """An embedding per category, a dense layer for the numbers, the dot products of all pairs, a small network on top.

    ``numbers`` are (B, 4) float32, ``categories`` (B, 8) int64 below ``values``; the result is (B,) logits. With
    ``served`` the embeddings lie on a parameter server, whose rows have no number: ``values`` is not used.
    """

    def __init__(self, values: int = 1000, width: int = 16, hidden: int = 64, served: bool = False) -> None:
        super().__init__()
        tables = [
            ServerEmbedding(f"category_{i}", width, seed=i, scale=0.17) if served else nn.Embedding(values, width)
            for i in range(CATEGORIES)
        ]
        self.embeddings = nn.ModuleList(tables)
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, hidden), nn.ReLU(), nn.Linear(hidden, width))
        pairs = (CATEGORIES + 1) * CATEGORIES // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        for embedding in tables:
            if isinstance(embedding, nn.Embedding):
                nn.init.normal_(embedding.weight, std=0.1)

    def lookups(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The ids that a batch looks up, by table on a parameter server."""
        return {
            table.spec.name: batch[table.spec.name] for table in self.embeddings if isinstance(table, ServerEmbedding)
        }

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(numbers)
        # (B, 1 + categories, width)
        features = torch.stack([dense, *(embed(categories[:, i]) for i, embed in enumerate(self.embeddings))], dim=1)
        products = features @ features.transpose(1, 2)
        rows, columns = torch.triu_indices(CATEGORIES + 1, CATEGORIES + 1, offset=1, device=products.device)
        logits: torch.Tensor = self.top(torch.cat([dense, products[:, rows, columns]], dim=1))
        return logits.squeeze(1)


def read_clicks(split: str, *, rows: int, values: int = 1000, seed: int = 0) -> Iterator[pa.RecordBatch]:
    """A synthetic click log whose clicks follow from hidden traits of the categories; its last tenth is held out."""
    if split not in ("train", "test"):
        raise TrainerConfigError(f"split={split!r} is not known; use 'train' or 'test'")
    random = np.random.default_rng(seed)
    traits = random.normal(size=(CATEGORIES, values, 3)) / np.sqrt(3)
    categories = np.minimum(random.zipf(1.3, size=(rows, CATEGORIES)) - 1, values - 1)
    numbers = random.normal(size=(rows, NUMBERS)).astype(np.float32)
    found = traits[np.arange(CATEGORIES), categories]  # (rows, categories, 3)
    score = (found[:, 0::2] * found[:, 1::2]).sum((1, 2)) * 2.0 + numbers @ np.array([0.8, -0.6, 0.4, 0.0]) - 0.5
    columns: dict[str, Any] = {f"category_{i}": categories[:, i].astype(np.int32) for i in range(CATEGORIES)}
    columns |= {f"number_{i}": numbers[:, i] for i in range(NUMBERS)}
    columns["click"] = (random.random(rows) < 1 / (1 + np.exp(-score))).astype(np.int8)
    log = pa.record_batch(columns)
    cut = rows - rows // 10
    part = log.slice(0, cut) if split == "train" else log.slice(cut)
    for start in range(0, len(part), _BATCH_ROWS):
        yield part.slice(start, _BATCH_ROWS)


def log_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the binary cross entropies of the valid rows, and their number."""
    losses, _, valid = _score(model, batch)
    return losses.sum(), valid.sum()


def measure(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Loss and accuracy over the valid rows, and the area under the ROC curve."""
    losses, logits, valid = _score(model, batch)
    click = batch["click"] > 0
    right = ((logits > 0) == click) & valid
    counts = {"loss": (losses.sum(), valid.sum()), "accuracy": (right.sum(), valid.sum())}
    return {**counts, "auc": count_ordered(logits[valid & click], logits[valid & ~click])}


def count_ordered(clicked: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the pairs of a clicked row of a batch and another in which the clicked has the higher logit, and all pairs.

    Their ratio is the area under the ROC curve (Mann and Whitney 1947); pairs of equal logits count half. Over several
    batches it is that of the pairs within each.
    """
    ordered = other.sort().values
    lower = torch.searchsorted(ordered, clicked).double().sum()
    upto = torch.searchsorted(ordered, clicked, right=True).double().sum()
    return (lower + upto) / 2, torch.tensor(float(len(clicked)) * len(other), dtype=torch.float64)


def _score(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each row's loss, zero where a row only fills up; the logits, and the mask of rows."""
    numbers = torch.stack([batch[f"number_{i}"] for i in range(NUMBERS)], dim=1)
    categories = torch.stack([batch[f"category_{i}"] for i in range(CATEGORIES)], dim=1).long()
    click = batch["click"].float()
    logits = model(numbers, categories).float()
    valid = batch.get(VALID, torch.ones_like(click, dtype=torch.bool))
    losses = F.binary_cross_entropy_with_logits(logits, click, reduction="none") * valid
    return losses, logits, valid
