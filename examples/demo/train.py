"""Train a small CNN on the digits, with a checkpoint every few steps: what a rank of the demo runs.

    torchrun --standalone --nproc-per-node=2 examples/demo/train.py --train URL --test URL --output FOLDER

Restarted on any number of ranks, it resumes from the newest checkpoint. Rank 0 prints a line of JSON per step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from penstock import DistributedDataLoader
from penstock.loader import WorkerError
from penstock.trainer import (
    CheckpointConfig,
    DistributedTrainer,
    EvaluateConfig,
    Evaluation,
    PrecisionConfig,
    ReportConfig,
    ScheduleConfig,
    TrainerConfig,
    World,
    close_world,
    open_world,
)

GLOBAL_BATCH_SIZE = 48  # the same on 2 ranks and on 3
CHECKPOINT_EVERY = 10


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 96, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(96 * 2 * 2, 96), nn.ReLU(), nn.Linear(96, 10),
    )  # fmt: skip


def read_sample(sample: dict[str, Any]) -> dict[str, Any]:
    gray = sample["png"][0]  # (8, 8) of the decoded (3, 8, 8)
    return {"image": np.float32(gray[None]) / 255, "label": sample["cls"]}


def shift_sample(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Move the digit by up to a pixel. ``rng`` depends only on seed, epoch and sample."""
    shift = rng.integers(-1, 2, size=2)
    read = read_sample(sample)
    read["image"] = np.roll(read["image"], tuple(shift), axis=(1, 2))
    return read


def main() -> None:
    options = parse_options()
    world = open_world(device="cpu")
    train(options, world)
    close_world()


def train(options: argparse.Namespace, world: World) -> None:
    """Train from the newest checkpoint, if there is one, to the end of the last epoch; then evaluate."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, weight_decay=1e-2)
    with (
        DistributedDataLoader(
            options.train,
            global_batch_size=GLOBAL_BATCH_SIZE,
            transform=shift_sample,
            last_batch="partial",  # every sample of every epoch, so that the audit can ask for each
            audit_dir=options.audit,
            place="process" if options.kill_loader and options.kill_loader[0] == world.rank else "threads",
        ) as loader,
        DistributedDataLoader(
            options.test, global_batch_size=120, shuffle=False, transform=read_sample, last_batch="pad"
        ) as held_out,
    ):
        steps = options.epochs * len(loader)
        config = TrainerConfig(
            epochs=options.epochs,
            output_dir=str(options.output),
            precision=PrecisionConfig(dtype="fp32"),
            schedule=ScheduleConfig(shape="cosine", warmup_steps=steps // 10),
            evaluate=EvaluateConfig(every=steps),  # once, at the end
            # Written before training goes on: what the kill finds on disk is then the same in every run.
            checkpoint=CheckpointConfig(every_steps=CHECKPOINT_EVERY, background=False),
            report=ReportConfig(every=1, quiet=True),
        )

        def compute_loss(model: nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, int]:
            at = trainer.progress
            here = (world.rank, at.epoch, at.step - at.epoch * len(loader))
            if here in (options.kill, options.kill_loader):
                pid = os.getpid() if here == options.kill else loader.metrics().loader_process
                report(event="kill", rank=world.rank, pid=pid, **position(loader))
                os.kill(pid, signal.SIGKILL)
            loss = functional.cross_entropy(model(batch["image"]), batch["label"], reduction="sum")
            return loss, len(batch["label"])

        with DistributedTrainer(
            model,
            optimizer,
            loader,
            config,
            loss=compute_loss,
            evaluation=Evaluation(batches=held_out, metrics=measure),
            observers=[Reporter(loader)],
            world=world,
        ) as trainer:
            if world.is_first:
                report(event="start", world_size=world.world_size, steps=len(loader), **position(loader))
            try:
                summary = trainer.train()
            except WorkerError as exc:
                report(event="error", rank=world.rank, text=str(exc))
                raise
            if world.is_first and not summary.stopped_early:
                report(event="end", **summary.metrics)


def measure(model: nn.Module, batch: dict[str, Any]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Sums and counts over the rows that are samples; the last batch is padded."""
    valid = batch["__valid__"]
    scores, labels = model(batch["image"])[valid], batch["label"][valid]
    right = (scores.argmax(1) == labels).sum()
    loss = functional.cross_entropy(scores, labels, reduction="sum")
    return {"accuracy": (right, valid.sum()), "loss": (loss, valid.sum())}


class Reporter:
    """Prints the trainer's events to standard output; the trainer calls observers on rank 0 only."""

    def __init__(self, loader: DistributedDataLoader) -> None:
        self._loader = loader

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if kind == "train":
            number = step - 1 - values["epoch"] * len(self._loader)
            report(event="step", epoch=values["epoch"], step=number, samples=values["samples"], loss=values["loss"])
        elif kind == "checkpoint":
            report(event="checkpoint", **position(self._loader))

    def close(self) -> None:
        """Nothing is held."""


def position(loader: DistributedDataLoader) -> dict[str, int]:
    state = loader.state_dict()
    return {"epoch": state["epoch"], "consumed": state["consumed"], "samples": state["num_samples"]}


def report(**event: Any) -> None:
    # In one write, for torchrun's ranks share a pipe and do not buffer: print() would write the line's end by itself.
    sys.stdout.write(f"{json.dumps(event)}\n")
    sys.stdout.flush()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, help="URL of the training shards")
    parser.add_argument("--test", required=True, help="URL of the held-out shards")
    parser.add_argument("--output", required=True, type=Path, help="folder for metrics and checkpoints, to resume from")
    parser.add_argument("--audit", help="folder to log every delivery in")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--kill", type=lambda text: tuple(map(int, text.split(":"))), metavar="RANK:EPOCH:STEP",
                        help="kill this rank with SIGKILL there")  # fmt: skip
    parser.add_argument("--kill-loader", type=lambda text: tuple(map(int, text.split(":"))), metavar="RANK:EPOCH:STEP",
                        help="give this rank a loader process, and kill that with SIGKILL there")  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    main()
