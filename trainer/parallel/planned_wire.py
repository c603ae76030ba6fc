"""Bytes that a rank sends in a step of a layout, by dimension, from shapes.

A collective over n ranks is counted as a ring: each rank sends 2 (n - 1) / n of what it reduces, (n - 1) / n of what it
gathers or scatters, and once what is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
)

from ..ranks.mesh import MeshSizes
from .config import ParallelConfig
from .pipeline.ties import Tie
from .planned_parts import Part, Work, block_of, count_shards, list_experts
from .tensor import LossParallel
from .trace import Record

_COUNT = 8  # bytes of a count of rows


def count_dp(parts: Sequence[Part], config: ParallelConfig, sizes: MeshSizes, *, passes: int) -> float:
    """Bytes of weights and gradients that a rank sends to those with the same part of the model."""
    total = 0.0
    once = config.zero == 1 or config.pp > 1
    for one in parts:
        shards = count_shards(one, config, sizes)
        ring = 1 - 1 / shards
        if not config.zero:
            total += 2 * ring * one.nbytes * one.trained
            continue
        times = 1 if once else passes
        whole = one.padded(shards)
        total += ring * whole * one.gathered * times * (2 if config.zero == 3 and config.pp == 1 else 1)
        total += ring * whole * one.reduced * times * one.trained
    return total


def count_exchanges(parts: Sequence[Part], config: ParallelConfig, sizes: MeshSizes) -> float:
    """Bytes that a rank sends to other learners of DiLoCo, as the mean over steps."""
    if config.mode != "diloco":
        return 0.0
    trained = sum(one.numel for one in parts if one.trained)
    width = {"fp32": 4, "bf16": 2, "int8": 1}[config.diloco.codec]
    ranks = sizes.dp // sizes.learners
    return 2 * (1 - 1 / sizes.learners) * width * trained / ranks / config.diloco.every


def count_buffers(nbytes: float, config: ParallelConfig, sizes: MeshSizes) -> float:
    """Bytes of buffers that the first rank of a stage gives to the others, once a step."""
    others = sizes.dp * sizes.cp // sizes.learners * (sizes.tp if config.zero else 1)
    return nbytes if others > 1 else 0.0


def count_borders(
    records: Sequence[Record],
    actions: Sequence[Any],
    begins: Sequence[str],
    rows: float,
    styles: Mapping[str, ParallelStyle],
    tp: int,
) -> float:
    """Bytes that a rank sends to other stages for one batch: each activation once, and its gradient once.

    Where a plan cuts sequences between layers, each rank sends its part of them.
    """
    share = 1 / tp if any(isinstance(one, SequenceParallel) for one in styles.values()) else 1.0
    size = {one.module: share * one.count(rows) for one in records if one.kind == "input"}
    total = 0.0
    for one in actions:
        if one.kind == "SEND_F":
            total += size.get(begins[one.stage], 0.0)
        elif one.kind == "SEND_B":
            total += size.get(begins[one.stage - 1], 0.0)
    return total


def count_ties(ties: Sequence[Tie], rank_of: Sequence[int], place: int, parts: Sequence[Part], shards: int) -> float:
    """Bytes of gradients of weights that several stages have, each of which sends its own to the others."""
    named = {one.name: one for one in parts}
    total = 0.0
    for tie in ties:
        ranks = {rank_of[stage] for stage in tie.stages}
        own = next((named[name] for name in tie.names if name in named), None)
        if place in ranks and own is not None and own.trained:
            size = own.nbytes / own.numel
            total += (len(ranks) - 1) * size * (own.padded(shards) / shards + 1)  # and whether there is one
    return total


def count_cp(work: Work, config: ParallelConfig, rows: float, recomputed: frozenset[str]) -> float:
    """Bytes of keys and values that a rank gathers in forward, and whose gradients it scatters, in fp32."""
    ring = (1 - 1 / config.cp) / config.tp
    wide = 1 if work.precision.dtype == "fp32" else 2
    return sum(
        ring * one.count(rows) * (1 + bool(block_of(one.module, recomputed)) + wide)
        for one in work.records
        if one.kind == "keys" and config.cp > 1
    )


def count_ep(work: Work, config: ParallelConfig, rows: float, recomputed: frozenset[str]) -> float:
    """Bytes of rows on their way to experts and back, and of their gradients, where all experts have as many."""
    if config.ep == 1:
        return 0.0
    ring = 1 - 1 / config.ep
    sizes = {(one.kind, one.module): one.count(rows) / config.cp for one in work.records}
    total = 0.0
    for name, module in list_experts(work.model).items():
        number: int = module.num_experts  # type: ignore[assignment]
        times = 1 + bool(block_of(name, recomputed))
        rows_sent = sizes.get(("input", name), 0.0) + sizes.get(("output", name), 0.0)
        total += ring * (rows_sent * (times + 1) + _COUNT * number * times)
    return total


def count_tp(
    work: Work,
    config: ParallelConfig,
    styles: Mapping[str, ParallelStyle],
    rows: float,
    recomputed: frozenset[str],
    has: Callable[[str], bool],
) -> float:
    """Bytes that a rank sends along tp for one forward and backward of what it ``has``, as the plan's styles say."""
    if config.tp == 1:
        return 0.0
    ring = 1 - 1 / config.tp
    sizes = {(one.kind, one.module): one.count(rows) / config.cp for one in work.records}
    prepared = frozenset(name for name, style in styles.items() if isinstance(style, PrepareModuleInput))
    modules = dict(work.model.named_modules())
    total = 0.0
    for name, style in styles.items():
        if not has(name):
            continue
        given, made = (sizes.get((kind, name), 0.0) for kind in ("input", "output"))
        forward = backward = 0.0
        if isinstance(style, PrepareModuleInput):
            forward = backward = ring * given
        elif isinstance(style, PrepareModuleInputOutput):  # inside all is whole, and each rank's gradients are, too
            forward, backward = ring * given, ring * made
        elif isinstance(style, ColwiseParallel | RowwiseParallel):
            cuts_output = isinstance(style, ColwiseParallel)
            takes, gives = style.input_layouts[0], style.output_layouts[0]
            if cuts_output and isinstance(modules[name], nn.Linear):
                if isinstance(takes, Shard):
                    forward, backward = ring * given, ring * given
                elif not block_of(name, prepared):
                    backward = 2 * ring * given
                if gives.is_replicate():
                    forward += ring * made
            elif cuts_output:
                forward = ring * made if gives.is_replicate() else 0.0
            else:
                if isinstance(modules[name], nn.Linear) and takes.is_replicate():
                    backward = ring * given
                forward = (2 if gives.is_replicate() else 1) * ring * made
                backward += 0.0 if gives.is_replicate() else ring * made
        if isinstance(style, LossParallel):  # the largest score, the sum, and the target's: a number for each token
            width = modules[name].weight.shape[0]
            forward += 3 * 2 * ring * made / width
        total += forward * (1 + bool(block_of(name, recomputed))) + backward
    return total


def count_norms(
    work: Work, config: ParallelConfig, styles: Mapping[str, ParallelStyle], passes: int, has: Callable[[str], bool]
) -> float:
    """Bytes of the gradients of norms on cut sequences, which are summands on each rank of tp."""
    names = [name for name, style in styles.items() if isinstance(style, SequenceParallel) and has(name)]
    modules = dict(work.model.named_modules())
    size: int = sum(one.nbytes for name in names for one in modules[name].parameters() if one.requires_grad)
    times = passes if config.zero > 1 and config.pp == 1 else 1  # else they are added up before
    return 2 * (1 - 1 / config.tp) * size * times
