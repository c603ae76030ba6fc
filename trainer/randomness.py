"""Random numbers by arithmetic, so that a resumed run draws what an unbroken one would have drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch

Purpose = Literal["step", "fetch", "evaluation"]
_PURPOSES: dict[Purpose, tuple[int, ...]] = {"step": (), "fetch": (1,), "evaluation": (2,)}


def seed_all(seed: int) -> None:
    """Seed torch's (on every device), NumPy's and Python's global generators: for weights, before a model is built."""
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def seed_step(seed: int, step: int, rank: int, device: torch.device, purpose: Purpose = "step") -> None:
    """Seed torch's, NumPy's and Python's global generators for what this rank draws in this step.

    Fetching and evaluating have seeds of their own: how much a loader draws changes no dropout.
    """
    mixed = hash((seed, step, rank, *_PURPOSES[purpose])) & 0x7FFFFFFFFFFFFFFF
    # torch.manual_seed formats three stack traces where CUDA is not in use: a third of a millisecond a step.
    torch.default_generator.manual_seed(mixed)
    if device.type == "cuda":
        torch.cuda.manual_seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)
    random.seed(mixed)


def tell_seed(seed: int, saved: Mapping[str, Any] | None, tell: Callable[[str], None]) -> None:
    """Tell of a seed that a checkpoint's run had otherwise."""
    if saved and saved.get("seed", seed) != seed:
        tell(f"seed={seed}, where the checkpoint had {saved['seed']}")
