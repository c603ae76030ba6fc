"""Random numbers by arithmetic, so that a resumed run draws what an unbroken one would have drawn."""

from __future__ import annotations

import torch


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed the generators that layers such as dropout use in this step on this rank."""
    mixed = hash((seed, step, rank)) & 0x7FFFFFFFFFFFFFFF
    # torch.manual_seed formats three stack traces where CUDA is not in use: a third of a millisecond a step.
    torch.default_generator.manual_seed(mixed)
    if device.type == "cuda":
        torch.cuda.manual_seed(mixed)
