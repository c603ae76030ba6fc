"""Bytes that a rank of a layout holds in a step, from shapes: what lies there, and the most at one time.

A backward is walked through from its end to its begin, as autograd does it: what forward kept is freed, gradients come,
blocks that are sharded are gathered and let go.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

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
from .planned_parts import Part, block_of, count_shards
from .tensor import LossParallel
from .trace import Record

_FP32 = 4
_UPDATE = 2  # tensors of a parameter's size that Adam makes, of one parameter at a time


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on a rank of one pipeline place, each at its own peak in a step."""

    parameters: int
    """Numbers of weights that the rank computes with, whole or gathered."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    total: float
    """The most at one time: parts do not all come to their peaks at once."""


@dataclass(frozen=True)
class Point:
    """A place in a forward: bytes kept there for backward, and of gradients that pass it then."""

    module: str
    kept: float
    passing: float


@dataclass(frozen=True)
class _Moment:
    """Bytes at a time of a step, beside weights and optimizer state at rest."""

    gathered: float = 0.0
    gradients: float = 0.0
    activations: float = 0.0
    passing: float = 0.0

    @property
    def total(self) -> float:
        return self.gathered + self.gradients + self.activations + self.passing


class Held:
    """Bytes that forwards keep for their backward, on a rank of a replica; constant.

    Along tp, what lies between matrices cut by columns and by rows is cut, and with norms on cut sequences all that is
    not gathered for such matrices; along cp, everything but the keys and values that attention gathers.
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
        self._gathering = {
            name for name, one in styles.items() if isinstance(one, PrepareModuleInput | PrepareModuleInputOutput)
        }

    def count(self, has: Callable[[str], bool]) -> float:
        """Bytes that modules keep for whose name ``has`` is true: the loss's has none."""
        points = self.points(has)
        return sum(one.kept for one in points) + max(self.again(points).values(), default=0.0)

    def points(self, has: Callable[[str], bool]) -> list[Point]:
        """Places of the forward, in order; of a block that is computed again its input is kept alone."""
        given: dict[str, float] = {}
        found = []
        for one in self._records:
            if not has(one.module):
                continue
            size = self._share(one) * one.count(self._rows)
            if one.kind == "input":
                given[one.module] = size
            kept, passing = 0.0, 0.0
            if one.kind in ("saved", "mask", "keys"):
                kept = 0.0 if self._around(one.module) else size
                passing = 2 * size if one.kind == "saved" and not one.module else 0.0  # what the loss makes of scores
            elif one.kind == "input" and one.module in self._recomputed:
                kept = size
            elif one.kind == "output":
                passing = size + given.get(one.module, 0.0)
            found.append(Point(one.module, kept, passing))
        return found

    def again(self, points: Sequence[Point]) -> dict[str, float]:
        """Bytes that each block keeps once it is computed again, by its name."""
        there = {one.module for one in points}
        found: dict[str, float] = {}
        for one in self._records:
            around = self._around(one.module)
            if around and one.module in there and one.kind in ("saved", "mask", "keys"):
                found[around] = found.get(around, 0.0) + self._share(one) * one.count(self._rows)
        return found

    def _around(self, module: str) -> str:
        return module if module in self._recomputed else block_of(module, self._recomputed)

    def _share(self, one: Record) -> float:
        cp, tp = 1 / self._config.cp, 1 / self._config.tp
        if one.kind == "keys":
            return (1 - cp) * tp  # a rank's own are among what attention keeps
        if one.kind == "mask":
            return cp
        return cp * tp if self._config.tp > 1 and self._is_cut(one) else cp

    def _is_cut(self, one: Record) -> bool:
        style = self._styles.get(one.module)
        if isinstance(style, ColwiseParallel):
            return one.kind == "output" and not style.output_layouts[0].is_replicate()
        if isinstance(style, RowwiseParallel):
            return one.kind != "output" or not style.output_layouts[0].is_replicate()
        if not one.module:
            return self._cuts_loss
        if block_of(f"{one.module}.", self._between):
            return True
        return self._cuts_sequence and not block_of(f"{one.module}.", self._gathering)


def count_memory(
    parts: Sequence[Part],
    held: Held,
    has: Callable[[str], bool],
    config: ParallelConfig,
    sizes: MeshSizes,
    *,
    passes: int,
    buffers: float,
) -> RankMemory:
    """Count what a rank without a pipeline holds; ``passes`` are forwards and backwards of a step."""
    points = held.points(has)
    walk = (_walk_sharded if config.zero else _walk_whole)(points, held.again(points), parts, config, sizes, passes)
    return _sum_up(parts, config, sizes, list(walk), buffers)


