"""Order is arithmetic: every sample once, the same global batches on any number of ranks, an order that is pinned."""

from __future__ import annotations

import hashlib
import sys
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.loader.order.permutation import IntArray, permutation
from penstock.loader.order.plan import (
    EpochPlan,
    Order,
    Share,
    batch_bounds,
    bit_reverse,
    count_steps,
    lane_offsets,
    lane_sizes,
    lane_turns,
    piece_order,
    rank_segments,
    share_bounds,
)
from penstock.loader.order.spans import EpochSpans, chunks_by_first_use

common = {
    "seed": st.integers(0, 2**64 - 1),
    "lanes": st.sampled_from([1, 2, 4, 16, 64]),
    "window": st.integers(1, 5),
}


orders = st.one_of(
    st.builds(Order, shuffle=st.booleans(), **common), st.builds(Order, piece=st.integers(1, 7), **common)
)


chunk_sizes = st.lists(st.integers(1, 30), min_size=1, max_size=40).map(lambda sizes: np.array(sizes, np.int64))


def first_ids(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(sizes)))


def naive_sample_at(sizes: np.ndarray, order: Order, epoch: int, position: int) -> int:
    """The sample id at a position, by the definition, one at a time: the specification of the fast path."""
    plan = EpochPlan(sizes, order, epoch)
    bits = order.lanes.bit_length() - 1
    lane = int(format(position % order.lanes, f"0{bits}b")[::-1], 2) if bits else 0
    offset = position // order.lanes
    lane_start = int(plan.lane_starts[lane])
    ranges = [piece for chunk, size in enumerate(sizes.tolist()) for piece in naive_pieces(chunk, size, order.piece)]
    stream = [(index, sample) for index in piece_order(len(ranges), order, epoch).tolist() for sample in ranges[index]]
    pieces = [
        [sample for _, sample in piece]
        for _, piece in groupby(stream[lane_start : int(plan.lane_starts[lane + 1])], key=lambda one: one[0])
    ]
    for index in range(len(pieces)):
        samples = [sample for piece in pieces[index * order.window :][: order.window] for sample in piece]
        if offset < len(samples):
            window = plan.open_window(lane, index)
            place = int(window.permutation[offset]) if window.permutation is not None else offset
            chunk, row = samples[place]
            return int(first_ids(sizes)[chunk]) + row
        offset -= len(samples)
    raise AssertionError("position past the end")


