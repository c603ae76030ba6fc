"""Handwritten digits: the 1,797 images of 8 by 8 pixels that scikit-learn ships, and a small CNN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ..data.batches import VALID
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


def read_digits(split: str) -> Iterator[dict[str, Any]]:
    """The images of the training or the held-out part, a fixed split, as PNG files with their classes."""
    if split not in ("train", "test"):
        raise TrainerConfigError(f"split={split!r} is not known; use 'train' or 'test'")
    try:
        import cv2
        from sklearn import datasets
    except ImportError as exc:
        raise TrainerConfigError("the digits need scikit-learn and OpenCV; install penstock[demo]") from exc
    found = datasets.load_digits()
    images = np.rint(found.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8), from 0..16
    order = np.random.default_rng(0).permutation(len(images))
    for row in order[_HELD_OUT:] if split == "train" else order[:_HELD_OUT]:
        png = cv2.imencode(".png", images[row])[1].tobytes()
        yield {"__key__": f"{row:04d}", "png": png, "cls": int(found.target[row])}


def cross_entropy(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses of the valid rows, and their number."""
    losses = F.cross_entropy(model(_images(batch)).float(), batch["cls"], reduction="none")
    valid = batch.get(VALID, torch.ones_like(batch["cls"], dtype=torch.bool))
    return (losses * valid).sum(), valid.sum()


def measure(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Loss and accuracy over the valid rows."""
    scores = model(_images(batch)).float()
    valid = batch.get(VALID, torch.ones_like(batch["cls"], dtype=torch.bool))
    right = (scores.argmax(1) == batch["cls"]) & valid
    losses = F.cross_entropy(scores, batch["cls"], reduction="none") * valid
    return {"loss": (losses.sum(), valid.sum()), "accuracy": (right.sum(), valid.sum())}


def _images(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    # (B, 3, 8, 8) uint8, all channels alike -> (B, 1, 8, 8) float32 in [0, 1]
    return (batch["png"][:, 0].float() / 255).unsqueeze(1)
