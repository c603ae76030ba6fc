"""Spans of runs of one source and of several are those of a naive reference, sample by sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.loader.order.mixture import Cursor, MixturePlan, WeightChange
from penstock.loader.order.permutation import IntArray
from penstock.loader.order.plan import EpochPlan, Order, Share, bit_reverse, share_bounds
from penstock.loader.order.spans import (
    EpochCourse,
    EpochSpans,
    MixtureCourse,
    SourceOrder,
    Span,
    SpanPlanner,
    chunks_by_first_use,
)

sizes_of_chunks = st.lists(st.integers(1, 9), min_size=1, max_size=12).map(lambda sizes: np.array(sizes, np.int64))
lanes_of_orders = st.sampled_from([1, 2, 4, 16])

Row = tuple[int, int]  # a joint chunk and a row of it


def rows_of(planner: SpanPlanner | EpochSpans, span: Span) -> list[list[Row]]:
    """The chunk and row of each sample that counts, step by step."""
    rows: list[Row] = [(-1, -1)] * span.num_rows
    for group in planner.expand(span):
        for row, target in zip(group.rows.tolist(), group.targets.tolist(), strict=True):
            rows[target] = group.chunk, row
    assert (-1, -1) not in rows
    starts = span.row_starts.tolist()
    return [rows[low : low + count] for low, count in zip(starts[:-1], span.num_valid.tolist(), strict=True)]


def sample_at(source: SourceOrder, epoch: int, position: int) -> tuple[int, int, Row]:
    """The lane, the offset in it, and the joint chunk and row of a sample: found alone."""
    plan, lanes = EpochPlan(source.chunk_samples, source.order, epoch), source.order.lanes
    lane = int(bit_reverse(np.array(position % lanes), lanes.bit_length() - 1))
    offset = position // lanes
    window = plan.open_window(lane, plan.window_at(lane, offset))
    [piece], [row] = window.locate(np.array([offset]))
    return lane, offset, (source.first_chunk + int(window.chunks[piece]), int(row))


def naive_step(sources: Sequence[SourceOrder], before: IntArray, after: IntArray, share: Share) -> list[Row]:
    """A rank's share of a step: all samples, sorted by (lane, source, epoch, offset), and cut."""
    samples = []
    for number, source in enumerate(sources):
        for ordinal in range(int(before[number]), int(after[number])):
            epoch, position = divmod(ordinal, source.num_samples)
            lane, offset, row = sample_at(source, epoch, position)
            samples.append((lane, number, epoch, offset, row))
    [cuts] = share_bounds(np.array([len(samples)]), share.world_size, share.weights).tolist()
    return [row for *_, row in sorted(samples)[cuts[share.rank] : cuts[share.rank + 1]]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(sizes_of_chunks, min_size=1, max_size=3),
    lanes_of_orders,
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 9),
    st.data(),
)
def test_spans_of_several_sources_have_each_sample_in_its_place(
    sizes, lanes, shuffle, world_size, batch, at_once, data
):
    first_chunks = np.cumsum([0, *map(len, sizes)]).tolist()
    sources = [
        SourceOrder(
            chunk_samples=of_source,
            order=Order(seed=number, lanes=lanes, window=1 + number, shuffle=shuffle),
            first_chunk=first_chunks[number],
        )
        for number, of_source in enumerate(sizes)
    ]
    weights = data.draw(st.lists(st.floats(0.1, 5), min_size=len(sizes), max_size=len(sizes)))
    share = Share(data.draw(st.integers(0, world_size - 1)), world_size, batch * world_size)
    changes = (WeightChange(0, tuple(weights)),)
    plan = MixturePlan(tuple(of.num_samples for of in sources), share.global_batch_size, changes)
    begin = Cursor.begin(len(sources))
    planner = SpanPlanner(sources, share, MixtureCourse(plan, 0, begin, begin), "drop")
    taken = plan.bounds(begin, 60)
    step, asked = 0, set()
    while step < 40:
        span = planner.plan_next(at_once)
        asked |= set(chunks_by_first_use(list(planner.open_windows(span))))
        for rows in rows_of(planner, span):
            assert rows == naive_step(sources, taken[step], taken[step + 1], share)
            step += 1
        assert {group.chunk for group in planner.expand(span)} <= asked
        if span.steps > 1:
            assert rows_of(planner, span.cut(1)) == rows_of(planner, span)[1:2]
        planner.release(span)


@settings(max_examples=60, deadline=None)
@given(
    sizes_of_chunks,
    lanes_of_orders,
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from(["drop", "pad", "partial"]),
    st.integers(1, 5),
    st.data(),
)
def test_a_run_of_one_data_set_has_the_spans_of_its_epochs_one_after_another(
    sizes, lanes, world_size, batch, last_batch, at_once, data
):
    order, first = Order(lanes=lanes, window=2, seed=3), data.draw(st.integers(0, int(sizes.sum())))
    share = Share(data.draw(st.integers(0, world_size - 1)), world_size, batch * world_size, pad=last_batch == "pad")
    planner = SpanPlanner([SourceOrder(chunk_samples=sizes, order=order)], share, EpochCourse(2, first), last_batch)
    for epoch in (2, 3, 4):
        spans = EpochSpans(EpochPlan(sizes, order, epoch), share, last_batch)
        while steps := spans.steps.ahead(first, at_once):
            expected, entered = spans.plan_span(first, steps)
            span = planner.plan_next(at_once)
            assert (span.epoch, span.bounds.tolist()) == (epoch, expected.bounds.tolist())
            assert chunks_by_first_use(list(planner.open_windows(span))) == chunks_by_first_use(entered)
            assert rows_of(planner, span) == rows_of(spans, expected)
            first = int(span.bounds[-1])
            done = [chunk for window in spans.close_windows(first) for chunk in window.chunks.tolist()]
            assert planner.next_uses(span) == spans.next_uses(first)
            assert planner.release(span) == done
        end = planner.plan_next(at_once)
        assert (end.steps, end.epoch, end.bounds.tolist()) == (0, epoch, [sizes.sum()])
        left = [chunk for window in spans.close_windows(sizes.sum()) for chunk in window.chunks.tolist()]
        assert planner.release(end) == left
        first = 0