def naive_pieces(chunk: int, size: int, piece: int) -> list[list[tuple[int, int]]]:
    """The ranges of a chunk's rows, as (chunk, row), that the permutation moves together."""
    parts = -(-size // piece) if piece else 1
    return [[(chunk, row) for row in range(size * i // parts, size * (i + 1) // parts)] for i in range(parts)]


def rank_batches(
    sizes: IntArray,
    order: Order,
    epoch: int,
    share: Share,
    *,
    first: int = 0,
    last_batch: str = "partial",
    steps_at_once: int = 3,
    most: int = sys.maxsize,
) -> list[IntArray]:
    """Every batch of a rank, or so many, as arrays of sample ids, through spans as the loader plans them."""
    spans = EpochSpans(EpochPlan(sizes, order, epoch), share)
    ids_of = first_ids(sizes)
    left = min(most, count_steps(int(sizes.sum()), first, share.global_batch_size, last_batch))
    batches = []
    while left:
        steps = min(steps_at_once, left)
        span, _ = spans.plan_span(first, steps)
        rows = np.full(span.num_rows, -1, np.int64)
        for group in spans.expand(span):
            assert (rows[group.targets] == -1).all()
            rows[group.targets] = ids_of[group.chunk] + group.rows
        assert (rows >= 0).all()
        counts = np.diff(span.row_starts) if share.pad else span.num_valid
        batches += [rows[a : a + count] for a, count in zip(span.row_starts[:-1], counts, strict=True)]
        first, left = int(span.bounds[-1]), left - steps
        list(spans.close_windows(first))
    return batches


@given(st.integers(0, 12), st.data())
def test_bit_reversal_is_its_own_inverse_and_spreads_runs_evenly(bits, data):
    values = np.arange(1 << bits)
    turned = bit_reverse(values, bits)
    assert (bit_reverse(turned, bits) == values).all()
    blocks = data.draw(st.integers(0, bits))
    start = data.draw(st.integers(0, 1000))
    run = (start + np.arange(1 << blocks)) % (1 << bits)
    assert sorted(bit_reverse(run, bits) >> (bits - blocks)) == list(range(1 << blocks))


@given(st.integers(0, 5000), st.integers(0, 2**64 - 1))
def test_a_permutation_holds_every_index_once(size, key):
    assert (np.sort(permutation(size, key)) == np.arange(size)).all()


@given(st.integers(0, 10**12), st.sampled_from([1, 2, 16, 1024]))
def test_lanes_differ_by_at_most_one_sample(num_samples, lanes):
    sizes = lane_sizes(num_samples, lanes)
    assert sizes.sum() == num_samples
    assert sizes.max() - sizes.min() <= 1


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 16, 64]))
def test_lane_offsets_count_the_positions_before(position, lanes):
    turns = lane_turns(lanes)
    before = np.bincount(np.arange(position % lanes), minlength=lanes) + position // lanes
    assert (lane_offsets(np.array(position), turns) == before[turns]).all()


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(chunk_sizes, orders, st.integers(0, 3), st.data())
def test_the_fast_path_agrees_with_the_definition(sizes, order, epoch, data):
    total = int(sizes.sum())
    (batch,) = rank_batches(sizes, order, epoch, Share(0, 1, total))
    step_order = {int(i) for i in batch}
    assert step_order == set(range(total))
    by_position = {}
    for position in range(total):
        (one,) = rank_batches(sizes, order, epoch, Share(0, 1, 1), first=position, last_batch="drop", most=1)
        by_position[position] = int(one[0])
        if position > 20:
            break
    for position, sample in by_position.items():
        assert sample == naive_sample_at(sizes, order, epoch, position)


@settings(max_examples=150)
@given(chunk_sizes, orders, st.integers(0, 5), st.integers(1, 9), st.integers(1, 8))
def test_every_sample_comes_exactly_once_an_epoch_and_ranks_get_equal_numbers(sizes, order, epoch, world_size, batch):
    shares = [Share(rank, world_size, batch * world_size) for rank in range(world_size)]
    batches = [rank_batches(sizes, order, epoch, share) for share in shares]
    delivered = np.concatenate([ids for of_rank in batches for ids in of_rank])
    assert (np.sort(delivered) == np.arange(sizes.sum())).all()
    assert len({len(of_rank) for of_rank in batches}) == 1
    for step in zip(*batches, strict=True):
        lengths = [len(ids) for ids in step]
        assert max(lengths) - min(lengths) <= 1


@settings(max_examples=100)
@given(chunk_sizes, orders, st.integers(1, 12), st.sampled_from([2, 3, 4, 6, 12]))
def test_global_batches_are_the_same_sets_on_every_world_size(sizes, order, factor, world_size):
    global_batch = 12 * factor
    alone = rank_batches(sizes, order, 0, Share(0, 1, global_batch))
    together = [rank_batches(sizes, order, 0, Share(r, world_size, global_batch)) for r in range(world_size)]
    for step, parts in zip(alone, zip(*together, strict=True), strict=True):
        assert (np.concatenate(parts) == step).all()


@pytest.mark.slow
@settings(max_examples=150)
@given(chunk_sizes, orders, st.data())
def test_stopping_anywhere_and_going_on_with_other_ranks_repeats_and_skips_nothing(sizes, order, data):
    total, consumed, delivered = int(sizes.sum()), 0, []
    while consumed < total:
        world_size, batch = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 7))
        steps = data.draw(st.integers(1, 6))
        for rank in range(world_size):
            share = Share(rank, world_size, batch * world_size)
            delivered += rank_batches(sizes, order, 2, share, first=consumed)[:steps]
        consumed = min(total, consumed + steps * world_size * batch)
    assert (np.sort(np.concatenate(delivered)) == np.arange(total)).all()


