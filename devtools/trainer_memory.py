"""Measure what each zero stage holds: memory of a rank in a step, against the formula.

torchrun --nproc-per-node=4 -m devtools trainer_memory
"""

from __future__ import annotations

import gc
import sys
import tempfile
from pathlib import Path

import torch

from penstock.storage.memory.libc import set_mmap_threshold, trim_heap
from penstock.trainer.config import TrainerConfig
from penstock.trainer.options import build_config
from penstock.trainer.ranks.world import World, close_world, open_world
from penstock.trainer.trainer import DistributedTrainer

from .arguments import make_parser
from .trainer_overhead import Stack, make_loader, sum_losses


def measure_memory(world: World) -> None:
    """Print the peak of each rank's memory in a step, for each zero stage, beside the formula's."""
    set_mmap_threshold(65536)  # large tensors go back to the system at once, so that a peak is what is held
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
        trim_heap()
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


def main() -> int:
    make_parser(__doc__).parse_args()
    torch.manual_seed(0)
    world = open_world(device="cpu")
    try:
        measure_memory(world)
    finally:
        close_world()
    return 0


if __name__ == "__main__":
    sys.exit(main())
