"""Handwritten digits: the 1,797 images of 8 by 8 pixels that scikit-learn ships, and a small CNN."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ..arrays import ArrayLoader
from ..batches import VALID
from ..errors import TrainerConfigError

_HELD_OUT = 360


class DigitsNet(nn.Module):
    """Three convolutions and a linear layer; images are (B, 1, 8, 8) float32 in [0, 1], scores are (B, 10)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, stride=2),
            nn.ReLU(),
        )
        self.scores = nn.Linear(2 * width * 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.scores(self.features(images).flatten(1))
        return scores


def load_digits(split: str = "train", **loader: Any) -> ArrayLoader:
    """The train or the held-out part, cut once and for all; ``loader`` goes to ``ArrayLoader``."""
    try:
        from sklearn import datasets
    except ImportError as exc:
        raise TrainerConfigError("the digits come with scikit-learn; install penstock[demo]") from exc
    if split not in ("train", "test"):
        raise TrainerConfigError(f"split={split!r} is not known; use 'train' or 'test'")
    found = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    rows = order[_HELD_OUT:] if split == "train" else order[:_HELD_OUT]
    images = (found.images[rows, None] / 16.0).astype(np.float32)
    return ArrayLoader({"image": images, "label": found.target[rows].astype(np.int64)}, **loader)


def cross_entropy(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses of the valid rows, and their number."""
    losses = F.cross_entropy(model(batch["image"]).float(), batch["label"], reduction="none")
    valid = batch.get(VALID, torch.ones_like(batch["label"], dtype=torch.bool))
    return (losses * valid).sum(), valid.sum()


def measure(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Loss and accuracy over the valid rows."""
    scores = model(batch["image"]).float()
    valid = batch.get(VALID, torch.ones_like(batch["label"], dtype=torch.bool))
    right = (scores.argmax(1) == batch["label"]) & valid
    losses = F.cross_entropy(scores, batch["label"], reduction="none") * valid
    return {"loss": (losses.sum(), valid.sum()), "accuracy": (right.sum(), valid.sum())}
