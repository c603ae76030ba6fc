"""Weights follow measured bandwidth where that ends a run sooner, and stay what they are otherwise."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.trainer.server.bandwidth import Bandwidth
from penstock.trainer.server.coordinator import Coordinator, Identity
from penstock.trainer.server.placement import BUCKETS, Placement, moves
from penstock.trainer.server.services import DataPlan

MB = 1e6


def measured(speeds: dict[str, float], *, seconds: float = 10.0, rate: float = 50.0) -> Bandwidth:
    """Measure shards that each move their equal share of so many MB a second."""
    found = Bandwidth()
    for second in range(int(seconds)):
        for shard, speed in speeds.items():
            share = rate / len(speeds)
            found.note(shard, share * MB, share / speed, float(second))
    return found


def test_speed_is_bytes_over_seconds_and_old_calls_count_less() -> None:
    found = measured({"a": 200.0, "b": 50.0})
    assert found.speeds == pytest.approx({"a": 200.0, "b": 50.0})
    for second in range(100, 200):
        found.note("a", 20 * MB, 1.0, float(second))
    assert found.speeds["a"] == pytest.approx(20, rel=0.05)


def test_too_little_says_nothing_of_a_speed() -> None:
    found = Bandwidth()
    found.note("a", 1 * MB, 0.001, 0.0)
    found.note("b", 0.0, 1.0, 0.0)
    assert found.speeds == {}
    assert found.weigh(Placement({"a": 1.0}), held_bytes=1.0, left_s=1e9, now=1e9) is None


@pytest.mark.parametrize(
    ("speeds", "left_s", "held", "expected"),
    [
        ({"a": 100.0, "b": 50.0}, 3600.0, 100 * MB, {"a": 100.0, "b": 50.0}),
        ({"a": 123.4, "b": 41.23}, 3600.0, 100 * MB, {"a": 120.0, "b": 41.0}),
        ({"a": 100.0, "b": 90.0}, 3600.0, 100 * MB, None),  # hardly faster
        ({"a": 100.0, "b": 50.0}, 1.0, 100 * MB, None),  # soon over
        ({"a": 100.0, "b": 50.0}, 3600.0, 1e9 * MB, None),  # too much to move
    ],
)
def test_weights_become_speeds_where_that_pays(
    speeds: dict[str, float], left_s: float, held: float, expected: dict[str, float] | None
) -> None:
    placement = Placement(dict.fromkeys(speeds, 1.0))
    assert measured(speeds).weigh(placement, held_bytes=held, left_s=left_s, now=10.0) == expected


def test_weights_rest_after_a_change_and_while_buckets_move() -> None:
    found, equal = measured({"a": 100.0, "b": 50.0}), Placement({"a": 1.0, "b": 1.0})
    moving = Placement({"a": 1.0, "b": 1.0}, {7: "a" if equal.shard_of(7) == "b" else "b"})
    assert found.weigh(moving, held_bytes=1.0, left_s=1e6, now=10.0) is None
    assert found.weigh(equal, held_bytes=1.0, left_s=1e6, now=10.0) is not None
    assert found.weigh(equal, held_bytes=1.0, left_s=1e6, now=30.0) is None
    assert found.weigh(equal, held_bytes=1.0, left_s=1e6, now=80.0) is not None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(5.0, 500.0), min_size=2, max_size=5),
    st.floats(1.0, 1e4),
    st.floats(1.0, 1e5),
)
def test_a_change_saves_more_time_than_it_takes(speeds: list[float], left_s: float, held_mb: float) -> None:
    by_name = {f"shard-{index}": speed for index, speed in enumerate(speeds)}
    equal = Placement(dict.fromkeys(by_name, 1.0))
    wanted = measured(by_name).weigh(equal, held_bytes=held_mb * MB, left_s=left_s, now=9.0)
    if wanted is None:
        return
    rate = 50.0 * 10 / 9  # MB a second, as it was measured

    def busy(placement: Placement) -> float:
        """Seconds of the slowest shard for all that is left, bucket by bucket."""
        by_bucket = rate * left_s / BUCKETS
        return max(len(placement.buckets_of(shard)) * by_bucket / speed for shard, speed in by_name.items())

    after = Placement(wanted)
    cost = len(moves(equal, after)) / BUCKETS * held_mb / min(speeds)
    assert busy(after) + cost < busy(equal)


def test_a_coordinator_weighs_what_workers_measure_and_its_state_has_the_weights() -> None:
    plan = DataPlan(batches=1000, units=1000, rows=1, span=10, workers=1)
    one = Coordinator(plan, Identity(run="r", schema="s"), shards={"a": 1.0, "b": 1.0}, silence_s=1e9)
    begun = one.begin("w", 0.0)
    for second in range(10):
        one.measure({"a": (80 * MB, 0.4), "b": (80 * MB, 1.6)}, float(second))
        lease = one.lease("w", begun.incarnation, second - 1, float(second))
        assert lease is not None
        one.consume("w", begun.incarnation, lease.number, lease.stop, float(second))
    assert one.speeds == pytest.approx({"a": 200.0, "b": 50.0})
    wanted = one.weigh(10 * MB, 10.0)
    assert wanted == {"a": 200.0, "b": 50.0}
    one.place(wanted, 10.0)
    assert one.state_dict()["shards"] == wanted
    assert not one.placement.is_settled
