"""From the outputs of lanes that are at hand to batches, and what was dropped on the way to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..columns import IntArray
from ..decoding.batch import BatchMaker, UnfinishedBatch
from ..decoding.rows import Rows
from ..order.plan import Share
from ..order.spans import Span
from ..pipeline.assembler import cut_step
from .feed import LaneOutputs
from .row_reader import pick_rows
from .work import Collected, StepRows, WindowWork

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


def _collect(span: Span, at_hand: Mapping[int, LaneOutputs]) -> tuple[Collected, int]:
    """The outputs of a span in the order of its rows, and the bytes of one, about."""
    ids, rows = np.zeros((2, span.num_rows), np.int64)
    samples: list[Any] = [None] * span.num_rows
    nbytes = 0
    for lane, index, targets in spread(span):
        outputs = at_hand[lane]
        index = index - outputs.first
        ids[targets] = outputs.ids[outputs.places[index]]
        if len(outputs.rows):
            rows[targets] = outputs.rows[index]
        for target, place in zip(targets.tolist(), index.tolist(), strict=True):
            samples[target] = outputs.samples[place]
        nbytes += outputs.sample_bytes * len(index)
    return Collected(samples, rows, ids), nbytes // max(1, span.num_rows)


def _join_samples(
    span: Span, at_hand: Mapping[int, LaneOutputs], collected: tuple[Collected, int], work: WindowWork, share: Share
) -> Iterator[Dealt]:
    outputs, sample_bytes = collected
    if not work.one_each:
        sample_bytes = work.output_bytes
    starts, valid = span.row_starts.tolist(), span.num_valid.tolist()
    steps = [
        StepRows(low, high, max(num_valid, share.batch_size) if share.pad else num_valid, num_valid)
        for low, high, num_valid in zip(starts[:-1], starts[1:], valid, strict=True)
    ]
    if work.one_each:
        held = [outputs.ids[rows.low : rows.low + rows.num_valid] for rows in steps]
    else:
        held = _ids_by_step(span, at_hand)
    for rows, of_step, batch in zip(steps, held, work.join(outputs, steps), strict=True):
        yield batch, of_step, sample_bytes * len(rows.picked)


def ids_in(span: Span, step: int, at_hand: Mapping[int, LaneOutputs]) -> IntArray:
    """The ids of the inputs that a rank's outputs of a step are made of, each with the first output that has it."""
    if not span.num_valid[step]:
        return _NO_IDS
    own = span.segments.of_step(step)
    parts = zip(own.lane.tolist(), own.start.tolist(), own.stop.tolist(), strict=True)
    return np.concatenate([_NO_IDS, *(at_hand[lane].delivered(start, stop) for lane, start, stop in parts)])


def _ids_by_step(span: Span, at_hand: Mapping[int, LaneOutputs]) -> list[IntArray]:
    """``ids_in`` of every step of a span, at less cost."""
    own = span.segments
    parts = zip(own.lane.tolist(), own.start.tolist(), own.stop.tolist(), strict=True)
    ids = [at_hand[lane].delivered(start, stop) for lane, start, stop in parts]
    ends = np.cumsum([0, *map(len, ids)])
    bounds = ends[np.searchsorted(own.step, np.arange(span.steps + 1))].tolist()
    joined: IntArray = np.concatenate([_NO_IDS, *ids])
    return [
        joined[low:high] if num_valid else _NO_IDS
        for low, high, num_valid in zip(bounds[:-1], bounds[1:], span.num_valid.tolist(), strict=True)
    ]


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
