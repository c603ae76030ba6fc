"""What three ranks do together; each case returns plain data, which its test reads from every rank."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from small_trainers import Line, add_up, make_trainer, rows, square
from torch import nn
from torch.distributed.tensor import DTensor

from penstock.trainer import (
    Evaluation,
    TrainerConfigError,
    TrainerError,
    World,
)


def evaluate_exactly(world: World) -> list[dict[str, float]]:
    found = []
    for zero, last_batch, size in (
        (0, "partial", 6),
        (0, "partial", 22),
        (0, "pad", 5),
        (3, "pad", 7),
        (2, "partial", 6),
    ):
        evaluation = Evaluation(batches=rows(world, last_batch, size), metrics=add_up)
        with (
            tempfile.TemporaryDirectory() as folder,
            make_trainer(world, folder, evaluation=evaluation, parallel={"zero": zero}) as trainer,
        ):
            found.append(trainer.evaluate())
            parameters = list(trainer.parallel.inner.parameters())
            assert all(isinstance(parameter, DTensor) == (zero > 0) for parameter in parameters), "left gathered"
    return found


class Unequal:
    """As many batches as the rank's number, plus ``more``."""

    def __init__(self, world: World, more: int) -> None:
        self._batches = world.rank + more
        self._rank = world.rank

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Any:
        for index in range(self._batches):
            yield {"x": torch.ones(1, 2), "number": torch.tensor([10.0 * self._rank + index])}


