"""Schedule every rank's reads in a job's first steps: which chunks, in which order, when needed and when dropped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...loader.order.distinct import distinct
from ...loader.order.permutation import IntArray
from ...loader.order.plan import Order, batch_bounds, lane_offsets, lane_turns, share_bounds
from .chunk_stream import ChunkStream

NEVER = np.int64(1) << 40  # a step beyond all


@dataclass(frozen=True, slots=True)
class Schedule:
    """The reads of all ranks, each (reads,), sorted by rank and, for each, in the order in which it asks for them.

    ``need`` and ``drop`` are the steps from which on a chunk is used, and after which it is not. ``amplification`` is
    how many times all ranks together read a window of a lane.
    """

    ranks: IntArray
    chunks: IntArray
    fetched: IntArray
    memory: IntArray
    need: IntArray
    drop: IntArray
    amplification: float


def schedule_reads(
    stream: ChunkStream, order: Order, *, world_size: int, global_batch_size: int, spans: IntArray, seed: int
) -> Schedule:
    """The reads of the steps that ``spans`` has the span of: (steps,) int64.

    The place of a chunk's first sample in its window is drawn: the first of as many random places as it has samples.
    """
    rng = np.random.default_rng(seed)
    identities = stream.identities(np.arange(stream.num_chunks, dtype=np.int64)) if order.piece else None
    if identities is not None and len(distinct(identities)) < len(identities):
        return _hold_all(stream, rng, world_size, global_batch_size)
    turns = lane_turns(order.lanes)
    step, lane, rank, low, high = _segments(stream.num_samples, turns, world_size, global_batch_size, len(spans))
    lane_starts = _lane_starts(stream.num_samples, turns)
    first_chunks = stream.find(lane_starts[:-1])
    stop_chunks = stream.find(lane_starts[1:] - 1) + 1
    # The windows that each segment lies in, and of each rank's the first time.
    window = (stream.find(lane_starts[lane] + low) - first_chunks[lane]) // order.window
    last = (stream.find(lane_starts[lane] + high - 1) - first_chunks[lane]) // order.window
    which, extra = _expand(last - window + 1)
    window, step, lane, rank, low = window[which] + extra, step[which], lane[which], rank[which], low[which]
    keys = np.stack((rank * order.lanes + lane, window))
    (pairs, window), first = np.unique(keys, axis=1, return_index=True)
    rank, lane = pairs // order.lanes, pairs % order.lanes
    windows = len(distinct(lane * (window.max() + 1) + window))
    entered, low = step[first], low[first]
    # The chunks of those windows.
    start = first_chunks[lane] + window * order.window
    stop = np.minimum(start + order.window, stop_chunks[lane])
    base, end = lane_starts[lane], lane_starts[lane + 1]
    window_start = np.maximum(stream.starts(start), base) - base
    window_stop = np.minimum(stream.starts(stop), end) - base
    which, extra = _expand(stop - start)
    place = start[which] + extra
    low_sample = np.maximum(stream.starts(place) - base[which], window_start[which])
    high_sample = np.minimum(stream.starts(place + 1) - base[which], window_stop[which])
    if order.shuffle:
        size = (window_stop - window_start)[which]
        draw = 1.0 - (1.0 - rng.random(len(place))) ** (1.0 / np.maximum(1, high_sample - low_sample))
        use = window_start[which] + (size * draw).astype(np.int64)
    else:
        use = low_sample
    use = np.maximum(use, low[which]) * order.lanes + turns[lane[which]]
    need = np.maximum(use // global_batch_size, entered[which])
    drop = np.maximum(((window_stop[which] - 1) * order.lanes + turns[lane[which]]) // global_batch_size, need)
    asked = np.lexsort((use, spans[entered[which]], rank[which]))
    fetched, memory = stream.sizes(place[asked])
    return Schedule(
        ranks=rank[which][asked],
        chunks=stream.identities(place[asked]),
        fetched=fetched,
        memory=memory,
        need=need[asked],
        drop=drop[asked],
        amplification=len(rank) / windows,
    )


def _segments(
    num_samples: int, turns: IntArray, world_size: int, global_batch_size: int, steps: int
) -> tuple[IntArray, ...]:
    """(step, lane, rank, first, one past the last offset of the lane) of all ranks' shares; (segments,) each."""
    lanes = len(turns)
    bounds = batch_bounds(0, steps, global_batch_size, num_samples)
    offsets = lane_offsets(bounds, turns)  # (steps + 1, lanes)
    counts = np.diff(offsets, axis=0)
    lane_ends = np.cumsum(counts, axis=1) + bounds[:-1, None]
    rank_cuts = share_bounds(np.diff(bounds), world_size)[:, 1:] + bounds[:-1, None]
    edges = np.sort(np.concatenate((bounds[:-1, None], lane_ends, rank_cuts), axis=1), axis=1)
    lengths = np.diff(edges, axis=1)
    step, column = np.nonzero(lengths)
    start, stop = edges[step, column], edges[step, column + 1]
    lane = np.searchsorted(lane_ends.ravel(), start, side="right") % lanes
    rank = np.searchsorted(rank_cuts.ravel(), start, side="right") % world_size
    # Lanes' samples lie one after another in a step: their offsets count from the lane's own.
    shift = offsets[step, lane] - (lane_ends[step, lane] - counts[step, lane])
    return step, lane, rank, start + shift, stop + shift


def _lane_starts(num_samples: int, turns: IntArray) -> IntArray:
    starts = np.zeros(len(turns) + 1, np.int64)
    np.cumsum(lane_offsets(np.array(num_samples, np.int64), turns), out=starts[1:])
    return starts


def _expand(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Owner and number from 0 of each part, for owners with these counts of parts."""
    which = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return which, np.arange(len(which), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)


def _hold_all(stream: ChunkStream, rng: np.random.Generator, world_size: int, global_batch_size: int) -> Schedule:
    """A small data set of which rows or pieces are shuffled: a rank reads, and keeps, each chunk that it has one of."""
    places = np.arange(stream.num_chunks, dtype=np.int64)
    chunks, first, pieces = np.unique(stream.identities(places), return_index=True, return_counts=True)
    # Each piece is a rank's with probability 1 / W, and lies anywhere in the epoch. The first of the rank's lies before
    # t with probability 1 - (1 - t / W)^pieces; beyond t = 1 there is none.
    draw = world_size * (1.0 - (1.0 - rng.random((world_size, len(chunks)))) ** (1.0 / pieces))
    ranks, columns = np.nonzero(draw < 1.0)
    need = (draw[ranks, columns] * stream.num_samples).astype(np.int64) // global_batch_size
    asked = np.lexsort((need, ranks))
    fetched, memory = stream.sizes(first[columns[asked]])
    return Schedule(
        ranks=ranks[asked],
        chunks=chunks[columns[asked]],
        fetched=fetched,
        memory=memory,
        need=need[asked],
        drop=np.full(len(asked), NEVER),
        amplification=float((1.0 - (1.0 - 1.0 / world_size) ** pieces).mean() * world_size),
    )
