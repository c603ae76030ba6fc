"""Memory a rank, bytes on the wire a step, and bubble of a layout, computed from shapes; and which layouts fit.

A collective over n ranks is counted as a ring: each rank sends 2 (n - 1) / n of what it reduces, and (n - 1) / n of
what it gathers or scatters. What is an estimate is said by ``Plan.notes``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from ..errors import TrainerConfigError
from ..ranks.mesh import MeshSizes
from .activation import ActivationConfig, find_recomputed
from .blocks import find_blocks
from .config import ParallelConfig
from .gathered import list_rounded
from .pipeline.cut import cut_model
from .pipeline.orders import count_stages, make_order
from .precision import PrecisionConfig
from .tensor import LossParallel, TensorPlan
from .trace import Record

_FP32 = 4
_FLOPS = 3e14  # a second, of one device: what a large product reaches on the accelerators of the day
_NODE, _NETWORK = 3e11, 4e10  # bytes a second, of one device, within a node of _NODE_RANKS and between nodes
_NODE_RANKS = 8
WIRE = ("dp", "cp", "tp", "pp", "ep")
"""Dimensions whose bytes on the wire are told."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A step's computation: a model of shapes, the trace of its forward (none: not known), and the step's rows.

    ``optimizer`` has the bytes of each parameter's state, by name.
    ``rows`` gives the rows of a batch on each of so many replicas, and raises TrainerConfigError where there are none.
    """

    model: nn.Module
    records: Sequence[Record]
    optimizer: Mapping[str, int]
    precision: PrecisionConfig
    activation: ActivationConfig
    rows: Callable[[int], int]
    accumulate: int = 1
    microbatch: int | None = None


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes at the peak of a step on a rank of one pipeline place."""

    parameters: int
    """Numbers of weights that the rank computes with, whole or gathered."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


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


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A parameter as a rank of its stage has it, before ZeRO."""

    name: str
    weight: int
    """The same for all names of one weight, of which each stage that has one has a copy."""

    numel: int
    nbytes: float
    gathered: float
    """Bytes in the format that sharded weights are gathered in."""

    state: float
    trained: bool
    is_spread: bool
    block: str


def plan_layout(work: Work, config: ParallelConfig, ranks: int) -> Plan:
    """Count what the layout costs.

    Raises:
        TrainerConfigError: the ranks, the model or the batch do not allow it; the message names key, value and cure.
    """
    sizes = config.fill(ranks)
    for key in ("tp", "cp", "ep"):
        if config.pp > 1 and getattr(config, key) > 1:
            raise TrainerConfigError(
                f"--plan does not count parallel.pp={config.pp} with parallel.{key}={getattr(config, key)} yet; leave "
                "one of them out"
            )
    rows = work.rows(sizes.dp)
    tensor_plan = TensorPlan(work.model, config) if config.tp > 1 else None
    styles = {} if tensor_plan is None else tensor_plan.styles
    stage_of, order, begins = _read_stages(work.model, config, rows)
    parts = list(_cut_parameters(work, config, styles))
    recomputed = _names_of(work.model, find_recomputed(work.model, work.activation))
    is_pipeline = order is not None
    passes = work.accumulate * (config.microbatches if is_pipeline else _count_microbatches(work, rows))
    rows_of_pass = rows / config.microbatches if is_pipeline else min(rows, work.microbatch or rows)
    held = _Held(work.records, styles, config, recomputed, rows_of_pass)
    memories, sent = [], dict.fromkeys(WIRE, 0.0)
    for place in range(config.pp):
        own = {stage for stage in range(len(begins) + 1) if not is_pipeline or order.rank_of[stage] == place}
        mine = list({one.weight: one for one in reversed(parts) if stage_of(one.name) in own}.values())[::-1]
        states = _count_states(mine, config, sizes, passes=passes)
        buffers = sum(one.nbytes for name, one in work.model.named_buffers() if stage_of(name) in own)
        if order is None:
            activations = held.count(lambda name: True)
        else:
            by_stage = {stage: held.count(partial(_is_of, stage_of, stage)) for stage in own}
            activations = _peak(order.actions[place], by_stage)
        weights, gradients, optimizer = states
        outer_state, outer_bytes = _count_exchanges(mine, config, sizes)
        memories.append(
            RankMemory(
                parameters=sum(one.numel for one in mine),
                weights=weights,
                gradients=gradients,
                optimizer=optimizer + outer_state,
                activations=activations,
                buffers=float(buffers),
            )
        )
        wire = {"dp": _count_dp(mine, config, sizes, passes=passes) + outer_bytes}
        wire["cp"] = passes * _count_cp(work.records, config, rows_of_pass, recomputed)
        wire["tp"] = passes * _count_tp(work, config, styles, rows_of_pass, recomputed)
        wire["tp"] += _count_norms(work, config, styles, passes)
        if order is not None:
            wire["pp"] = work.accumulate * _count_borders(work.records, order.actions[place], begins, rows_of_pass)
        for name, amount in wire.items():
            sent[name] = max(sent[name], amount)
    bubble = 0.0 if order is None else order.idle_share()
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


