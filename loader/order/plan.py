"""The plan: which sample comes when, and on which rank. Order is arithmetic; nothing here does I/O or keeps state.

From (manifest, seed, epoch, lanes, window, piece) to a rank's batch in six steps, each a function below. Where a
selection of samples is made, what it has of a chunk takes the place of the chunk.

1. ``piece_order``     the epoch's permutation of all chunks, or of their pieces; laid end to end they are its stream
2. ``lane_sizes``      the stream is cut into L contiguous lanes, equal to within one sample
3. ``EpochPlan.open_window``  inside a lane, samples are permuted in windows of a few consecutive pieces
4. ``lane_offsets``    position p is sample p // L of lane bit_reverse(p mod L)
5. ``batch_bounds``    step s is the positions [s * G, (s + 1) * G): the same set of samples whatever the world size
6. ``rank_segments``   a global batch, sorted by (lane, offset), is cut into one contiguous share per rank

Ranks appear only in step 6, so everything before it, and with it a checkpointed position, holds for any number of them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..errors import ConfigError, PartitionError
from .cached import cached_property
from .permutation import FOR_CHUNKS, FOR_WINDOWS, IntArray, permutation, stream_key
from .selecting import Parts, Selection, lay_rows
from .window import LaneWindow, Pieces, cut_into_pieces

if TYPE_CHECKING:
    from .costs.budget import StepBudget
    from .costs.costs import SampleCosts


def share_bounds(sizes: IntArray, world_size: int, weights: Sequence[float] | None = None) -> IntArray:
    """Cut global batches of the given sizes (steps,) into shares: (steps, world_size + 1) int64, from 0 to each size.

    Shares are equal to within one sample, or proportional to ``weights`` (one positive number per rank), also to within
    one sample.
    """
    if weights is None:
        ranks = np.arange(world_size + 1, dtype=np.int64)
        cuts: IntArray = sizes[:, None] // world_size * ranks + np.minimum(ranks, sizes[:, None] % world_size)
        return cuts
    check_weights(weights, world_size)
    cut = np.concatenate(([0.0], np.cumsum(np.asarray(weights, np.float64))))
    cuts = np.rint(sizes[:, None] * (cut / cut[-1])).astype(np.int64)
    return cuts


def check_weights(weights: Sequence[float], world_size: int) -> None:
    """Raise PartitionError unless there is one positive, finite weight per rank."""
    try:
        fit = len(weights) == world_size and all(0 < weight < float("inf") for weight in weights)
    except (TypeError, ValueError):  # what cannot be compared with a number
        fit = False
    if not fit or isinstance(weights, str | bytes):
        raise PartitionError(f"shares={weights!r}: needs {world_size} positive numbers, one a rank")


@dataclass(frozen=True, slots=True)
class Share:
    """Share of this rank in every global batch. ``weights``: one positive number per rank; None for equal parts.

    With ``pad``, a rank gets no more samples of the last, smaller batch than of a full one, and without any it borrows
    one, to have a row to repeat. With or without ``pad``, a rank without a sample of any step of a span borrows one, to
    know which fields a batch has.
    ``costs``, one a source: parts cost the same, instead of having as many samples. ``budget``: global batches are as
    large as it lets them be, and ``global_batch_size`` about how large that is.
    """

    rank: int
    world_size: int
    global_batch_size: int
    weights: Sequence[float] | None = None
    pad: bool = False
    costs: Sequence[SampleCosts] | None = None
    budget: StepBudget | None = None

    def __post_init__(self) -> None:
        if self.weights is not None:
            check_weights(self.weights, self.world_size)

    def cuts(self, sizes: IntArray) -> IntArray:
        """``share_bounds`` of global batches of the given sizes (steps,), none above a full one."""
        cuts = share_bounds(sizes, self.world_size, self.weights)
        if not self.pad or self.weights is None:  # equal parts do not grow where the batch is smaller
            return cuts
        full = share_bounds(np.array([self.global_batch_size]), self.world_size, self.weights)
        # What a part has too many goes to the ranks after it, and what is over at the end to those before it.
        less = np.minimum.accumulate(cuts - full, axis=1)
        less[:, -1] = (cuts - full)[:, -1]
        capped: IntArray = full + np.maximum.accumulate(less[:, ::-1], axis=1)[:, ::-1]
        return capped

    @property
    def batch_size(self) -> int:
        """The number of samples of a full global batch that are this rank's."""
        cuts = share_bounds(np.array([self.global_batch_size]), self.world_size, self.weights)[0]
        return int(cuts[self.rank + 1] - cuts[self.rank])


