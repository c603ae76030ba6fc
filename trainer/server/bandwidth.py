"""Bandwidth of shards, as those who call them measure it, and weights that follow it where that pays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from . import placement as placement_module
from .placement import Placement, moves

LEAST_CALL_BYTES = 1 << 18
"""Bytes of a call from which on it tells of bandwidth; a smaller one tells of latency."""
_HALF_LIFE_S = 20.0
_LEAST_MB = 8.0  # of a shard, before its speed is believed
_GAIN = 1.25  # the slowest shard's time over that of the best weights
_MARGIN = 2.0  # seconds that are saved over those that moving takes
_REST_S = 60.0  # between two changes


@dataclass(kw_only=True)
class _Sums:
    """MB and seconds of a shard's calls, of which those of a half-life ago count half."""

    megabytes: float = 0.0
    seconds: float = 0.0
    at: float = 0.0


class Bandwidth:
    """Measured MB/s of each shard. All mutable state: decaying sums, what was moved since when, and the last change."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}
        self._megabytes = 0.0
        self._began: float | None = None
        self._changed = -math.inf

    def note(self, shard: str, count: float, seconds: float, now: float) -> None:
        """Note calls of ``count`` bytes in all that took so many seconds."""
        if not (count > 0 and seconds > 0):
            return
        self._began = now if self._began is None else self._began
        one = self._sums.setdefault(shard, _Sums(at=now))
        left = 0.5 ** (max(0.0, now - one.at) / _HALF_LIFE_S)
        one.megabytes = one.megabytes * left + count / 1e6
        one.seconds = one.seconds * left + seconds
        one.at = now
        self._megabytes += count / 1e6

    @property
    def speeds(self) -> dict[str, float]:
        """MB/s of the shards that are measured well enough."""
        return {shard: one.megabytes / one.seconds for shard, one in self._sums.items() if one.megabytes >= _LEAST_MB}

    def weigh(self, placement: Placement, *, held_bytes: float, left_s: float, now: float) -> dict[str, float] | None:
        """Weights that are the shards' speeds, if by them the run of ``left_s`` more seconds ends sooner.

        A shard is busy with its share of what moves; the slowest one counts, and some of ``held_bytes`` would move.
        """
        speeds = self.speeds
        if not placement.weights.keys() <= speeds.keys() or now < self._changed + _REST_S or not placement.is_settled:
            return None
        wanted = {shard: _round(speeds[shard]) for shard in placement.weights}
        after = Placement(wanted)
        busy, best = _busy(placement, wanted), _busy(after, wanted)
        if busy < _GAIN * best:
            return None
        began = now if self._began is None else self._began
        rate = self._megabytes / max(1e-9, now - began)
        moved = len(moves(placement, after)) / placement_module.BUCKETS * held_bytes / 1e6
        if (busy - best) * rate * left_s < _MARGIN * moved / min(wanted.values()):
            return None
        self._changed = now
        return wanted


def _busy(placement: Placement, speeds: Mapping[str, float]) -> float:
    """Seconds of the slowest shard for each MB that all of them move together."""
    return max(share / speeds[shard] for shard, share in placement.shares.items())


def _round(speed: float) -> float:
    """Round to two digits, so that weights are readable and stay what they are."""
    return float(f"{speed:.2g}")