def count_stage_memory(
    parts: Sequence[Part],
    actions: Sequence[Any],
    by_stage: Mapping[int, float],
    config: ParallelConfig,
    sizes: MeshSizes,
    *,
    buffers: float,
) -> RankMemory:
    """Count what a rank of a pipeline holds, whose forwards keep ``by_stage`` bytes until their backward.

    Gathered weights, and whole gradients, stay from a step's first part to its last.
    """
    split = {(one.stage, one.part) for one in actions if one.kind == "W"}
    trained = [one for one in parts if one.trained]
    gathered = sum(_whole(one, config, sizes) for one in parts) if config.zero else 0.0
    whole = sum(_whole(one, config, sizes) if config.zero else one.nbytes for one in trained)
    kept = gradients = copied = 0.0
    if config.zero:  # the last block comes in one piece, and is copied to where it is used
        copied = max((size for name, size in _by_block(parts, config, sizes).items() if name), default=0.0)
    walk = [_Moment(gathered + copied)]
    for one in actions:
        if one.kind == "F":
            kept += by_stage[one.stage]
        elif one.kind in ("B", "I", "W"):
            gradients = whole
            if one.kind == "W" or (one.kind == "B" and (one.stage, one.part) not in split):
                kept -= by_stage[one.stage]
        walk.append(_Moment(gathered, gradients, kept))
    if config.zero:
        walk.append(_Moment(gathered, whole + max(_by_block(trained, config, sizes).values(), default=0.0)))
    else:
        copies = sum(one.nbytes for one in trained if count_shards(one, config, sizes) > 1)
        walk.append(_Moment(0.0, whole + copies))  # in buckets, which stay until all have come
    return _sum_up(parts, config, sizes, walk, buffers)


def _sum_up(
    parts: Sequence[Part], config: ParallelConfig, sizes: MeshSizes, walk: Sequence[_Moment], buffers: float
) -> RankMemory:
    shards = {one.weight: count_shards(one, config, sizes) if config.zero else 1 for one in parts}
    at_rest = {
        one.weight: one.nbytes * one.padded(shards[one.weight]) / one.numel / shards[one.weight] for one in parts
    }
    trained = [one for one in parts if one.trained]
    weights = sum(at_rest.values())
    optimizer = sum(one.state * at_rest[one.weight] / one.nbytes for one in trained)
    optimizer += _count_outer_state(trained, config, sizes)
    gradients = sum(at_rest[one.weight] for one in trained)
    updating = gradients + _UPDATE * max((at_rest[one.weight] for one in trained), default=0.0)
    return RankMemory(
        parameters=sum(one.numel for one in parts),
        weights=weights + max((one.gathered for one in walk), default=0.0),
        gradients=max((one.gradients for one in walk), default=0.0),
        optimizer=optimizer,
        activations=max((one.activations for one in walk), default=0.0),
        buffers=buffers,
        total=weights + optimizer + buffers + max([updating, *(one.total for one in walk)]),
    )


def _count_outer_state(trained: Sequence[Part], config: ParallelConfig, sizes: MeshSizes) -> float:
    """Bytes that DiLoCo keeps on a rank: weights of the last exchange, momentum, and what rounding owes."""
    if config.mode != "diloco":
        return 0.0
    copies = 1 + bool(config.diloco.momentum) + (config.diloco.codec == "int8" and sizes.learners > 1)
    ranks = sizes.dp // sizes.learners if config.zero else 1
    return _FP32 * copies * sum(one.numel for one in trained) / ranks


def _walk_whole(
    points: Sequence[Point],
    again: Mapping[str, float],
    parts: Sequence[Part],
    config: ParallelConfig,
    sizes: MeshSizes,
    passes: int,
) -> Iterator[_Moment]:
    """Moments of a backward with whole weights: gradients come one by one, or lie in DDP's buckets all the time."""
    trained = [one for one in parts if one.trained]
    sums = _Sums(points, [(one, one.nbytes) for one in trained])
    is_ddp = sizes.dp * sizes.cp // sizes.learners > 1 and config.tp == config.ep == 1
    exchanged = [] if is_ddp else [one for one in trained if count_shards(one, config, sizes) > 1]
    copies = _Sums(points, [(one, one.nbytes) for one in exchanged])  # in buckets, which stay until all have come
    stays = passes > 1 or is_ddp
    kept = list(accumulate((one.kept for one in points), initial=0.0))
    for at in reversed(range(len(points))):
        gradients = sums.total if stays else sums.after(at)
        gradients += copies.after(at) if config.overlap else 0.0
        activations = kept[at + 1] + _again_at(points[at].module, again)
        yield _Moment(0.0, gradients, activations, points[at].passing)
    yield _Moment(0.0, sums.total + copies.total)


