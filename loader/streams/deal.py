"""From the outputs of lanes that are at hand to batches, and what was dropped on the way to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..columns import IntArray
from ..decoding.batch import BatchMaker, UnfinishedBatch
from ..decoding.gather import Rows
from ..order.plan import Share
from ..order.spans import Span
from ..pipeline.assembler import cut_step
from .feed import LaneOutputs
from .work import WindowWork, pick_rows

_NO_IDS: IntArray = np.empty(0, np.int64)
Dealt = tuple[UnfinishedBatch, IntArray, int]


def deal(
    span: Span, at_hand: Mapping[int, LaneOutputs], work: WindowWork, maker: BatchMaker, share: Share
) -> Iterator[Dealt]:
    """For each step of a span: its batch, begun when it is asked for; the ids of the rows that count; bytes, about.

    Raises, before the first batch is asked for, what reading the rows raises.
    """
    if work.gives_samples:
        return _join_samples(span, at_hand, _collect(span, at_hand), work, share)
    chunks, rows = np.empty((2, span.num_rows), np.int64)
    for lane, index, targets in spread(span):
        outputs = at_hand[lane]
        chunks[targets], rows[targets] = outputs.chunks[index - outputs.first], outputs.rows[index - outputs.first]
    return _start_rows(span, work.reader.gather(pick_rows(chunks, rows), span.num_rows), maker, share)


def _start_rows(span: Span, gathered: Rows, maker: BatchMaker, share: Share) -> Iterator[Dealt]:
    for step in range(span.steps):
        rows, num_rows, num_valid = cut_step(gathered, span, step, share)
        batch = maker.start(rows, span.epoch, num_rows, num_valid)
        yield batch, rows.ids[:num_valid], rows.count_bytes(maker.decoders.settled)


def _collect(span: Span, at_hand: Mapping[int, LaneOutputs]) -> tuple[Sequence[Any], IntArray, int]:
    """The samples of a span in the order of its rows, their ids, and the bytes of one, about."""
    ids: IntArray = np.empty(span.num_rows, np.int64)
    samples: list[Any] = [None] * span.num_rows
    nbytes = 0
    for lane, index, targets in spread(span):
        outputs = at_hand[lane]
        index = index - outputs.first
        ids[targets] = outputs.ids[outputs.places[index]]
        for target, place in zip(targets.tolist(), index.tolist(), strict=True):
            samples[target] = outputs.samples[place]
        nbytes += outputs.sample_bytes * len(index)
    return samples, ids, nbytes // max(1, span.num_rows)


def _join_samples(
    span: Span,
    at_hand: Mapping[int, LaneOutputs],
    collected: tuple[Sequence[Any], IntArray, int],
    work: WindowWork,
    share: Share,
) -> Iterator[Dealt]:
    samples, ids, sample_bytes = collected
    for step in range(span.steps):
        low, high = int(span.row_starts[step]), int(span.row_starts[step + 1])
        num_valid = int(span.num_valid[step])
        num_rows = max(num_valid, share.batch_size) if share.pad else num_valid
        picked = [low + i % (high - low) for i in range(max(num_rows, high - low))]
        batch = work.join([samples[i] for i in picked], ids[picked], high - low, num_rows, num_valid)
        held = ids[low : low + num_valid] if work.one_each else ids_in(span, step, at_hand)
        yield batch, held, sample_bytes * len(picked)


def ids_in(span: Span, step: int, at_hand: Mapping[int, LaneOutputs]) -> IntArray:
    """The ids of the inputs that a rank's outputs of a step are made of, each with the first output that has it."""
    if not span.num_valid[step]:
        return _NO_IDS
    own = span.segments.of_step(step)
    parts = zip(own.lane.tolist(), own.start.tolist(), own.stop.tolist(), strict=True)
    return np.concatenate([_NO_IDS, *(at_hand[lane].delivered(start, stop) for lane, start, stop in parts)])


def find_dropped(span: Span, step: int, at_hand: Mapping[int, LaneOutputs]) -> IntArray:
    """The ids that were dropped on the way to a rank's outputs of a step."""
    if not span.num_valid[step]:
        return _NO_IDS
    own = span.segments.of_step(step)
    parts = zip(own.lane.tolist(), own.start.tolist(), own.stop.tolist(), strict=True)
    return np.concatenate([_NO_IDS, *(at_hand[lane].dropped(start, stop) for lane, start, stop in parts)])


def spread(span: Span) -> Iterator[tuple[int, IntArray, IntArray]]:
    """Lane by lane, the numbers of its outputs in a span, and the rows of the span that they go to."""
    segments = span.segments
    lengths = segments.stop - segments.start
    within = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    lanes = np.repeat(segments.lane, lengths)
    index = np.repeat(segments.start, lengths) + within
    targets = np.repeat(span.row_starts[segments.step] + segments.slot, lengths) + within
    by_lane = np.argsort(lanes, kind="stable")
    numbers, starts = np.unique(lanes[by_lane], return_index=True)
    edges = [*starts.tolist(), len(by_lane)]
    for lane, low, high in zip(numbers.tolist(), edges[:-1], edges[1:], strict=True):
        yield lane, index[by_lane[low:high]], targets[by_lane[low:high]]
