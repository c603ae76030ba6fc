"""Compare training on ranks with one process, over all combinations of model, zero stage, ranks and accumulation.

python -m devtools equality                                  # all, on up to eight local ranks
python -m devtools equality --models lm --zero 3 --ranks 4   # some
python -m devtools equality --layouts tp=2 tp=2,cp=2         # those whose replicas lie on several ranks
python -m devtools equality --results benchmarks/results     # and keep what was found, as it is found
python -m devtools equality --results benchmarks/results --resume    # leave out what is kept there and was equal

Each combination trains three times. In fp32 and in fp64, weights and buffers must be those of the naive loop in one
process, but for the rounding of sums; modes of modules and generators must be equal. The third run is stopped
half-way and resumed by a new trainer, and must end bit-equal to the unbroken one. The command fails on a difference.
Where replicas lie on several ranks, by a layout, gradients are clipped too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.benchmarks.machine import describe_machine, list_versions
from penstock.trainer.config import TrainerConfig
from penstock.trainer.options import build_config
from penstock.trainer.parallel.config import open_mesh
from penstock.trainer.ranks.world import World
from penstock.trainer.trainer import DistributedTrainer

from .arguments import make_parser
from .equality_cases import CASES, SEED, Case, Trained, copy_buffers, digest_generators, train_naively
from .worlds import open_local_world

STEPS = 6
CLIP_NORM = 0.5
REPLICATED = ("lm", "resnet", "embeddings")
"""Models that are trained on replicas of one rank, too."""

LAYOUTS = ("", "tp=2", "cp=2", "tp=2,cp=2", "pp=2", "pp=2,tp=2", "ep=2", "ep=2,tp=2", "ep=2,cp=2")
BOUNDS = {"fp32": 2e-6, "fp64": 1e-13}
_EACH = 6  # combinations of a process
_PRELOADED = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "devtools.equality"]
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One way to train one model."""

    model: str
    ranks: int
    accumulate: int
    zero: int
    layout: str = ""
    """Ranks of a replica, by dimension: ``tp=2,cp=2``; none: one."""

    @property
    def sizes(self) -> dict[str, int]:
        return {name: int(size) for name, _, size in (one.partition("=") for one in self.layout.split(",") if one)}

    @property
    def replica_ranks(self) -> int:
        """Ranks of each replica; experts are spread over replicas."""
        return math.prod(size for name, size in self.sizes.items() if name != "ep")

    @property
    def replicas(self) -> int:
        return self.ranks // self.replica_ranks

    @property
    def clip_norm(self) -> float | None:
        return CLIP_NORM if self.layout else None


@dataclass(frozen=True, kw_only=True)
class Found:
    """The largest differences from one process, in weights and buffers, and in words what should not be."""

    weights: dict[str, float]
    buffers: dict[str, float]
    wrong: list[str]


