"""State of a source of a mixture whose samples are dropped or packed: laps, and a cursor a lane."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import StateMismatchError
from ..cursors import Cursors, pack_integers, unpack_integers
from .laps import Lap

_MOST = 1 << 62


@dataclass(frozen=True, slots=True)
class SourceStream:
    """A source was at ``start`` when the mixture's epoch began, and is ``here``, its lanes at ``cursors``.

    ``kind`` says what is done to samples, as far as states know: {"kind": "filter"}, or for packing also which settings
    and how many samples are packed together.
    """

    kind: Mapping[str, Any]
    start: Lap
    here: Lap
    cursors: Cursors

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        laps = {"start": [self.start.epoch, self.start.outputs], "here": [self.here.epoch, self.here.outputs]}
        if not self.here.outputs:
            return {**self.kind, **laps}
        offsets, outputs = pack_integers(self.cursors.offsets), pack_integers(self.cursors.outputs)
        return {**self.kind, **laps, "offsets": offsets, "outputs": outputs}

    @staticmethod
    def from_dict(state: Mapping[str, Any], *, name: str, lane_sizes: Any) -> SourceStream:
        """Read what ``to_dict`` returned, of a source whose lanes have these inputs, (lanes,) int64.

        Raises:
            StateMismatchError: it is damaged.
        """
        lanes = len(lane_sizes)
        try:
            start, here = _lap(state["start"]), _lap(state["here"])
            if start > here:
                raise ValueError(f"it is at {here} of what began at {start}")
            cursors = Cursors.at_start(lanes)
            if here.outputs:
                offsets, outputs = (unpack_integers(state[name], lanes) for name in ("offsets", "outputs"))
                cursors = Cursors(offsets, outputs, outputs)
                fits = (offsets >= 0) & (offsets <= lane_sizes) & (outputs >= 0)
                if "unit" in state:
                    fits &= (offsets % state["unit"] == 0) | (offsets == lane_sizes)
                else:
                    fits &= (outputs <= offsets) & (here.outputs <= int(lane_sizes.sum()))
                if not np.all(fits) or int(outputs.sum()) > here.outputs:
                    raise ValueError("its cursors contradict each other")
        except (KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError, zlib.error) as exc:
            raise StateMismatchError(f"a damaged loader state of a mixture: source {name!r}: {exc}") from exc
        kind = {name: value for name, value in state.items() if name in ("kind", "packing", "unit")}
        return SourceStream(kind, start, here, cursors)


def _lap(given: Any) -> Lap:
    epoch, outputs = given
    if type(epoch) is not int or type(outputs) is not int or not (0 <= epoch < _MOST and 0 <= outputs < _MOST):
        raise ValueError(f"{given!r} where an epoch and a number of outputs belong")
    return Lap(epoch, outputs)
