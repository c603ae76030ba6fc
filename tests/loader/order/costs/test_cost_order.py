"""Costs in the order of samples: shares cut by cost, buckets and budgets of tokens, each against a naive reference."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.loader.errors import ConfigError, PartitionError, StateMismatchError
from penstock.loader.order.costs.buckets import Bucket, BucketedOrder, add_buckets, plan_epoch
from penstock.loader.order.costs.budget import StepBudget, TokenBudget
from penstock.loader.order.costs.costs import Cost, SampleCosts
from penstock.loader.order.costs.forecast import count_reads, forecast_costs
from penstock.loader.order.costs.steps import BudgetSteps
from penstock.loader.order.costs.walk import CostWalk
from penstock.loader.order.permutation import permutation, stream_key
from penstock.loader.order.plan import EpochPlan, Order, Share, bit_reverse
from penstock.loader.order.selecting import Selection, Subset
from penstock.loader.order.spans import EpochSpans
from penstock.loader.order.state import LoaderState

sizes_of_chunks = st.lists(st.integers(1, 12), min_size=1, max_size=30).map(lambda sizes: np.array(sizes, np.int64))
orders = st.builds(
    Order,
    lanes=st.sampled_from([1, 2, 4, 16]),
    window=st.integers(1, 4),
    shuffle=st.just(True),
    seed=st.integers(0, 99),
    piece=st.sampled_from([0, 0, 1, 3]),
)


def make_costs(samples: int, seed: int = 0, most: int = 50) -> SampleCosts:
    return SampleCosts(np.random.default_rng(seed).integers(0, most, samples).astype(np.uint16), "d" * 16)


def ids_by_position(plan: EpochPlan) -> list[int]:
    """The sample id at each position, one at a time."""
    first_ids = np.cumsum(plan.chunk_samples) - plan.chunk_samples
    lanes = plan.order.lanes
    found = []
    for position in range(plan.num_samples):
        lane = int(bit_reverse(np.array(position % lanes), lanes.bit_length() - 1))
        window = plan.open_window(lane, plan.window_at(lane, position // lanes))
        pieces, rows = window.locate(np.array([position // lanes]))
        found.append(int(first_ids[window.chunks[pieces[0]]] + rows[0]))
    return found


def rank_ids(plan: EpochPlan, share: Share, first: int, steps: int) -> list[list[int]]:
    """What the loader's own way gives a rank, step by step."""
    spans = EpochSpans(plan, share)
    span, _ = spans.plan_span(first, steps)
    first_ids = np.cumsum(plan.chunk_samples) - plan.chunk_samples
    rows = np.zeros(span.num_rows, np.int64)
    for group in spans.expand(span):
        rows[group.targets] = first_ids[group.chunk] + group.rows
    return [
        rows[low : low + valid].tolist()
        for low, valid in zip(span.row_starts.tolist(), span.num_valid.tolist(), strict=False)
    ]


