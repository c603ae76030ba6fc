"""Memory a rank, bytes on the wire a step, and bubble of a layout, computed from shapes; and which layouts fit.

Memory is counted in ``planned_memory.py``, the wire in ``planned_wire.py``; ``Plan.notes`` say what is an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from ..errors import TrainerConfigError
from ..ranks.mesh import MeshSizes
from .activation import find_recomputed
from .config import ParallelConfig
from .pipeline.cut import cut_model
from .pipeline.orders import Order, count_stages, make_order
from .pipeline.ties import Tie, find_ties
from .planned_memory import Held, RankMemory, count_memory, count_stage_memory
from .planned_parts import Work, cut_parameters, names_of
from .planned_wire import (
    count_borders,
    count_buffers,
    count_cp,
    count_dp,
    count_ep,
    count_exchanges,
    count_norms,
    count_ties,
    count_tp,
)
from .tensor import TensorPlan

_FP32 = 4
_FLOPS = 3e14  # a second, of one device: what a large product reaches on the accelerators of the day
_NODE, _NETWORK = 3e11, 4e10  # bytes a second, of one device, within a node of _NODE_RANKS and between nodes
_NODE_RANKS = 8
_MOST_PROPOSED = 8
WIRE = ("dp", "cp", "tp", "pp", "ep")
"""Dimensions whose bytes on the wire are told."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout's costs: memory by pipeline place, bytes that a rank sends a step by dimension, and the bubble."""

    config: ParallelConfig
    sizes: MeshSizes
    ranks: tuple[RankMemory, ...]
    wire: Mapping[str, float]
    """Of the rank that sends most."""

    bubble: float
    rows: int
    """Rows of a batch, on each replica."""

    seconds_by_row: float
    """By which layouts are put in order: a nominal device's time for each row of a step."""

    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> RankMemory:
        """The memory of the rank that needs most."""
        return max(self.ranks, key=lambda one: one.total)