@settings(max_examples=60)
@given(chunk_sizes, orders, st.integers(2, 6), st.integers(1, 5))
def test_padded_ranks_all_have_a_row_to_repeat(sizes, order, world_size, batch):
    for rank in range(world_size):
        share = Share(rank, world_size, batch * world_size, pad=True)
        assert all(len(ids) >= 1 for ids in rank_batches(sizes, order, 0, share))


@settings(max_examples=60)
@given(st.lists(st.integers(5, 40), min_size=64, max_size=120), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 7))
def test_ranks_that_divide_the_lanes_read_each_piece_once(sizes, world_size, batch):
    sizes = np.array(sizes, np.int64)
    order = Order(lanes=16, window=2)
    readers: dict[tuple[int, int, int], int] = {}
    pieces = 0
    for rank in range(world_size):
        spans = EpochSpans(EpochPlan(sizes, order, 0), Share(rank, world_size, batch * world_size))
        _, entered = spans.plan_span(0, count_steps(int(sizes.sum()), 0, batch * world_size, "drop"))
        for window in entered:
            key = (window.window.lane, window.window.index, 0)
            readers[key] = readers.get(key, 0) + 1
            pieces += len(window.chunks)
    # Read amplification is 1.00: no window of a lane is read by two ranks; only chunks on a lane's cut come twice.
    assert set(readers.values()) == {1}
    assert pieces <= len(sizes) + order.lanes - 1


@given(st.integers(1, 10**6), st.lists(st.floats(0.01, 100), min_size=1, max_size=9))
def test_weighted_shares_cover_the_batch_and_keep_to_proportion(size, weights):
    cuts = share_bounds(np.array([size]), len(weights), weights)[0]
    assert cuts[0] == 0
    assert cuts[-1] == size
    exact = size * np.array(weights) / sum(weights)
    assert (np.abs(np.diff(cuts) - exact) <= 1.0 + 1e-6 * size).all()


@given(st.integers(1, 10**6), st.lists(st.floats(0.01, 100), min_size=1, max_size=9), st.data())
def test_with_pad_no_rank_has_more_of_a_smaller_batch_than_of_a_full_one(full, weights, data):
    size = data.draw(st.integers(1, full))
    shares = [Share(rank, len(weights), full, weights, pad=True) for rank in range(len(weights))]
    [cuts] = shares[0].cuts(np.array([size]))
    assert cuts[0] == 0
    assert cuts[-1] == size
    parts = np.diff(cuts)
    most = np.array([share.batch_size for share in shares])
    assert (parts >= 0).all()
    assert (parts <= most).all()
    uncapped = share_bounds(np.array([size]), len(weights), weights)[0]
    if (np.diff(uncapped) <= most).all():
        assert (cuts == uncapped).all()


def test_weights_change_who_computes_but_no_global_batch():
    sizes = np.full(50, 13, np.int64)
    plain = rank_batches(sizes, Order(), 0, Share(0, 1, 32))
    weighted = [rank_batches(sizes, Order(), 0, Share(r, 3, 32, weights=(1, 2, 5))) for r in range(3)]
    for step, parts in zip(plain, zip(*weighted, strict=True), strict=True):
        assert (np.concatenate(parts) == step).all()
        assert len(parts[2]) > len(parts[0])


def test_epochs_and_seeds_have_orders_of_their_own():
    sizes = np.full(100, 10, np.int64)
    runs = [(Order(), 0), (Order(), 1), (Order(seed=1), 0)]
    orders_ = {tuple(np.concatenate(rank_batches(sizes, order, epoch, Share(0, 1, 50)))) for order, epoch in runs}
    assert len(orders_) == 3