def compare(combination: Combination, world: World, folder: str) -> Found:
    """Train the combination on all ranks of ``world``, and compare; a collective. ``folder`` is empty, and everyone's.

    What is found is complete on rank 0, where it is compared, and empty elsewhere.
    """
    case = CASES[combination.model]
    weights, buffers, wrong = {}, {}, []
    is_whole = not combination.sizes.keys() & {"cp", "pp"}
    unbroken: Trained | None = None
    for name, dtype in _DTYPES.items():
        found = _train(case, dtype, combination, world, f"{folder}/{name}", steps=(STEPS,))
        unbroken = found if name == "fp32" else unbroken
        if world.is_first:
            expected = _naive(combination, name).laid_out(found.draws)
            weights[name] = _distance([found.weights], [expected.weights])
            buffers[name] = _distance(found.buffers, expected.buffers)
            for what, distance in (("weights", weights[name]), ("buffers", buffers[name])):
                if not distance <= BOUNDS[name]:
                    wrong.append(f"{what} differ from one process by {distance:.1e} in {name}")
            wrong += [
                f"{text} differ from one process in {name}" for text in _list_other(found, expected, is_whole=is_whole)
            ]
    resumed = _train(case, torch.float32, combination, world, f"{folder}/resumed", steps=(STEPS // 2, STEPS))
    assert unbroken is not None, "fp32 is among the formats"
    if world.is_first:
        for what in ("weights", "buffers"):
            one, other = (getattr(run, what) for run in (resumed, unbroken))
            distance = _distance(*((given if isinstance(given, list) else [given]) for given in (one, other)))
            if distance:
                wrong.append(f"{what} differ by {distance:.1e} after a resume")
        wrong += [f"{text} differ after a resume" for text in _list_other(resumed, unbroken)]
    return Found(weights=weights, buffers=buffers, wrong=wrong)


def _train(
    case: Case, dtype: torch.dtype, combination: Combination, world: World, folder: str, *, steps: Sequence[int]
) -> Trained:
    """Train with the trainer up to each of ``steps`` in turn, each time with a new model and trainer."""
    model: nn.Module = nn.Module()
    for until in steps:
        options = {
            "steps": until,
            "seed": SEED,
            "output_dir": folder,
            "precision": {"dtype": "fp32"},
            "parallel": _read_layout(case, combination),
            "step": {"accumulate": combination.accumulate, "clip_norm": combination.clip_norm},
            "checkpoint": {"every_steps": until if len(steps) > 1 else 0, "background": False},
            "report": {"quiet": True},
        }
        model = case.model(dtype)
        config = build_config(TrainerConfig, options)
        mesh = open_mesh(config.parallel, world)
        loader = case.loader(dtype, mesh.replica, mesh.replicas, mesh)
        with DistributedTrainer(
            model, case.make_optimizer, loader, config, loss=case.loss, world=world, mesh=mesh
        ) as trainer:
            trainer.train()
            generators = digest_generators()
    modes = {name: one.training for name, one in model.named_modules()}
    weights = {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach()
        for name, one in model.named_parameters()
    }
    own = (copy_buffers(model), modes, generators, mesh.replica)
    everyones: list[Any] = [None] * world.world_size
    dist.all_gather_object(everyones, own)
    if mesh.sizes.pp > 1:
        names = {name for name, _ in case.model(dtype).named_parameters()}  # a stage may use other names of tied ones
        stages: list[Any] = [None] * world.world_size
        dist.all_gather_object(stages, weights)
        weights = {name: one for stage in stages for name, one in stage.items() if name in names}
    buffers, modes_of, generators_of, replicas = zip(*everyones, strict=True)
    return Trained(weights, list(buffers), list(modes_of), list(generators_of), list(replicas))


def _read_layout(case: Case, combination: Combination) -> dict[str, Any]:
    sizes = combination.sizes
    more = {key: value for name in sizes for key, value in case.parallel[name].items()}
    return {"zero": combination.zero, **sizes, **more}


_naive_runs: dict[tuple[str, int, int, float | None, str], Trained] = {}  # every zero stage is compared with the same


def _naive(combination: Combination, dtype: str) -> Trained:
    key = (combination.model, combination.replicas, combination.accumulate, combination.clip_norm, dtype)
    if key not in _naive_runs:
        _naive_runs.clear()
        _naive_runs[key] = train_naively(
            CASES[combination.model],
            _DTYPES[dtype],
            ranks=combination.replicas,
            accumulate=combination.accumulate,
            steps=STEPS,
            clip_norm=combination.clip_norm,
        )
    return _naive_runs[key]


def _distance(found: Sequence[dict[str, Tensor]], expected: Sequence[dict[str, Tensor]]) -> float:
    """The largest difference of two elements; infinite where there are other tensors, or types."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if one.keys() != other.keys() or any(one[name].dtype != other[name].dtype for name in one):
            return float("inf")
        for name in one:
            apart = (one[name].double() - other[name].double()).abs()
            worst = max(worst, float(apart.max()) if apart.numel() else 0.0)
    return worst


def _list_other(found: Trained, expected: Trained, *, is_whole: bool = True) -> Iterator[str]:
    """Yield what else differs; each part of a sequence, and each stage, draws numbers of its own."""
    for rank, (one, other) in enumerate(zip(found.modes, expected.modes, strict=True)):
        if one != other:
            yield f"rank {rank}: modes of modules"
    for rank, (states, others) in enumerate(zip(found.generators, expected.generators, strict=True)):
        for name in states if is_whole else ():
            if states[name] != others[name]:
                yield f"rank {rank}: {name}'s generator"


def _run_rank(rank: int, combinations: Sequence[Combination], folder: str, end: Connection) -> None:
    """One of the ranks: takes part in every world that is large enough; rank 0 sends what is found."""
    torch.set_num_threads(1)
    try:
        for number, combination in enumerate(combinations):
            size = combination.ranks
            if rank >= size:
                continue
            with open_local_world(rank, size, f"{folder}/store-{number}") as world:
                found = compare(combination, world, f"{folder}/{number}")
            if rank == 0:
                end.send((number, found))
    except BaseException:
        end.send((rank, traceback.format_exc()))
        raise
    finally:
        end.close()


def run_all(combinations: Sequence[Combination]) -> Iterator[tuple[Combination, Found]]:
    """Train and compare each combination, on ranks that are processes of this machine.

    Each process takes part in a few, in one where replicas lie on several ranks: DTensor's caches keep the meshes of
    worlds that have ended, by names of groups, which come again.

    Raises:
        RuntimeError: a rank failed; the message has its stack.
    """
    for layout, ones in itertools.groupby(combinations, key=lambda one: one.layout):
        together, each = list(ones), 1 if layout else _EACH
        for start in range(0, len(together), each):
            yield from _run_some(together[start : start + each])


def _run_some(combinations: Sequence[Combination]) -> Iterator[tuple[Combination, Found]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(max(one.ranks for one in combinations)):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run_rank, args=(rank, combinations, folder, theirs), daemon=True)
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            yield from _receive(combinations, ends)
        finally:
            for process in processes:
                process.terminate()
                process.join()


def _receive(combinations: Sequence[Combination], ends: Sequence[Connection]) -> Iterator[tuple[Combination, Found]]:
    opened, received = list(ends), 0
    while opened:
        for end in wait(opened):
            assert isinstance(end, Connection)
            try:
                number, found = end.recv()
            except EOFError:
                opened.remove(end)
                continue
            if isinstance(found, str):
                raise RuntimeError(f"rank {number} failed after {received} combinations:\n{found}")
            received += 1
            yield combinations[number], found
    if received < len(combinations):
        raise RuntimeError(f"a rank died after {received} combinations of {len(combinations)}")


def list_combinations(given: argparse.Namespace) -> list[Combination]:
    """All combinations that are asked for; those of one world, and of one naive run, one after another."""
    return [
        one
        for ranks, model, layout, accumulate, zero in itertools.product(
            sorted(set(given.ranks)), given.models, given.layouts, given.accumulate, given.zero
        )
        if can_run(one := Combination(model=model, ranks=ranks, accumulate=accumulate, zero=zero, layout=layout))
    ]


def can_run(combination: Combination) -> bool:
    """Return whether the ranks can be laid out so, and the model be cut so; without a layout, as asked for."""
    if not combination.layout:
        return combination.ranks <= 4 and combination.model in REPLICATED
    if combination.ranks % combination.replica_ranks or combination.replicas % combination.sizes.get("ep", 1):
        return False
    return combination.sizes.keys() <= CASES[combination.model].parallel.keys()


def read_results(path: Path) -> tuple[list[tuple[Combination, Found]], float]:
    """The combinations that earlier runs found equal, and their seconds; none where there is no such file."""
    if not path.exists():
        return [], 0.0
    kept = json.loads(path.read_text())
    names = {one.name for one in fields(Combination)}
    rows = [
        (
            Combination(**{name: row[name] for name in names if name in row}),
            Found(weights=row["weights"], buffers=row["buffers"], wrong=row["wrong"]),
        )
        for row in kept["rows"]
    ]
    return [(combination, found) for combination, found in rows if not found.wrong], kept["seconds"]


def write_results(path: Path, rows: Sequence[tuple[Combination, Found]], seconds: float, asked: int) -> None:
    """Write what was found of ``asked`` combinations, with command, date and machine; a kill leaves a whole file."""
    result = {
        "command": f"python -m devtools equality {shlex.join(sys.argv[1:])}".strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": list_versions(),
        "seconds": round(seconds),
        "asked": asked,
        "steps": STEPS,
        "bounds": BOUNDS,
        "worst": _worst(rows),
        "rows": [asdict(combination) | asdict(found) for combination, found in rows],
    }
    written = path.with_suffix(".tmp")
    written.write_text(json.dumps(result, indent=1) + "\n")
    written.replace(path)


def _worst(rows: Sequence[tuple[Combination, Found]]) -> dict[str, float]:
    return {dtype: max(max(one.weights[dtype], one.buffers[dtype]) for _, one in rows) for dtype in _DTYPES}


def format_row(combination: Combination, found: Found) -> str:
    """One line of the table."""
    numbers = "".join(f"{found.weights[dtype]:>9.1e}{found.buffers[dtype]:>9.1e}" for dtype in _DTYPES)
    return (
        f"{combination.model:<11}{combination.layout:<10}{combination.ranks:>5}{combination.accumulate:>11}"
        f"{combination.zero:>5}"
        f"{numbers}  {'; '.join(found.wrong) or 'equal'}"
    )


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--zero", nargs="+", type=int, choices=range(4), default=list(range(4)))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 3, 4, 8])
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, metavar="NAME=RANKS,...", help="'' is one rank each")
    parser.add_argument("--accumulate", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument(
        "--results",
        type=Path,
        help="write equality.json into this folder, or equality-layouts.json without '' of --layouts",
    )
    parser.add_argument("--resume", action="store_true", help="leave out what was found equal in that file")
    combinations = list_combinations(given := parser.parse_args())
    if given.resume and given.results is None:
        parser.error("--resume goes on with what is in --results; give that too")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no rank is left behind
    name = "equality.json" if "" in given.layouts else "equality-layouts.json"
    path = None if given.results is None else given.results / name
    rows, before = read_results(path) if given.resume and path is not None else ([], 0.0)
    known = {combination for combination, _ in rows}
    left = [one for one in combinations if one not in known]
    print(f"{'':<42}{'fp32, largest':>18}{'fp64, largest':>18}")
    print(
        f"{'model':<11}{'layout':<10}{'ranks':>5}{'accumulate':>11}{'zero':>5}{'weights':>9}{'buffers':>9}{'weights':>9}{'buffers':>9}"
    )
    started = time.monotonic()
    for combination, found in run_all(left) if left else ():
        rows.append((combination, found))
        print(format_row(combination, found), flush=True)
        if path is not None:
            write_results(path, rows, before + time.monotonic() - started, len(known | set(combinations)))
    wrong = sum(bool(found.wrong) for _, found in rows)
    worst = ", ".join(f"{distance:.1e} in {dtype}" for dtype, distance in _worst(rows).items())
    seconds = before + time.monotonic() - started
    print(f"{len(rows)} combinations in {seconds:.0f} s, {wrong} of them wrong; at most {worst}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
