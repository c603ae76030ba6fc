"""DDP's buckets: their sizes, and a resumed run on three ranks or more that is bit-equal to an unbroken one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch_ranks import run_ranks
from small_trainers import rows
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from penstock.trainer import DistributedTrainer, TrainerConfig, World
from penstock.trainer.options import build_config
from penstock.trainer.parallel.buckets import settle_buckets


class Crossed(nn.Module):
    """Layers used in another order than they are registered, so that gradients arrive in a third one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.last = nn.Linear(301, 2)
        self.first = nn.Linear(2, 907)
        self.middle = nn.Linear(907, 301)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return (model(batch["x"]).float() - batch["number"][:, None] / 7).square().sum(), len(batch["x"])


def train(world: World, folder: str, steps: int, scheme: str, dtype: str, parallel: dict[str, Any]) -> torch.Tensor:
    options: dict[str, Any] = {
        "steps": steps,
        "output_dir": folder,
        "precision": {"dtype": dtype},
        "parallel": {"bucket_mb": 0.5, **parallel},
        "compression": {"scheme": scheme},
        "checkpoint": {"every_steps": 3},
        "report": {"quiet": True},
    }
    trainer = DistributedTrainer(
        Crossed(),
        lambda parameters: (
            torch.optim.SGD(parameters, lr=1e-3) if scheme == "topk" else torch.optim.AdamW(parameters, lr=1e-2)
        ),
        rows(world, size=12, with_ids=True),
        build_config(TrainerConfig, options),
        loss=loss,
        world=world,
    )
    with trainer:
        trainer.train()
        weights = [getattr(one, "full_tensor", lambda one=one: one)() for one in trainer.parallel.inner.parameters()]
        return torch.cat([weight.detach().flatten() for weight in weights])


def resume_and_compare(world: World, folder: str, scheme: str, dtype: str, parallel: dict[str, Any]) -> bool:
    whole = train(world, f"{folder}/whole", 9, scheme, dtype, parallel)
    train(world, f"{folder}/parts", 4, scheme, dtype, parallel)
    return torch.equal(train(world, f"{folder}/parts", 9, scheme, dtype, parallel), whole)


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("none", "fp32"),
        ("none", "bf16"),
        ("none", "fp16"),
        ("fp16", "fp32"),
        ("int8", "fp32"),
        ("powersgd", "fp32"),
        ("topk", "fp32"),
    ],
)
@pytest.mark.parametrize("ranks", [3, 4])
def test_a_resumed_run_is_bit_equal_on_three_ranks_and_more(scheme: str, dtype: str, ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert all(run_ranks(resume_and_compare, ranks, folder, scheme, dtype, {}))


@pytest.mark.parametrize(
    ("parallel", "scheme", "dtype"),
    [
        ({"unused_parameters": True}, "none", "fp32"),
        ({"zero": 1}, "none", "bf16"),
        ({"zero": 2}, "int8", "fp32"),
        ({"zero": 3}, "none", "fp16"),
    ],
)
def test_it_is_so_for_every_way_of_sharding(parallel: dict[str, Any], scheme: str, dtype: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert all(run_ranks(resume_and_compare, 3, folder, scheme, dtype, parallel))


def test_buckets_are_settled_under_a_ddp_that_moves_inputs_to_its_device(world: World) -> None:
    replicated = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    replicated.device_ids = [0]  # as on CUDA, where DDP cannot call what takes no inputs
    settle_buckets(replicated)
    assert all(one.grad is None for one in replicated.parameters())
    replicated(torch.ones(1, 2)).sum().backward()
    assert replicated.module.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def wide(layers: int) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(layers)], nn.Linear(512, 2))  # a layer has 1 MiB


def list_buckets(world: World, folder: str, layers: int, parallel: dict[str, Any]) -> list[int]:
    """The bytes of each bucket that is exchanged in one step."""
    found: list[int] = []

    def exchange(state, bucket):  # type: ignore[no-untyped-def] # DDP wants annotations as objects, or none
        found.append(bucket.buffer().nbytes)
        return allreduce_hook(dist.group.WORLD, bucket)

    trainer = DistributedTrainer(
        wide(layers),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        [{"x": torch.ones(4, 512), "number": torch.ones(4)}],
        build_config(
            TrainerConfig, {"steps": 1, "output_dir": folder, "parallel": parallel, "report": {"quiet": True}}
        ),
        loss=loss,
        world=world,
    )
    with trainer:
        trainer.parallel.module.register_comm_hook(None, exchange)
        trainer.train()
    return found


@pytest.mark.parametrize(
    ("layers", "parallel", "most_in_the_last"),
    [
        (8, {}, 2),
        (8, {"bucket_mb": 1.0}, 1),
        (8, {"overlap": False}, 9),
        (1, {}, 2),
    ],
)
def test_a_small_models_gradients_are_exchanged_while_backward_goes_on(
    tmp_path: Path, layers: int, parallel: dict[str, Any], most_in_the_last: int
) -> None:
    """The last bucket is complete only when backward is, so a model in one bucket would hide nothing."""
    sizes, _ = run_ranks(list_buckets, 2, str(tmp_path), layers, parallel)
    assert sum(sizes) == sum(parameter.nbytes for parameter in wide(layers).parameters())
    assert sizes[-1] < most_in_the_last * 2**20 + 2**14