_MASK = (1 << 64) - 1
# Far beyond any use: more lanes would be arrays that no machine holds, larger numbers would not fit into int64.
_MOST = {"lanes": 1 << 20, "window": 1 << 40, "piece": 1 << 40}


@dataclass(frozen=True, kw_only=True)
class Order:
    """Settings that decide an epoch's order besides the data set: in every state, and fixed from the start of a run.

    ``lanes`` is a power of two. ``piece`` is the number of rows that the permutation of an epoch moves together, 0 for
    whole chunks; ``window`` is the number of consecutive pieces of a lane whose samples are mixed. Without ``shuffle``
    chunks stay in manifest order and samples in their chunk's.

    A loader's "auto" takes as ``lanes`` 1 for one rank without shuffle, otherwise the power of two at or above 4 times
    the world size, at least 16; as ``window`` 1 to 8 chunks, so that all lanes together mix about 64 and one lane opens
    at most about 64 MiB, or 4,096 rows of pieces; as ``piece`` single rows for data sets of one chunk, or with fewer
    than 4 chunks a lane and at most 64 MiB (a few rows above a million rows), otherwise 0.
    """

    seed: int = 0
    shuffle: bool = True
    lanes: int = 16
    window: int = 4
    piece: int = 0

    def __post_init__(self) -> None:
        for name in ("seed", "lanes", "window", "piece"):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, int(operator.index(value)))  # numpy's integers are not JSON-able
            except TypeError as exc:
                raise ConfigError(f"{name}={value!r} is not a whole number") from exc
        object.__setattr__(self, "shuffle", bool(self.shuffle))
        if self.lanes < 1 or self.lanes & (self.lanes - 1):
            raise ConfigError(f"lanes={self.lanes} is not a power of two; use {next_power_of_two(max(1, self.lanes))}")
        if self.window < 1:
            raise ConfigError(f"window={self.window} chunks: must be at least 1")
        if self.piece < 0:
            raise ConfigError(f"piece={self.piece} rows: must be at least 1, or 0 for whole chunks")
        if self.piece and not self.shuffle:
            raise ConfigError(f"piece={self.piece} without shuffle: nothing is permuted; leave it out")
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at most {most}")
        if not 0 <= self.seed <= _MASK:
            raise ConfigError(f"seed={self.seed}: must be from 0 to 2**64 - 1")


def next_power_of_two(value: int) -> int:
    """The smallest power of two at or above ``value`` (at least 1)."""
    return 1 << max(0, value - 1).bit_length()


# -- chunks and lanes ------------------------------------------------------------------------------------------------


def piece_order(num_pieces: int, order: Order, epoch: int) -> IntArray:
    """The pieces of an epoch in the order in which they are laid end to end: (num_pieces,) int64."""
    if not order.shuffle:
        return np.arange(num_pieces, dtype=np.int64)
    return permutation(num_pieces, stream_key(FOR_CHUNKS, order.seed, epoch))


def bit_reverse(values: IntArray, bits: int) -> IntArray:
    """Each value's lowest ``bits`` bits in reverse; its own inverse.

    Any run of 2**k consecutive numbers, reversed, has one in each 2**k-th of the range (van der Corput's sequence).
    Batches are made of consecutive positions, so they fall evenly on the lanes of every rank.
    """
    reversed_ = np.zeros_like(values)
    for bit in range(bits):
        reversed_ |= ((values >> bit) & 1) << (bits - 1 - bit)
    return reversed_


def lane_turns(lanes: int) -> IntArray:
    """(lanes,) int64: lane l gets the positions p with p mod lanes == turns[l]."""
    return bit_reverse(np.arange(lanes, dtype=np.int64), lanes.bit_length() - 1)


