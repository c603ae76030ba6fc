"""Run on four ranks: trains the same cases on worlds of 2, 3 and 4 ranks and writes the results.

A world of fewer ranks than were started is a process group of the first ones, joined through a file.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from chain_cases import CHAIN, train_link
from parity_cases import Case, all_cases, train_case
from together_cases import TOGETHER

from penstock.trainer import World


def train_all(started: World, folder: Path) -> None:
    """Leave the process group of all four for those of the cases, and end in it again."""
    rank = started.rank
    dist.destroy_process_group()
    for size in (2, 3, 4):
        if rank < size:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store-{size}", rank=rank, world_size=size)
            for case in all_cases(size):
                parameters = train_case(case, make_world(case, size, rank))
                if rank == 0:
                    torch.save(parameters, folder / f"{size}-{case.name}.pt")
            if size == 3:
                for name, run in TOGETHER.items():
                    found = run(make_world(None, size, rank))
                    (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
            dist.destroy_process_group()
    for turn, (size, zero) in enumerate(CHAIN):
        if rank < size:
            dist.init_process_group("gloo", init_method=f"file://{folder}/chain-{turn}", rank=rank, world_size=size)
            link(folder, make_world(None, size, rank), turn, zero)
            dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/end", rank=rank, world_size=started.world_size)


def link(folder: Path, world: World, turn: int, zero: int) -> None:
    """One link of a chain of worlds and zero stages, each continuing where the one before was stopped."""
    with train_link(str(folder / "chain"), world, zero, steps=5 * (turn + 1)) as trainer:
        began = trainer.progress.step
        ids = trainer.train_and_list_ids()
        (folder / f"chain-{turn}-{world.rank}.json").write_text(json.dumps({"began": began, "ids": ids}))
        if turn == len(CHAIN) - 1 and world.rank == 0:
            torch.save(trainer.parallel.inner.state_dict(), folder / "chain.pt")


def make_world(case: Case | None, size: int, rank: int) -> World:
    world = World(
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        node_rank=0,
        num_nodes=1,
        device=torch.device("cpu"),
        backend="gloo",
    )
    if case is not None and case.config.parallel.hybrid:
        world = replace(world, local_rank=rank % 2, local_world_size=2, node_rank=rank // 2, num_nodes=size // 2)
    return world
