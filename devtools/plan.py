"""Compare what ``--plan`` says of a layout with what ranks hold and send in a step of the llama, layout by layout.

python -m devtools plan                                  # all layouts, on up to four local ranks
python -m devtools plan --layouts dp=2,zero=3 tp=2       # some
python -m devtools plan --results benchmarks/results     # and keep what was found, in plan.json

After two steps a third is looked at after each operator, for weights, gradients and tensors that autograd keeps, and
for what collectives send; of a fourth, torch's allocator tells the peak; the bubble is that of eight more. The command
fails where a rank's peak is off by more than 15%, or bytes on the wire are not equal.
"""

from __future__ import annotations

import json
import multiprocessing
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock import SequenceCut
from penstock.benchmarks.machine import describe_machine, list_versions
from penstock.trainer.config import TrainerConfig
from penstock.trainer.options import build_config
from penstock.trainer.parallel.config import open_mesh
from penstock.trainer.parallel.meta import build_on_meta
from penstock.trainer.parallel.planned_parts import Work
from penstock.trainer.parallel.planner import WIRE, Plan, plan_layout
from penstock.trainer.parallel.trace import trace_forward, trace_optimizer
from penstock.trainer.ranks.mesh import Mesh
from penstock.trainer.ranks.world import World
from penstock.trainer.recipes.experts import ExpertsConfig
from penstock.trainer.recipes.llama import Llama, next_token_loss
from penstock.trainer.recipes.llama_config import LlamaConfig
from penstock.trainer.trainer import DistributedTrainer

from .arguments import make_parser
from .step_account import OTHER, StepAccount, allocations, held_between_steps
from .worlds import open_local_world

LAYOUTS = (
    "dp=2",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "tp=2",
    "pp=2",
    "cp=2",
    "dp=2,ep=2",
    "dp=2,ep=2,zero=2",
    "dp=2,tp=2",
    "dp=2,tp=2,zero=3",
    "dp=2,pp=2",
    "dp=2,pp=2,zero=3",
    "pp=2,tp=2",
    "pp=2,tp=2,zero=1",
    "dp=2,cp=2,zero=1",
    "dp=2,ep=2,tp=2",
)
OFF = 0.15
"""Share by which a rank's peak may differ from the plan's."""

