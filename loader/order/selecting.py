"""Selections of an epoch's samples: a subset by a hash of their ids, or draws in proportion to weights."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from ..errors import ConfigError, PartitionError
from .cached import cached_property
from .permutation import (
    FOR_CHUNK_DRAWS,
    FOR_ROW_DRAWS,
    FOR_SUBSETS,
    IntArray,
    UIntArray,
    permutation,
    random_numbers,
    random_numbers_at,
    stream_key,
)

_LARGEST = 1 << 30  # the largest weight as a whole number: sums of 2**33 of them are exact in int64
_MOST_SAMPLES = 1 << 33


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Whole numbers in proportion to what was given, the largest 2**30: ``values`` is (samples,) or (chunks,) int32."""

    values: np.ndarray[tuple[int, ...], np.dtype[np.int32]]
    by_chunk: bool = False

    @staticmethod
    def read(given: Sequence[float] | np.ndarray[Any, Any], *, by_chunk: bool = False) -> Weights:
        """Round weights to multiples of 2**-30 of the largest.

        Raises:
            ConfigError: they are not positive, finite numbers in one dimension, or one is too small beside the largest.
        """
        try:
            weights = np.asarray(given, np.float64)
        except (TypeError, ValueError) as exc:
            raise ConfigError(f"weights={type(given).__name__}: not numbers, one a sample ({exc})") from exc
        if weights.ndim != 1 or not len(weights):
            raise ConfigError(f"weights of shape {weights.shape}: needs one dimension, one weight a sample")
        bad = np.flatnonzero(~((weights > 0) & (weights < np.inf)))
        if len(bad):
            raise ConfigError(
                f"weights[{bad[0]}]={weights[bad[0]]} ({len(bad):,} such): weights are positive, finite numbers; leave "
                "samples out with subset=, or by naming other shards"
            )
        values = np.rint(weights / weights.max() * _LARGEST).astype(np.int32)
        if not values.all():
            least = int(weights.argmin())
            raise ConfigError(
                f"weights[{least}]={weights[least]} is below a billionth of the largest, {weights.max()}; raise it"
            )
        return Weights(values=values, by_chunk=by_chunk)

    def check(self, num_samples: int, num_chunks: int) -> None:
        """Raise ConfigError unless there is one weight a sample (or chunk) of a data set of this size."""
        needed = num_chunks if self.by_chunk else num_samples
        if len(self.values) != needed:
            raise ConfigError(
                f"weights: {len(self.values):,} of them for {needed:,} samples; give one a sample id of the whole data "
                "set (also with subset=), or a mapping from patterns of shard names to weights"
            )
        if num_samples > _MOST_SAMPLES:
            raise ConfigError(f"weights: at most {_MOST_SAMPLES:,} samples can be weighted, not {num_samples:,}")

    @cached_property
    def digest(self) -> str:
        """16 hex digits over the weights, for states."""
        data = self.values.astype("<i4").tobytes()
        return hashlib.blake2b(bytes([self.by_chunk]) + data, digest_size=8).hexdigest()


BLOCK = 1 << 18  # samples that are decided at once
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
        return stream_key(FOR_SUBSETS, self.seed)


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


_U_STEPS = 1024  # the random start of a systematic sample is a multiple of 1/1024, so that sums with it are exact


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an epoch: (parts,) int64 of their chunks and of their sizes, and ``rows_of(part)``, (size,)."""

    chunks: IntArray
    samples: IntArray
    rows_of: Callable[[int], IntArray]


def lay_rows(parts: Parts, chosen: IntArray) -> tuple[IntArray, IntArray]:
    """The rows of some parts laid end to end, and where each part's begin, (parts,) int64."""
    starts = np.cumsum(parts.samples[chosen]) - parts.samples[chosen]
    return np.concatenate([parts.rows_of(part) for part in chosen.tolist()]), starts


