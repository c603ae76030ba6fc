"""Forecast a run's batches, skew, reads and memory for any world size, from the plan alone, without data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError
from .distinct import distinct
from .plan import EpochPlan, Order, batch_bounds, lane_offsets, rank_segments, require_steps, share_bounds

if TYPE_CHECKING:
    from .permutation import IntArray


FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
_MOST_EDGES = 1 << 20  # cuts of lanes and ranks that are examined at most: it bounds memory


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Forecast of a run with this plan. Bytes are estimates from the manifest; all else is exact unless noted.

    ``skew`` is the largest difference between two ranks' numbers of samples over the epoch; ``batch_skew`` that of one
    full batch. ``read_amplification`` is the expected number of times that all ranks together read a chunk in an epoch;
    it is 1.00 if every lane belongs to one rank. ``cut_chunks`` lie on the cut between two lanes and are read once for
    each of them in any case. ``open_windows`` and the bytes are those of the rank that has the most: ``window_bytes``
    is what its open windows take, ``first_batch_bytes`` the most that it must read before its first batch. ``mixing``
    says how well batches are mixed; None without shuffle, or where no batch is full.
    """

    samples: int
    chunks: int
    shards: int
    bytes: int
    world_size: int
    global_batch_size: int
    lanes: int
    window: int
    piece: int
    batches_per_rank: int
    samples_left_out: int
    batch_skew: int
    skew: int
    read_amplification: float
    cut_chunks: int
    open_windows: int
    window_bytes: int
    first_batch_bytes: int
    mixing: Mixing | None

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, as JSON has them."""
        return asdict(self)


def forecast(
    chunk_samples: IntArray,
    *,
    chunk_bytes: IntArray,
    chunk_memory: IntArray,
    shards: int,
    order: Order,
    world_size: int,
    global_batch_size: int,
    last_batch: str = "drop",
) -> Forecast:
    """Forecast a run over chunks of the given samples, bytes and memory once opened: (chunks,) int64 each.

    Raises:
        ConfigError, PartitionError: there can be no such run.
    """
    if world_size < 1 or global_batch_size < 1:
        raise ConfigError(f"world_size={world_size}, global_batch_size={global_batch_size}: must be at least 1")
    plan = EpochPlan(chunk_samples, order, epoch=0)
    steps = require_steps(plan.num_samples, global_batch_size, last_batch, world_size=world_size)
    owned = _lane_shares(plan, world_size, global_batch_size, steps)
    mean_samples = plan.num_samples / len(chunk_samples)
    windows = np.bincount(owned.ranks, minlength=world_size)
    full = np.diff(share_bounds(np.array([global_batch_size]), world_size)[0])
    # A rank that takes a part f of a lane's samples enters a window of n of them with probability 1 - (1 - f)^n, and
    # then reads the window's chunks.
    touched = 1.0 - (1.0 - owned.parts) ** (order.window * mean_samples)
    reads = float(touched.sum() / owned.lanes)
    open_chunks = min(int(windows.max() * order.window), len(chunk_samples))
    cuts = plan.lane_starts[1:-1]
    cut_chunks = int((plan.stream_starts[np.searchsorted(plan.stream_starts, cuts)] != cuts).sum())
    if len(plan.pieces.chunks) > len(chunk_samples):
        # Pieces of a chunk lie in any lanes: a rank reads each chunk of which it has one, and keeps it.
        shares = _chunk_shares(chunk_samples, order.piece, owned)
        reads, open_chunks, cut_chunks = float(shares.sum()), math.ceil(shares.max() * len(chunk_samples)), 0
    return Forecast(
        samples=plan.num_samples,
        chunks=len(chunk_samples),
        shards=shards,
        bytes=int(chunk_bytes.sum()),
        world_size=world_size,
        global_batch_size=global_batch_size,
        lanes=order.lanes,
        window=order.window,
        piece=order.piece,
        batches_per_rank=steps,
        samples_left_out=max(0, plan.num_samples - steps * global_batch_size),
        batch_skew=int(full.max() - full.min()),
        skew=_skew(plan.num_samples, world_size, global_batch_size, steps),
        read_amplification=reads,
        cut_chunks=cut_chunks,
        open_windows=int(windows.max()),
        window_bytes=int(open_chunks * chunk_memory.mean()),
        first_batch_bytes=int(min(full.max(), open_chunks) * chunk_bytes.mean()),
        mixing=measure_mixing(plan, global_batch_size) if order.shuffle else None,
    )


def _chunk_shares(chunk_samples: IntArray, piece: int, owned: _LaneShares) -> FloatArray:
    """The share of all chunks that each rank reads where pieces of them are shuffled: (ranks,)."""
    pieces = -(-chunk_samples // piece)
    rows = chunk_samples.sum() / pieces.sum()
    # The probability that a rank has a row of a piece, which may lie in any lane; then, of any piece of a chunk.
    of_piece = np.bincount(owned.ranks, 1.0 - (1.0 - owned.parts) ** rows) / owned.lanes
    counts, chunks = np.unique(pieces, return_counts=True)
    alike, which = np.unique(of_piece.round(12), return_inverse=True)
    shares = np.array([((1.0 - (1.0 - each) ** counts) * chunks).sum() / chunks.sum() for each in alike])
    return shares[which]


def _skew(num_samples: int, world_size: int, global_batch_size: int, steps: int) -> int:
    last = min(num_samples, steps * global_batch_size) - (steps - 1) * global_batch_size
    full, rest = (np.diff(share_bounds(np.array([size]), world_size)[0]) for size in (global_batch_size, last))
    totals = full * (steps - 1) + rest
    return int(totals.max() - totals.min())


@dataclass(frozen=True, slots=True)
class _LaneShares:
    """Shares of ranks in lanes: (pairs,) each; the parts of one of the ``lanes`` with samples sum to 1."""

    lanes: int
    ranks: IntArray
    parts: FloatArray


def _lane_shares(plan: EpochPlan, world_size: int, global_batch_size: int, steps: int) -> _LaneShares:
    """Computed from the first steps: until the pattern of shares repeats, or as many as can be examined."""
    lanes = plan.order.lanes
    period = min(steps, lanes // math.gcd(lanes, global_batch_size), max(1, _MOST_EDGES // (lanes + world_size)))
    bounds = batch_bounds(0, period, global_batch_size, plan.num_samples)
    lane_ends = np.cumsum(np.diff(lane_offsets(bounds, plan.turns), axis=0), axis=1)  # (steps, lanes)
    rank_cuts = share_bounds(np.diff(bounds), world_size)  # (steps, world_size + 1)
    # All steps in a row: between two neighbouring edges lie samples of one lane and one rank.
    base = bounds[:-1, None]
    lane_ends, rank_cuts = (lane_ends + base).ravel(), (rank_cuts[:, 1:] + base).ravel()
    edges = distinct(np.concatenate((bounds[:1], lane_ends, rank_cuts)))
    lane = np.searchsorted(lane_ends, edges[:-1], side="right") % lanes
    rank = np.searchsorted(rank_cuts, edges[:-1], side="right") % world_size
    pairs, which = np.unique(lane * world_size + rank, return_inverse=True)
    amounts = np.bincount(which, weights=np.diff(edges))
    by_lane = np.bincount(pairs // world_size, weights=amounts, minlength=lanes)
    return _LaneShares(
        lanes=np.count_nonzero(by_lane), ranks=pairs % world_size, parts=amounts / by_lane[pairs // world_size]
    )


_CLASSES = 10
_FAIR, _POOR, _MOST_DRIFT = 1.5, 4.0, 0.2  # spreads of classes, and a correlation, from which on words change
_MOST_WINDOWS = 1 << 13  # windows opened at most, which takes a second or two
_MOST_BATCHES = 64
_EXPECTED_PAIRS = 256  # neighbours are counted as far apart as makes a uniform shuffle have so many: noise of 6%


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Measures of mixing in some ``batches`` of an epoch, from their sample ids alone.

    ``neighbours``: how often two samples at most ``distance`` ids apart meet in a batch, over the same of a uniform
    shuffle. ``classes``: if the data set were sorted by ten classes, the spread of their counts in a batch, over that
    of a uniform shuffle. ``drift``: the correlation of position and id; 1 is manifest order, 0 no trace of it.
    """

    batches: int
    distance: int
    neighbours: float
    classes: float
    drift: float

    @property
    def verdict(self) -> str:
        """In a word: "uniform", "fair", or "poor", where a data set that is sorted would make lopsided batches."""
        if abs(self.drift) > _MOST_DRIFT or self.classes > _POOR:
            return "poor"
        return "fair" if self.classes > _FAIR else "uniform"