def lane_offsets(positions: IntArray, turns: IntArray) -> IntArray:
    """Samples that each lane has contributed before a position: (..., lanes) int64 for positions (...)."""
    lanes = len(turns)
    offsets: IntArray = (positions[..., None] - turns + (lanes - 1)) // lanes
    return offsets


def lane_sizes(num_samples: int, lanes: int) -> IntArray:
    """(lanes,) int64: num_samples // lanes each, and one more for the num_samples mod lanes whose turn comes first."""
    return lane_offsets(np.array(num_samples, np.int64), lane_turns(lanes))


@dataclass(frozen=True)
class EpochPlan:
    """The order of one epoch over chunks of the given sizes: ``chunk_samples`` is (chunks,) int64, each at least 1.

    ``selection``, made for the same chunks, says which samples the epoch has; None: each once.
    """

    chunk_samples: IntArray
    order: Order
    epoch: int
    selection: Selection | None = None

    @cached_property
    def num_samples(self) -> int:
        return int(self.stream_starts[-1])

    @property
    def repeats_chunks(self) -> bool:
        """True if several pieces may be of one chunk."""
        return self.order.piece > 0 or (self.selection is not None and self.selection.is_weighted)

    @cached_property
    def parts(self) -> Parts | None:
        """Parts of the chunks that are selected in this epoch; None: all of each."""
        return None if self.selection is None else self.selection.parts(self.order.seed, self.epoch)

    @cached_property
    def pieces(self) -> Pieces:
        """The chunks (or parts), or the ranges of their rows that the permutation moves, in the epoch's order."""
        samples = self.chunk_samples if self.parts is None else self.parts.samples
        if not self.order.piece:
            chunks = piece_order(len(samples), self.order, self.epoch)
            return Pieces(chunks, np.broadcast_to(np.int64(0), chunks.shape), samples[chunks])
        pieces = cut_into_pieces(samples, self.order.piece)
        return pieces.take(piece_order(len(pieces.chunks), self.order, self.epoch))

    @cached_property
    def stream_starts(self) -> IntArray:
        """(pieces + 1,) int64: where in the epoch's stream each of ``pieces`` starts, and the stream's end."""
        starts = np.zeros(len(self.pieces.samples) + 1, np.int64)
        np.cumsum(self.pieces.samples, out=starts[1:])
        return starts

    @cached_property
    def turns(self) -> IntArray:
        return lane_turns(self.order.lanes)

    @cached_property
    def lane_starts(self) -> IntArray:
        """(lanes + 1,) int64: where in the epoch's stream each lane starts, and the stream's end."""
        starts = np.zeros(self.order.lanes + 1, np.int64)
        np.cumsum(lane_sizes(self.num_samples, self.order.lanes), out=starts[1:])
        return starts

    @cached_property
    def _lane_pieces(self) -> tuple[list[int], list[int]]:
        """The pieces, as ordinals of the epoch's order, that each lane has samples of: firsts, and ends (exclusive)."""
        firsts = self.stream_starts.searchsorted(self.lane_starts[:-1], side="right") - 1
        return firsts.tolist(), self.stream_starts.searchsorted(self.lane_starts[1:], side="left").tolist()

    def window_at(self, lane: int, offset: int) -> int:
        """The index of the window that holds an offset of a lane."""
        piece = int(self.stream_starts.searchsorted(self.lane_starts[lane] + offset, side="right")) - 1
        return (piece - self._lane_pieces[0][lane]) // self.order.window

    def open_window(self, lane: int, index: int) -> LaneWindow:
        """Compute a window: its pieces; the order of its samples, which takes a sort, when it is first asked for."""
        firsts, stops = self._lane_pieces
        low = firsts[lane] + index * self.order.window
        high = min(stops[lane], low + self.order.window)
        begin, end = self.lane_starts[lane : lane + 2]
        edges = np.minimum(np.maximum(self.stream_starts[low : high + 1], begin), end)
        is_mixed = self.order.shuffle and self.order.piece != 1  # single rows are mixed already
        chunks = self.pieces.chunks[low:high]
        first_rows = self.pieces.first_rows[low:high] + edges[:-1] - self.stream_starts[low:high]
        selected = None
        if self.parts is not None:
            selected, starts = self._all_rows if self.order.piece else lay_rows(self.parts, chunks)
            first_rows += starts[chunks] if self.order.piece else starts
            chunks = self.parts.chunks[chunks]
        return LaneWindow(
            lane=lane,
            index=index,
            start=int(edges[0] - begin),
            stop=int(edges[-1] - begin),
            chunks=chunks,
            first_rows=first_rows,
            bounds=edges - edges[0],
            key=stream_key(FOR_WINDOWS, self.order.seed, self.epoch, lane, index) if is_mixed else None,
            selected=selected,
        )

    @cached_property
    def _all_rows(self) -> tuple[IntArray, IntArray]:
        """``lay_rows`` of all parts: pieces are for data sets that a rank holds whole."""
        assert self.parts is not None
        return lay_rows(self.parts, np.arange(len(self.parts.chunks)))