def propose_layouts(work: Work, config: ParallelConfig, ranks: int, memory: float, most: int = 8) -> list[Proposal]:
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
    return [Proposal(plan=one, reason=_give_reason(one, best[0], whole, memory)) for one in best[:most]]


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


def _read_stages(
    model: nn.Module, config: ParallelConfig, rows: int
) -> tuple[Callable[[str], int], Any, tuple[str, ...]]:
    """The stage of a name, the order of the pipeline or None, and the modules that later stages begin with."""
    if config.pp == 1:
        return (lambda name: 0), None, ()
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

    return stage_of, order, cut.begins


def cut_dims(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> dict[str, int]:
    """The dimension along which each parameter that a plan cuts is cut, by name."""
    found = {}
    modules = dict(model.named_modules())
    for name, style in styles.items():
        if not isinstance(style, ColwiseParallel | RowwiseParallel):
            continue
        is_linear = isinstance(modules[name], nn.Linear)
        dim = int(is_linear != isinstance(style, ColwiseParallel))
        for key, _ in modules[name].named_parameters(recurse=False):
            if key == "weight":
                found[f"{name}.{key}"] = dim
            elif is_linear and dim == 0:
                found[f"{name}.{key}"] = 0
    return found


def _cut_parameters(work: Work, config: ParallelConfig, styles: Mapping[str, ParallelStyle]) -> Iterator[_Part]:
    cut = cut_dims(work.model, styles)
    experts = {
        id(one)
        for module in work.model.modules()
        if hasattr(module, "num_experts") and hasattr(module, "exchange")
        for one in module.parameters()
    }
    if config.ep > 1 and not experts:
        raise TrainerConfigError(f"parallel.ep={config.ep} spreads experts, and the model has none; leave it out")
    rounded = list_rounded(work.model, work.precision)
    blocks = _names_of(work.model, find_blocks(work.model, config.blocks, "parallel.blocks"))
    first = {id(one): name for name, one in work.model.named_parameters()}
    for name, one in work.model.named_parameters(remove_duplicate=False):
        share = config.tp if name in cut else 1
        is_spread = config.ep > 1 and id(one) in experts
        if is_spread:
            share *= config.ep
        numel = one.numel() // share
        yield _Part(
            name=name,
            weight=id(one),
            numel=numel,
            nbytes=one.nbytes / share,
            gathered=numel * (2 if name in rounded else one.element_size()),
            state=work.optimizer.get(first[id(one)], 0) / share,
            trained=one.requires_grad,
            is_spread=is_spread,
            block=_block_of(name, blocks),
        )


def _names_of(model: nn.Module, chosen: Sequence[nn.Module]) -> frozenset[str]:
    found = set(map(id, chosen))
    return frozenset(name for name, module in model.named_modules() if id(module) in found)


def _is_of(stage_of: Callable[[str], int], stage: int, name: str) -> bool:
    return stage_of(name) == stage


def _block_of(name: str, blocks: Collection[str]) -> str:
    """The innermost block around a name; empty outside of all."""
    while name:
        name = name.rpartition(".")[0]
        if name in blocks:
            return name
    return ""


def _shards(one: _Part, config: ParallelConfig, sizes: MeshSizes) -> int:
    return sizes.dp * sizes.cp // sizes.learners // (config.ep if one.is_spread else 1)


def _count_states(
    parts: Sequence[_Part], config: ParallelConfig, sizes: MeshSizes, *, passes: int
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer state at the peak."""
    trained = [one for one in parts if one.trained]
    if not config.zero:
        weights = sum(one.nbytes for one in parts)
        gradients = sum(one.nbytes for one in trained)
        if config.tp > 1 or config.pp > 1 or config.ep > 1:  # buckets of copies, which stay until all have come
            gradients *= 2
        return weights, gradients, sum(one.state for one in trained)
    weights = sum(one.nbytes / _shards(one, config, sizes) for one in parts)
    gradients = sum(one.nbytes / _shards(one, config, sizes) for one in trained)
    optimizer = sum(one.state / _shards(one, config, sizes) for one in trained)
    by_block: dict[str, float] = {}
    for one in parts:
        by_block[one.block] = by_block.get(one.block, 0.0) + one.gathered
    largest = max((size for name, size in by_block.items() if name), default=0.0)
    waits = config.pp > 1 or (config.zero == 1 and passes > 1)
    if config.zero == 3 and config.pp == 1:
        gathered = by_block.get("", 0.0) + (1 + config.overlap) * largest
    else:
        gathered = sum(by_block.values())
    gradients += sum(one.gathered for one in trained) if waits else max(largest, by_block.get("", 0.0))
    return weights + gathered, gradients, optimizer


def _count_dp(parts: Sequence[_Part], config: ParallelConfig, sizes: MeshSizes, *, passes: int) -> float:
    """Bytes of weights and gradients that a rank sends to those with the same part of the model."""
    total = 0.0
    once = config.zero == 1 or config.pp > 1
    for one in parts:
        ring = 1 - 1 / _shards(one, config, sizes)
        if not config.zero:
            total += 2 * ring * one.nbytes * one.trained
            continue
        times = 1 if once else passes
        total += ring * one.gathered * times * (2 if config.zero == 3 and config.pp == 1 else 1)
        total += ring * one.nbytes * times * one.trained
    return total


def _count_exchanges(parts: Sequence[_Part], config: ParallelConfig, sizes: MeshSizes) -> tuple[float, float]:
    """Bytes that DiLoCo keeps on a rank, and that a rank sends to other learners, as the mean over steps."""
    if config.mode != "diloco":
        return 0.0, 0.0
    trained = sum(one.numel for one in parts if one.trained)
    diloco, ranks = config.diloco, sizes.dp // sizes.learners
    kept = 4.0 * (1 + bool(diloco.momentum) + (diloco.codec == "int8" and sizes.learners > 1))
    width = {"fp32": 4, "bf16": 2, "int8": 1}[diloco.codec]
    sent = 2 * (1 - 1 / sizes.learners) * width * trained / ranks / diloco.every
    return kept * trained / (ranks if config.zero else 1), sent


class _Held:
    """Bytes that forwards keep for their backward, on a rank of a replica; constant.

    Along tp, what lies between matrices cut by columns and by rows is cut, and with norms on cut sequences all that is
    not gathered for such matrices; along cp, everything.
    """

    def __init__(
        self,
        records: Sequence[Record],
        styles: Mapping[str, ParallelStyle],
        config: ParallelConfig,
        recomputed: frozenset[str],
        rows: float,
    ) -> None:
        self._records = records
        self._styles = styles
        self._config = config
        self._recomputed = recomputed
        self._rows = rows
        self._cuts_sequence = any(isinstance(one, SequenceParallel) for one in styles.values())
        self._cuts_loss = any(isinstance(one, LossParallel) for one in styles.values())
        inside = {
            kind: {name.rpartition(".")[0] for name, one in styles.items() if isinstance(one, kind)}
            for kind in (ColwiseParallel, RowwiseParallel)
        }
        self._between = (inside[ColwiseParallel] & inside[RowwiseParallel]) - {""}

    def count(self, has: Callable[[str], bool]) -> float:
        """Bytes that modules keep for whose name ``has`` is true: the loss's has none."""
        kept = 0.0
        again: dict[str, float] = {}
        for one in self._records:
            if not has(one.module):
                continue
            if one.kind == "input" and one.module in self._recomputed:
                kept += self._share(one) * one.count(self._rows)
            if one.kind not in ("saved", "mask"):
                continue
            size = self._share(one) * one.count(self._rows)
            around = one.module if one.module in self._recomputed else _block_of(one.module, self._recomputed)
            if around:
                again[around] = again.get(around, 0.0) + size
            else:
                kept += size
        return kept + max(again.values(), default=0.0)

    def _share(self, one: Record) -> float:
        cp = 1 / self._config.cp
        if self._config.tp == 1 or one.kind == "mask":
            return cp
        style = self._styles.get(one.module)
        if isinstance(style, ColwiseParallel):
            is_cut = False
        elif isinstance(style, RowwiseParallel):
            is_cut = True
        elif not one.module:
            is_cut = self._cuts_loss
        else:
            is_cut = self._cuts_sequence or _block_of(f"{one.module}.", self._between) != ""
        return cp / self._config.tp if is_cut else cp


def _peak(actions: Sequence[Any], by_stage: Mapping[int, float]) -> float:
    """The most that a rank of a pipeline keeps for backwards to come."""
    split = {(one.stage, one.part) for one in actions if one.kind == "W"}
    held = most = 0.0
    for one in actions:
        if one.kind == "F":
            held += by_stage[one.stage]
        elif one.kind == "W" or (one.kind == "B" and (one.stage, one.part) not in split):
            held -= by_stage[one.stage]
        most = max(most, held)
    return most


def _count_borders(records: Sequence[Record], actions: Sequence[Any], begins: Sequence[str], rows: float) -> float:
    """Bytes that a rank sends to other stages for one batch: each activation once, and its gradient once."""
    size = {one.module: one.count(rows) for one in records if one.kind == "input"}
    total = 0.0
    for one in actions:
        if one.kind == "SEND_F":
            total += size.get(begins[one.stage], 0.0)
        elif one.kind == "SEND_B":
            total += size.get(begins[one.stage - 1], 0.0)
    return total


def _count_cp(records: Sequence[Record], config: ParallelConfig, rows: float, recomputed: frozenset[str]) -> float:
    """Bytes of keys and values that a rank gathers in forward, and whose gradients it scatters in backward."""
    ring = (1 - 1 / config.cp) / config.tp
    return sum(
        ring * one.count(rows) * (2 + bool(_block_of(one.module, recomputed)))
        for one in records
        if one.kind == "keys" and config.cp > 1
    )


def _count_tp(
    work: Work, config: ParallelConfig, styles: Mapping[str, ParallelStyle], rows: float, recomputed: frozenset[str]
) -> float:
    """Bytes that a rank sends along tp for one forward and backward, as the styles of the plan say."""
    if config.tp == 1:
        return 0.0
    ring = 1 - 1 / config.tp
    sizes = {(one.kind, one.module): one.count(rows) / config.cp for one in work.records}
    prepared = frozenset(name for name, style in styles.items() if isinstance(style, PrepareModuleInput))
    modules = dict(work.model.named_modules())
    total = 0.0
    for name, style in styles.items():
        given, made = (sizes.get((kind, name), 0.0) for kind in ("input", "output"))
        forward = backward = 0.0
        if isinstance(style, PrepareModuleInput):
            forward = backward = ring * given
        elif isinstance(style, ColwiseParallel | RowwiseParallel):
            cuts_output = isinstance(style, ColwiseParallel)
            takes, gives = style.input_layouts[0], style.output_layouts[0]
            if cuts_output and isinstance(modules[name], nn.Linear):
                if isinstance(takes, Shard):
                    forward, backward = ring * given, ring * given
                elif not _block_of(name, prepared):
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
        total += forward * (1 + bool(_block_of(name, recomputed))) + backward
    return total


def _count_norms(work: Work, config: ParallelConfig, styles: Mapping[str, ParallelStyle], passes: int) -> float:
    """Bytes of the gradients of norms on cut sequences, which are summands on each rank of tp."""
    names = [name for name, style in styles.items() if isinstance(style, SequenceParallel)]
    modules = dict(work.model.named_modules())
    size: int = sum(one.nbytes for name in names for one in modules[name].parameters() if one.requires_grad)
    return 2 * (1 - 1 / config.tp) * size * (passes if config.zero else 1)


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
    yield "A rank's total adds up parts whose peaks do not come at once; a step's temporary tensors are not in it."
    if not work.records:
        yield "Activations, and bytes of tp, cp and pp, are not known."
    if config.zero:
        yield "Sharded weights: gathered ones are in weights, whole gradients before they are scattered in gradients."
    if config.tp > 1:
        yield "tp: shares of activations are those of the plan's styles, and estimates."
    if config.cp > 1:
        yield "cp: activations are cut evenly; keys and values that attention gathers are not in them."
    if config.ep > 1:
        yield "ep: the rows that are sent to experts are not counted."
    if config.hybrid:
        yield "hybrid: counted as sharding over all replicas."
    if config.pp > 1:
        yield "pp: of weights that stages share, the exchange of gradients is not counted."
    if config.cpu_offload:
        yield "cpu_offload: weights, gradients and optimizer state are in host memory."
