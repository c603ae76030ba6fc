"""Placement: pieces of tensors and rows of tables lie in buckets, and buckets on shards.

A bucket is the unit of version, snapshot, replica and migration. Which bucket holds what is fixed for ever by a hash.
Which shard holds a bucket follows by weighted rendezvous hashing (Thaler and Ravishankar 1998; the logarithm method for
weights): the shard with the highest score of (bucket, shard), so that a shard more or less moves only the buckets that
it wins or held.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..errors import TrainerConfigError

BUCKETS = 4096
PIECE_BYTES = 4 << 20
"""Bytes of a dense tensor that travel and are stored as one."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NEVER = 1e-300  # the weight of a shard that gets no buckets


def stable_hash(text: str) -> int:
    """The 64-bit hash of a text, the same on every machine and in every version."""
    return xxhash.xxh3_64_intdigest(text.encode())


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scatter 64-bit integers of any shape over all 64-bit integers (the finaliser of splitmix64)."""
    mixed = values + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def bucket_of_piece(tensor: str, piece: int) -> int:
    """The bucket of the ``piece``-th piece of a dense tensor."""
    return stable_hash(f"piece {piece} {tensor}") % BUCKETS


def buckets_of_rows(table: str, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The buckets (n,) of the rows with these ids (n,) of a table."""
    mixed = mix(ids.astype(np.uint64) ^ np.uint64(stable_hash(f"rows {table}")))
    return (mixed % np.uint64(BUCKETS)).astype(np.int64)


@cache
def _unit_logs(shard: str) -> NDArray[np.float64]:
    """Return -ln(u) of each bucket, u uniform in (0, 1) and a function of bucket and shard."""
    mixed = mix(np.arange(BUCKETS, dtype=np.uint64) ^ np.uint64(stable_hash(f"shard {shard}")))
    uniform = ((mixed >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52
    logs: NDArray[np.float64] = -np.log(uniform)
    return logs


@dataclass(frozen=True, kw_only=True)
class Move:
    """A bucket that goes to ``target``, which copies it from ``source``."""

    bucket: int
    source: str
    target: str


class Placement:
    """The shards of every bucket, best first: a pure function of the shards' names and weights (say, MB/s).

    ``elsewhere`` are the buckets that still lie where they were before the weights were these, by number. A shard
    without a weight holds such buckets alone.

    Raises:
        TrainerConfigError: there is no shard, or a weight is not a positive number.
    """

    def __init__(self, weights: Mapping[str, float], elsewhere: Mapping[int, str] | None = None) -> None:
        if not weights:
            raise TrainerConfigError("a parameter server needs 1 shard or more, and none is left; add one")
        for shard, weight in weights.items():
            if not (math.isfinite(weight) and weight > 0):
                raise TrainerConfigError(f"the weight of shard {shard!r} is {weight}; it must be a number above 0")
        self.weights = dict(sorted(weights.items()))
        self.elsewhere = dict(elsewhere or {})
        self._names = sorted({*self.weights, *self.elsewhere.values()})
        costs = np.stack([_unit_logs(shard) / self.weights.get(shard, _NEVER) for shard in self._names])
        for bucket, shard in self.elsewhere.items():
            costs[self._names.index(shard), bucket] = -1.0
        self._ranked = np.argsort(costs, axis=0, kind="stable")  # (shards, buckets)

    @property
    def shards(self) -> tuple[str, ...]:
        """All shards, those that are being left, too."""
        return tuple(self._names)

    @property
    def is_settled(self) -> bool:
        """Return whether all buckets lie where the weights say."""
        return not self.elsewhere

    @property
    def shares(self) -> dict[str, float]:
        """The share of all buckets that lie on each shard."""
        counts = np.bincount(self._ranked[0], minlength=len(self._names))
        return dict(zip(self._names, (counts / len(self._ranked[0])).tolist(), strict=True))

    def after(self, arrived: Collection[int]) -> Placement:
        """The placement once these buckets have arrived where the weights say."""
        left = {bucket: shard for bucket, shard in self.elsewhere.items() if bucket not in arrived}
        return Placement(self.weights, left)

    def shard_of(self, bucket: int) -> str:
        """The shard that holds a bucket."""
        return self._names[int(self._ranked[0, bucket])]

    def holds(self, shard: str, buckets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell of each of these buckets (n,) if it lies on a shard."""
        found: NDArray[np.bool_] = self._ranked[0, buckets] == self._names.index(shard)
        return found

    def split(self, buckets: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """Divide buckets (n,) by the shard that holds them, those of none left out."""
        parts = {shard: buckets[self.holds(shard, buckets)] for shard in self._names}
        return {shard: part for shard, part in parts.items() if len(part)}

    def holders(self, bucket: int, replicas: int) -> tuple[str, ...]:
        """The shards that hold a bucket and its copies, the one that answers first; fewer where there are fewer."""
        return tuple(self._names[index] for index in self._ranked[:replicas, bucket])

    def buckets_of(self, shard: str) -> frozenset[int]:
        """The buckets that a shard holds."""
        index = self._names.index(shard)
        return frozenset(np.flatnonzero(self._ranked[0] == index).tolist())


def moves(before: Placement, after: Placement) -> list[Move]:
    """The buckets whose shard is another one afterwards, in order."""
    pairs = ((bucket, before.shard_of(bucket), after.shard_of(bucket)) for bucket in range(BUCKETS))
    return [Move(bucket=bucket, source=source, target=target) for bucket, source, target in pairs if source != target]