class Selection:
    """Selection of an epoch's samples, and how often each comes; chunks have ``chunk_samples`` rows, (chunks,) int64.

    Making one takes O(samples) time, more for a subset by count, and O(chunks) memory. ``counts``: (chunks,) int64, how
    many samples of each chunk are in the subset. An epoch has ``num_samples`` samples or draws.

    Raises:
        ConfigError: subset or weights do not fit the data set.
        PartitionError: the subset has no sample.
    """

    def __init__(self, chunk_samples: IntArray, subset: Subset | None = None, weights: Weights | None = None) -> None:
        self.subset = subset
        self.weights = weights
        self._starts: IntArray = np.zeros(len(chunk_samples) + 1, np.int64)
        np.cumsum(chunk_samples, out=self._starts[1:])
        total = int(self._starts[-1])
        self._bounds = None if subset is None else subset.bounds(total)
        if weights is not None:
            weights.check(total, len(chunk_samples))
        self.counts = chunk_samples if subset is None else self._sum_chosen(lambda low, high, held: held)
        self.num_samples = int(self.counts.sum())
        if not self.num_samples:
            raise PartitionError(f"{subset} has none of the data set's {total:,} samples; take a larger share")

    @property
    def is_weighted(self) -> bool:
        """True if samples are drawn with replacement, so that one may come several times an epoch."""
        return self.weights is not None

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that the order depends on, as a state holds them."""
        return {
            **({"subset": self.subset.to_dict()} if self.subset is not None else {}),
            **({"weights": self.weights.digest} if self.weights is not None else {}),
        }

    @property
    def members(self) -> list[int]:
        """Number of samples in the subset, and their lowest and highest random number."""
        return [int(self.counts.sum()), *(self._bounds or ())]

    def rows_of(self, chunk: int) -> IntArray:
        """The rows of a chunk whose samples are in the subset, in increasing order: (counts[chunk],) int64."""
        start, stop = int(self._starts[chunk]), int(self._starts[chunk + 1])
        if self.subset is None or self._bounds is None:
            return np.arange(stop - start, dtype=np.int64)
        return np.flatnonzero(self.subset.holds(start, stop, self._bounds))

    def id_at(self, place: int) -> int:
        """The id of the subset's sample at a place, of all its samples in the order of their ids."""
        chunk = int(np.searchsorted(self._places, place, side="right")) - 1
        return int(self._starts[chunk] + self.rows_of(chunk)[place - self._places[chunk]])

    def all_ids(self) -> IntArray:
        """(samples,) int64: the ids of the subset's samples, each once, in increasing order."""
        parts = [self._starts[chunk] + self.rows_of(chunk) for chunk in np.flatnonzero(self.counts).tolist()]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def place_of(self, sample_id: int) -> int | None:
        """The place of a sample id, as ``id_at`` counts them; None if the subset does not have it."""
        if not 0 <= sample_id < self._starts[-1]:
            return None
        chunk = int(np.searchsorted(self._starts, sample_id, side="right")) - 1
        rows, row = self.rows_of(chunk), sample_id - int(self._starts[chunk])
        place = int(np.searchsorted(rows, row))
        return int(self._places[chunk]) + place if place < len(rows) and rows[place] == row else None

    @cached_property
    def _places(self) -> IntArray:
        """(chunks + 1,) int64: how many of the subset's samples are before each chunk, and how many there are."""
        places = np.zeros(len(self.counts) + 1, np.int64)
        np.cumsum(self.counts, out=places[1:])
        return places

    def parts(self, seed: int, epoch: int) -> Parts:
        """The parts of an epoch, in the order of their chunks; without weights the same in all epochs."""
        if self.weights is None:
            chunks = np.flatnonzero(self.counts)
            return Parts(chunks, self.counts[chunks], lambda part: self.rows_of(int(chunks[part])))
        return self._drawn_parts(self.weights, seed, epoch)

    # -- draws ----------------------------------------------------------------------------------------------------

    @cached_property
    def _chunk_weights(self) -> IntArray:
        """(chunks,) int64: the weights of the chunk's samples together."""
        weights = self.weights
        assert weights is not None
        if weights.by_chunk:
            return self.counts * weights.values.astype(np.int64)
        return self._sum_chosen(lambda low, high, held: weights.values[low:high] * held)

    def _drawn_parts(self, weights: Weights, seed: int, epoch: int) -> Parts:
        """Systematic sampling (Madow 1949), of chunks and then of the rows of each: all counts within 1 of expectation.

        The draws of a chunk that has far more of them than samples are dealt to several parts in turn, so that its
        samples repeat far apart in the epoch. Up to a quarter more is one part: that costs no second read of the chunk.
        """
        draws = _systematic(self._chunk_weights, self.num_samples, stream_key(FOR_CHUNK_DRAWS, seed, epoch))
        held = np.maximum(self.counts, 1)
        counts = np.where(draws > 0, np.maximum(1, -((held - 4 * draws) // (4 * held))), 0)  # parts of each chunk
        chunks = np.repeat(np.arange(len(draws)), counts)
        turn = np.arange(len(chunks)) - np.repeat(np.cumsum(counts) - counts, counts)
        samples = (draws[chunks] - turn + counts[chunks] - 1) // counts[chunks]

        def rows_of(part: int) -> IntArray:
            chunk = int(chunks[part])
            drawn = self._draw_rows(weights, chunk, int(draws[chunk]), stream_key(FOR_ROW_DRAWS, seed, epoch, chunk))
            return drawn[int(turn[part]) :: int(counts[chunk])]

        return Parts(chunks, samples, rows_of)

    def _draw_rows(self, weights: Weights, chunk: int, draws: int, key: int) -> IntArray:
        """The rows of a chunk's draws, (draws,) int64; copies of a row follow one another.

        Rows are mixed first, so that what alternates in the data set is not drawn in step with the sampling interval.
        """
        rows = self.rows_of(chunk)
        rows = rows[permutation(len(rows), key)]
        values = np.ones(len(rows), np.int64) if weights.by_chunk else weights.values[self._starts[chunk] + rows]
        return np.repeat(rows, _systematic(values, draws, stream_key(key)))

    def _sum_chosen(self, values: Callable[[int, int, Any], Any]) -> IntArray:
        """(chunks,) int64: the sum over each chunk of what ``values(start, stop, held)`` says of each sample."""
        sums = np.zeros(len(self._starts) - 1, np.int64)
        for start, stop in blocks(int(self._starts[-1])):
            if self.subset is None or self._bounds is None:
                held: Any = np.ones(stop - start, np.bool_)
            else:
                held = self.subset.holds(start, stop, self._bounds)
            first = int(np.searchsorted(self._starts, start, side="right")) - 1
            last = int(np.searchsorted(self._starts, stop, side="left"))
            edges = np.maximum(self._starts[first:last], start) - start
            sums[first:last] += np.add.reduceat(values(start, stop, held), edges, dtype=np.int64)
        return sums


def _systematic(weights: IntArray, draws: int, key: int) -> IntArray:
    """Draw systematically: how often each weighted item comes, (items,) int64, with the sum ``draws``.

    Item i gets floor or ceil of draws * weights[i] / sum(weights), which is its mean over all keys; so does any run of
    consecutive items. Sums are of whole numbers, and all else is IEEE arithmetic by element: the same anywhere.
    """
    start = int(random_numbers(0, 1, key)[0]) % _U_STEPS / _U_STEPS
    ends = np.cumsum(weights, dtype=np.int64)
    reached = np.floor(ends / ends[-1] * draws + start).astype(np.int64)
    return np.diff(reached, prepend=0)
