"""A part of a data set's samples, chosen by a hash of their ids: for validation splits and for runs on less data.

Each sample id has a random number of 64 bits that depends on the subset's seed alone. A share is the samples whose
number lies in a range of all numbers, a count those whose numbers are the lowest. So parts of one seed that do not
overlap are disjoint, smaller shares lie inside larger ones, and nothing depends on ranks, batches or the order's seed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from ...errors import ConfigError
from ..permutation import IntArray, UIntArray, random_numbers, random_numbers_at, stream_key

BLOCK = 1 << 18  # samples that are decided at once
_FOR_SUBSETS = 3  # plan.py's streams are 1 and 2
_BUCKET_BITS = 16
_ROUNDING = 1e-9  # how far the shares of a split may be from 1 together


@dataclass(frozen=True, kw_only=True)
class Subset:
    """Subset of a data set's samples that a loader delivers. Make it with ``share``, ``split`` or ``take``.

    ``unit`` "share": the samples whose random number, as a fraction of all, is from ``start`` to ``stop`` (exclusive).
    ``unit`` "count": those at places ``start`` to ``stop`` of all samples sorted by their numbers; None is the end.
    """

    unit: str
    start: float
    stop: float | None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.unit not in ("share", "count"):
            raise ConfigError(f"unit={self.unit!r}: must be 'share' or 'count'")
        object.__setattr__(self, "seed", _whole("seed", self.seed))
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"seed={self.seed}: must be from 0 to 2**64 - 1")
        if self.unit == "count":
            object.__setattr__(self, "start", _whole("skip", self.start))
            if self.stop is not None:
                object.__setattr__(self, "stop", _whole("count", self.stop))
            if not 0 <= self.start < (math.inf if self.stop is None else self.stop):
                raise ConfigError(f"{self}: skip must be 0 or more, and count 1 or more")
            return
        for name in ("start", "stop"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
                raise ConfigError(f"{name}={value!r}: a share is a number from 0 to 1")
            object.__setattr__(self, name, float(value))
        if self.stop is None or not 0 <= self.start < self.stop <= 1:
            raise ConfigError(f"{self}: a share needs 0 <= start < stop <= 1")

    @staticmethod
    def share(start: float, stop: float, *, seed: int = 0) -> Subset:
        """The samples from ``start`` to ``stop`` of all, as fractions; which ones, ``seed`` decides.

        ``Subset.share(0, 0.01)`` lies inside ``Subset.share(0, 0.1)``. Each sample is decided by itself, so the number
        of samples is binomial (5% of a million: 50,000 with a standard deviation of 218), and a sample keeps its side
        when shards are appended to the data set.

        Raises:
            ConfigError: the range is empty or not within 0 and 1.
        """
        return Subset(unit="share", start=start, stop=stop, seed=seed)

    @staticmethod
    def split(shares: Mapping[str, float], *, seed: int = 0) -> dict[str, Subset]:
        """Disjoint parts that are everything together: ``Subset.split({"train": 0.95, "val": 0.05})["val"]``.

        Raises:
            ConfigError: a share is not positive, or they do not add up to 1.
        """
        parts = [float(part) for part in shares.values()]
        if not parts or not all(0 < part <= 1 for part in parts) or abs(math.fsum(parts) - 1) > _ROUNDING:
            raise ConfigError(f"shares={dict(shares)}: must be positive and add up to 1, not {math.fsum(parts):g}")
        edges = [math.fsum(parts[:number]) for number in range(len(parts))] + [1.0]
        return {
            name: Subset.share(low, high, seed=seed)
            for name, low, high in zip(shares, edges[:-1], edges[1:], strict=True)
        }

    @staticmethod
    def take(count: int | None = None, *, skip: int = 0, seed: int = 0) -> Subset:
        """Exactly ``count`` samples (None: all that are left) after the first ``skip`` of a random order of all.

        Runs on 1,000, 10,000 and 100,000 samples hold one another; what ``take(1000)`` has, ``take(skip=1000)`` lacks.

        Raises:
            ConfigError: a number is negative, or nothing is left.
        """
        skip = _whole("skip", skip)
        stop = None if count is None else skip + _whole("count", count)
        return Subset(unit="count", start=skip, stop=stop, seed=seed)

    def __str__(self) -> str:
        if self.unit == "share":
            return f"Subset.share({self.start!r}, {self.stop!r}, seed={self.seed})"
        count = None if self.stop is None else int(self.stop - self.start)
        return f"Subset.take({count}, skip={int(self.start)}, seed={self.seed})"

    def to_dict(self) -> dict[str, Any]:
        """The subset as JSON holds it, for states and logs."""
        return asdict(self)

    def bounds(self, num_samples: int) -> tuple[int, int]:
        """The lowest and the highest random number of the subset's samples; O(samples) time for a count.

        Raises:
            ConfigError: there are not as many samples as the subset counts.
        """
        if self.unit == "share":
            low, stop = (int(Fraction(edge or 0.0) * (1 << 64)) for edge in (self.start, self.stop))
            return low, max(low, stop - 1)
        stop = num_samples if self.stop is None else int(self.stop)
        if not self.start < stop <= num_samples:
            raise ConfigError(f"{self}: the data set has {num_samples:,} samples; take and skip fewer")
        return (
            _number_at(int(self.start), num_samples, self._key) if self.start else 0,
            _number_at(stop - 1, num_samples, self._key),
        )

    def holds(self, start: int, stop: int, bounds: tuple[int, int]) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Mask of the samples from ``start`` to ``stop`` that belong to it, (stop - start,); ``bounds`` of the set."""
        return _within(random_numbers(start, stop, self._key), bounds)

    def holds_ids(self, ids: IntArray, bounds: tuple[int, int]) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Mask of the samples with these ids that belong to it, (len(ids),)."""
        return _within(random_numbers_at(ids, self._key), bounds)

    @property
    def _key(self) -> int:
        return stream_key(_FOR_SUBSETS, self.seed)


def _within(numbers: UIntArray, bounds: tuple[int, int]) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    inside: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = numbers >= np.uint64(bounds[0])
    inside &= numbers <= np.uint64(bounds[1])
    return inside


def blocks(num_samples: int) -> Iterator[tuple[int, int]]:
    """Ranges of sample ids, (start, stop), small enough to be worked on at once."""
    for start in range(0, num_samples, BLOCK):
        yield start, min(num_samples, start + BLOCK)


def _number_at(place: int, num_samples: int, key: int) -> int:
    """The random number at a place of all samples' numbers in increasing order.

    A radix selection: one pass counts the numbers by their highest bits, one collects the bucket that the place is in.
    """
    shift = np.uint64(64 - _BUCKET_BITS)
    counts: IntArray = np.zeros(1 << _BUCKET_BITS, np.int64)
    for start, stop in blocks(num_samples):
        top = (random_numbers(start, stop, key) >> shift).view(np.int64)
        counts += np.bincount(top, minlength=len(counts))
    ends = np.cumsum(counts)
    bucket = int(np.searchsorted(ends, place, side="right"))
    found: list[UIntArray] = []
    for start, stop in blocks(num_samples):
        numbers = random_numbers(start, stop, key)
        found.append(numbers[(numbers >> shift) == np.uint64(bucket)])
    return int(np.sort(np.concatenate(found))[place - int(ends[bucket] - counts[bucket])])


def _whole(name: str, value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{name}={value!r} is not a whole number") from None