def measure_mixing(plan: EpochPlan, global_batch_size: int) -> Mixing | None:
    """Measure some full global batches that are spread evenly over an epoch; None if no batch is full."""
    steps = plan.num_samples // global_batch_size
    if not steps or global_batch_size < 2:
        return None
    lanes = min(plan.order.lanes, global_batch_size)
    count = int(min(steps, _MOST_BATCHES, max(2, _MOST_WINDOWS // lanes)))
    chosen = np.linspace(0, steps - 1, count).astype(np.int64)
    first_ids = np.cumsum(plan.chunk_samples) - plan.chunk_samples
    ids = np.stack([batch_ids(plan, first_ids, int(step) * global_batch_size, global_batch_size) for step in chosen])
    pairs_in_reach = count * global_batch_size * (global_batch_size - 1) / plan.num_samples  # a unit of distance
    distance = int(min(max(1, -(-_EXPECTED_PAIRS // max(pairs_in_reach, 1e-9))), max(1, plan.num_samples // 8)))
    return Mixing(
        batches=count,
        distance=distance,
        neighbours=_neighbours(ids, plan.num_samples, distance),
        classes=_classes(ids, plan.num_samples),
        drift=_drift(ids, chosen),
    )


def batch_ids(plan: EpochPlan, first_ids: IntArray, first: int, count: int) -> IntArray:
    """The sample ids at ``count`` positions from ``first`` on, sorted by lane and offset: (count,) int64.

    ``first_ids``: the id of each chunk's first sample, (chunks,) int64.
    """
    segments = rank_segments(batch_bounds(first, 1, count, plan.num_samples), plan.turns, 0, 1)
    found: list[IntArray] = []
    for lane, start, stop in zip(segments.lane.tolist(), segments.start.tolist(), segments.stop.tolist(), strict=True):
        while start < stop:
            window = plan.open_window(lane, plan.window_at(lane, start))
            pieces, rows = window.locate(np.arange(start, min(stop, window.stop), dtype=np.int64))
            found.append(first_ids[window.chunks[pieces]] + rows)
            start = window.stop
    return np.concatenate(found)


def _neighbours(ids: IntArray, num_samples: int, distance: int) -> float:
    batches, size = ids.shape
    ordered = np.sort(ids, axis=1)
    later = [np.searchsorted(row, row + distance, side="right") - np.arange(1, size + 1) for row in ordered]
    met = sum(int(count.sum()) for count in later)
    # Of all pairs of samples, those at most d apart are the fraction that this many of N * (N - 1) / 2 are.
    close = distance * num_samples - distance * (distance + 1) / 2
    expected = batches * size * (size - 1) / 2 * close / (num_samples * (num_samples - 1) / 2)
    return met / expected


def _classes(ids: IntArray, num_samples: int) -> float:
    size = ids.shape[1]
    classes = ids * _CLASSES // num_samples
    counts = np.stack([np.bincount(row, minlength=_CLASSES) for row in classes])
    share = 1 / _CLASSES
    # Drawn without replacement: the variance of a hypergeometric count.
    variance = size * share * (1 - share) * (num_samples - size) / max(1, num_samples - 1)
    if not variance:
        return 1.0
    return float(np.sqrt(((counts - size * share) ** 2).mean() / variance))


def _drift(ids: IntArray, steps: IntArray) -> float:
    if len(steps) < 3:
        return 0.0
    positions = np.repeat(steps, ids.shape[1]).astype(np.float64)
    return float(np.corrcoef(positions, ids.ravel())[0, 1])
