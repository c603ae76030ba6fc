"""Shapes of activations where a plan cuts sequences: what a stage of a pipeline is sent, found without computing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
)

from ..errors import TrainerConfigError

SEQUENCE = 1
"""The dimension of activations, (B, T, ...), along which sequences are cut between layers."""

Forward = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class ShapeChange:
    """Makes of a forward one of whole weights that takes, and gives, parts of sequences as the cut module does.

    ``joined`` are places of arguments of which the module gathers the sequence; ``is_cut``: of its output each of
    ``tp`` ranks keeps a part of the sequence.
    """

    name: str
    tp: int
    joined: tuple[int, ...] = ()
    is_cut: bool = False

    def __call__(self, forward: Forward) -> Forward:
        def changed(*args: Any, **kwargs: Any) -> Any:
            given = [torch.cat([one] * self.tp, SEQUENCE) if at in self.joined else one for at, one in enumerate(args)]
            found = forward(*given, **kwargs)
            if not self.is_cut:
                return found
            check_length(self.name, self.tp, None, (found,))
            return found.narrow(SEQUENCE, 0, found.shape[SEQUENCE] // self.tp).contiguous()

        return changed if self.joined or self.is_cut else forward


def find_shape_change(name: str, style: ParallelStyle, tp: int) -> ShapeChange:
    """Find how a style changes the shapes of a module's sequences.

    Raises:
        TrainerConfigError: it is none of torch's, or lays activations out in another way.
    """
    cut = Shard(SEQUENCE)
    if isinstance(style, ColwiseParallel | RowwiseParallel):
        joined = (0,) if style.input_layouts[0] == cut else ()
        return ShapeChange(name=name, tp=tp, joined=joined, is_cut=style.output_layouts[0] == cut)
    if isinstance(style, SequenceParallel):
        return ShapeChange(name=name, tp=tp)
    if type(style) is PrepareModuleInput:
        found = _find_joined(style)
        if found is not None:
            return ShapeChange(name=name, tp=tp, joined=found)
    if type(style) is PrepareModuleInputOutput:
        found, output = _find_joined(style.prepare_module_input), style.prepare_module_output
        if found is not None and (*output.output_layouts, *output.desired_output_layouts) == (Replicate(), cut):
            return ShapeChange(name=name, tp=tp, joined=found, is_cut=True)
    raise TrainerConfigError(
        f"parallel.plan lays {name!r} out by {type(style).__name__}, of which a pipeline cannot tell the shapes that "
        "go from stage to stage; use the words for styles, or PrepareModuleInput that gathers sequences, or leave "
        "parallel.pp out"
    )


def _find_joined(style: PrepareModuleInput) -> tuple[int, ...] | None:
    """Places of arguments whose sequences are gathered; None where others are laid out in another way."""
    pairs = list(zip(style.input_layouts or (), style.desired_input_layouts or (), strict=True))
    if style.input_kwarg_layouts or any(a != b and (a, b) != (Shard(SEQUENCE), Replicate()) for a, b in pairs):
        return None
    return tuple(at for at, (a, b) in enumerate(pairs) if a != b)


def check_length(name: str, tp: int, module: nn.Module | None, values: Any) -> None:
    """Refuse sequences, (B, T, ...), that ``tp`` does not divide; a hook before a module.

    Raises:
        TrainerConfigError: it does not.
    """
    length = values[0].shape[SEQUENCE] if values and isinstance(values[0], Tensor) and values[0].ndim > 1 else 0
    if length % tp:
        raise TrainerConfigError(
            f"parallel.plan cuts sequences after {name!r} over the parallel.tp={tp} ranks, and one of {length} tokens "
            f"has no {tp} equal parts; make them {-(-length // tp) * tp} long, or use a plan that leaves them whole"
        )