# -- batches and ranks -----------------------------------------------------------------------------------------------


def count_steps(num_samples: int, consumed: int, global_batch_size: int, last_batch: str) -> int:
    """Count the global batches of an epoch that are left after ``consumed`` positions."""
    left = num_samples - consumed
    return left // global_batch_size if last_batch == "drop" else -(-left // global_batch_size)


def require_steps(num_samples: int, global_batch_size: int, last_batch: str, *, world_size: int) -> int:
    """Count the global batches of a whole epoch.

    Raises:
        PartitionError: none, because the only one is dropped; says what to use instead.
    """
    steps = count_steps(num_samples, 0, global_batch_size, last_batch)
    if not steps:
        raise PartitionError(
            f"a global batch of {global_batch_size} is above the data set's {num_samples} samples "
            f"(world_size={world_size}), and last_batch='drop' leaves nothing; use a smaller batch, or "
            "last_batch='pad' or 'partial'"
        )
    return steps


def batch_bounds(first: int, steps: int, global_batch_size: int, num_samples: int) -> IntArray:
    """(steps + 1,) int64: the positions at which ``steps`` global batches from position ``first`` on begin and end."""
    return np.minimum(first + np.arange(steps + 1, dtype=np.int64) * global_batch_size, np.int64(num_samples))


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments that one rank takes in some steps: offsets ``start`` to ``stop`` of ``lane`` go to rows from ``slot``.

    All arrays are (segments,) int64, sorted by (step, lane); ``step`` counts from 0, ``slot`` within the rank's batch.
    """

    step: IntArray
    lane: IntArray
    start: IntArray
    stop: IntArray
    slot: IntArray

    def join(self, others: Segments, step: int) -> Segments:
        """These segments followed by ``others``, which are of one step and become step ``step``."""
        return Segments(
            step=np.append(self.step, np.full(len(others.step), step, np.int64)),
            lane=np.append(self.lane, others.lane),
            start=np.append(self.start, others.start),
            stop=np.append(self.stop, others.stop),
            slot=np.append(self.slot, others.slot),
        )

    def of_steps(self, start: int, stop: int) -> Segments:
        """Those of some steps, of which the first becomes step 0."""
        cut = slice(*np.searchsorted(self.step, [start, stop]).tolist())
        return Segments(self.step[cut] - start, self.lane[cut], self.start[cut], self.stop[cut], self.slot[cut])


def rank_segments(
    bounds: IntArray,
    turns: IntArray,
    rank: int,
    world_size: int,
    weights: Sequence[float] | None = None,
) -> Segments:
    """One rank's share of consecutive global batches whose positions begin and end at ``bounds`` (steps + 1,)."""
    return column_segments(lane_offsets(bounds, turns), rank, world_size, weights)


