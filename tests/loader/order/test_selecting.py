"""Subsets and weights are arithmetic too: the same samples on any number of ranks, and orders that are pinned."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.loader.errors import ConfigError, PartitionError
from penstock.loader.order import selecting as subset_module
from penstock.loader.order.permutation import IntArray, stream_key
from penstock.loader.order.plan import EpochPlan, Order, Share, count_steps
from penstock.loader.order.selecting import Selection, Subset, Weights
from penstock.loader.order.spans import EpochSpans, chunks_by_first_use

MASK = (1 << 64) - 1
chunk_sizes = st.lists(st.integers(1, 30), min_size=1, max_size=30).map(lambda sizes: np.array(sizes, np.int64))
seeds = st.integers(0, 2**64 - 1)
orders = st.builds(
    Order,
    seed=seeds,
    lanes=st.sampled_from([1, 2, 16, 64]),
    window=st.integers(1, 5),
    piece=st.sampled_from([0, 0, 1, 4]),
)


def random_number(sample_id: int, seed: int) -> int:
    """A sample's random number, by SplitMix64's definition."""
    value = (stream_key(3, seed) + (sample_id + 1) * 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def naive_subset(subset: Subset, num_samples: int) -> set[int]:
    """A subset's sample ids, by the definition."""
    by_number = sorted(range(num_samples), key=lambda sample_id: random_number(sample_id, subset.seed))
    if subset.unit == "count":
        return set(by_number[int(subset.start) : None if subset.stop is None else int(subset.stop)])
    low, high = Fraction(subset.start) * 2**64, Fraction(subset.stop or 1) * 2**64
    return {one for one in by_number if math.floor(low) <= random_number(one, subset.seed) < math.floor(high)}


def selected(selection: Selection, chunks: int) -> list[int]:
    starts = np.concatenate(([0], selection._starts[1:]))
    return [int(starts[chunk]) + row for chunk in range(chunks) for row in selection.rows_of(chunk).tolist()]


def rank_batches(plan: EpochPlan, share: Share, first: int = 0) -> list[list[int]]:
    """A rank's batches from a position on, as sample ids, as the loader plans them."""
    spans = EpochSpans(plan, share)
    ids_of = np.concatenate(([0], np.cumsum(plan.chunk_samples)))
    batches: list[list[int]] = []
    left = count_steps(plan.num_samples, first, share.global_batch_size, "partial")
    while left:
        steps = min(3, left)
        span, entered = spans.plan_span(first, steps)
        asked = set(chunks_by_first_use(entered))
        rows: IntArray = np.full(span.num_rows, -1, np.int64)
        for group in spans.expand(span):
            assert len(asked) == 0 or group.chunk in asked or first > 0
            assert (rows[group.targets] == -1).all()
            rows[group.targets] = ids_of[group.chunk] + group.rows
            assert (group.rows >= 0).all()
            assert (group.rows < plan.chunk_samples[group.chunk]).all()
        batches += [
            rows[a : a + n].tolist() for a, n in zip(span.row_starts[:-1], span.num_valid.tolist(), strict=True)
        ]
        first, left = int(span.bounds[-1]), left - steps
        list(spans.close_windows(first))
        spans.next_uses(first)
    return batches


@st.composite
def subsets(draw: st.DrawFn, num_samples: int) -> Subset:
    seed = draw(seeds)
    if draw(st.booleans()):
        edges = sorted(draw(st.lists(st.floats(0, 1), min_size=2, max_size=2, unique=True)))
        return Subset.share(edges[0], edges[1], seed=seed)
    skip = draw(st.integers(0, num_samples - 1))
    return Subset.take(draw(st.none() | st.integers(1, num_samples - skip)), skip=skip, seed=seed)


@settings(max_examples=80, deadline=None)
@given(chunk_sizes, st.data())
def test_a_subset_is_what_its_definition_says(sizes, data):
    subset = data.draw(subsets(int(sizes.sum())))
    expected = naive_subset(subset, int(sizes.sum()))
    if not expected:
        with pytest.raises(PartitionError, match=r"none of the data set's .* samples"):
            Selection(sizes, subset)
        return
    selection = Selection(sizes, subset)
    assert selected(selection, len(sizes)) == sorted(expected)
    assert selection.num_samples == len(expected)
    assert [selection.id_at(place) for place in range(len(expected))] == sorted(expected)
    for sample_id in (-1, *range(int(sizes.sum())), int(sizes.sum())):
        place = selection.place_of(sample_id)
        assert (place is None) == (sample_id not in expected)
        assert place is None or selection.id_at(place) == sample_id


