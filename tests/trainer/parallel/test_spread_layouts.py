"""Tensor parallelism with every zero stage on real ranks: the numbers of one process, and checkpoints in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.trainer import (
    ArrayLoader,
    DistributedTrainer,
    Evaluation,
    Mesh,
    TrainerConfig,
    TrainerConfigError,
    World,
    open_mesh,
)
from penstock.trainer.options import build_config

STEPS, EACH = 4, 2
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tp": 2},
    {"tp": 2, "zero": 1},
    {"tp": 4},
    {"zero": 3},
    {"tp": 2, "zero": 2},
    {"tp": 2, "zero": 3},
    {"tp": 4, "zero": 3},
    {},
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.frozen


class Net(nn.Module):
    """Two blocks whose linear layers are cut, between layers that are whole; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 3)
        self.spare = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor, *, uses_spare: bool = False) -> Tensor:
        if self.training:
            self.seen += 1
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        return self.spare(x) if uses_spare else x


def weighted(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Squares over rows that count, of which ranks have unequal numbers."""
    apart = (model(batch["x"], uses_spare=True) - batch["y"]).square().sum(1)
    return (apart * batch["counts"]).sum(), batch["counts"].sum()


def measure(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
    return {"mse": ((model(batch["x"]) - batch["y"]).square().sum(), len(batch["x"]))}


def rows(mesh: Mesh, **options: Any) -> ArrayLoader:
    generator = torch.Generator().manual_seed(1)
    fields = {
        "x": torch.randn(60, 8, generator=generator),
        "y": torch.randn(60, 3, generator=generator),
        "counts": (torch.rand(60, generator=generator) > 0.3).float(),
    }
    return ArrayLoader(fields, global_batch_size=8, rank=mesh.replica, world_size=mesh.replicas, **options)


def train(world: World, folder: str, parallel: dict[str, Any], *, steps: int = STEPS, **options: Any) -> dict[str, Any]:
    """Train, evaluate, and return whole weights, buffers, metrics and norms of gradients."""
    loss = options.pop("loss", weighted)
    given = {
        "steps": steps,
        "output_dir": folder,
        "precision": {"dtype": "fp32"},
        "parallel": parallel | ({"plan": PLAN} if "tp" in parallel else {}),
        "step": {"accumulate": 3, "clip_norm": 0.5},
        "report": {"quiet": True, "every": 1},
        **options,
    }
    config = build_config(TrainerConfig, given)
    mesh = open_mesh(config.parallel, world)
    model = Net()
    norms: list[Any] = []

    class Norms:
        def record(self, kind: str, step: int, values: Any) -> None:
            if kind == "train":
                norms.append(values["gradient_norm"])

        def close(self) -> None:
            pass

    with DistributedTrainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        rows(mesh, shuffle=True),
        config,
        loss=loss,
        evaluation=Evaluation(batches=rows(mesh, shuffle=False, last_batch="partial"), metrics=measure),
        observers=[Norms()],
        world=world,
        mesh=mesh,
    ) as trainer:
        summary = trainer.train()
        metrics = trainer.evaluate()
    found = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in model.named_parameters()}
    tensors = {name: one.detach().clone() for name, one in (*found.items(), *model.named_buffers())}
    return {"tensors": tensors, "metrics": metrics, "loss": summary.loss, "norms": norms}


def train_layouts(world: World, folder: str) -> list[dict[str, Any]]:
    return [train(world, f"{folder}/{number}", layout) for number, layout in enumerate(LAYOUTS)]


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one["tensors"].keys() == other["tensors"].keys()
    return max(float((one["tensors"][name] - value).abs().max()) for name, value in other["tensors"].items())


@pytest.mark.slow
def test_layouts_train_evaluate_and_clip_as_one_process(world: World, tmp_path: Path) -> None:
    everyones = run_ranks(train_layouts, 4, str(tmp_path), timeout_s=270)
    expected = train(world, str(tmp_path / "one"), {})
    for number, layout in enumerate(LAYOUTS):
        for rank, found in enumerate(one[number] for one in everyones):
            assert apart(found, expected) < 1e-5, (layout, rank)
            assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert everyones[0][number]["norms"] == pytest.approx(expected["norms"], rel=1e-5)


def train_chain(world: World, folder: str) -> dict[str, Any]:
    """One run, whose every two steps are trained in another layout, from the checkpoint of the one before."""
    found: dict[str, Any] = {}
    for number, layout in enumerate(LAYOUTS, 1):
        options: dict[str, Any] = {"checkpoint": {"every_steps": EACH, "background": False}, "ema": {"decay": 0.9}}
        found = train(world, folder, layout, steps=EACH * number, **options)
    return found


@pytest.mark.slow
def test_a_checkpoint_continues_in_every_other_layout(world: World, tmp_path: Path) -> None:
    (first, *_) = run_ranks(train_chain, 4, str(tmp_path / "chain"), timeout_s=270)
    expected = train(world, str(tmp_path / "one"), {}, steps=EACH * len(LAYOUTS), ema={"decay": 0.9})
    assert apart(first, expected) < 1e-5
    assert first["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)


def without_spare(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (model(batch["x"]) - batch["y"]).square().sum(), len(batch["x"])


def train_unused(world: World, folder: str) -> tuple[str, dict[str, Any]]:
    refusal = ""
    try:
        train(world, folder, {"tp": 2}, loss=without_spare)
    except TrainerConfigError as exc:
        refusal = str(exc)
    return refusal, train(world, folder, {"tp": 2, "unused_parameters": True}, loss=without_spare)


@pytest.mark.slow
def test_a_parameter_without_a_gradient_is_named_or_allowed(world: World, tmp_path: Path) -> None:
    for refusal, found in run_ranks(train_unused, 2, str(tmp_path), timeout_s=200):
        assert "spare.weight, spare.bias got no gradient in a step's last microbatch" in refusal
        assert apart(found, train(world, str(tmp_path / "one"), {}, loss=without_spare)) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average_every": 2}, r"average_every=2 takes each rank for a whole replica .* parallel\.tp=2 spreads"),
        ({"compression": {"scheme": "bf16"}}, r"compression\.scheme='bf16' takes each rank"),
        ({"step": {"adaptive_batch": True}}, r"step\.adaptive_batch=True takes each rank .* step\.microbatch by hand"),
        ({"compile": {"enabled": True, "cuda_graphs": True}}, r"compile\.cuda_graphs=True takes each rank"),
    ],
)
def test_what_takes_ranks_for_replicas_is_refused_with_a_spread_model(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainerConfigError, match=message):
        build_config(TrainerConfig, {"steps": 1, "parallel": {"tp": 2}, **options})
