"""Measure what a rank holds while a trainer is made: a model built whole on each rank, and one on the meta device.

torchrun --nproc-per-node=4 -m devtools trainer_start [RESULT.json]
"""

from __future__ import annotations

import gc
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.storage.memory.libc import set_mmap_threshold, trim_heap
from penstock.trainer import (
    ArrayLoader,
    DistributedTrainer,
    TrainerConfig,
    World,
    build_on_meta,
    close_world,
    export_run,
    open_world,
)
from penstock.trainer.options import build_config

from .arguments import make_parser

_WIDTH, _LAYERS = 2048, 24
_SHARD_BYTES = 100_000_000


class Stack(nn.Module):
    """Linear layers, each sharded by itself: 24 of 2048 by 2048 are 403 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def sum_losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return model(batch["x"]).square().sum(), len(batch["x"])


def measure(world: World, build: Callable[[], nn.Module], folder: str, **options: Any) -> dict[str, Any]:
    """Make a trainer; returns each rank's peak of resident memory above what it had before, and the longest time."""
    gc.collect()
    trim_heap()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before, began = read_status("VmRSS"), time.perf_counter()
    with make_trainer(world, build(), folder, **options):
        seconds, peak = time.perf_counter() - began, read_status("VmHWM") - before
        gc.collect()
        trim_heap()
        held = read_status("RssAnon")
    found: list[Any] = [None] * world.world_size
    dist.all_gather_object(found, (peak, seconds, held))
    return {"peak_bytes": [one[0] for one in found], "seconds": max(one[1] for one in found)}


def make_trainer(world: World, model: nn.Module, folder: str, **options: Any) -> DistributedTrainer:
    rows = torch.zeros(world.world_size, _WIDTH)
    values = {
        "steps": 1,
        "output_dir": folder,
        "precision": {"dtype": "fp32"},
        "parallel": {"zero": 3},
        "report": {"quiet": True},
        "stall_timeout_s": None,
        **options,
    }
    return DistributedTrainer(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ArrayLoader({"x": rows}, global_batch_size=world.world_size),
        build_config(TrainerConfig, values),
        loss=sum_losses,
        world=world,
    )


def measure_all(world: World) -> dict[str, Any]:
    """Every way to begin, in one scratch folder of rank 0's choice."""
    with tempfile.TemporaryDirectory() as scratch:
        place = [scratch]
        dist.broadcast_object_list(place)
        root = place[0]
        saves = {"checkpoint": {"every_steps": 1}}
        with make_trainer(world, build_on_meta(Stack), f"{root}/run", **saves) as trainer:
            trainer.train()
        del trainer
        if world.is_first:
            export_run(f"{root}/run", f"{root}/one")
            export_run(f"{root}/run", f"{root}/hf", format="hf", max_shard_bytes=_SHARD_BYTES)
        dist.barrier()
        cases: list[tuple[str, Callable[[], nn.Module], str, dict[str, Any]]] = [
            ("built whole on each rank", Stack, "a", {}),
            ("meta device", lambda: build_on_meta(Stack), "b", {}),
            ("meta, init_from a run", lambda: build_on_meta(Stack), "c", {"init_from": f"{root}/run"}),
            ("meta, init_from a safetensors file", lambda: build_on_meta(Stack), "d", {"init_from": f"{root}/one"}),
            ("meta, init_from a Hugging Face folder", lambda: build_on_meta(Stack), "e", {"init_from": f"{root}/hf"}),
            ("meta, resumed", lambda: build_on_meta(Stack), "run", saves),
        ]
        measure(world, Stack, f"{root}/warm")  # libraries, threads and groups come once
        rows = {name: measure(world, build, f"{root}/{at}", **options) for name, build, at, options in cases}
        dist.barrier()
    return rows


def read_status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}; this measurement needs Linux")


def main(arguments: list[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("result", nargs="?", type=Path, metavar="RESULT.json", help="write the numbers here, too")
    result_path: Path | None = parser.parse_args(arguments).result
    set_mmap_threshold(65536)  # tensors go back to the system at once: a peak is what is held
    world = open_world(device="cpu")
    try:
        model_bytes = 4 * _LAYERS * _WIDTH * (_WIDTH + 1)
        rows = measure_all(world)
        if world.is_first:
            print(f"{model_bytes / 1e6:.0f} MB of weights, zero=3, {world.world_size} ranks; peak of the highest rank")
            for name, row in rows.items():
                peak = max(row["peak_bytes"])
                print(f"{name:<40} {peak / 1e6:>6.0f} MB {peak / model_bytes:>6.0%} {row['seconds']:>6.1f} s")
            if result_path is not None:
                result = {
                    "command": f"torchrun --nproc-per-node={world.world_size} -m devtools trainer_start",
                    "torch": str(torch.__version__),
                    "machine": platform.machine(),
                    "ranks": world.world_size,
                    "model_bytes": model_bytes,
                    "rows": rows,
                }
                result_path.write_text(json.dumps(result, indent=1) + "\n")
    finally:
        close_world()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
