"""Where sources of a mixture are whose epochs have numbers of outputs that only reading tells: by their own epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .mixture import Stop


@dataclass(frozen=True, slots=True, order=True)
class Lap:
    """So many ``outputs`` of ``epoch`` have been taken of a source; where it has no more, this is the next epoch's 0.

    Its endless sequence is its epochs laid end to end, each in the order of ``outputs.py``, whose tail begins with the
    first position that a lane cannot fill. So a lap names the same place whatever the batches were that led there.
    """

    epoch: int = 0
    outputs: int = 0


def has_come_round(start: Lap, here: Lap) -> bool:
    """Whether a source that was at ``start`` has since given as much as it has: it is there again, an epoch later."""
    return here >= Lap(start.epoch + 1, start.outputs)


def is_over(stop: Stop, starts: Sequence[Lap], here: Sequence[Lap], last_weights: Sequence[float]) -> bool:
    """Whether an epoch of a mixture that began at ``starts`` ends ``here``; see ``MixturePlan.steps_left``."""
    if stop == "never":
        return False
    round_ = [has_come_round(start, lap) for start, lap in zip(starts, here, strict=True)]
    if stop == "first_exhausted":
        return any(round_)
    return all(done for done, weight in zip(round_, last_weights, strict=True) if weight)
