"""Bucketing: samples of about the same cost come together, by arithmetic inside each lane.

Each lane's samples, in its own order, are cut into pools of equally many. A pool is sorted by cost and cut into runs,
and its runs come in a random order, which is the same in the pools of all lanes that lie side by side. So the positions
of a run hold samples that cost about the same, one quantile of every lane; and all of the plan's other rules, with what
they promise of reads, ranks and resumes, hold as before: in ``EpochPlan``'s terms a pool is a window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...errors import ConfigError, StateMismatchError
from ..permutation import FOR_RUNS, IntArray, permutation, stream_key
from ..plan import EpochPlan, Order
from ..window import LaneWindow
from .costs import DEFAULT_INDEX, SampleCosts

if TYPE_CHECKING:
    from ..selecting import Selection

_FEWEST_RUNS, _MOST_RUNS = 8, 64  # of a pool that is chosen
_MOST_POOL = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Bring samples of about the same length together, to save padding; ``bucket="tokens"`` is ``Bucket()``.

    ``run``: how many consecutive samples of the order are alike; best a global batch or a multiple of it. ``pool``: how
    many samples are sorted together; more sort finer, and take more open windows. Both are rounded up to multiples of
    the lanes; "auto" takes the global batch that the run starts with, and 8 to 64 runs. Both stay as they are from then
    on: other batch sizes and ranks change no order. ``index`` names the index of costs.

    Raises:
        ConfigError: a number is not what it must be.
    """

    index: str = DEFAULT_INDEX
    run: int | Literal["auto"] = "auto"
    pool: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        for name in ("run", "pool"):
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if value != "auto" and not (is_whole and 1 <= value <= _MOST_POOL):
                raise ConfigError(f"{name}={value!r} samples: must be a whole number of at least 1, or 'auto'")
        if self.run != "auto" and self.pool != "auto" and self.pool < self.run:
            raise ConfigError(f"pool={self.pool} is below run={self.run}: a pool is cut into runs")

    @staticmethod
    def read(given: str | Bucket) -> Bucket:
        """A name of an index as a bucket by it. Raises ConfigError for anything else but a Bucket."""
        if isinstance(given, Bucket):
            return given
        if not isinstance(given, str) or not given:
            raise ConfigError(f"bucket={given!r}: give the name of an index of costs, such as 'tokens', or a Bucket")
        return Bucket(index=given)


@dataclass(frozen=True, kw_only=True)
class BucketedOrder(Order):
    """An order whose samples are bucketed: ``run`` and ``pool`` are offsets of a lane, ``costs`` the index's digest."""

    run: int
    pool: int
    index: str
    costs: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.run <= self.pool <= _MOST_POOL:
            raise ConfigError(f"run={self.run}, pool={self.pool} samples of a lane: needs 1 <= run <= pool")

    @property
    def bucket(self) -> dict[str, Any]:
        """Fields of a state beside those of the plain order."""
        return {"index": self.index, "costs": self.costs, "run": self.run, "pool": self.pool}


def add_buckets(
    order: Order, bucket: Bucket, costs: SampleCosts, *, global_batch_size: int, window_samples: float
) -> BucketedOrder:
    """The order with buckets, "auto" chosen; ``window_samples`` are those of a usual window."""
    run, pool = size_in_lanes(bucket, order.lanes, global_batch_size=global_batch_size, window_samples=window_samples)
    return BucketedOrder(**asdict(order), run=run, pool=pool, index=bucket.index, costs=costs.digest)