def evaluate_unequal(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for zero, more in ((0, 0), (3, 1)):
            evaluation = Evaluation(batches=Unequal(world, more), metrics=add_up)
            with make_trainer(world, folder, evaluation=evaluation, parallel={"zero": zero}) as trainer:
                found[f"zero{zero}"] = trainer.evaluate()["number"]
        evaluation = Evaluation(batches=Unequal(world, 0), metrics=add_up)
        with make_trainer(world, folder, evaluation=evaluation, parallel={"zero": 3}) as trainer:
            try:
                trainer.evaluate()
            except TrainerError as exc:
                found["error"] = str(exc)
    return found


def refuse_unequal(world: World) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            make_trainer(world, folder, Unequal(world, 1)).close()
        except TrainerConfigError as exc:
            return str(exc)
    return "accepted"


def spoil(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    total, count = square(model, batch)
    return total * torch.where(batch["number"] == 9, torch.nan, 1.0).sum(), count


def meet_nan(world: World) -> dict[str, Any]:
    """Row 9, of sample id 8, is in the second step and on the second rank; every rank must say so."""
    found: dict[str, Any] = {}
    for policy in ("stop", "skip"):
        step = {"on_nan": policy, "max_skipped": 1, "clip_norm": 10.0}
        for zero in (0, 3):
            loader = rows(world, shuffle=False, with_ids=True)
            with (
                tempfile.TemporaryDirectory() as folder,
                make_trainer(world, folder, loader, loss=spoil, step=step, steps=8, parallel={"zero": zero}) as trainer,
            ):
                try:
                    trainer.train()
                except TrainerError as exc:
                    found[f"{policy}{zero}"] = str(exc)
                found[f"{policy}{zero} progress"] = [trainer.progress.step, trainer.progress.updates]
                weights = [
                    parameter.full_tensor() if zero else parameter for parameter in trainer.parallel.inner.parameters()
                ]
                found[f"{policy}{zero} finite"] = all(bool(weight.isfinite().all()) for weight in weights)
    return found


def overflow(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    total, count = square(model, batch)
    return total * 10.0, count


def scale_losses(world: World) -> dict[str, Any]:
    """The first scale is far too big: it must shrink until updates fit, on all ranks alike, then grow."""
    found: dict[str, Any] = {}
    for zero in (0, 1, 3):
        precision = {"dtype": "fp16", "init_scale": 2.0**20, "growth_interval": 3, "reduce_dtype": "fp32"}
        schedule = {"shape": "linear", "warmup_steps": 4}
        with (
            tempfile.TemporaryDirectory() as folder,
            make_trainer(
                world, folder, loss=overflow, precision=precision, steps=24, parallel={"zero": zero}, schedule=schedule
            ) as trainer,
        ):
            summary = trainer.train()
            found[f"zero{zero}"] = {
                "overflows": summary.overflows,
                "updates": summary.updates,
                "scale": trainer.steps.loss_scale,
                "state": trainer.state_dict()["steps"]["scaler"],
                "rate": trainer.schedule.rate,
            }
    return found


def take_norms(world: World) -> dict[str, Any]:
    """The norm of each step's gradients with a clip that never clips, and without one; the last batch is partial."""
    found: dict[str, Any] = {}
    for zero in (0, 1, 3):
        for name, step in (("clipped", {"clip_norm": 1e9}), ("free", {})):
            report = {"quiet": True, "every": 1, "flops_per_sample": 6.0, "peak_flops": 1e3}
            with (
                tempfile.TemporaryDirectory() as folder,
                make_trainer(world, folder, step=step, report=report, parallel={"zero": zero}) as trainer,
            ):
                trainer.train()
                if world.is_first:
                    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
                    found[f"{name}{zero}"] = [line for line in lines if line["kind"] == "train"]
    return found


def slow_on_the_last_rank(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    slow = torch.distributed.get_rank() == 2
    time.sleep(len(batch["x"]) * (4e-3 if slow else 1e-3))
    return square(model, batch)


def share_by_speed(world: World) -> dict[str, Any]:
    given = {}
    for shares in ("equal", "auto"):
        loader = rows(world, size=23, with_ids=True)
        with (
            tempfile.TemporaryDirectory() as folder,
            make_trainer(
                world, folder, loader, loss=slow_on_the_last_rank, shares=shares, shares_every=2, steps=10
            ) as trainer,
        ):
            trainer.train()
            given[shares] = [parameter.flatten().tolist() for parameter in trainer.parallel.inner.parameters()]
            given[f"{shares} rows"] = len(next(iter(loader))["x"])
    return given


def stop_by_signal(world: World) -> dict[str, Any]:
    """Rank 1 alone gets SIGTERM, in its fourth forward or in the evaluation; all ranks must stop, and save."""
    found: dict[str, Any] = {}
    for where in ("step", "evaluation"):
        calls = 0

        def ask(only: str, at: int, where: str = where) -> None:
            nonlocal calls
            calls += where == only
            if world.rank == 1 and where == only and calls == at:
                os.kill(os.getpid(), signal.SIGTERM)

        def loss(model: nn.Module, batch: dict[str, torch.Tensor], ask: Any = ask) -> tuple[torch.Tensor, int]:
            ask("step", 4)
            return square(model, batch)

        def metrics(model: nn.Module, batch: dict[str, torch.Tensor], ask: Any = ask) -> Any:
            ask("evaluation", 2)
            return add_up(model, batch)

        with shared_folder(world) as folder:
            options: dict[str, Any] = {
                "loss": loss,
                "evaluation": Evaluation(batches=rows(world, "pad"), metrics=metrics),
                "checkpoint": {"every_steps": 100},
                "steps": 50,
            }
            with make_trainer(world, folder, **options) as trainer:
                summary = trainer.train()
            with make_trainer(world, folder, **{**options, "loss": square, "steps": 6}) as trainer:
                resumed_at = trainer.progress.step
                end = trainer.train().steps
        found[where] = [summary.stopped_early, summary.steps, resumed_at, end]
    return found


def average_weights(world: World) -> dict[str, Any]:
    """Each rank trains a copy; after the last average the copies are one."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, make_trainer(world, folder, average_every=3, steps=7) as trainer:
        trainer.train()
        found["weights"] = [parameter.flatten().tolist() for parameter in trainer.parallel.inner.parameters()]
        found["own"] = not trainer.parallel.exchanges
    return found


def faint(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    total, count = square(model, batch)
    return total * 1e-4, count


def compress_gradients(world: World) -> dict[str, Any]:
    found = {}
    for scheme, zero in (("int8", 0), ("powersgd", 0), ("topk", 0), ("bf16", 2)):
        options: dict[str, Any] = {
            "model": nn.Sequential(Line(), nn.Linear(2, 64), nn.Linear(64, 64), nn.Linear(64, 1)),
            "compression": {"scheme": scheme, "momentum": 0.0},
            "parallel": {"zero": zero},
            "steps": 10,
            "loss": faint,
        }
        with (
            tempfile.TemporaryDirectory() as folder,
            make_trainer(world, folder, **options) as trainer,
        ):
            summary = trainer.train()
            found[f"{scheme}-{zero}"] = summary.wire_bytes / summary.plain_bytes
    return found


@contextmanager
def shared_folder(world: World) -> Iterator[str]:
    """One new folder for all ranks, removed when they are through with it."""
    with tempfile.TemporaryDirectory() as mine:
        everyones = [mine]
        torch.distributed.broadcast_object_list(everyones, src=0)
        yield str(everyones[0])
        torch.distributed.barrier()


def refuse_output(world: World) -> str:
    """Only rank 0 writes there, and every rank must hear that it cannot."""
    with tempfile.NamedTemporaryFile() as file:
        try:
            make_trainer(world, file.name).close()
        except TrainerError as exc:
            return str(exc)
    return "accepted"


def fit_memory(world: World) -> dict[str, Any]:
    """Ranks with memory for 5, 2 and 4 rows; batches of 6 rows each, and of 2, 2 and 1 at an epoch's end."""
    limit = (5, 2, 4)[world.rank]
    found: dict[str, Any] = {}

    def limited(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        if len(batch["x"]) > limit:
            raise torch.OutOfMemoryError("nothing is left")
        return square(model, batch)

    for name, zero, step, loss in (
        ("adaptive", 0, {"adaptive_batch": True}, limited),
        ("by hand", 0, {"microbatch": 2}, limited),
        ("whole", 0, {}, square),
        ("zero 1", 1, {"microbatch": 2}, limited),
        ("zero 3", 3, {"microbatch": 2}, limited),
    ):
        options: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "parallel": {"zero": zero},
            "loader": rows(world, size=18),
        }
        with tempfile.TemporaryDirectory() as folder, make_trainer(world, folder, **options) as trainer:
            trainer.train()
            weights = [one.full_tensor() if zero else one for one in trainer.parallel.inner.parameters()]
            found[name] = [one.flatten().tolist() for one in weights]
            if name == "adaptive":
                found["state"] = trainer.state_dict()["microbatches"]
    return found


TOGETHER: dict[str, Callable[[World], Any]] = {
    "evaluate-exactly": evaluate_exactly,
    "evaluate-unequal": evaluate_unequal,
    "refuse-unequal": refuse_unequal,
    "refuse-output": refuse_output,
    "meet-nan": meet_nan,
    "take-norms": take_norms,
    "scale-losses": scale_losses,
    "share-by-speed": share_by_speed,
    "stop-by-signal": stop_by_signal,
    "average-weights": average_weights,
    "compress-gradients": compress_gradients,
    "fit-memory": fit_memory,
}
