"""Outer optimizers on the shards of a parameter server, and the fragments of what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from ..errors import TrainerConfigError
from ..parallel.diloco_config import DilocoConfig
from ..server.config import ParameterServerConfig
from ..server.optimizers import Optimizer, Sgd, State, outer_nesterov
from ..server.placement import bucket_of_piece
from ..server.schema import Schema
from .schedule import cut_fragments


@dataclass(frozen=True, kw_only=True)
class TakeMean:
    """Makes values what is pushed, which are the learners' weights: merged, the mean of these, exactly."""

    rate: float = 1.0

    def new_state(self, like: Tensor) -> State:
        return {}

    def step(self, values: Tensor, gradients: Tensor, state: State, rate: float) -> None:
        values.copy_(gradients)


def pushes_weights(config: DilocoConfig, server: ParameterServerConfig) -> bool:
    """Return whether learners push weights and not what these have changed by.

    So the outer optimizer averages them without rounding, which is right only where all learners of a round are merged,
    and at its end none has anything left to push.
    """
    is_exact = config.is_average and config.fragments == 1 and server.push == "fp32" and server.pull == "fp32"
    return is_exact and server.rule.merges == "by clock"


def make_outer(config: DilocoConfig, server: ParameterServerConfig) -> Optimizer:
    """Make the outer optimizer of shards."""
    if pushes_weights(config, server):
        return TakeMean()
    return outer_nesterov(rate=config.rate, momentum=config.momentum) if config.momentum else Sgd(rate=config.rate)


def rate_of_push(config: DilocoConfig, server: ParameterServerConfig, learners: int) -> float:
    """The outer rate of one push: where each is a step of its own, all learners together step as far as one mean."""
    return config.rate / learners if server.rule.merges == "no" else config.rate


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Buckets that are exchanged together, and the parts of flat tensors in them, by name, as (start, stop)."""

    buckets: frozenset[int]
    parts: Mapping[str, tuple[tuple[int, int], ...]]

    @property
    def size(self) -> int:
        """The number of values."""
        return sum(stop - start for several in self.parts.values() for start, stop in several)


def cut_schema(schema: Schema, fragments: int) -> list[Fragment]:
    """Cut what servers hold into fragments: ranges of buckets, by number, that hold about equally much.

    Raises:
        TrainerConfigError: there are fewer buckets than fragments.
    """
    held: dict[int, list[tuple[str, int, int]]] = {}
    for spec in schema.tensors:
        sizes = [spec.piece_size(index) for index in range(spec.pieces)]
        for index, stop in enumerate(accumulate(sizes)):
            held.setdefault(bucket_of_piece(spec.name, index), []).append((spec.name, stop - sizes[index], stop))
    numbers = sorted(held)
    if len(numbers) < fragments:
        raise TrainerConfigError(
            f"parallel.diloco.fragments={fragments} is more than the {len(numbers)} buckets that parameters lie in, "
            "which are exchanged as wholes; use fewer fragments"
        )
    found = []
    for indices in cut_fragments([sum(stop - start for _, start, stop in held[one]) for one in numbers], fragments):
        parts: dict[str, list[tuple[int, int]]] = {}
        for number in (numbers[index] for index in indices):
            for name, start, stop in held[number]:
                parts.setdefault(name, []).append((start, stop))
        ordered = {name: tuple(sorted(several)) for name, several in sorted(parts.items())}
        found.append(Fragment(buckets=frozenset(numbers[index] for index in indices), parts=ordered))
    return found


def due_after(done: int, length: int, *, every: int, fragments: int) -> list[int]:
    """Return the fragments that are exchanged after ``done`` of a lease's ``length`` steps.

    Each comes once in a lease: p of P after H (p + 1) / P steps, rounded down, or with the lease's last step.
    """
    return [p for p in range(fragments) if min((p + 1) * every // fragments, length) == done]