def test_without_shuffle_and_with_one_lane_samples_come_in_manifest_order():
    sizes = np.array([3, 1, 4, 1, 5], np.int64)
    batches = rank_batches(sizes, Order(shuffle=False, lanes=1), 7, Share(0, 1, 4))
    assert np.concatenate(batches).tolist() == list(range(14))


def test_chunks_are_asked_for_in_the_order_in_which_they_are_used():
    sizes = np.full(100, 5, np.int64)
    spans = EpochSpans(EpochPlan(sizes, Order(lanes=4, window=3), 0), Share(0, 1, 8))
    span, entered = spans.plan_span(0, 20)
    first_step: dict[int, int] = {}
    for group in spans.expand(span):
        first_step[group.chunk] = int(np.searchsorted(span.row_starts, group.targets.min(), side="right"))
    steps = [first_step[chunk] for chunk in chunks_by_first_use(entered) if chunk in first_step]
    assert len(set(steps)) > 5
    assert steps == sorted(steps)


GOLDEN = {
    (0, 0): "a5ba87647e0b15de",
    (0, 1): "60854148392d3f00",
    (12345, 0): "345df6b20d0f000d",
}


@pytest.mark.parametrize(("seed", "epoch"), GOLDEN)
def test_the_order_of_a_seed_never_changes(seed, epoch):
    sizes = (np.arange(200, dtype=np.int64) * 37) % 50 + 1
    batches = rank_batches(sizes, Order(seed=seed, lanes=16, window=4), epoch, Share(0, 1, 64))
    digest = hashlib.sha256(np.concatenate(batches).astype("<i8").tobytes()).hexdigest()[:16]
    assert digest == GOLDEN[seed, epoch]


def test_the_order_of_pieces_never_changes():
    sizes = (np.arange(20, dtype=np.int64) * 37) % 50 + 1
    digests = []
    for piece in (1, 8):
        batches = rank_batches(sizes, Order(seed=5, lanes=16, window=100, piece=piece), 2, Share(0, 1, 64))
        digests.append(hashlib.sha256(np.concatenate(batches).astype("<i8").tobytes()).hexdigest()[:16])
    assert digests == ["935088f9fcb23809", "be24d3c701414ad6"]


def test_a_piece_as_large_as_any_chunk_is_the_order_of_whole_chunks():
    sizes = (np.arange(50, dtype=np.int64) * 37) % 50 + 1
    whole, one = (rank_batches(sizes, Order(piece=piece), 1, Share(0, 1, 32)) for piece in (0, 50))
    assert np.concatenate(whole).tolist() == np.concatenate(one).tolist()


def test_ranks_of_a_data_set_of_one_chunk_get_other_samples_in_every_epoch():
    def ids_of(epoch: int) -> set[int]:
        order = Order(lanes=32, window=4096, piece=1)
        return set(np.concatenate(rank_batches(np.array([5000]), order, epoch, Share(3, 8, 80))).tolist())

    first, second = ids_of(0), ids_of(1)
    assert len(first) == len(second) == 625
    # Chance has them share 625 / 8 = 78, with a standard deviation of 8.
    assert abs(len(first & second) - 78) < 40


def test_the_first_positions_of_a_small_epoch_are_as_they_always_were():
    batches = rank_batches(np.array([5, 3, 4, 6], np.int64), Order(lanes=4, window=2), 0, Share(0, 1, 6))
    assert [ids.tolist() for ids in batches] == [[6, 5, 14, 8, 10, 4], [13, 15, 16, 9, 3, 2], [7, 12, 17, 0, 11, 1]]


def test_a_billion_samples_in_a_million_chunks_plan_within_a_second_of_arithmetic():
    plan = EpochPlan(np.full(10**6, 1000, np.int64), Order(lanes=4096, window=2), 3)
    bounds = batch_bounds(10**8 // 32768 * 32768, 16, 32768, plan.num_samples)
    segments = rank_segments(bounds, plan.turns, 517, 1024)
    assert int((segments.stop - segments.start).sum()) == 16 * 32
    assert plan.open_window(int(segments.lane[0]), 5).stop > 0