ROWS, TOKENS = 8, 32
_FIELDS = ("tokens", "position_ids", "document_ids", "targets")
_SIZES: dict[str, dict[str, Any]] = {
    "whole": {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6},
    "small": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout of the llama; ``size`` is one of ``_SIZES``."""

    layout: str
    size: str = "whole"

    @property
    def options(self) -> dict[str, int]:
        """Options of ``parallel``, without dp."""
        given = {name: int(value) for name, _, value in (one.partition("=") for one in self.layout.split(","))}
        return {name: value for name, value in given.items() if name != "dp"} | (
            {"microbatches": 4} if "pp" in given else {}
        )

    @property
    def ranks(self) -> int:
        given = dict(one.partition("=")[::2] for one in self.layout.split(","))
        ranks = 1
        for name in ("pp", "dp", "cp", "tp"):
            ranks *= int(given.get(name, 1))
        return ranks

    def model_config(self) -> LlamaConfig:
        # With as many experts a token as there are, each has its even share, which the planner counts.
        experts = ExpertsConfig(num_experts=2, num_experts_per_tok=2) if "ep=" in self.layout else None
        return LlamaConfig(**_SIZES[self.size], num_attention_heads=4, experts=experts)

    def config(self, folder: str) -> TrainerConfig:
        values = {
            "steps": 2,
            "output_dir": folder,
            "precision": {"dtype": "fp32"},
            "parallel": self.options,
            "report": {"quiet": True},
        }
        return build_config(TrainerConfig, values)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank's bytes, planned or measured; ``peak`` is the most at one time."""

    parameters: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    peak: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """A layout's plan beside what was measured; ``ranks`` are planned and measured ones by pipeline place."""

    layout: str
    ranks: list[tuple[Rank, Rank]]
    wire: dict[str, tuple[float, float]]
    other: float
    """Bytes sent that no plan counts: sums of losses and norms."""

    bubble: tuple[float, float]

    @property
    def wrong(self) -> list[str]:
        """In words, what is off by more than it may."""
        found = []
        for place, (planned, measured) in enumerate(self.ranks):
            if abs(planned.peak / measured.peak - 1) > OFF:
                found.append(f"pp {place}: peak {planned.peak / measured.peak:.2f} of what is measured")
        found += [f"{dim}: {plan:.0f} and {sent:.0f} bytes" for dim, (plan, sent) in self.wire.items() if plan != sent]
        return found


def make_batch(rows: int, seed: int = 0) -> dict[str, Tensor]:
    """Whole sequences of random tokens, (rows, TOKENS) each, with what they predict."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 64, (rows, TOKENS + 1), generator=random)
    places = torch.arange(TOKENS).repeat(rows, 1)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "position_ids": places,
        "document_ids": places // (TOKENS // 2),
        "targets": tokens[:, 1:].contiguous(),
    }


def _share(mesh: Mesh) -> dict[str, Tensor]:
    """This rank's rows, of which context parallelism leaves it a part of each."""
    rows = ROWS // mesh.replicas
    batch = {name: one[rows * mesh.replica : rows * (mesh.replica + 1)] for name, one in make_batch(ROWS).items()}
    if mesh.sizes.cp == 1:
        return {name: one.clone() for name, one in batch.items()}
    places = SequenceCut(["tokens"]).positions(TOKENS, mesh.place["cp"], mesh.sizes.cp)
    return {name: one[:, places] for name, one in batch.items()} | {"__positions__": places.repeat(rows, 1)}


def _zeros(rows: int) -> dict[str, Tensor]:
    return {name: torch.zeros(rows, TOKENS, dtype=torch.int64) for name in _FIELDS}


def plan_case(case: Case) -> Plan:
    """Plan the case, from shapes."""
    model = build_on_meta(Llama, case.model_config())
    config = case.config("unused")
    work = Work(
        model=model,
        records=trace_forward(model, next_token_loss, _zeros, config.precision),
        optimizer=trace_optimizer(model, torch.optim.AdamW),
        precision=config.precision,
        activation=config.activation,
        rows=lambda replicas: ROWS // replicas,
    )
    return plan_layout(work, config.parallel, case.ranks)


def measure_case(case: Case, world: World, folder: str) -> tuple[int, Rank, dict[str, float], float]:
    """This rank's place in the pipeline, its bytes, what it sent by dimension, and the bubble; a collective."""
    config = case.config(folder)
    mesh = open_mesh(config.parallel, world)
    batch = _share(mesh)
    torch.manual_seed(0)
    model = Llama(case.model_config())
    with DistributedTrainer(
        model, torch.optim.AdamW, [batch] * 2, config, loss=next_token_loss, world=world, mesh=mesh
    ) as trainer:
        trainer.train()
        del model
        account = StepAccount(trainer.parallel)
        with account.counting():
            trainer.steps.run(2, [batch])
        kept = held_between_steps(trainer.parallel, trainer.optimizer)
        with allocations() as most:
            trainer.steps.run(3, [batch])
        trainer._passes.describe()
        for step in range(4, 12):
            trainer.steps.run(step, [batch])
        bubble = trainer._passes.describe().get("bubble", 0.0)
    measured = Rank(
        parameters=account.parameters,
        weights=account.peaks["weights"],
        gradients=account.peaks["gradients"],
        optimizer=kept["optimizer"],
        activations=account.peaks["activations"],
        peak=sum(kept.values()) + most[0],
    )
    return mesh.place["pp"], measured, account.sent, bubble


def compare(case: Case, world: World, folder: str) -> Row | None:
    """Measure on all ranks of ``world``, and compare on the first one; a collective. None on others."""
    everyones: list[Any] = [None] * world.world_size
    dist.all_gather_object(everyones, measure_case(case, world, folder))
    if not world.is_first:
        return None
    plan = plan_case(case)
    ranks = []
    for place, planned in enumerate(plan.ranks):
        own = Rank(
            parameters=planned.parameters,
            weights=planned.weights,
            gradients=planned.gradients,
            optimizer=planned.optimizer,
            activations=planned.activations,
            peak=planned.total,
        )
        ranks.append((own, max((one for at, one, _, _ in everyones if at == place), key=lambda one: one.peak)))
    sent = {dim: max(of_one.get(dim, 0.0) for _, _, of_one, _ in everyones) for dim in (*WIRE, OTHER)}
    return Row(
        layout=case.layout,
        ranks=ranks,
        wire={dim: (plan.wire[dim], sent[dim]) for dim in WIRE},
        other=sent[OTHER],
        bubble=(plan.bubble, everyones[0][3]),
    )


def _run_rank(rank: int, cases: Sequence[Case], folder: str, end: Connection) -> None:
    torch.set_num_threads(1)
    try:
        for number, case in enumerate(cases):
            size = case.ranks
            if rank >= size:
                continue
            with open_local_world(rank, size, f"{folder}/store-{number}") as world:
                row = compare(case, world, f"{folder}/{number}")
            if row is not None:
                end.send(row)
    except BaseException:
        end.send(f"rank {rank} failed:\n{traceback.format_exc()}")
        raise
    finally:
        end.close()


def run_all(cases: Sequence[Case]) -> Iterator[Row]:
    """Compare each case, on ranks that are processes of this machine.

    Raises:
        RuntimeError: a rank failed; the message has its stack.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        opened, processes = [], []
        for rank in range(max(one.ranks for one in cases)):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run_rank, args=(rank, cases, folder, theirs), daemon=True)
            process.start()
            theirs.close()
            opened.append(ours)
            processes.append(process)
        try:
            left = len(cases)
            while left and opened:
                for end in wait(opened):
                    assert isinstance(end, Connection)
                    try:
                        found = end.recv()
                    except EOFError:
                        opened.remove(end)
                        continue
                    if isinstance(found, str):
                        raise RuntimeError(found)
                    left -= 1
                    yield found
            if left:
                raise RuntimeError(f"a rank died, and {left} layouts of {len(cases)} are left")
        finally:
            for process in processes:
                process.terminate()
                process.join()


def format_row(row: Row) -> str:
    """Lines of the table: one for each pipeline place, and of the wire."""
    lines = []
    for place, (planned, measured) in enumerate(row.ranks):
        numbers = "".join(
            f"{getattr(planned, name) / 1e6:>9.2f}{getattr(measured, name) / 1e6:>8.2f}"
            for name in ("weights", "gradients", "optimizer", "activations", "peak")
        )
        label = f"{row.layout}{f' pp {place}' if len(row.ranks) > 1 else ''}"
        lines.append(f"{label:<22}{numbers}   {planned.peak / measured.peak:.2f}")
    for dim, (expected, sent) in row.wire.items():
        if expected or sent:
            lines.append(f"    sent, {dim}: planned {expected:,.0f}, counted {sent:,.0f} bytes")
    if row.bubble[0]:
        lines.append(f"    bubble: planned {row.bubble[0]:.1%}, measured {row.bubble[1]:.1%}")
    return "\n".join([*lines, *(f"    WRONG {one}" for one in row.wrong)])


def write_results(path: Path, rows: Sequence[Row], seconds: float) -> None:
    """Write what was found, with the command, date and machine."""
    result = {
        "command": f"python -m devtools plan {shlex.join(sys.argv[1:])}".strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": list_versions(),
        "seconds": round(seconds),
        "model": _SIZES["whole"] | {"rows": ROWS, "tokens": TOKENS},
        "rows": [asdict(row) | {"wrong": row.wrong} for row in rows],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, metavar="NAME=RANKS,...", help="which to compare")
    parser.add_argument("--results", type=Path, help="write plan.json into this folder")
    given = parser.parse_args()
    print(
        f"{'MB a rank: planned':<22}" + "".join(f"{one:>17}" for one in ("weights", "gradients", "optimizer")), end=""
    )
    print("".join(f"{one:>17}" for one in ("activations", "peak")) + "   planned / measured")
    started = time.monotonic()
    rows = []
    for row in run_all([Case(layout=one) for one in given.layouts]):
        rows.append(row)
        print(format_row(row), flush=True)
    wrong = sum(bool(row.wrong) for row in rows)
    print(f"{len(rows)} layouts in {time.monotonic() - started:.0f} s, {wrong} of them wrong")
    if given.results is not None:
        write_results(given.results / "plan.json", rows, time.monotonic() - started)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
