"""Runs a pipeline on real ranks, without the rest of the trainer, and compares its gradients with one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from pipeline_cases import CASES
from torch import Tensor

from penstock.trainer import ParallelConfig, TrainerConfigError, World
from penstock.trainer.data.batches import find_rows
from penstock.trainer.parallel.pipeline.pipeline import Pipeline, Rows
from penstock.trainer.ranks.mesh import Mesh, MeshSizes
from penstock.trainer.steps.microbatches import cut_batch

ROWS = Rows(count=find_rows, cut=cut_batch)


def gradients_alone(name: str, rows: int, parts: int) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Gradients, buffers and losses of one process that runs the parts of a batch one after another."""
    case = CASES[name]
    model = case.model()
    losses = []
    for part in cut_batch(case.batch(rows), parts):
        loss, _ = case.loss(model, part)
        (loss * 0.5).backward()
        losses.append(float(loss.detach()))
    gradients = {key: one.grad for key, one in model.named_parameters() if one.grad is not None}
    return gradients, dict(model.named_buffers()), losses


def gradients_of_stages(
    world: World, name: str, schedule: str, rows: int, parts: int, stages: Any = ()
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float], list[str]]:
    """The same of a pipeline over all ranks, gathered on each, and the names that several ranks have."""
    case = CASES[name]
    mesh = _mesh(world)
    model = case.model()
    config = ParallelConfig(pp=world.world_size, schedule=schedule, microbatches=parts, stages=stages)
    pipeline = Pipeline(model, config, mesh, ROWS)
    pipeline.spread()
    pipeline.cut_batch(case.batch(16))  # later ones may have fewer rows
    losses: dict[int, float] = {}

    def found(part: int, returned: Any) -> Tensor:
        losses[part] = float(returned[0].detach())
        total: Tensor = returned[0]
        return total

    pipeline.train(pipeline.cut_batch(case.batch(rows)), case.loss, model, found=found, weigh=lambda loss: loss * 0.5)
    pipeline.exchange_ties()
    own = {key: one.grad for key, one in model.named_parameters() if one.grad is not None}
    everywhere: list[Any] = [None] * world.world_size
    dist.all_gather_object(everywhere, (own, dict(model.named_buffers()), losses))
    gradients: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    repeated = []
    for its, its_buffers, its_losses in everywhere:
        repeated += [key for key in its if key in gradients]
        gradients |= its
        buffers |= its_buffers
        losses |= its_losses
    return gradients, buffers, [losses[part] for part in sorted(losses)], repeated


def compare(world: World, cases: list[tuple[str, str, int, int]]) -> list[str]:
    """The differences from one process, in words, of (case, schedule, rows, parts)."""
    wrong = []
    for name, schedule, rows, parts in cases:
        found = gradients_of_stages(world, name, schedule, rows, parts)
        used = min(parts, next(n for n in range(parts, 0, -1) if rows % n == 0))
        expected = gradients_alone(name, rows, used)
        label = f"{name} {schedule} {rows}/{parts}"
        names, exact = (
            set(expected[0]),
            CASES[name].is_exact and schedule != "LoopedBFS",
        )  # whose backwards go from last to first
        if not names <= set(found[0]):
            wrong.append(f"{label}: lacks {sorted(names - set(found[0]))}")
        if found[3] and exact:
            wrong.append(f"{label}: twice {found[3]}")
        for kind, its, other in (("gradient", found[0], expected[0]), ("buffer", found[1], expected[1])):
            for key in other.keys() & its.keys():
                equal = torch.equal(its[key], other[key])
                if not (equal if exact else torch.allclose(its[key], other[key], atol=1e-6, rtol=1e-5)):
                    worst = float((its[key] - other[key]).abs().max())
                    wrong.append(f"{label}: {kind} {key} differs by {worst:.1e}")
        if found[2] != expected[2]:
            wrong.append(f"{label}: losses {found[2]} {expected[2]}")
    return wrong


_meshes: dict[int, Mesh] = {}


def _mesh(world: World) -> Mesh:
    if world.world_size not in _meshes:
        _meshes[world.world_size] = Mesh(world, MeshSizes(pp=world.world_size))
    return _meshes[world.world_size]


def agree_on_tied_groups(world: World, by_place: bool) -> str:
    """What two stages with one weight say to an optimizer of two groups, by places or by kinds; empty if nothing."""
    model = CASES["tied llama"].model()
    pipeline = Pipeline(model, ParallelConfig(pp=world.world_size, microbatches=2), _mesh(world), ROWS)
    pipeline.spread()
    own = list(model.parameters())
    few = own[:2] if by_place else [one for one in own if one.ndim < 2]
    rest = [one for one in own if all(one is not other for other in few)]
    optimizer = torch.optim.SGD([{"params": few, "lr": 0.1}, {"params": rest, "lr": 0.2}])
    try:
        pipeline.agree_on_names(optimizer)
    except TrainerConfigError as exc:
        return str(exc)
    return ""