def plan_layout(work: Work, config: ParallelConfig, ranks: int) -> Plan:
    """Count what the layout costs.

    Raises:
        TrainerConfigError: the ranks, the model or the batch do not allow it; the message names key, value and cure.
    """
    sizes = config.fill(ranks)
    rows = work.rows(sizes.dp)
    tensor_plan = TensorPlan(work.model, config) if config.tp > 1 else None
    styles = {} if tensor_plan is None else tensor_plan.styles
    stages = _read_stages(work.model, config, rows)
    parts = list(cut_parameters(work, config, styles, sizes))
    recomputed = names_of(work.model, find_recomputed(work.model, work.activation))
    is_pipeline = stages.order is not None
    passes = work.accumulate * (config.microbatches if is_pipeline else _count_microbatches(work, rows))
    rows_of_pass = rows / config.microbatches if is_pipeline else min(rows, work.microbatch or rows)
    held = Held(work.records, styles, config, recomputed, rows_of_pass)
    memories, sent = [], dict.fromkeys(WIRE, 0.0)
    for place in range(config.pp):
        own = stages.own(place)
        has = partial(_is_of, stages.stage_of, own)
        mine = list({one.weight: one for one in reversed(parts) if has(one.name)}.values())[::-1]
        buffers = float(sum(one.nbytes for name, one in work.model.named_buffers() if has(name)))
        wire = {"dp": count_dp(mine, config, sizes, passes=passes) + count_buffers(buffers, config, sizes)}
        wire["dp"] += count_exchanges(mine, config, sizes)
        wire["cp"] = passes * count_cp(work, config, rows_of_pass, recomputed)
        wire["tp"] = passes * count_tp(work, config, styles, rows_of_pass, recomputed, has)
        wire["tp"] += count_norms(work, config, styles, passes, has)
        wire["ep"] = passes * count_ep(work, config, rows_of_pass, recomputed)
        if stages.order is None:
            memory = count_memory(mine, held, has, config, sizes, passes=passes, buffers=buffers)
        else:
            actions = stages.order.actions[place]
            by_stage = {stage: held.count(partial(_is_of, stages.stage_of, {stage})) for stage in own}
            memory = count_stage_memory(mine, actions, by_stage, config, sizes, buffers=buffers)
            wire["pp"] = work.accumulate * count_borders(
                work.records, actions, stages.begins, rows_of_pass, styles, config.tp
            )
            shards = sizes.dp * sizes.cp if config.zero else 1
            wire["pp"] += count_ties(stages.ties, stages.order.rank_of, place, mine, shards)
        memories.append(memory)
        for name, amount in wire.items():
            sent[name] = max(sent[name], amount)
    bubble = 0.0 if stages.order is None else stages.order.idle_share()
    return Plan(
        config=config,
        sizes=sizes,
        ranks=tuple(memories),
        wire=sent,
        bubble=bubble,
        rows=rows,
        seconds_by_row=_time_row(work, sizes, sent, bubble, rows),
        notes=tuple(_list_notes(work, config)),
    )


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A layout that fits, and why it stands where it does."""

    plan: Plan
    reason: str


def propose_layouts(work: Work, config: ParallelConfig, ranks: int, memory: float) -> list[Proposal]:
    """The layouts, of all zero, tp and pp with the rest of ``config``, whose rank needs at most ``memory`` bytes.

    Best first: by a nominal device's time for a row, of computing, the bubble, and the wire at the speeds of a node or
    a network. Of each tp and pp there is the fastest zero alone.
    """
    fitting: dict[tuple[int, int], list[Plan]] = {}
    whole: dict[tuple[int, int, int], Plan] = {}
    for tp, pp in ((a, b) for a in _divisors(ranks) for b in _divisors(ranks // a)):
        for zero in (0, 1, 2, 3):
            try:
                changed = replace(
                    config,
                    tp=tp,
                    pp=pp,
                    zero=zero,
                    plan=config.plan if tp > 1 else None,
                    stages=config.stages if pp == config.pp else (),
                    hybrid=config.hybrid and zero > 0,
                    cpu_offload=config.cpu_offload and zero > 0,
                    blocks=config.blocks if zero else (),
                    unused_parameters=config.unused_parameters and not zero,
                )
                found = plan_layout(work, changed, ranks)
            except TrainerConfigError:
                continue
            if zero and found.sizes.dp * found.sizes.cp == 1:
                continue  # there is nothing to shard over
            whole[tp, pp, zero] = found
            if found.worst.total <= memory:
                fitting.setdefault((tp, pp), []).append(found)
    # Of those as fast the simplest, which has the least zero.
    best = [min(plans, key=lambda one: (one.seconds_by_row, one.config.zero)) for plans in fitting.values()]
    best.sort(key=lambda one: one.seconds_by_row)
    return [Proposal(plan=one, reason=_give_reason(one, best[0], whole, memory)) for one in best[:_MOST_PROPOSED]]


def _give_reason(plan: Plan, first: Plan, whole: Mapping[tuple[int, int, int], Plan], memory: float) -> str:
    config = plan.config
    said = []
    if plan is first:
        said.append("least time for a row")
    else:
        said.append(f"{plan.seconds_by_row / first.seconds_by_row:.2f} times the first one's time")
    less = whole.get((config.tp, config.pp, config.zero - 1))
    if less is not None and less.worst.total > memory:
        said.append(f"zero={config.zero - 1} does not fit")
    if plan.bubble:
        said.append(f"{plan.bubble:.0%} bubble")
    largest = max(plan.wire, key=lambda name: plan.wire[name])
    if plan.wire[largest]:
        said.append(f"most bytes by {largest}")
    return ", ".join(said)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _count_microbatches(work: Work, rows: int) -> int:
    return -(-rows // work.microbatch) if work.microbatch else 1


@dataclass(frozen=True, kw_only=True)
class _Stages:
    """Stages of a model: their order or None, the modules that later ones begin with, and weights of several."""

    stage_of: Callable[[str], int]
    """The stage of a name."""

    order: Order | None = None
    begins: tuple[str, ...] = ()
    ties: tuple[Tie, ...] = ()

    def own(self, place: int) -> set[int]:
        """The stages at a place of the pipeline."""
        return {0} if self.order is None else {at for at, rank in enumerate(self.order.rank_of) if rank == place}


def _read_stages(model: nn.Module, config: ParallelConfig, rows: int) -> _Stages:
    if config.pp == 1:
        return _Stages(stage_of=lambda name: 0)
    lists = bool(config.stages) and not isinstance(config.stages[0], str)
    named = len(config.stages) + (not lists) if config.stages else 0
    stages = count_stages(config.schedule, config.pp, named)
    order = make_order(config.schedule, config.pp, stages, config.microbatches)
    if rows % config.microbatches:
        raise TrainerConfigError(
            f"parallel.microbatches={config.microbatches} does not divide the {rows} rows of a replica's batch; use a "
            f"divisor of {rows}"
        )
    cut = cut_model(model, config.stages, stages)

    def stage_of(name: str) -> int:
        if name in cut.parameters:
            return cut.parameters[name]
        while name:
            if name in cut.units:
                return cut.units[name]
            name = name.rpartition(".")[0]
        return stages - 1 if not name else 0  # what the loss keeps is on the last stage

    return _Stages(stage_of=stage_of, order=order, begins=cut.begins, ties=tuple(find_ties(model, cut)))


def _is_of(stage_of: Callable[[str], int], stages: Container[int], name: str) -> bool:
    return stage_of(name) in stages


def _time_row(work: Work, sizes: MeshSizes, wire: Mapping[str, float], bubble: float, rows: int) -> float:
    """Seconds of a nominal device for each row of a step; dp's bytes hide behind half of the computing."""
    tokens = max((one.by_row for one in work.records if one.kind == "output"), default=_FP32) / _FP32
    width = max((one.shape[-1] for one in work.model.parameters() if one.ndim > 1), default=1)
    numbers = sum(one.numel() for one in work.model.parameters())
    computing = 6 * numbers * max(1.0, tokens / width) * rows * work.accumulate
    computing /= _FLOPS * sizes.pp * sizes.cp * sizes.tp * (1 - bubble)
    inside = _NODE if sizes.tp * sizes.cp <= _NODE_RANKS else _NETWORK
    around = _NODE if sizes.world_size <= _NODE_RANKS else _NETWORK
    waiting = (wire["tp"] + wire["cp"]) / inside + (wire["pp"] + wire["ep"]) / around
    hidden = max(0.0, wire["dp"] / around - computing / 2)
    return (computing + waiting + hidden) / (rows * sizes.dp * work.accumulate)


def _list_notes(work: Work, config: ParallelConfig) -> Iterator[str]:
    yield "A rank's total is the most at one time; its parts come to their peaks at others."
    yield "Of temporary tensors there are gradients on their way, and Adam's of a weight; on CUDA, add a copy of all."
    if not work.records:
        yield "Activations, and bytes of tp, cp, pp and ep, are not known."
    if config.zero:
        yield "Sharded weights: gathered ones are in weights, whole gradients before they are scattered in gradients."
    if config.tp > 1:
        yield "tp: shares of activations are those of the plan's styles, and estimates."
    if config.ep > 1:
        yield "ep: rows are counted as if each expert had its even share."
    if config.hybrid:
        yield "hybrid: counted as sharding over all replicas."
    if config.cpu_offload:
        yield "cpu_offload: weights, gradients and optimizer state are in host memory."
