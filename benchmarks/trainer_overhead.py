"""What the trainer costs over a bare PyTorch loop, and what each zero stage saves.

torchrun --nproc-per-node=2 -m penstock.benchmarks.trainer_overhead          # time, in alternating runs
torchrun --nproc-per-node=4 -m penstock.benchmarks.trainer_overhead memory   # memory per rank, against the formula
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from ..trainer.arrays import ArrayLoader
from ..trainer.config import TrainerConfig
from ..trainer.options import build_config
from ..trainer.ranks.world import World, close_world, open_world
from ..trainer.trainer import DistributedTrainer

_WIDTH = 512
_CLASSES = 32
_STEPS = 60
_ROUNDS = 12
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


class Stack(nn.Module):
    """Linear layers with residual connections; ``layers * width * (width + 1)`` parameters and a few at the ends."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.scores = nn.Linear(width, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.relu(block(x))
        scores: torch.Tensor = self.scores(x)
        return scores


def sum_losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


def make_loader(world: World, rows: int, batch_size: int, width: int) -> ArrayLoader:
    random = torch.Generator().manual_seed(0)
    arrays = {
        "x": torch.randn(rows, width, generator=random),
        "y": torch.randint(0, _CLASSES, (rows,), generator=random),
    }
    return ArrayLoader(arrays, batch_size=batch_size, rank=world.rank, world_size=world.world_size)


def time_bare(world: World, loader: ArrayLoader) -> float:
    """Seconds of one epoch of a plain PyTorch loop."""
    model = Stack(_WIDTH, 8)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True) if world.world_size > 1 else model
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    loader.set_epoch(0)
    started = time.perf_counter()
    for batch in loader:
        loss = F.cross_entropy(parallel(batch["x"]), batch["y"])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - started


def time_trainer(world: World, loader: ArrayLoader) -> float:
    """Seconds of the same epoch with the trainer, including everything that it does in a step."""
    loader.set_epoch(0)
    with tempfile.TemporaryDirectory() as folder:
        options = {"epochs": 1, "output_dir": folder, "precision": {"dtype": "fp32"}, "report": {"quiet": True}}
        with DistributedTrainer(
            Stack(_WIDTH, 8),
            lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            loader,
            build_config(TrainerConfig, options),
            loss=sum_losses,
            world=world,
        ) as trainer:
            return trainer.train().seconds


def measure_overhead(world: World) -> None:
    """Print the ratio of both loops' times; runs alternate, so that a busy machine slows both."""
    batch_size = 256
    loader = make_loader(world, _STEPS * batch_size * world.world_size, batch_size, _WIDTH)
    time_bare(world, loader)
    pairs = []
    for turn in range(_ROUNDS):
        first, second = (time_bare, time_trainer) if turn % 2 else (time_trainer, time_bare)
        one, other = first(world, loader), second(world, loader)
        pairs.append((one, other) if turn % 2 else (other, one))
    if world.is_first:
        columns = list(zip(*pairs, strict=True))
        bare, ours = (statistics.median(column) / _STEPS * 1e3 for column in columns)
        best_bare, best_ours = (min(column) / _STEPS * 1e3 for column in columns)
        low, middle, high = statistics.quantiles((trained / plain for plain, trained in pairs), n=4)
        print(f"{world.world_size} ranks, {_ROUNDS} pairs of runs of {_STEPS} steps of {batch_size} rows per rank")
        print(f"bare DDP loop {bare:8.2f} ms per step (median) {best_bare:8.2f} (fastest)")
        print(f"trainer       {ours:8.2f} ms per step (median) {best_ours:8.2f} (fastest)")
        print(f"overhead      {middle - 1:8.2%} (median of pairs; quartiles {low - 1:.2%} to {high - 1:.2%})")
        print(f"              {best_ours / best_bare - 1:8.2%} (of the fastest runs)")


def measure_memory(world: World) -> None:
    """Print the peak of each rank's memory in a step, for each zero stage, beside the formula's."""
    libc = ctypes.CDLL(None)
    libc.mallopt(
        _M_MMAP_THRESHOLD, 65536
    )  # large tensors go back to the system at once, so that a peak is what is held
    width, layers = 2048, 12
    model_bytes = 4 * sum(parameter.numel() for parameter in Stack(width, layers).parameters())
    block_bytes = 4 * width * (width + 1)
    loader = make_loader(world, 16 * world.world_size, 4, width)
    rows = []
    for zero in range(4):
        options = {
            "steps": 3,
            "precision": {"dtype": "fp32"},
            "parallel": {"zero": zero},
            "step": {"clip_norm": 1.0},
            "report": {"quiet": True},
        }
        gc.collect()
        libc.malloc_trim(0)
        before = _read_status("VmRSS")
        with tempfile.TemporaryDirectory() as folder:
            with DistributedTrainer(
                Stack(width, layers),
                lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False),
                loader,
                build_config(TrainerConfig, {**options, "output_dir": folder}),
                loss=sum_losses,
                world=world,
            ) as trainer:
                trainer.train()
                Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the first steps
                trainer.steps.run(3, [next(iter(loader))])
                peak = _read_status("VmHWM") - before
            del trainer
        rows.append((zero, expect_peak(zero, world.world_size, model_bytes, block_bytes), peak))
    if world.is_first:
        print(f"{model_bytes / 4e6:.1f}M parameters, AdamW, fp32, {world.world_size} ranks; MB of rank 0")
        print(f"{'zero':>4} {'formula':>9} {'measured':>9} {'of zero=0':>9}")
        for zero, expected, found in rows:
            print(f"{zero:>4} {expected / 1e6:>9.0f} {found / 1e6:>9.0f} {found / rows[0][2]:>9.0%}")


def expect_peak(zero: int, ranks: int, model_bytes: int, block_bytes: int) -> float:
    """Bytes of weights, gradients and both Adam moments at the peak of a step (Rajbhandari et al. 2020, section 3).

    FSDP2 shards all four at rest for every stage. Within a step zero=1 and 2 also hold all weights gathered, zero=3 the
    block at work and the one fetched ahead; each holds a block's whole gradients until they are reduced.
    """
    if zero == 0:
        return 4.0 * model_bytes
    gathered = model_bytes if zero < 3 else 2 * block_bytes
    return 4.0 * model_bytes / ranks + gathered + block_bytes


def _read_status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}; this measurement needs Linux")


def main(arguments: list[str]) -> int:
    torch.manual_seed(0)
    world = open_world(device="cpu")
    try:
        if arguments == ["memory"]:
            measure_memory(world)
        elif not arguments:
            measure_overhead(world)
        else:
            print(__doc__)
            return 2
    finally:
        close_world()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
