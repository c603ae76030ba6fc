"""The order of outputs where lanes yield different numbers of them, and cursors into it.

Rule 4 holds while all lanes can, then lane after lane.

Pure arithmetic over what is known of the lanes: (lanes,) int64 each, ``known`` outputs so far and ``totals``, -1 where
a lane's end has not been reached.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import StateMismatchError
from .plan import batch_bounds, lane_offsets, lane_turns, rank_segments

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


def fillable(known: IntArray, turns: IntArray) -> int:
    """The first position for which some lane lacks the output that rule 4 asks of it."""
    return int((known * len(turns) + turns).min())


def limit(totals: IntArray, turns: IntArray) -> int | None:
    """The first position for which a lane, as far as known, has no output left; None while no lane has ended."""
    ended = totals >= 0
    return int((totals[ended] * len(turns) + turns[ended]).min()) if ended.any() else None


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of an epoch: from position ``start`` on, what is left of each lane, laid end to end, lane by lane.

    ``taken`` (lanes,): the outputs of each lane before it; ``totals`` (lanes,): all that there are. ``is_resumed``:
    some of the tail came before ``start``.
    """

    start: int
    taken: IntArray
    totals: IntArray
    is_resumed: bool = False

    @property
    def stop(self) -> int:
        """The number of outputs of the epoch."""
        return self.start + int((self.totals - self.taken).sum())

    def taken_at(self, position: int) -> IntArray:
        """(lanes,): how many outputs of each lane come before a position at or after ``start``."""
        left = self.totals - self.taken
        before = np.cumsum(left) - left
        taken: IntArray = self.taken + np.clip(position - self.start - before, 0, left)
        return taken

    def segments(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Segments of positions ``start`` to ``stop``: (lane, first output, one past the last), lane by lane."""
        first, last = self.taken_at(start), self.taken_at(stop)
        return [(lane, int(first[lane]), int(last[lane])) for lane in np.flatnonzero(last > first).tolist()]


def lanes_of_share(
    position: int,
    turns: IntArray,
    global_batch_size: int,
    rank: int,
    world_size: int,
    weights: Sequence[float] | None = None,
) -> IntArray:
    """The lanes that one rank's share of global batches from ``position`` on ever has a part of, in increasing order.

    Batches repeat their pattern of lanes after lanes / gcd(lanes, global_batch_size) steps.
    """
    lanes = len(turns)
    period = lanes // int(np.gcd(lanes, global_batch_size))
    at_once = max(1, (1 << 20) // lanes)
    found = np.zeros(lanes, np.bool_)
    for first in range(0, period, at_once):
        steps = min(at_once, period - first)
        start = position + first * global_batch_size
        bounds = batch_bounds(start, steps, global_batch_size, start + steps * global_batch_size)
        found[rank_segments(bounds, turns, rank, world_size, weights).lane] = True
    found |= keeper_ranks(lanes, world_size) == rank
    return np.flatnonzero(found)


def keeper_ranks(lanes: int, world_size: int) -> IntArray:
    """(lanes,): the one rank that answers for each lane's end, among those that read it."""
    ranks: IntArray = np.arange(lanes, dtype=np.int64) * world_size // lanes
    return ranks
