"""Train a small CNN on the digits, with a checkpoint every few steps: what a rank of the demo runs.

    torchrun --standalone --nproc-per-node=2 examples/demo/train.py --train URL --test URL --checkpoint FILE

Started again, on any number of ranks, it goes on from the checkpoint. Rank 0 prints a line of JSON per step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

from penstock import DistributedDataLoader

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
    gray = sample["png"][:, :, 0]  # (8, 8) of the decoded (8, 8, 3)
    return {"image": np.float32(gray[None]) / 255, "label": sample["cls"]}


def shift_sample(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Move the digit by up to a pixel. ``rng`` depends on seed, epoch and sample alone: a resume moves it alike."""
    shift = rng.integers(-1, 2, size=2)
    read = read_sample(sample)
    read["image"] = np.roll(read["image"], tuple(shift), axis=(1, 2))
    return read


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
    dist.init_process_group("gloo")
    train(options, model, optimizer)
    # Only once nothing holds the group does this end its threads; those that outlive it can abort Python's exit.
    gc.collect()
    dist.destroy_process_group()


def train(options: argparse.Namespace, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Go on from the checkpoint, if there is one, to the end of the last epoch; then evaluate."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(module)
    with DistributedDataLoader(
        options.train,
        global_batch_size=GLOBAL_BATCH_SIZE,
        transform=shift_sample,
        last_batch="partial",  # every sample of every epoch, so that the audit can ask for each
        audit_dir=options.audit,
    ) as loader:
        schedule = OneCycleLR(optimizer, max_lr=4e-3, total_steps=options.epochs * len(loader))
        parts = {"model": module, "optimizer": optimizer, "schedule": schedule, "loader": loader}
        if options.checkpoint.exists():
            saved = torch.load(options.checkpoint, weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(saved[name])
        report(rank, event="start", world_size=world_size, steps=len(loader), **position(loader))

        while loader.epoch < options.epochs:
            for step, batch in enumerate(loader, start=len(loader) - loader.steps_left):
                if (rank, loader.epoch, step) == options.kill:
                    report(0, event="kill", rank=rank, pid=os.getpid(), **position(loader))
                    os.kill(os.getpid(), signal.SIGKILL)

                loss_sum = functional.cross_entropy(model(batch["image"]), batch["label"], reduction="sum")
                totals = torch.tensor([loss_sum.item(), len(batch["label"])])
                dist.all_reduce(totals)
                # DDP averages over ranks. Shares of an epoch's last batch differ in size, so each rank scales its sum
                # such that the average is the gradient of the mean over the whole global batch.
                (world_size * loss_sum / totals[1]).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()

                report(rank, event="step", epoch=loader.epoch, step=step, samples=int(totals[1]),
                       loss=float(totals[0] / totals[1]))  # fmt: skip
                if (step + 1) % CHECKPOINT_EVERY == 0 and rank == 0:
                    save_checkpoint(options.checkpoint, {name: part.state_dict() for name, part in parts.items()})
                    report(rank, event="checkpoint", **position(loader))

    right, loss, count = evaluate(module, options.test)
    report(rank, event="end", right=right, count=count, loss=loss)


@torch.no_grad()
def evaluate(model: nn.Module, url: str) -> tuple[int, float, int]:
    """Right answers, mean loss and number of the held-out samples, each counted once over all ranks."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    with DistributedDataLoader(
        url, global_batch_size=120, shuffle=False, transform=read_sample, last_batch="partial"
    ) as loader:
        for batch in loader:
            answers = model(batch["image"])
            totals[0] += (answers.argmax(1) == batch["label"]).sum()
            totals[1] += functional.cross_entropy(answers, batch["label"], reduction="sum")
            totals[2] += len(answers)
    dist.all_reduce(totals)
    return int(totals[0]), float(totals[1] / totals[2]), int(totals[2])


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write beside, sync, rename: whenever a process dies, ``path`` holds one whole checkpoint."""
    fresh = path.with_suffix(".writing")
    with fresh.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def position(loader: DistributedDataLoader) -> dict[str, int]:
    state = loader.state_dict()
    return {"epoch": state["epoch"], "consumed": state["consumed"], "samples": state["num_samples"]}


def report(rank: int, /, **event: Any) -> None:
    if rank == 0:
        print(json.dumps(event), flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, help="URL of the training shards")
    parser.add_argument("--test", required=True, help="URL of the held-out shards")
    parser.add_argument("--checkpoint", required=True, type=Path, help="file to save to, and to go on from")
    parser.add_argument("--audit", help="folder to log every delivery in")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--kill", type=lambda text: tuple(map(int, text.split(":"))), metavar="RANK:EPOCH:STEP",
                        help="have this rank die by SIGKILL there")  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    main()