# -- shares cut by cost ----------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(sizes_of_chunks, orders, st.integers(1, 6), st.integers(1, 6), st.data())
def test_shares_by_cost_are_the_same_global_batches_in_the_same_order_and_differ_by_one_sample(
    sizes, order, world_size, batch, data
):
    costs = make_costs(int(sizes.sum()))
    plan = EpochPlan(sizes, order, 1)
    size = batch * world_size
    first = data.draw(st.integers(0, plan.num_samples - 1))
    steps = min(3, -(-(plan.num_samples - first) // size))
    plain = rank_ids(plan, Share(0, 1, size), first, steps)
    model = data.draw(st.sampled_from([Cost(), Cost(model="quadratic", hidden_size=2), Cost(model=lambda n: n**0.5)]))
    by_cost = SampleCosts(costs.values, costs.digest, model)
    parts = [rank_ids(plan, Share(r, world_size, size, costs=(by_cost,)), first, steps) for r in range(world_size)]
    for step, whole in enumerate(plain):
        assert [sample for part in parts for sample in part[step]] == whole
        total = [int(by_cost.of(np.array(part[step], np.int64)).sum()) for part in parts]
        assert max(total) - min(total) <= by_cost.of(np.array(whole)).max()


@settings(max_examples=40)
@given(sizes_of_chunks, orders, st.data())
def test_a_walk_reads_the_costs_of_positions_wherever_it_begins(sizes, order, data):
    costs = make_costs(int(sizes.sum()))
    plan = EpochPlan(sizes, order, 0)
    ids = ids_by_position(plan)
    walk = CostWalk(plan, costs)
    for _ in range(3):
        start = data.draw(st.integers(0, plan.num_samples))
        stop = data.draw(st.integers(start, plan.num_samples))
        assert walk.by_position(start, stop).tolist() == costs.values[ids[start:stop]].tolist()


# -- buckets ---------------------------------------------------------------------------------------------------------


def bucket_naively(plan: EpochPlan, order: BucketedOrder, costs: SampleCosts) -> list[int]:
    """The ids by position: each lane's plain order, pool by pool sorted, cut into runs, and the runs dealt."""
    plain = ids_by_position(plan)
    by_lane: dict[int, list[int]] = {}
    for position, sample in enumerate(plain):
        by_lane.setdefault(position % order.lanes, []).append(sample)
    fewest = len(plain) // order.lanes
    for residue, lane in by_lane.items():
        dealt = []
        for number, start in enumerate(range(0, len(lane), order.pool)):
            pool = sorted(lane[start : start + order.pool], key=lambda sample: costs.values[sample])
            runs = max(1, -(-min(order.pool, fewest - start) // order.run))
            turns = permutation(runs, stream_key(6, order.seed, plan.epoch, number)).tolist()
            for turn in turns if order.shuffle else range(runs):
                dealt += pool[len(pool) * turn // runs : len(pool) * (turn + 1) // runs]
        by_lane[residue] = dealt
    return [by_lane[position % order.lanes][position // order.lanes] for position in range(len(plain))]


@settings(max_examples=60)
@given(sizes_of_chunks, orders, st.integers(1, 5), st.integers(1, 6), st.booleans())
def test_buckets_are_pools_of_each_lane_sorted_cut_into_runs_and_dealt(sizes, order, run, runs, is_subset):
    costs = make_costs(int(sizes.sum()), most=9)
    selection = Selection(sizes, Subset.take(max(1, int(sizes.sum()) // 2))) if is_subset else None
    bucketed = BucketedOrder(**asdict(order), run=run, pool=run * runs, index="tokens", costs=costs.digest)
    plan = plan_epoch(sizes, bucketed, 2, selection, costs)
    expected = bucket_naively(EpochPlan(sizes, order, 2, selection), bucketed, costs)
    assert ids_by_position(plan) == expected
    assert sorted(expected) == sorted(ids_by_position(EpochPlan(sizes, order, 2, selection)))
    half = plan.num_samples // 2
    by_ranks = [rank_ids(plan, Share(r, 3, 6), half, 1)[0] for r in range(3)] if plan.num_samples - half >= 6 else []
    assert sorted(s for part in by_ranks for s in part) == sorted(expected[half : half + 6] if by_ranks else [])


def test_the_order_of_buckets_is_pinned():
    """A change of this order breaks saved states."""
    costs = SampleCosts((np.arange(60) * 37 % 61).astype(np.uint16), "d" * 16)
    order = BucketedOrder(seed=5, lanes=4, window=2, run=2, pool=6, index="tokens", costs="d" * 16)
    plan = plan_epoch(np.array([10, 20, 5, 25]), order, 1, None, costs)
    assert ids_by_position(plan)[:24] == [
        49,
        18,
        59,
        6,
        46,
        28,
        51,
        8,
        35,
        15,
        53,
        33,
        40,
        17,
        12,
        2,
        37,
        24,
        52,
        4,
        42,
        26,
        57,
        9,
    ]


def test_auto_takes_the_global_batch_as_a_run_and_up_to_64_runs_of_a_window():
    costs = make_costs(10)
    order = Order(lanes=16)
    for window, runs in ((0.0, 8), (40.0 * 4, 40), (1e6, 64)):
        chosen = add_buckets(order, Bucket(), costs, global_batch_size=64, window_samples=window)
        assert (chosen.run, chosen.pool) == (4, 4 * runs)
    chosen = add_buckets(order, Bucket(run=100, pool=1000), costs, global_batch_size=64, window_samples=1)
    assert (chosen.run, chosen.pool) == (7, 63)


def test_a_state_of_buckets_is_of_version_6_and_damaged_ones_are_refused():
    order = BucketedOrder(seed=5, lanes=4, window=2, run=2, pool=6, index="tokens", costs="d" * 16)
    fields = {name: getattr(order, name) for name in ("seed", "shuffle", "lanes", "window", "piece")}
    state = LoaderState(fingerprint="f", num_samples=60, epoch=1, consumed=8, bucket=order.bucket, **fields)
    saved = state.to_dict()
    assert saved["version"] == 6
    assert LoaderState.from_dict(saved) == state
    assert LoaderState.from_dict(saved).order == order
    bucket: dict[str, Any] = saved["bucket"]
    for damaged in ({}, {**bucket, "run": 7}, {**bucket, "run": "2"}, {**bucket, "more": 1}, {"run": 1, "pool": 2}):
        with pytest.raises(StateMismatchError, match="damaged"):
            LoaderState.from_dict({**saved, "bucket": damaged})


# -- budgets ---------------------------------------------------------------------------------------------------------


def cut_naively(tokens: list[int], first: int, budget: StepBudget, last_batch: str) -> list[int]:
    """Bounds of the batches from a position on, each found by adding sample after sample."""

    def fits(rows: list[int], more: int = 0) -> bool:
        if not budget.padded:
            return sum(rows) + more * max(rows) <= budget.tokens
        count = -(-(len(rows) + more) // budget.multiple) * budget.multiple
        return count * max(rows) <= budget.tokens

    bounds = [first]
    while bounds[-1] < len(tokens):
        rest = [max(1, n) for n in tokens[bounds[-1] :]]
        if fits(rest):
            is_full = len(rest) % budget.multiple == 0 and not fits(rest, budget.multiple)
            if last_batch != "drop" or is_full:
                bounds.append(len(tokens))
            break
        count = 0
        while count + budget.multiple <= len(rest) and fits(rest[: count + budget.multiple]):
            count += budget.multiple
        bounds.append(bounds[-1] + count)
    return bounds


@settings(max_examples=80)
@given(
    sizes_of_chunks,
    orders,
    st.integers(50, 400),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["drop", "partial"]),
    st.data(),
)
def test_batches_under_a_budget_are_those_of_a_greedy_count_from_any_of_their_bounds(
    sizes, order, tokens, world_size, whole, padded, last_batch, data
):
    costs = make_costs(int(sizes.sum()))
    told = TokenBudget(tokens=tokens * (world_size if whole else 1), whole=whole, padded=padded)
    budget = StepBudget.of(told, costs, world_size)
    plan = EpochPlan(sizes, order, 0)
    numbers = costs.values[ids_by_position(plan)].tolist()
    expected = cut_naively(numbers, 0, budget, last_batch)
    steps = BudgetSteps(plan, budget, last_batch)
    assert steps.bounds(0, 10**6).tolist() == expected
    assert steps.count(0) == len(expected) - 1
    at = data.draw(st.integers(0, len(expected) - 1))
    fresh = BudgetSteps(plan, budget, last_batch)  # a resume
    assert fresh.count(expected[at]) == steps.count(expected[at]) == len(expected) - 1 - at
    assert fresh.bounds(expected[at], 2).tolist() == expected[at : at + 3]
    assert fresh.ahead(expected[at], 2) == min(2, len(expected) - 1 - at)
    for low, high in pairwise(expected[:-1]):
        assert high - low >= world_size
        if padded and not whole:
            parts = [rank_ids(plan, Share(r, world_size, 1, budget=budget), low, 1)[0] for r in range(world_size)]
            assert len(set(map(len, parts))) == 1
            assert all(len(part) * max(1, costs.values[part].max()) <= tokens for part in parts)


def test_a_budget_below_the_longest_sample_is_refused_by_its_name():
    costs = SampleCosts(np.array([3, 90, 5], np.uint16), "d" * 16)
    with pytest.raises(PartitionError, match=r"batch_tokens=89: sample 1 has 90 tokens.* at least 90,"):
        StepBudget.of(TokenBudget(tokens=89), costs, 4)
    with pytest.raises(PartitionError, match=r"sample 1 .*in each of 4 ranks' parts; give at least 360"):
        StepBudget.of(TokenBudget(tokens=300, whole=True), costs, 4)


# -- models ----------------------------------------------------------------------------------------------------------


def test_the_quadratic_cost_is_n_plus_n_squared_over_six_widths():
    costs = SampleCosts(np.array([0, 10, 65535], np.uint16), "", Cost(model="quadratic", hidden_size=4))
    assert costs.of(np.arange(3)).tolist() == [0, 10 + 100 // 24, 65535 + 65535**2 // 24]


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (lambda n: n / (1 + n.sum()), "changes with the other samples"),
        (lambda n: -n.astype(float) - 1, "costs are from 0"),
        (lambda n: n * float("nan"), "costs are from 0"),
        (lambda n: [1], "of shape"),
        (lambda n: n.astype(str), "returned <U"),
    ],
)
def test_functions_that_are_no_costs_of_single_samples_are_refused(model, problem):
    costs = SampleCosts(np.arange(100, dtype=np.uint16), "", Cost(model=model))
    with pytest.raises(ConfigError, match=problem):
        costs.check_function()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"model": "cubic"}, "'linear', 'quadratic' or a function"),
        ({"model": "quadratic"}, "needs hidden_size="),
        ({"hidden_size": 8}, "only the quadratic"),
        ({"model": "quadratic", "hidden_size": 0}, "at least 1"),
        ({"index": ""}, "name of an index"),
    ],
)
def test_costs_that_cannot_be_are_refused(options, problem):
    with pytest.raises(ConfigError, match=problem):
        Cost(**options)


# -- forecasts ---------------------------------------------------------------------------------------------------------


def test_a_forecast_knows_what_is_padding_and_how_uneven_ranks_are():
    sizes = np.full(64, 32, np.int64)
    order = Order(lanes=16, window=4)
    plan = EpochPlan(sizes, order, 0)
    given: dict[str, Any] = {"world_size": 4, "global_batch_size": 64}
    for alike in (True, False):
        values = np.full(2048, 7, np.uint16) if alike else make_costs(2048, most=500).values
        costs = SampleCosts(values, "d" * 16)
        bucketed = add_buckets(order, Bucket(), costs, global_batch_size=64, window_samples=128.0)
        plans = plan, plan_epoch(sizes, bucketed, 0, None, costs)
        budget = StepBudget.of(TokenBudget(tokens=2000), costs, 4)
        found = forecast_costs(*plans, costs, **given, bucket=(64, 2048), budget=budget)
        if alike:
            assert (found.skew, found.skew_by_cost, found.padding, found.bucket_padding) == (1, 1, 0, 0)
            assert (found.budget_batches, found.budget_padding) == (2048 // (2000 // 7 * 4), 0)
            continue
        ids = [rank_ids(plan, Share(rank, 4, 64), 0, 32) for rank in range(4)]
        parts = [[values[batch].astype(np.int64) for batch in part] for part in ids]
        skews = [max(map(np.sum, step)) / np.mean([part.sum() for part in step]) for step in zip(*parts, strict=True)]
        padded = sum(len(batch) * batch.max() for part in parts for batch in part)
        assert found.skew == pytest.approx(np.mean(skews))
        assert found.padding == pytest.approx(1 - values.sum() / padded)
        assert found.skew_by_cost < 1 + (found.skew - 1) / 2
        assert found.bucket_padding < found.padding / 3


@pytest.mark.parametrize("world_size", [1, 4, 16])
def test_buckets_read_each_chunk_as_often_as_the_plain_order(world_size):
    sizes = np.full(64, 32, np.int64)  # four chunks a lane
    costs = make_costs(2048)
    bucketed = BucketedOrder(lanes=16, window=2, run=4, pool=32, index="tokens", costs=costs.digest)
    for plan in (EpochPlan(sizes, Order(lanes=16, window=2), 0), plan_epoch(sizes, bucketed, 0, None, costs)):
        assert count_reads(plan, world_size=world_size, global_batch_size=64) == 1.0
