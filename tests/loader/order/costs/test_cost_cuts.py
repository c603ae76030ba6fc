"""Shares of a global batch cut by cost: what they promise of any costs, and of the best that there is."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.loader.order.costs.cuts import cut_by_cost

costs_of_samples = st.lists(
    st.one_of(st.integers(0, 4), st.integers(0, 5000), st.integers(0, 1 << 50)), min_size=0, max_size=60
)


def shares_of(costs: list[int], cuts: list[int]) -> list[int]:
    return [sum(costs[low:high]) for low, high in pairwise(cuts)]


@settings(max_examples=400)
@given(costs_of_samples, st.integers(1, 40))
@example([100, 1, 1, 1], 4)
@example([0, 0, 0, 0, 0], 3)
@example([1, 1, 5, 1, 1, 5], 4)
def test_any_two_ranks_differ_by_at_most_the_largest_cost_and_none_is_without_a_sample(costs, world_size):
    cuts = cut_by_cost(costs, world_size)
    assert cuts[0] == 0
    assert cuts[-1] == len(costs)
    assert len(cuts) == world_size + 1
    assert all(low <= high for low, high in pairwise(cuts))
    if len(costs) >= world_size:
        assert all(low < high for low, high in pairwise(cuts))
    shares = shares_of(costs, cuts)
    assert max(shares) - min(shares) <= max(costs, default=0)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.integers(1, 4))
def test_the_least_share_is_the_largest_that_any_cut_has(costs, world_size):
    """The reference tries all cuts."""
    every = combinations_with_replacement(range(len(costs) + 1), world_size - 1)
    best = max(min(shares_of(costs, [0, *inner, len(costs)])) for inner in every)
    assert min(shares_of(costs, cut_by_cost(costs, world_size))) == best


@given(st.integers(0, 200), st.integers(1, 20), st.integers(0, 9))
def test_equal_costs_are_equal_numbers_of_samples(count, world_size, cost):
    sizes = [high - low for low, high in pairwise(cut_by_cost([cost] * count, world_size))]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=200)
@given(st.lists(st.integers(1, 5000), min_size=20, max_size=60), st.lists(st.floats(0.2, 5), min_size=1, max_size=8))
def test_weighted_shares_are_near_their_ideal_and_none_is_without_a_sample(costs, weights):
    cuts = cut_by_cost(costs, len(weights), weights)
    assert (cuts[0], cuts[-1]) == (0, len(costs))
    assert all(low < high for low, high in pairwise(cuts))
    ideals = [sum(costs) * weight / sum(weights) for weight in weights]
    if min(ideals) >= max(costs):  # else a rank may have to take a sample that is more than its part
        for share, ideal in zip(shares_of(costs, cuts), ideals, strict=True):
            assert abs(share - ideal) <= max(costs) + 1e-6 * sum(costs)
