"""What a step waits for: the sums of its forwards, and nothing else that the device computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import cliff, make_trainer, rows
from small_world import Slope, batch_of, make_steps
from torch import nn

from penstock.trainer import Mesh, NonFiniteLossError, TrainerError, World
from penstock.trainer.steps.totals import Reading, StepTotals, Totals


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def on_meta(world: World, *, accumulate: int, rows_per_batch: int, **config: Any) -> Any:
    """A runner on a device that holds no values, so that whatever reads one raises; and a step's microbatches."""
    steps = make_steps(
        replace(world, device=torch.device("meta")),
        nn.Sequential(Slope(), nn.BatchNorm1d(1)),
        optimizer=adam,
        reads_late=True,
        accumulate=accumulate,
        **config,
    )
    count = accumulate * rows_per_batch
    steps.load_state_dict({"expected_count": count, "skipped": 0, "scaler": None})
    batch = {"x": torch.ones(rows_per_batch, 1, device="meta")}
    batch["__valid__"] = torch.ones(rows_per_batch, dtype=torch.bool, device="meta")
    return steps, [batch] * accumulate


@pytest.mark.parametrize("config", [{}, {"clip_norm": 1.0}], ids=["plain", "clipped"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_reads_only_its_sums_from_the_device(
    world: World, monkeypatch: pytest.MonkeyPatch, accumulate: int, config: dict[str, Any]
) -> None:
    read = []

    def wait(reading: Reading) -> list[float]:
        read.append(reading)
        return [
            6.0,
            2.0 * accumulate,
            2.0 * accumulate,
            *[0.0] * (len(fields(Totals)) - 4),
        ]  # of one learner no count

    monkeypatch.setattr(Reading, "wait", wait)
    steps, microbatches = on_meta(world, accumulate=accumulate, rows_per_batch=2, **config)
    for step in range(3):
        result = steps.run(step, microbatches)
        assert result.outcome == "updated"
        assert result.rows == 2 * accumulate
        assert len(read) == step + 1


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_number_of_any_shape_is_a_count_on_every_device(world: World, device: str, shape: tuple[int, ...]) -> None:
    totals = StepTotals(Mesh(replace(world, device=torch.device(device))))
    totals.add(torch.ones((), device=device), torch.ones(shape, device=device, requires_grad=True))
    assert totals.own_count().shape == ()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_on_cuda_waits_for_no_kernel() -> None:
    """Torch raises at what waits for the device; waiting for the event after the forwards' sums is not among that."""
    device = torch.device("cuda", 0)
    here = World(
        rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1, device=device, backend="nccl"
    )
    steps = make_steps(here, Slope(), optimizer=adam, clip_norm=1.0, accumulate=2)
    batch = {name: value.to(device) for name, value in batch_of(1.0, 2.0, __valid__=torch.ones(2).bool()).items()}
    steps.run(0, [batch, batch])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 4):
            assert steps.run(step, [batch, batch]).outcome == "updated"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    steps.settle()


def root(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Finite at 0, where its slope is not."""
    return model(batch["x"]).sqrt().sum(), len(batch["x"])


@pytest.mark.parametrize("ask", ["next", "settle"])
def test_gradients_that_are_read_late_stop_the_run_by_the_name_of_their_step(world: World, ask: str) -> None:
    steps = make_steps(world, Slope(1.0), loss=root, reads_late=True)
    steps.run(6, [batch_of(1.0)])
    steps.settle()
    assert steps.run(7, [batch_of(0.0)]).outcome == "updated"
    second: Callable[[], Any] = steps.settle if ask == "settle" else lambda: steps.run(8, [batch_of(1.0)])
    with pytest.raises(NonFiniteLossError, match=r"step 7: the loss was finite and the gradient of w was not"):
        second()


def test_clipping_without_waiting_spoils_no_other_weight(world: World) -> None:
    model = nn.ModuleDict({"good": Slope(0.5), "bad": Slope(1.0)})

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        x = batch["x"]
        return (model["good"](x + 1) + model["bad"](x).sqrt()).sum(), len(x)  # type: ignore[index]

    steps = make_steps(world, model, loss=loss, reads_late=True, clip_norm=1.0)
    steps.run(0, [batch_of(0.0)])
    with pytest.raises(NonFiniteLossError, match=r"the gradient of bad\.w was not"):
        steps.settle()


@pytest.mark.parametrize("clip_norm", [None, 0.7])
def test_a_step_that_reads_late_makes_the_same_weights(world: World, clip_norm: float | None) -> None:
    found = []
    for late in (False, True):
        model = Slope(0.3)
        steps = make_steps(world, model, optimizer=adam, reads_late=late, clip_norm=clip_norm, accumulate=2)
        results = [
            steps.run(step, [batch_of(*[1.0 + step] * count), batch_of(0.3)]) for step, count in enumerate((1, 4, 2, 2))
        ]
        assert all(isinstance(one.gradient_norm, torch.Tensor) == late for one in results)
        found.append((float(model.w.detach()), [float(one.gradient_norm or 0) for one in results]))
    assert found[0] == found[1]


def test_a_norm_that_overflows_is_refused_as_such(world: World) -> None:
    line = nn.Linear(2, 1, bias=False)
    nn.init.constant_(line.weight, 0.1)  # so that the loss does not overflow
    steps = make_steps(world, line, loss=lambda model, batch: (model(batch["x"]).sum() * 1e-9, 1))
    with pytest.raises(NonFiniteLossError, match="the loss is finite and the norm of the gradients overflows"):
        steps.run(0, [{"x": torch.full((1, 2), 3e38)}] * 1)


def read_late(world: World, folder: str, options: dict[str, Any]) -> Any:
    kept = {"checkpoint": {"every_steps": 2}, "steps": 4}
    with make_trainer(world, folder, rows(world, shuffle=False), loss=cliff, **kept, **options) as trainer:
        trainer.steps._reads_late = True  # as on CUDA
        try:
            trainer.train()
        except TrainerError as exc:
            return str(exc), trainer.progress.step
    return "trained", 4


@pytest.mark.parametrize(
    "options",
    [{"parallel": {"zero": 0}}, {"parallel": {"zero": 3}, "ema": {"decay": 0.9}}, {"average_every": 10}],
    ids=str,
)
def test_all_ranks_stop_for_gradients_that_were_read_late_and_save_none_of_it(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Row 9 is in the second step, after which a save is due."""
    for told, step in run_ranks(read_late, 2, str(tmp_path), options):
        assert "step 1: the loss was finite and the gradient of line.weight" in told
        assert step == 2
    assert not list((tmp_path / "checkpoints").glob("step-*"))