def test_what_is_decided_in_blocks_is_decided_alike(monkeypatch):
    sizes = np.array([3, 70, 1, 1, 40, 200, 5], np.int64)
    whole = [Selection(sizes, one) for one in (Subset.share(0.2, 0.7), Subset.take(100, skip=30))]
    weighted = Selection(sizes, Subset.share(0, 0.5), Weights.read(np.arange(1, 321)))
    monkeypatch.setattr(subset_module, "BLOCK", 64)
    for one in whole:
        assert Selection(sizes, one.subset).counts.tolist() == one.counts.tolist()
    again = Selection(sizes, weighted.subset, weighted.weights)
    assert again.parts(0, 0).samples.tolist() == weighted.parts(0, 0).samples.tolist()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(chunk_sizes, orders, st.data())
def test_every_sample_of_a_subset_comes_once_on_any_ranks_through_any_stop(sizes, order, data):
    subset = data.draw(subsets(int(sizes.sum())))
    expected = naive_subset(subset, int(sizes.sum()))
    if not expected:
        return
    plan = EpochPlan(sizes, order, 1, Selection(sizes, subset))
    consumed, delivered = 0, []
    while consumed < len(expected):
        world_size, batch, steps = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(1, 6)))
        of_ranks = [
            rank_batches(plan, Share(rank, world_size, batch * world_size), consumed) for rank in range(world_size)
        ]
        assert len({len(batches) for batches in of_ranks}) == 1
        alone = rank_batches(plan, Share(0, 1, batch * world_size), consumed)
        for together, one in zip(zip(*of_ranks, strict=True), alone, strict=True):
            assert [x for part in together for x in part] == one
        delivered += [x for step in alone[:steps] for x in step]
        consumed = min(len(expected), consumed + steps * world_size * batch)
    assert sorted(delivered) == sorted(expected)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=5), seeds)
def test_a_split_is_disjoint_and_complete(parts, seed):
    shares = {str(number): part / sum(parts) for number, part in enumerate(parts)}
    found = [naive_subset(one, 200) for one in Subset.split(shares, seed=seed).values()]
    assert sorted(x for part in found for x in part) == list(range(200))


def test_shares_and_counts_hold_smaller_ones_and_a_share_keeps_its_samples_when_the_data_grow():
    for small, large in (
        (Subset.share(0, 0.1), Subset.share(0, 0.3)),
        (Subset.take(10), Subset.take(50)),
    ):
        assert naive_subset(small, 300) < naive_subset(large, 300)
    assert naive_subset(Subset.share(0.9, 1), 300) == {x for x in naive_subset(Subset.share(0.9, 1), 500) if x < 300}
    assert not naive_subset(Subset.take(10), 300) & naive_subset(Subset.take(skip=10), 300)
    assert naive_subset(Subset.share(0, 0.5), 300) != naive_subset(Subset.share(0, 0.5, seed=1), 300)


def test_chunks_without_a_chosen_sample_are_no_part_of_the_order():
    sizes = np.full(200, 5, np.int64)
    selection = Selection(sizes, Subset.take(20))
    spans = EpochSpans(EpochPlan(sizes, Order(), 0, selection), Share(0, 1, 20))
    _, entered = spans.plan_span(0, 1)
    assert set(chunks_by_first_use(entered)) == set(np.flatnonzero(selection.counts).tolist())
    assert 0 < np.count_nonzero(selection.counts) <= 20


# -- weights ---------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(chunk_sizes, orders, st.integers(1, 4), st.data())
def test_draws_keep_to_their_weights_and_are_the_same_on_any_ranks(sizes, order, world_size, data):
    total = int(sizes.sum())
    by_chunk = data.draw(st.booleans())
    count = len(sizes) if by_chunk else total
    weights_of = np.array(data.draw(st.lists(st.floats(0.01, 50), min_size=count, max_size=count)))
    subset = data.draw(st.none() | st.builds(Subset.share, st.just(0.0), st.floats(0.3, 1), seed=seeds))
    members = range(total) if subset is None else sorted(naive_subset(subset, total))
    if not len(members):
        return
    selection = Selection(sizes, subset, Weights.read(weights_of, by_chunk=by_chunk))
    plan = EpochPlan(sizes, order, 3, selection)
    batch = data.draw(st.integers(1, 40)) * world_size
    alone = rank_batches(plan, Share(0, 1, batch))
    of_ranks = [rank_batches(plan, Share(rank, world_size, batch)) for rank in range(world_size)]
    for together, one in zip(zip(*of_ranks, strict=True), alone, strict=True):
        assert [x for part in together for x in part] == one
    drawn = np.bincount([x for step in alone for x in step], minlength=total)
    assert drawn.sum() == len(members)
    weights = np.zeros(total)
    weights[members] = (np.repeat(weights_of, sizes) if by_chunk else weights_of)[members]
    expected = weights / weights.sum() * len(members)
    edges = np.cumsum(sizes) - sizes
    in_chunk, of_chunk = np.add.reduceat(drawn, edges), np.add.reduceat(expected, edges)
    assert (np.abs(in_chunk - of_chunk) < 1 + 1e-6 * total).all()
    # A sample's draws are its part of its chunk's draws, to within one.
    part = expected / np.repeat(np.maximum(of_chunk, 1e-12), sizes)
    assert (np.abs(drawn - part * np.repeat(in_chunk, sizes)) < 1 + 1e-5 * total).all()


