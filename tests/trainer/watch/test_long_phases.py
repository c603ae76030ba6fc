"""What takes longer than the time-out and makes progress is no stall; what hangs in it is found in the time named."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import Ranks
from safetensors.torch import load_file
from small_trainers import add_up, make_trainer, rows

from penstock.trainer import Evaluation, World
from penstock.trainer.checkpoint import traffic
from penstock.trainer.run.guard import Compiling

STALL_TIMEOUT_S = 10.0
LONGER_S = 1.5 * STALL_TIMEOUT_S
COMPILES_S = 3.0


def compile_slowly(world: World, folder: str, how: str) -> int:
    """On rank 0 the forwards, or the first of an evaluation, are compiled for long, or for ever."""
    compiled = 0

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        nonlocal compiled
        compiled += 1
        is_slow = torch.is_grad_enabled() == (how != "evaluation")
        if world.rank == 0 and is_slow:
            time.sleep(600.0 if how == "hangs" else LONGER_S)
        return graph.forward

    torch._dynamo.register_backend(compiler_fn=backend, name="slow")
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))  # loads dynamo, which may take seconds
    with make_trainer(
        world,
        folder,
        rows(world, "drop"),
        evaluation=Evaluation(batches=rows(world, "pad"), metrics=add_up),
        evaluate={"every": 1},
        compile={"enabled": True, "backend": "slow", **({"timeout_s": COMPILES_S} if how == "hangs" else {})},
        steps=2,
        stall_timeout_s=STALL_TIMEOUT_S,
    ) as trainer:
        trainer.train()
    return compiled


@pytest.mark.parametrize("how", ["forward", pytest.param("evaluation", marks=pytest.mark.full)])
def test_a_compilation_longer_than_the_timeout_is_no_stall(tmp_path: Path, how: str) -> None:
    began_s = time.monotonic()
    outcomes = Ranks(compile_slowly, 2, str(tmp_path), how).join(timeout_s=200.0)
    assert all(outcome.value >= 2 for outcome in outcomes), list((tmp_path / "stalls").glob("*"))
    assert time.monotonic() - began_s > LONGER_S


def test_a_hang_inside_a_compilation_is_found_and_named(tmp_path: Path) -> None:
    outcomes = Ranks(compile_slowly, 2, str(tmp_path), "hangs").join(timeout_s=200.0)
    assert all(outcome.exit_code not in (0, None) for outcome in outcomes)
    for rank in range(2):
        report = (tmp_path / "stalls" / f"stall-rank-{rank}.txt").read_text()
        found = re.search(
            r"training stops: rank 0 is stalled in forward \(compiling_s=(\d+\.\d), step=0, epoch=0\)", report
        )
        assert found, report
        assert COMPILES_S < float(found[1]) < COMPILES_S + STALL_TIMEOUT_S + 2.0


def export_slowly(world: World, folder: str) -> int:
    write = traffic.CountedFile._write_piece

    def write_slowly(file: traffic.CountedFile, piece: memoryview) -> int:
        if "weights" not in str(file.name):
            return write(file, piece)
        time.sleep(0.5)
        return write(file, piece[:15_000])

    traffic.CountedFile._write_piece = write_slowly  # type: ignore[method-assign]
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 40_000))
    with make_trainer(
        world,
        folder,
        model=model,
        checkpoint={"every_steps": 1000},
        export="weights.safetensors",
        steps=2,
        stall_timeout_s=STALL_TIMEOUT_S,
    ) as trainer:
        return int(trainer.train().steps)


@pytest.mark.full
def test_an_export_longer_than_the_timeout_is_no_stall_while_it_writes(tmp_path: Path) -> None:
    began_s = time.monotonic()
    outcomes = Ranks(export_slowly, 2, str(tmp_path)).join(timeout_s=200.0)
    assert [outcome.value for outcome in outcomes] == [2, 2], list((tmp_path / "stalls").glob("*"))
    assert time.monotonic() - began_s > LONGER_S, "the export was too quick to show anything"
    assert len(load_file(tmp_path / "weights.safetensors")) == 4


@pytest.mark.slow
def test_compilations_count_up_to_a_limit_each_and_nothing_else_counts() -> None:
    compiling = Compiling()
    compiling.listen()
    compiling.listen()
    seen: list[tuple[int, dict[str, Any]]] = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        for _ in range(2):
            seen.append((compiling.advance(0.05), compiling.activity()))
            time.sleep(0.1)
        return graph.forward

    try:
        function = torch.compile(lambda x: x + 1, backend=backend)
        assert compiling.advance(60.0) == 0
        function(torch.ones(2))
        (begun, _), (later, doing) = seen
        assert begun <= later == 50
        assert doing["compiling_s"] >= 0.1
        after = compiling.advance(0.05)
        assert after >= 200
        function(torch.ones(2))
        assert compiling.advance(0.05) == after
        assert compiling.activity() == {}
    finally:
        torch._dynamo.reset()