def _walk_sharded(
    points: Sequence[Point],
    again: Mapping[str, float],
    parts: Sequence[Part],
    config: ParallelConfig,
    sizes: MeshSizes,
    passes: int,
) -> Iterator[_Moment]:
    """Moments of a backward with sharded weights: a block's gradients are copied to be scattered, and kept a while."""
    trained = [one for one in parts if one.trained]
    size = _by_block(parts, config, sizes)
    own = _by_block(trained, config, sizes)
    blocks = [_block_at(one.module, size) for one in points]
    first = {block: blocks.index(block) for block in dict.fromkeys(blocks) if block}
    order = list(first)
    sharded = {
        block: sum(one.nbytes / count_shards(one, config, sizes) for one in trained if one.block == block)
        for block in size
    }
    sums = {
        block: _Sums(points, [(one, _whole(one, config, sizes)) for one in trained if one.block == block])
        for block in size
    }
    waits = config.zero == 1 and passes > 1
    kept = list(accumulate((one.kept for one in points), initial=0.0))
    root, scattering = size.get("", 0.0), 0.0
    if order and config.zero < 3:  # the last one comes in one piece, and is copied to where it is used
        last = order[-1]
        gathered = root + sum(size[name] for name in order) + size[last]
        before = sum(sharded.values()) if passes > 1 else 0.0
        yield _Moment(gathered, before, kept[first[last]])
    for at in reversed(range(len(points))):
        block = blocks[at]
        left = [name for name in order if first[name] <= at]
        if config.zero == 3:
            near = [block] if block else []
            if config.overlap and left:
                near += [name for name in left[-2:] if name != block][-1:]
            gathered = root + sum(size[name] for name in near)
        else:
            gathered = root + sum(size[name] for name in left)
        done = [name for name in order if first[name] > at]
        gradients = sum(sharded.values() if passes > 1 and not waits else (sharded[name] for name in done))
        if waits:
            gradients += own.get("", 0.0) + sum(own.get(name, 0.0) for name in left)
        else:
            gradients += sums[""].after(at) if "" in sums else 0.0
            gradients += sums[block].after(at) if block else 0.0
        if block and first[block] == at:
            scattering = own.get(block, 0.0)
        activations = kept[at + 1] + _again_at(points[at].module, again)
        yield _Moment(gathered, gradients + scattering, activations, points[at].passing)
    yield _Moment(root, sum(one for block, one in sharded.items() if block) + 2 * own.get("", 0.0))


class _Sums:
    """Bytes of gradients that are there once backward has come to a point of the forward."""

    def __init__(self, points: Sequence[Point], sizes: Sequence[tuple[Part, float]]) -> None:
        first: dict[str, int] = {}
        for at, one in enumerate(points):
            first.setdefault(one.module, at)
        placed = sorted((max(first.get(name.rpartition(".")[0], 0) for name in one.names), size) for one, size in sizes)
        self._places = [at for at, _ in placed]
        self._before = list(accumulate((size for _, size in placed), initial=0.0))
        self.total = self._before[-1]

    def after(self, at: int) -> float:
        return self.total - self._before[bisect_left(self._places, at)]


def _again_at(module: str, again: Mapping[str, float]) -> float:
    around = module if module in again else block_of(module, again)
    return again.get(around, 0.0)


def _block_at(module: str, blocks: Mapping[str, float]) -> str:
    return module if module in blocks else block_of(module, blocks)


def _whole(one: Part, config: ParallelConfig, sizes: MeshSizes) -> float:
    """Bytes of a sharded parameter once it is gathered, and of its gradient."""
    return one.padded(count_shards(one, config, sizes)) * one.gathered


def _by_block(parts: Sequence[Part], config: ParallelConfig, sizes: MeshSizes) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in parts:
        found[one.block] = found.get(one.block, 0.0) + _whole(one, config, sizes)
    return found
