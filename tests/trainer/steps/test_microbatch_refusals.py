"""What cannot be cut into microbatches, and what smaller ones do not mend, is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from microbatch_cases import LimitedLoss, Net, loader, make
from torch import nn

from penstock.trainer import DistributedTrainer, TrainerConfig, TrainerConfigError, TrainerError, World
from penstock.trainer.options import build_config


@pytest.mark.parametrize("step", [{"microbatch": 2}, {"adaptive_batch": True}])
def test_a_batch_that_cannot_be_cut_is_refused_and_not_computed_whole(
    world: World, tmp_path: Path, step: dict[str, Any]
) -> None:
    def loss(model: nn.Module, batch: SimpleNamespace) -> tuple[torch.Tensor, int]:
        return model(batch.x).sum(), len(batch.x)

    batches = [SimpleNamespace(x=torch.ones(6, 4))]
    with (
        make(world, tmp_path, loss, batches, step=step, steps=1) as trainer,  # type: ignore[arg-type]
        pytest.raises(TrainerConfigError, match="the batch is a SimpleNamespace without a field that goes by rows"),
    ):
        trainer.train()


def test_a_batch_of_tuples_of_rows_is_counted_and_not_cut_elsewhere(world: World, tmp_path: Path) -> None:
    seen: list[int] = []

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        seen.append(len(batch[0]))
        return model(torch.cat(batch[0])).sum(), len(batch[1])

    batches = [tuple(zip(*[(torch.ones(8, 4), row) for row in range(6)], strict=True))]
    with make(world, tmp_path, loss, batches, steps=1) as trainer:  # type: ignore[arg-type]
        trainer.train()
        assert (trainer.progress.samples, seen) == (6, [6])
    with (
        make(world, tmp_path, loss, batches, step={"microbatch": 2}, steps=1) as trainer,  # type: ignore[arg-type]
        pytest.raises(TrainerConfigError, match=r"batch\[0\] is a tuple of 6 alike, which may be rows, or fields"),
    ):
        trainer.train()
    assert seen == [6]


@pytest.mark.parametrize(
    ("loss", "kind", "said"),
    [
        (LimitedLoss(0), TrainerError, "not even one row fits"),
        (LimitedLoss(5, RuntimeError("shapes do not match")), RuntimeError, "shapes do not match"),
        (LimitedLoss(5, ValueError("no such label")), ValueError, "no such label"),
    ],
)
def test_what_no_smaller_batch_mends_is_raised(
    world: World, tmp_path: Path, loss: LimitedLoss, kind: type[Exception], said: str
) -> None:
    model = Net()
    model.norm = nn.Identity()  # a batch norm takes no single row
    with (
        DistributedTrainer(
            model,
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            loader(),
            build_config(TrainerConfig, {"steps": 1, "output_dir": str(tmp_path), "step": {"adaptive_batch": True}}),
            loss=loss,
            world=world,
        ) as trainer,
        pytest.raises(kind, match=said),
    ):
        trainer.train()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("parallel", "said"),
    [({"zero": 3}, r"parallel\.zero=3 a forward needs all ranks"), ({"sync_batchnorm": True}, "sync_batchnorm=True")],
)
def test_what_needs_all_ranks_in_forward_is_refused(parallel: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainerConfigError, match=said):
        build_config(TrainerConfig, {"steps": 1, "parallel": parallel, "step": {"adaptive_batch": True}})


def test_batches_by_tokens_are_refused(world: World, tmp_path: Path) -> None:
    batches = loader()
    batches.is_batched_by_tokens = True  # type: ignore[attr-defined]
    with pytest.raises(TrainerConfigError, match="batch_tokens="):
        make(world, tmp_path, LimitedLoss(), batches, step={"adaptive_batch": True})
