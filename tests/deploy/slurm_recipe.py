"""What the recipe of the test under Slurm names: a line as a model, and a loss that takes its time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from small_trainers import Line
from tar_rows import square_x
from torch import nn

__all__ = ["Line", "slow_loss"]


def slow_loss(model: nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """As ``square_x``, slowly until the job's folder has a file ``hurry``."""
    if not Path("hurry").exists():
        time.sleep(0.1)
    return square_x(model, batch)
