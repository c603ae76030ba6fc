"""How many samples each source gives to each batch: proportions, closed forms, ends of epochs."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.loader import PartitionError
from penstock.loader.order.mixture import Cursor, MixturePlan, WeightChange, floor_sum, to_shares

WEIGHTS = st.lists(st.floats(0, 100) | st.sampled_from([1e-6, 0.001, 0.7]), min_size=1, max_size=8).filter(any)


def make_plan(weights: list[float], size: int = 64, **options: object) -> MixturePlan:
    sizes = tuple(options.pop("sizes", (1000,) * len(weights)))  # type: ignore[arg-type]
    return MixturePlan(sizes, size, (WeightChange(0, tuple(weights)),), **options)  # type: ignore[arg-type]


@given(WEIGHTS, st.integers(1, 3000), st.integers(0, 1 << 40))
def test_each_batch_has_each_share_rounded_down_or_up(weights, size, steps_before):
    plan = make_plan(weights, size)
    counts = np.diff(plan.bounds(Cursor(0, steps_before, (0,) * len(weights)), 50), axis=0)
    total = sum(map(Fraction, weights))
    assert counts.sum(axis=1).tolist() == [size] * 50
    for k, weight in enumerate(weights):
        ideal = size * Fraction(weight) / total
        # Shares are multiples of 2**-32: what is whole in exact arithmetic may be rounded the other way.
        low, high = math.floor(ideal - Fraction(size, 1 << 31)), math.ceil(ideal + Fraction(size, 1 << 31))
        assert low <= counts[:, k].min() <= counts[:, k].max() <= high
        assert weight > 0 or not counts[:, k].any()


@settings(max_examples=20)
@given(WEIGHTS, st.sampled_from([1, 7, 64, 1000]), st.integers(0, 1 << 40))
def test_any_100000_samples_have_the_proportions_to_a_tenth_of_a_percent(weights, size, steps_before):
    plan = make_plan(weights, size)
    bounds = plan.bounds(Cursor(0, steps_before, (0,) * len(weights)), 150_000 // size)
    length = -(-100_000 // size)
    shares = (bounds[length:] - bounds[:-length]) / (length * size)
    assert np.abs(shares - np.array(weights) / sum(weights)).max() < 0.001


@given(WEIGHTS, WEIGHTS, st.integers(1, 100), st.integers(0, 5000), st.integers(0, 300))
def test_going_steps_ahead_at_once_is_the_same_as_one_by_one(one, other, size, position, steps):
    width = min(len(one), len(other))
    first, second = tuple(one[:width]), tuple(other[:width])
    if not (any(first) and any(second)):
        return
    plan = MixturePlan((10,) * width, size, (WeightChange(0, first), WeightChange(position + 1, second)))
    begin = Cursor.begin(width)
    bounds = plan.bounds(begin, steps)
    there = plan.advance(begin, steps)
    assert there == Cursor(steps * size, steps, tuple(bounds[-1].tolist()))
    half = plan.advance(begin, steps // 2)
    assert plan.advance(half, steps - steps // 2) == there


@given(st.integers(0, 60), st.integers(1, 50), st.integers(0, 200), st.integers(0, 200))
def test_floor_sums_are_sums(count, divisor, slope, offset):
    assert floor_sum(count, divisor, slope, offset) == sum((slope * i + offset) // divisor for i in range(count))


@given(WEIGHTS)
def test_shares_are_whole_numbers_that_add_up_and_leave_no_source_out(weights):
    shares = to_shares(weights)
    assert sum(shares) == 1 << 32
    assert all((share > 0) == (weight > 0) for share, weight in zip(shares, weights, strict=True))
    assert to_shares([2 * weight for weight in weights]) == shares


@given(st.lists(st.tuples(st.integers(1, 400), st.floats(0.05, 1)), min_size=1, max_size=5), st.integers(1, 40))
def test_an_epoch_ends_with_the_batch_that_uses_up_the_first_or_the_last_source(sources, size):
    sizes, weights = zip(*sources, strict=True)
    for stop, is_over in (("first_exhausted", any), ("all_exhausted", all)):
        plan = make_plan(list(weights), size, sizes=sizes, stop=stop)
        start = Cursor.begin(len(sizes))
        steps = plan.steps_left(start, start)
        bounds = plan.bounds(start, steps) - np.array(start.taken)
        assert is_over((bounds[-1] >= sizes).tolist())
        assert not is_over((bounds[-2] >= sizes).tolist())
        later = plan.advance(start, steps // 2)
        assert plan.steps_left(start, later) == steps - steps // 2
        end = plan.advance(start, steps)
        assert plan.steps_left(start, end) == 0
        assert plan.steps_left(end, end) == steps
        changing = plan.change_weights(later.position + 1, weights[::-1])
        left = changing.steps_left(start, later)
        given = changing.bounds(later, left)
        assert is_over((given[-1] >= sizes).tolist())
        assert not left or not is_over((given[-2] >= sizes).tolist())


def test_a_mixture_that_never_stops_has_no_end_and_idle_sources_keep_none_from_ending():
    begin = Cursor.begin(2)
    assert make_plan([1, 2], stop="never").steps_left(begin, begin) is None
    assert make_plan([1, 0], 10, sizes=(100, 5), stop="all_exhausted").steps_left(begin, begin) == 10


def test_stratified_batches_have_exactly_so_many_of_each():
    plan = make_plan([5, 2, 1], 24, stratified=True)
    assert np.diff(plan.bounds(Cursor.begin(3), 100), axis=0).tolist() == [[15, 6, 3]] * 100
    with pytest.raises(PartitionError, match=r"5 \+ 2 \+ 1 = 8 .* 20; use global_batch_size=24"):
        make_plan([5, 2, 1], 20, stratified=True)


def test_golden_counts_of_a_mixture():
    """Runs that began with an earlier penstock go on: never change these."""
    counts = np.diff(make_plan([0.7, 0.2, 0.1], 8).bounds(Cursor.begin(3), 10), axis=0)
    assert counts.tolist() == [
        [5, 2, 1],
        [6, 1, 1],
        [5, 2, 1],
        [6, 2, 0],
        [6, 1, 1],
        [5, 2, 1],
        [6, 1, 1],
        [5, 2, 1],
        [6, 2, 0],
        [6, 1, 1],
    ]
