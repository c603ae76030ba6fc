"""Cursors into the lanes of a stream that has fewer outputs than inputs: two small integers a lane.

An *input* is a sample as the plan orders it, an *output* what is left of inputs for training. Position p of a stream is
a place among outputs. A cursor says: before input ``offset`` of the lane come ``outputs`` outputs. Work on the lane
begins there again, and leaves out what of it has been handed out.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import StateMismatchError
from .plan import lane_offsets, lane_turns

if TYPE_CHECKING:
    from .permutation import IntArray

_PLAIN_LANES = 64  # up to here, arrays are lists that people can read
_MOST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Cursors:
    """One cursor a lane, (lanes,) each: before input ``offsets`` come ``outputs`` outputs; ``taken`` are handed out.

    Where ``outputs`` is less than ``taken``, the first outputs found from there on are known to be handed out.
    ``in_tail``: what is left of the lanes is dealt lane by lane, as at the end of an epoch.
    """

    offsets: IntArray
    outputs: IntArray
    taken: IntArray
    in_tail: bool = False

    @staticmethod
    def at_start(lanes: int) -> Cursors:
        """Those of an epoch's beginning."""
        zeros = np.zeros(lanes, np.int64)
        return Cursors(zeros, zeros, zeros)

    @staticmethod
    def of_all(consumed: int, lanes: int) -> Cursors:
        """Those after so many positions of an epoch, if each input so far had an output."""
        due = lane_offsets(np.array(consumed, np.int64), lane_turns(lanes))
        return Cursors(due, due, due)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; of many lanes the arrays are compressed."""
        return {
            "in_tail": self.in_tail,
            "offsets": pack_integers(self.offsets),
            "outputs": pack_integers(self.outputs),
            "taken": pack_integers(self.taken),
        }

    @staticmethod
    def from_dict(cursors: Mapping[str, Any], *, lanes: int, consumed: int, one_each: bool = True) -> Cursors:
        """Read what ``to_dict`` returned; ``one_each``: an input has one output at most.

        Raises:
            StateMismatchError: it is damaged.
        """
        try:
            arrays = [unpack_integers(cursors[name], lanes) for name in ("offsets", "outputs", "taken")]
            in_tail = cursors["in_tail"]
        except (KeyError, TypeError, ValueError, OverflowError, zlib.error) as exc:
            raise StateMismatchError(f"a damaged loader state: its cursors cannot be read ({exc})") from exc
        offsets, outputs, taken = arrays
        fits = (outputs >= 0) & (offsets >= 0) & (outputs <= taken)
        if one_each:
            fits &= outputs <= offsets
        if type(in_tail) is not bool or not fits.all() or int(taken.sum()) != consumed:
            raise StateMismatchError("a damaged loader state: its cursors contradict each other")
        return Cursors(offsets, outputs, taken, in_tail)


def pack_integers(values: IntArray) -> list[int] | str:
    """Integers for JSON: a list, or where there are many, the compressed differences of neighbours as text."""
    if len(values) <= _PLAIN_LANES:
        return [int(value) for value in values]
    steps = np.diff(values, prepend=0)
    folded = ((steps << 1) ^ (steps >> 63)).astype("<u8")  # small numbers, positive or negative, have few bytes
    planes = folded.view(np.uint8).reshape(len(values), 8).T.copy()  # (8, n): the n lowest bytes first
    return base64.b64encode(zlib.compress(planes.tobytes(), 9)).decode()


def unpack_integers(packed: object, count: int) -> IntArray:
    """Unpack the result of ``pack_integers``, (count,) int64. Raises ValueError or zlib.error for anything else."""
    if isinstance(packed, list):
        if len(packed) != count or not all(type(value) is int for value in packed):
            raise ValueError(f"{count} whole numbers were expected")
        return np.array(packed, np.int64)
    if not isinstance(packed, str):
        raise ValueError(f"{count} whole numbers were expected, not {type(packed).__name__}")
    reader = zlib.decompressobj()
    data = reader.decompress(base64.b64decode(packed, validate=True), _MOST_BYTES + 1)
    if len(data) != 8 * count:
        raise ValueError(f"{count} whole numbers were expected")
    folded = np.frombuffer(data, np.uint8).reshape(8, count).T.copy().view("<u8").reshape(count).astype(np.uint64)
    steps = (folded >> np.uint64(1)).astype(np.int64) ^ -(folded & np.uint64(1)).astype(np.int64)
    values: IntArray = np.cumsum(steps, dtype=np.int64)
    return values
