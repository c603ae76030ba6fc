"""A world of one and a model of one weight: the smallest real objects that a step and an evaluation can run on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from penstock.trainer import LossFunction, Mesh, ParallelConfig, PrecisionConfig, StepConfig, World
from penstock.trainer.parallel.model import ParallelModel
from penstock.trainer.parallel.passes import PlainPasses
from penstock.trainer.steps.step import StepRunner

FP32 = PrecisionConfig(dtype="fp32")


class Slope(nn.Module):
    """y = w x; with ``dropout``, in training, half of the x are zero."""

    def __init__(self, w: float = 1.0, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([[w]]))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x) @ self.w


def batch_of(*x: float, **fields: torch.Tensor) -> dict[str, torch.Tensor]:
    """A batch of rows (B, 1)."""
    return {"x": torch.tensor(x).reshape(-1, 1), **fields}


def sum_of_outputs(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | float]:
    """The sum of y over valid rows and their number; its gradient is the sum of their x."""
    valid = batch.get("__valid__", torch.ones(len(batch["x"]), dtype=torch.bool))
    return (model(batch["x"]).float().squeeze(1) * valid).sum(), valid.sum()


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def make_steps(
    world: World,
    model: nn.Module,
    *,
    loss: LossFunction = sum_of_outputs,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    precision: PrecisionConfig = FP32,
    reads_late: bool | None = None,
    **config: Any,
) -> StepRunner:
    """A step runner over the model in this process alone; rate 1, so that w falls by the gradient."""
    parallel = ParallelModel(model, ParallelConfig(), precision, Mesh(world))
    return StepRunner(
        parallel,
        parallel.adopt_optimizer(optimizer),
        loss,
        passes=PlainPasses(parallel, precision, lambda name: nullcontext()),
        config=StepConfig(**config),
        precision=precision,
        phase=lambda name: nullcontext(),
        reads_late=reads_late,
    )