def size_in_lanes(
    bucket: Bucket, lanes: int, *, global_batch_size: int, window_samples: float = 0.0
) -> tuple[int, int]:
    """The run and the pool in offsets of one lane."""
    run = -(-(global_batch_size if bucket.run == "auto" else bucket.run) // lanes)
    if bucket.pool == "auto":
        runs = min(_MOST_RUNS, max(_FEWEST_RUNS, int(window_samples / run)))
        return run, runs * run
    return run, -(-max(bucket.pool, run * lanes) // (run * lanes)) * run


def count_open_chunks(order: Order, chunk_samples: float) -> int:
    """Most chunks, of ``chunk_samples`` samples each, that a lane keeps open: a window's, or those of a pool."""
    if not isinstance(order, BucketedOrder):
        return order.window
    return order.window * (1 + math.ceil(order.pool / (order.window * chunk_samples)))


def plan_epoch(
    chunk_samples: IntArray,
    order: Order,
    epoch: int,
    selection: Selection | None = None,
    costs: SampleCosts | None = None,
) -> EpochPlan:
    """The plan of an epoch of any order; that of a bucketed one needs the costs of its index."""
    if not isinstance(order, BucketedOrder):
        return EpochPlan(chunk_samples, order, epoch, selection)
    if costs is None or costs.digest != order.costs:
        raise ConfigError(f"the order is bucketed by costs {order.index!r} that are not given; this is a bug")
    return BucketedPlan(chunk_samples, order, epoch, selection, costs=costs)


class BucketedPlan(EpochPlan):
    """A plan whose windows are pools. It keeps the windows of the plain order that each lane used last.

    Used by one thread.
    """

    order: BucketedOrder

    def __init__(
        self,
        chunk_samples: IntArray,
        order: BucketedOrder,
        epoch: int,
        selection: Selection | None = None,
        *,
        costs: SampleCosts,
    ) -> None:
        super().__init__(chunk_samples, order, epoch, selection)
        first_ids: IntArray = np.cumsum(chunk_samples) - chunk_samples
        kept: Mapping[int, list[LaneWindow]] = {}
        for name, value in (("_costs", costs), ("_first_ids", first_ids), ("_kept", kept)):
            object.__setattr__(self, name, value)

    _costs: SampleCosts
    _first_ids: IntArray
    _kept: dict[int, list[LaneWindow]]

    @property
    def repeats_chunks(self) -> bool:
        return True

    def window_at(self, lane: int, offset: int) -> int:
        return offset // self.order.pool

    def open_window(self, lane: int, index: int) -> LaneWindow:
        """Compute a pool: O(n log n) for its samples, and the plain windows that it lies in."""
        size = int(self.lane_starts[lane + 1] - self.lane_starts[lane])
        start = index * self.order.pool
        stop = min(size, start + self.order.pool)
        chunks, rows = self._locate(lane, start, stop)
        costs = self._costs.of(self._first_ids[chunks] + rows)
        order = self._arrange(costs, index)
        chunks, rows = chunks[order], rows[order]
        return LaneWindow(
            lane=lane,
            index=index,
            start=start,
            stop=stop,
            chunks=chunks,
            first_rows=rows,
            bounds=np.arange(stop - start + 1, dtype=np.int64),
            key=None,
        )

    def _locate(self, lane: int, start: int, stop: int) -> tuple[IntArray, IntArray]:
        """The chunks and rows of a lane's offsets in its plain order, (stop - start,) each."""
        kept = [window for window in self._kept.get(lane, ()) if window.stop > start]
        if kept and kept[0].start > start:
            kept = []
        while not kept or kept[-1].stop < stop:
            index = kept[-1].index + 1 if kept else super().window_at(lane, start)
            kept.append(super().open_window(lane, index))
        self._kept[lane] = [window for window in kept if window.stop > stop]
        chunks, rows = [], []
        for window in kept:
            offsets = np.arange(max(start, window.start), min(stop, window.stop), dtype=np.int64)
            pieces, found = window.locate(offsets)
            chunks.append(window.chunks[pieces])
            rows.append(found)
        return np.concatenate(chunks), np.concatenate(rows)

    def _arrange(self, costs: IntArray, index: int) -> IntArray:
        """The order of a pool's samples, (n,): sorted by cost, and cut into runs that come in the pool's own order.

        All lanes have as many runs in their pools ``index``, also in the last, of which some have one sample more.
        """
        by_cost = np.argsort(costs, kind="stable")
        common = min(self.order.pool, self.num_samples // self.order.lanes - index * self.order.pool)
        runs = max(1, -(-common // self.order.run))
        if runs == 1 or not self.order.shuffle:
            return by_cost
        edges = len(costs) * np.arange(runs + 1) // runs  # of full pools, multiples of the run
        turns = permutation(runs, stream_key(FOR_RUNS, self.order.seed, self.epoch, index))
        return np.concatenate([by_cost[edges[turn] : edges[turn + 1]] for turn in turns.tolist()])


def check_bucket(
    bucket: Bucket | None, order: Order, loaded: Mapping[str, Any], lanes: int, where: str = "the state"
) -> None:
    """Check that a state's buckets, of so many lanes, are those of an order here, where ``bucket`` gives any.

    Raises:
        StateMismatchError: they differ.
    """
    here = order.bucket if isinstance(order, BucketedOrder) else {}
    if bool(here) != bool(loaded):
        raise StateMismatchError(
            f"{where} belongs to another run's order and cannot be resumed here; bucket=: "
            f"{loaded or 'none'} in the state, {here or 'none'} here"
        )
    if not here or bucket is None:
        return
    # Both were given in samples; the lanes, and what was not given, are the state's.
    sizes = size_in_lanes(bucket, lanes, global_batch_size=loaded["run"] * lanes)
    given = dict(zip(("run", "pool"), sizes, strict=True))
    here |= {name: given[name] if getattr(bucket, name) != "auto" else loaded[name] for name in given}
    if loaded != here:
        raise StateMismatchError(
            f"{where} belongs to another run's order and cannot be resumed here; bucket=: {loaded} in the "
            f"state, {here} here (run and pool are samples of a lane, costs is the index's checksum)"
        )