def column_segments(
    offsets: IntArray,
    rank: int,
    world_size: int,
    weights: Sequence[float] | None = None,
    cuts: IntArray | None = None,
) -> Segments:
    """One rank's share of global batches that take from each column its next samples, cut in the order of the columns.

    ``offsets``: (steps + 1, columns) int64, how many samples each column has given before each step. Where one data set
    is read, columns are its lanes. The segments' ``lane`` is the column. ``cuts`` are those of ``share_bounds`` if not
    given.
    """
    counts = np.diff(offsets, axis=0)  # (steps, columns): samples that each column contributes to each step
    ends = np.cumsum(counts, axis=1)
    before = ends - counts  # ... and those of the columns before it
    if cuts is None:
        cuts = share_bounds(ends[:, -1], world_size, weights)
    low, high = cuts[:, rank, None], cuts[:, rank + 1, None]
    first = np.clip(low - before, 0, counts)
    last = np.clip(high - before, 0, counts)
    step, column = np.nonzero(last > first)
    start = offsets[step, column]
    return Segments(
        step=step,
        lane=column,
        start=start + first[step, column],
        stop=start + last[step, column],
        slot=(before + first - low)[step, column],
    )


Choice = int | Literal["auto"]

_MANY_CHUNKS_A_LANE = 4  # from here on a permutation of chunks mixes well by itself
_HELD_BYTES = 64 << 20  # a data set that any rank may hold whole
_MOST_PIECES = 1 << 20  # bounds the memory of an order: 8 bytes a piece in each of three arrays
_WINDOW_ROWS = 4096
_MIXED_CHUNKS, _LANE_BYTES = 64, 64 << 20  # of the windows of whole chunks


def choose_order(
    *,
    seed: int,
    shuffle: bool,
    lanes: Choice,
    window: Choice,
    piece: Choice,
    world_size: int,
    chunk_samples: IntArray,
    chunk_memory: IntArray,
    held_bytes: int = 0,
) -> Order:
    """The order with all that is "auto" chosen, for chunks of these samples and bytes once opened: (chunks,) each.

    ``held_bytes``: what other data sets take that are read beside this one, and would be held whole if this were.

    Raises:
        ConfigError: no order has such a seed, number of lanes, window or piece.
    """
    if lanes == "auto":
        lanes = auto_lanes(shuffle=shuffle, world_size=world_size)
    order = Order(seed=seed, shuffle=shuffle, lanes=lanes)
    if piece == "auto":
        piece = auto_piece(
            shuffle=order.shuffle,
            lanes=order.lanes,
            num_chunks=len(chunk_samples),
            num_samples=int(chunk_samples.sum()),
            memory_bytes=int(chunk_memory.sum()) + held_bytes,
        )
    order = replace(order, piece=piece)
    if window == "auto":
        window = auto_window(lanes=order.lanes, mean_chunk_bytes=float(chunk_memory.mean()), piece=order.piece)
    return replace(order, window=window)


def auto_lanes(*, shuffle: bool, world_size: int) -> int:
    """Lanes for a new run: 1 for one rank without shuffle, otherwise enough for four times the current ranks."""
    return 1 if not shuffle and world_size == 1 else max(16, next_power_of_two(4 * world_size))


def auto_piece(*, shuffle: bool, lanes: int, num_chunks: int, num_samples: int, memory_bytes: int) -> int:
    """The piece for a new run, 0 for whole chunks: ranges of rows where chunks are few and a rank may hold them all.

    ``memory_bytes`` is what the data set takes once opened.
    """
    is_held = num_chunks == 1 or memory_bytes <= _HELD_BYTES
    if not shuffle or num_chunks >= _MANY_CHUNKS_A_LANE * lanes or not is_held:
        return 0
    return -(-num_samples // _MOST_PIECES)


def auto_window(*, lanes: int, mean_chunk_bytes: float, piece: int = 0) -> int:
    """Pieces to mix in a lane.

    Whole chunks: enough for all lanes together to mix about 64, within about 64 MiB a lane. Ranges of rows, which the
    permutation has mixed already: as many as are worth planning at once.
    """
    if piece:
        return max(1, _WINDOW_ROWS // piece)
    by_mixing = max(2, _MIXED_CHUNKS // lanes)
    by_memory = int(_LANE_BYTES // max(1.0, mean_chunk_bytes))
    return max(1, min(by_mixing, by_memory, 8))