@pytest.mark.slow
def test_over_many_epochs_every_sample_comes_as_often_as_its_weight_says():
    sizes = np.full(10, 30, np.int64)
    weights = np.tile([1.0, 3.0], 150)  # kinds that alternate, as of pairs
    selection = Selection(sizes, None, Weights.read(weights))
    drawn = np.zeros(300)
    of_epochs = []
    for epoch in range(400):
        parts = selection.parts(7, epoch)
        for part, chunk in enumerate(parts.chunks.tolist()):
            np.add.at(drawn, 30 * chunk + parts.rows_of(part), 1)
        of_epochs.append(drawn[1::2].sum() / (300 * (epoch + 1)))
    expected = weights / 2 * 400
    assert np.abs(drawn - expected).max() < 5 * math.sqrt(400 * 0.25)
    # Both kinds have their share in each epoch, not only on average.
    assert max(abs(share - 0.75) for share in of_epochs) < 0.03


def test_a_class_of_ten_times_the_weight_repeats_far_apart():
    sizes = np.full(64, 20, np.int64)
    weights = np.ones(64)
    weights[:4] = 10
    plan = EpochPlan(sizes, Order(), 0, Selection(sizes, None, Weights.read(weights, by_chunk=True)))
    batches = rank_batches(plan, Share(0, 1, 32))
    repeats = sum(len(batch) - len(set(batch)) for batch in batches)
    assert len({x for batch in batches for x in batch if x < 80}) == 80
    assert repeats < plan.num_samples * 0.06  # of a uniform shuffle 3% are expected; side by side it would be a third


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 0.0, 2.0], r"weights\[1\]=0\.0 \(1 such\).*positive"),
        ([1.0, -1.0, float("nan")], r"weights\[1\]=-1\.0 \(2 such\)"),
        ([1.0, float("inf"), 1.0], r"weights\[1\]=inf"),
        ([], "one weight a sample"),
        ([[1.0, 2.0]], "one dimension"),
        (["a"], "not numbers"),
        ([1.0, 1e-12, 1.0], r"weights\[1\]=1e-12 is below a billionth"),
        ([1.0, 1.0], "2 of them for 3 samples"),
    ],
)
def test_weights_that_cannot_be_are_refused(weights, message):
    with pytest.raises(ConfigError, match=message):
        Selection(np.array([2, 1], np.int64), None, Weights.read(weights))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Subset.share(0.5, 0.5), "0 <= start < stop <= 1"),
        (lambda: Subset.share(0, 95), "0 <= start < stop <= 1"),
        (lambda: Subset.share(float("nan"), 1), "0 <= start < stop <= 1"),
        (lambda: Subset.share("0", 1), "start='0'"),
        (lambda: Subset.split({"train": 0.9, "val": 0.2}), r"add up to 1, not 1\.1"),
        (lambda: Subset.split({"train": 1.5, "val": -0.5}), "positive"),
        (lambda: Subset.take(0), "count 1 or more"),
        (lambda: Subset.take(5, skip=-1), "skip must be 0"),
        (lambda: Subset.take(0.1), r"count=0\.1 is not a whole number"),
        (lambda: Subset.share(0, 1, seed=-1), "seed=-1"),
        (lambda: Selection(np.array([5]), Subset.take(6)), "has 5 samples; take and skip fewer"),
        (lambda: Selection(np.array([5]), Subset.take(skip=5)), "has 5 samples"),
    ],
)
def test_subsets_that_cannot_be_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


SIZES = (np.arange(60, dtype=np.int64) * 37) % 50 + 1
SELECTIONS = {
    "share": (Subset.share(0.1, 0.6, seed=4), None),
    "take": (Subset.take(500, skip=50), None),
    "weights": (None, Weights.read(np.arange(int(SIZES.sum())) % 7 + 1)),
    "chunks": (Subset.share(0, 0.8), Weights.read(np.arange(60) % 9 + 0.5, by_chunk=True)),
}
GOLDEN = {
    ("share", 0): "3494fff50124368d",
    ("share", 1): "75c6e95fa4ead4c5",
    ("take", 0): "aa7606586cc8ac22",
    ("take", 1): "09e9c3726788ebde",
    ("weights", 0): "62613e384062e3a4",
    ("weights", 1): "5defd523db30d87e",
    ("chunks", 0): "34f92ab56a0e87c1",
    ("chunks", 1): "e29b711b756a8ff7",
}


@pytest.mark.parametrize(("name", "piece"), GOLDEN)
def test_the_order_of_a_selection_never_changes(name, piece):
    plan = EpochPlan(SIZES, Order(seed=5, piece=piece), 2, Selection(SIZES, *SELECTIONS[name]))
    ids = np.concatenate(rank_batches(plan, Share(0, 1, 64)))
    assert hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()[:16] == GOLDEN[name, piece]
