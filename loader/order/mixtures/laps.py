"""Positions of a mixture's sources by their own epochs, whose numbers of outputs only reading tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .mixture import Stop


@dataclass(frozen=True, slots=True, order=True)
class Lap:
    """Position in a source: ``outputs`` of ``epoch`` have been taken; at the epoch's end it is 0 of the next one.

    Its endless sequence is its epochs laid end to end, each in the order of ``outputs.py``, whose tail begins with the
    first position that a lane cannot fill. So a lap names the same place whatever the batches were that led there.
    """

    epoch: int = 0
    outputs: int = 0


def has_come_round(start: Lap, here: Lap) -> bool:
    """Return whether a source has given a whole epoch since ``start``: it is at the same place, an epoch later."""
    return here >= Lap(start.epoch + 1, start.outputs)


def is_over(stop: Stop, starts: Sequence[Lap], here: Sequence[Lap], last_weights: Sequence[float]) -> bool:
    """Return whether an epoch of a mixture that began at ``starts`` ends ``here``; see ``MixturePlan.steps_left``."""
    if stop == "never":
        return False
    round_ = [has_come_round(start, lap) for start, lap in zip(starts, here, strict=True)]
    if stop == "first_exhausted":
        return any(round_)
    return all(done for done, weight in zip(round_, last_weights, strict=True) if weight)
