"""What of an order is chosen, and which orders cannot be."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from penstock.loader.errors import ConfigError, PartitionError
from penstock.loader.order.plan import (
    Order,
    auto_lanes,
    auto_piece,
    auto_window,
    share_bounds,
)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lanes": 12}, "lanes=12 is not a power of two; use 16"),
        ({"lanes": 0}, "lanes=0"),
        ({"window": 0}, "window=0"),
        ({"seed": -1}, "seed=-1"),
        ({"piece": -1}, "piece=-1"),
        ({"piece": 4, "shuffle": False}, "piece=4 without shuffle"),
    ],
)
def test_impossible_orders_say_what_would_do(wrong, message):
    with pytest.raises(ConfigError, match=message):
        replace(Order(), **wrong)


@pytest.mark.parametrize("weights", [(1.0,), (1.0, -1.0), (0.0, 1.0), (1.0, float("inf"))])
def test_shares_that_cannot_be_are_refused(weights):
    with pytest.raises(PartitionError, match="one a rank"):
        share_bounds(np.array([10]), 2, weights)


def test_auto_lanes_are_one_only_in_order_on_one_rank():
    assert auto_lanes(shuffle=False, world_size=1) == 1
    assert auto_lanes(shuffle=True, world_size=1) == 16
    assert auto_lanes(shuffle=False, world_size=2) == 16
    assert auto_lanes(shuffle=True, world_size=5) == 32
    assert auto_lanes(shuffle=True, world_size=1000) == 4096


@pytest.mark.parametrize(
    ("chunks", "memory", "piece"),
    [(1, 1 << 40, 1), (8, 64 << 20, 1), (8, (64 << 20) + 1, 0), (63, 1 << 20, 1), (64, 1 << 20, 0)],
)
def test_few_chunks_that_a_rank_may_hold_are_shuffled_by_rows(chunks, memory, piece):
    made = {"num_chunks": chunks, "num_samples": 10**6, "memory_bytes": memory}
    assert auto_piece(shuffle=True, lanes=16, **made) == piece
    assert auto_piece(shuffle=False, lanes=16, **made) == 0


def test_an_order_has_at_most_a_million_pieces():
    piece = auto_piece(shuffle=True, lanes=16, num_chunks=1, num_samples=10**10, memory_bytes=1)
    assert math.ceil(10**10 / piece) <= 1 << 20
    assert auto_window(lanes=16, mean_chunk_bytes=1, piece=piece) >= 1


def test_auto_window_shrinks_with_lanes_and_with_large_chunks():
    assert auto_window(lanes=16, mean_chunk_bytes=4 << 20) == 4
    assert auto_window(lanes=4096, mean_chunk_bytes=4 << 20) == 2
    assert auto_window(lanes=16, mean_chunk_bytes=100 << 20) == 1
