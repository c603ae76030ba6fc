"""Spans at the edges: odd windows, lanes without samples, spans without rows, plans that run ahead."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.loader.order.plan import EpochPlan, Order, Share, count_steps
from penstock.loader.order.selecting import Selection, Subset
from penstock.loader.order.spans import EnteredWindow, EpochSpans, Span, chunks_by_first_use
from penstock.loader.order.window import Run, locate_runs

sizes_of_chunks = st.lists(st.integers(1, 12), min_size=1, max_size=30).map(lambda sizes: np.array(sizes, np.int64))
orders = st.builds(
    Order,
    lanes=st.sampled_from([1, 2, 16, 64]),
    window=st.integers(1, 4),
    shuffle=st.booleans(),
    seed=st.integers(0, 99),
)


def plan_all(
    spans: EpochSpans, first: int, at_once: int, last_batch: str = "partial"
) -> Iterator[tuple[Span, list[EnteredWindow]]]:
    total = spans.plan.num_samples
    left = count_steps(total, first, spans.share.global_batch_size, last_batch)
    while left:
        steps = min(at_once, left)
        span, entered = spans.plan_span(first, steps)
        yield span, entered
        first, left = int(span.bounds[-1]), left - steps


@settings(max_examples=100)
@given(sizes_of_chunks, orders, st.integers(1, 5), st.integers(1, 5), st.integers(1, 7), st.data())
def test_every_chunk_that_a_span_takes_was_asked_for_and_each_window_is_closed_once(
    sizes, order, world_size, batch, ahead, data
):
    """As the pipeline does it: several spans are planned before one is expanded and closed."""
    rank = data.draw(st.integers(0, world_size - 1))
    first = data.draw(st.integers(0, int(sizes.sum())))
    spans = EpochSpans(
        EpochPlan(sizes, order, 1), Share(rank, world_size, batch * world_size, pad=data.draw(st.booleans()))
    )
    asked: dict[int, int] = {}
    waiting = []
    planned = plan_all(spans, first, data.draw(st.integers(1, 4)))

    def finish_one() -> None:
        span = waiting.pop(0)
        groups = spans.expand(span)
        assert all(asked.get(group.chunk, 0) > 0 for group in groups)
        rows = np.concatenate([group.targets for group in groups]) if groups else np.empty(0, np.int64)
        assert sorted(rows.tolist()) == list(range(span.num_rows))
        assert all((group.rows < sizes[group.chunk]).all() and (group.rows >= 0).all() for group in groups)
        assert len({group.chunk for group in groups}) == len(groups)
        first_uses = [int(group.targets.min()) for group in groups]
        assert first_uses == sorted(first_uses)
        for window in spans.close_windows(int(span.bounds[-1])):
            for chunk in window.chunks.tolist():
                asked[chunk] -= 1

    for span, entered in planned:
        for chunk in chunks_by_first_use(entered):
            asked[chunk] = asked.get(chunk, 0) + 1
        waiting.append(span)
        if len(waiting) >= ahead:
            finish_one()
    while waiting:
        finish_one()
    for window in spans.close_windows(spans.plan.num_samples):
        for chunk in window.chunks.tolist():
            asked[chunk] -= 1
    assert set(asked.values()) <= {0}


@settings(max_examples=60)
@given(sizes_of_chunks, orders, st.integers(1, 4), st.integers(1, 5))
def test_next_uses_are_when_a_chunk_is_next_used(sizes, order, world_size, batch):
    plan = EpochPlan(sizes, order, 0)
    spans = EpochSpans(plan, Share(0, world_size, batch * world_size))
    alone = EpochSpans(plan, Share(0, 1, 1))
    span, _ = spans.plan_span(0, max(1, count_steps(plan.num_samples, 0, batch * world_size, "drop") // 2))
    position = int(span.bounds[-1]) // 2
    chunk_at = [alone.expand(one)[0].chunk for one, _ in plan_all(alone, 0, 1)]
    for chunk, use in spans.next_uses(position).items():
        assert use >= position
        assert chunk_at[use] == chunk
        # The first use in the lanes of this rank's open windows; another lane may use the chunk earlier.
        lanes = {p % order.lanes for p in range(use % order.lanes, use + 1, order.lanes)}
        assert not any(chunk_at[p] == chunk for p in range(position, use) if p % order.lanes in lanes)


def test_a_rank_without_a_sample_of_a_span_borrows_a_row_that_does_not_count():
    spans = EpochSpans(EpochPlan(np.array([3], np.int64), Order(lanes=4), 0), Share(5, 6, 6))
    span, entered = spans.plan_span(0, 1)
    assert span.num_valid.tolist() == [0]
    assert span.num_rows == 1
    assert [group.chunk for group in spans.expand(span)] == [0]
    assert chunks_by_first_use(entered) == [0]


def test_a_span_taken_apart_leaves_no_step_without_a_row_to_show_its_fields_by():
    plan = EpochPlan(np.array([40], np.int64), Order(lanes=4), 0)
    for weights, expected in (([1.0, 1.0], [1, 1, 1, 1]), ([1.0, 0.0001], [4])):
        span, _ = EpochSpans(plan, Share(1, 2, 8, weights=weights)).plan_span(0, 4)
        assert [part.steps for part in span.apart()] == expected
    spans = EpochSpans(EpochPlan(np.array([18], np.int64), Order(lanes=4), 0), Share(2, 3, 6))
    span, _ = spans.plan_span(0, 3)
    *_, last = span.apart()
    assert (last.num_valid.tolist(), last.bounds.tolist()) == ([2], [12, 18])
    spans = EpochSpans(EpochPlan(np.array([13], np.int64), Order(lanes=4), 0), Share(2, 3, 6))
    first, last = spans.plan_span(0, 3)[0].apart()
    assert [part.num_valid.tolist() for part in (first, last)] == [[2], [2, 0]]
    assert sorted(np.concatenate([group.targets for group in spans.expand(last)]).tolist()) == [0, 1]


def test_positions_near_a_trillion_are_planned_without_overflow():
    plan = EpochPlan(np.full(10**6, 10**6, np.int64), Order(lanes=16, window=1), 0)
    first = 10**12 - 64 * 5
    spans = EpochSpans(plan, Share(15, 16, 64))
    span, entered = spans.plan_span(first, 5)
    (group,) = spans.expand(span)
    assert span.num_rows == 20
    assert span.bounds[-1] == 10**12
    assert sorted(group.targets.tolist()) == list(range(20))
    assert ((group.rows >= 0) & (group.rows < 10**6)).all()
    assert first <= int(entered[0].first_uses[0]) < 10**12
    assert spans.next_uses(first) == {group.chunk: int(entered[0].first_uses[0])}


def test_one_window_of_each_chunk_keeps_chunks_together_and_in_order_of_use():
    sizes = np.full(8, 4, np.int64)
    spans = EpochSpans(EpochPlan(sizes, Order(lanes=1, window=1), 0), Share(0, 1, 4))
    chunks = []
    for span, entered in plan_all(spans, 0, 1):
        (group,) = spans.expand(span)
        assert chunks_by_first_use(entered) == [group.chunk]
        assert sorted(group.rows.tolist()) == [0, 1, 2, 3]
        chunks.append(group.chunk)
        list(spans.close_windows(int(span.bounds[-1])))
    assert sorted(chunks) == list(range(8))
    assert chunks == spans.plan.pieces.chunks.tolist()


def test_chunks_are_asked_for_before_the_samples_of_windows_of_one_chunk_are_sorted(monkeypatch):
    """So reading begins at once, and epochs that are planned ahead sort when their turn comes."""

    def refuse(size: int, key: int) -> None:
        raise AssertionError(f"{size} samples are sorted")

    monkeypatch.setattr("penstock.loader.order.window.permutation", refuse)
    spans = EpochSpans(EpochPlan(np.full(8, 40, np.int64), Order(lanes=4, window=1), 0), Share(0, 1, 16))
    _, entered = spans.plan_span(0, 5)
    by_lane = {opened.window.lane: int(opened.window.chunks[0]) for opened in entered}
    assert chunks_by_first_use(entered) == [by_lane[lane] for lane in (0, 2, 1, 3)]
    assert set(spans.next_uses(80).values()) == {80, 81, 82, 83}


def test_no_windows_want_no_chunks():
    assert chunks_by_first_use([]) == []


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 6000), min_size=1, max_size=6).map(lambda sizes: np.array(sizes, np.int64)),
    st.booleans(),
    st.integers(0, 99),
    st.data(),
)
def test_a_piece_is_first_used_where_its_first_row_comes_in_the_window_from_any_offset_on(sizes, shuffle, seed, data):
    order = Order(lanes=1, window=len(sizes), shuffle=shuffle, seed=seed)
    window = EpochPlan(sizes, order, 0).open_window(0, 0)
    start = data.draw(st.integers(0, window.stop))
    pieces, _ = window.locate(np.arange(start, window.stop, dtype=np.int64))
    expected = [
        start + found[0] if len(found := np.flatnonzero(pieces == piece)) else -1 for piece in range(len(sizes))
    ]
    assert window.first_uses(start).tolist() == expected


def test_a_lane_whose_windows_were_closed_is_entered_again_from_before_them() -> None:
    """A rank that borrows a lane lets go of it, and may need a part of it later."""
    spans = EpochSpans(EpochPlan(np.full(12, 4), Order(lanes=2, window=2), 0), Share(0, 1, 8))
    entered = [window.chunks.tolist() for window in spans.enter(1, 0, 24)]
    assert len(list(spans.close_before(np.array([24, 24])))) == len(entered)
    assert [window.chunks.tolist() for window in spans.enter(1, 0, 24)] == entered
    assert list(spans.enter(1, 0, 24)) == []


@settings(max_examples=100)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=40), orders, st.booleans(), st.data())
def test_runs_that_are_located_together_lie_where_each_offset_lies(sizes, order, are_picked, data):
    samples = np.array(sizes, np.int64)
    selection = Selection(samples, Subset.take(1 + sum(sizes) // 2)) if are_picked else None
    plan = EpochPlan(samples, order, 1, selection)
    runs = []
    for lane, size in enumerate(np.diff(plan.lane_starts).tolist()):
        start = data.draw(st.integers(0, size))
        while start < size and len(runs) < 20:
            window = plan.open_window(lane, plan.window_at(lane, start))
            stop = data.draw(st.integers(start + 1, window.stop))
            runs.append(Run(window, start, stop))
            start = stop
    if not runs:
        return
    chunks, rows = locate_runs(runs)
    of_each = [run.window.locate(np.arange(run.start, run.stop, dtype=np.int64)) for run in runs]
    wanted = [run.window.chunks[pieces] for run, (pieces, _) in zip(runs, of_each, strict=True)]
    assert chunks.tolist() == np.concatenate(wanted).tolist()
    assert rows.tolist() == np.concatenate([of_run for _, of_run in of_each]).tolist()
