"""Measure what the trainer's loop costs over a bare PyTorch loop with the same model, engine and optimizer.

torchrun --nproc-per-node=2 -m devtools trainer_overhead --results benchmarks/results
torchrun --nproc-per-node=2 -m devtools trainer_overhead --workloads tp pp --rounds 12 --results benchmarks/results
python -m devtools trainer_overhead --device cuda --workloads short large

"tp" and "pp" lay the model over both ranks; their bare loops are torch's parallelize_module and torch's 1F1B schedule.

Rounds of both loops alternate in one run, so that a busy machine slows both. Steps are timed by when the loop asks for
batches: what happens once a run does not count, all that happens once a step or once a record does. A round's time is
that of its median block of ten steps, as many as a record covers; a round's ratio is that of its two times; and told
are the median of the rounds' ratios and their quartiles. The same is told of the processor time of the loop's thread,
which computes forward, backward and update: other jobs on the machine change it less.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from penstock.benchmarks.machine import describe_machine, list_versions
from penstock.trainer.config import TrainerConfig
from penstock.trainer.data.arrays import ArrayLoader
from penstock.trainer.options import build_config
from penstock.trainer.ranks.world import World, close_world, open_world
from penstock.trainer.report.flops import device_name
from penstock.trainer.trainer import DistributedTrainer

from .arguments import make_parser

_CLASSES = 32
_BLOCK = 10  # steps: as many as a record of the trainer covers
_PARTS = 4  # of a batch, in a pipeline


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


class Pairs(nn.Module):
    """Pairs of linear layers with residual connections, which tensor parallelism cuts by columns and by rows."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Pair(width) for _ in range(layers)])
        self.scores = nn.Linear(width, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.scores(x)
        return scores


class _Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return result


def sum_losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


def make_loader(world: World, rows: int, batch_size: int, width: int, *, same: bool = False) -> ArrayLoader:
    """Batches of this rank's rows, or with ``same`` of those of all ranks."""
    random = torch.Generator().manual_seed(0)
    arrays = {
        "x": torch.randn(rows, width, generator=random),
        "y": torch.randint(0, _CLASSES, (rows,), generator=random),
    }
    rank, ranks = (0, 1) if same else (world.rank, world.world_size)
    return ArrayLoader(arrays, batch_size=batch_size, rank=rank, world_size=ranks)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and how it is trained; ``accumulate`` microbatches of ``batch_size`` rows a step on each rank."""

    name: str
    width: int
    layers: int
    batch_size: int
    zero: int = 0
    accumulate: int = 1
    clip_norm: float | None = None
    tp: int = 1
    pp: int = 1

    @property
    def is_spread(self) -> bool:
        return self.tp * self.pp > 1

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        return (Pairs if self.is_spread else Stack)(self.width, self.layers)

    def parallel(self) -> dict[str, Any]:
        """Options of the trainer's table of that name."""
        options: dict[str, Any] = {"zero": self.zero, "tp": self.tp, "pp": self.pp}
        options |= {"plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}} if self.tp > 1 else {}
        return options | ({"microbatches": _PARTS} if self.pp > 1 else {})


WORKLOADS = (
    Workload(name="short", width=256, layers=8, batch_size=64),
    Workload(name="middle", width=384, layers=8, batch_size=192),
    Workload(name="short-clip", width=256, layers=8, batch_size=64, clip_norm=1.0),
    Workload(name="short-accumulate-4", width=256, layers=8, batch_size=16, accumulate=4),
    Workload(name="short-zero1", width=256, layers=8, batch_size=64, zero=1),
    Workload(name="short-zero3", width=256, layers=8, batch_size=64, zero=3),
    Workload(name="tp", width=512, layers=6, batch_size=64, tp=2),  # some 20 ms a step on two cores
    Workload(name="pp", width=512, layers=6, batch_size=64, pp=2),
    Workload(name="large", width=2048, layers=8, batch_size=2048),  # some ms a step on a large GPU
)
_ON_CPU = [work.name for work in WORKLOADS if not work.is_spread and work.name != "large"]


class TimedBatches:
    """The same batches over and over; notes when each is asked for, and when there are no more."""

    def __init__(self, batches: list[Any], count: int) -> None:
        self._batches = batches
        self._count = count
        self.asked_s: list[tuple[float, float]] = []  # by the clock, and of this thread's processor time

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for number in range(self._count):
            self.asked_s.append((time.perf_counter(), time.thread_time()))
            yield self._batches[number % len(self._batches)]
        self.asked_s.append((time.perf_counter(), time.thread_time()))

    def step_ms(self, accumulate: int) -> tuple[float, float]:
        """Milliseconds of a step in the median block of steps, by the clock and of the processor.

        The first block is left out: caches, layouts of buckets.
        """
        blocks = list(pairwise(self.asked_s[:: accumulate * _BLOCK][1:]))
        clock, processor = (statistics.median(stop[k] - start[k] for start, stop in blocks) for k in (0, 1))
        return clock / _BLOCK * 1e3, processor / _BLOCK * 1e3


def run_bare(work: Workload, world: World, loader: TimedBatches) -> None:
    """The loop that a PyTorch user writes: exchange with the last microbatch, clip where asked to, step."""
    if work.pp > 1:
        return run_bare_pipeline(work, world, loader)
    model: nn.Module = work.make_model().to(world.device)
    if work.tp > 1:
        cut = init_device_mesh(world.device.type, (work.tp,))
        for block in model.get_submodule("blocks").children():
            parallelize_module(block, cut, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    elif work.zero:
        mesh = init_device_mesh(world.device.type, (world.world_size,))
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh, reshard_after_forward=work.zero == 3)
        fully_shard(model, mesh=mesh, reshard_after_forward=work.zero == 3)
    elif world.world_size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = iter(loader)
    while True:
        taken = [batch for _, batch in zip(range(work.accumulate), batches, strict=False)]
        if not taken:
            return None
        for index, batch in enumerate(taken):
            waits = index < len(taken) - 1 and isinstance(model, DistributedDataParallel)
            with model.no_sync() if waits else nullcontext():  # type: ignore[operator]
                loss = F.cross_entropy(model(batch["x"]), batch["y"]) / len(taken)
                loss.backward()  # type: ignore[no-untyped-call]
        if work.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), work.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def run_bare_pipeline(work: Workload, world: World, loader: TimedBatches) -> None:
    """The loop that a PyTorch user writes with torch's pipelines: each rank keeps its half of the blocks."""
    whole = work.make_model()
    assert isinstance(whole, Pairs), "it is spread"
    size = work.layers // work.pp
    mine = list(whole.blocks)[size * world.rank : size * (world.rank + 1)]
    is_last = world.rank == work.pp - 1
    model = nn.Sequential(*mine, *([whole.scores] if is_last else [])).to(world.device)
    stage = PipelineStage(model, world.rank, work.pp, world.device)
    schedule = Schedule1F1B(stage, _PARTS, loss_fn=F.cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in loader:
        if world.rank == 0:
            schedule.step(batch["x"])
        else:
            schedule.step(target=batch["y"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def run_trainer(work: Workload, world: World, loader: TimedBatches) -> None:
    """The same steps with the trainer and all that it does in a step: watchdog, checks, records."""
    options = {
        "epochs": 1,
        "precision": {"dtype": "fp32"},
        "parallel": work.parallel(),
        "step": {"accumulate": work.accumulate, "clip_norm": work.clip_norm},
        "report": {"quiet": True},
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = DistributedTrainer(
            work.make_model(),
            lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            loader,
            build_config(TrainerConfig, {**options, "output_dir": folder}),
            loss=sum_losses,
            world=world,
        )
        with trainer:
            trainer.train()


def measure(work: Workload, world: World, *, rounds: int, steps: int) -> dict[str, Any]:
    """The steps of each round of both loops in ms, and the quartiles of the rounds' ratios."""
    rows = 16 * work.batch_size * world.world_size
    made = make_loader(world, rows, work.batch_size, work.width, same=work.is_spread)
    batches = [{name: value.to(world.device) for name, value in batch.items()} for batch in made]
    loops: dict[str, Callable[[Workload, World, TimedBatches], None]] = {"bare": run_bare, "trainer": run_trainer}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for turn in range(rounds):
        for name in sorted(loops, reverse=bool(turn % 2)):
            loader = TimedBatches(batches, (steps + _BLOCK) * work.accumulate)
            dist.barrier()
            loops[name](work, world, loader)
            found[name].append(loader.step_ms(work.accumulate))
    row: dict[str, Any] = {**vars(work), "device": device_name(world.device), "ranks": world.world_size}
    row |= {"rounds": rounds, "steps": steps}
    for k, prefix in enumerate(("", "cpu_")):
        bare, ours = ([round_[k] for round_ in found[name]] for name in ("bare", "trainer"))
        low, middle, high = statistics.quantiles((one / other for one, other in zip(ours, bare, strict=True)), n=4)
        row[f"{prefix}bare_ms"], row[f"{prefix}trainer_ms"] = statistics.median(bare), statistics.median(ours)
        row[f"{prefix}ratio"], row[f"{prefix}quartiles"] = middle, [low, high]
    return row | {"round_ms": found}


def format_row(row: dict[str, Any]) -> str:
    """One line of what is printed."""
    texts = [f"{row['name']:<20}"]
    for prefix, what in (("", "clock"), ("cpu_", "processor")):
        low, high = row[f"{prefix}quartiles"]
        texts.append(
            f"{what} {row[f'{prefix}bare_ms']:.2f} -> {row[f'{prefix}trainer_ms']:.2f} ms, "
            f"{row[f'{prefix}ratio']:.3f} ({low:.3f} to {high:.3f})  "
        )
    return "".join(texts).rstrip()


def write_results(path: Path, rows: list[dict[str, Any]], design: str) -> None:
    """Append this run to the results in ``path``, with the command, date and machine."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    command = f"torchrun --nproc-per-node={rows[0]['ranks']} -m devtools trainer_overhead"
    run = {
        "design": design,
        "command": f"{command} {shlex.join(sys.argv[1:])}".strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": list_versions(),
        "rows": rows,
    }
    about = "Other jobs ran on the machine meanwhile (see load_1m): compare ratios, which are taken within a round."
    path.write_text(json.dumps({"about": about, "runs": [*runs, run]}, indent=1) + "\n")


def main() -> int:
    parser = make_parser(__doc__)
    names = [work.name for work in WORKLOADS]
    parser.add_argument("--workloads", nargs="+", choices=names, default=_ON_CPU, help="which to measure")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where both loops train")
    parser.add_argument("--rounds", type=int, default=20, help="pairs of rounds, which alternate")
    parser.add_argument("--steps", type=int, default=60, help="timed steps in a round, a multiple of ten")
    parser.add_argument("--results", type=Path, help="append to trainer-overhead.json in this folder")
    parser.add_argument("--design", default="", help="what is measured, in words, for the results")
    given = parser.parse_args()
    world = open_world(device=given.device)
    try:
        rows = []
        for work in WORKLOADS:
            if work.name not in given.workloads:
                continue
            rows.append(row := measure(work, world, rounds=given.rounds, steps=given.steps))
            if world.is_first:
                print(format_row(row), flush=True)
        if given.results is not None and world.is_first:
            write_results(given.results / "trainer-overhead.json", rows, given.design)
    finally:
        close_world()
    return 0


if __name__ == "__main__":
    sys.exit(main())
