"""The spread of clocks stays within the staleness; quorums close, wait and fail by the clock that they are given."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.trainer.errors import TrainerConfigError
from penstock.trainer.server.policies import AnyPolicy, Asp, Bsp, Quorum, Ssp, parse_policy


def run_schedule(policy: AnyPolicy, workers: int, schedule: list[int]) -> list[tuple[dict[str, int], str]]:
    """Have one worker after another, as scheduled, begin a step or finish it; returns the clocks at each beginning."""
    clocks = {f"w{index}": 0 for index in range(workers)}
    running: set[str] = set()
    begun = []
    for turn in schedule:
        worker = f"w{turn % workers}"
        if worker in running:
            running.remove(worker)
            clocks[worker] += 1
        elif not policy.slow_workers(clocks, clocks[worker]):
            running.add(worker)
            begun.append((dict(clocks), worker))
        for one in running:  # at every moment, not only at the beginning
            assert not isinstance(policy, Ssp) or clocks[one] - min(clocks.values()) <= policy.staleness
    return begun


SCHEDULES = st.lists(st.integers(0, 11), max_size=150)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 4), st.integers(1, 4), SCHEDULES)
def test_nobody_computes_further_ahead_than_the_staleness(staleness: int, workers: int, schedule: list[int]) -> None:
    run_schedule(Ssp(staleness), workers, schedule)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), SCHEDULES)
def test_a_staleness_of_zero_is_bulk_synchronous(workers: int, schedule: list[int]) -> None:
    assert run_schedule(Ssp(0), workers, schedule) == run_schedule(Bsp(), workers, schedule)
    assert Ssp(0).merges == Bsp().merges


@given(st.integers(0, 3), st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9), min_size=1))
def test_somebody_can_always_go_on(staleness: int, clocks: dict[str, int]) -> None:
    slowest = min(clocks, key=lambda worker: clocks[worker])
    for policy in (Ssp(staleness), Bsp(), Asp()):
        assert policy.slow_workers(clocks, clocks[slowest]) == []


def test_a_worker_hears_whom_it_waits_for() -> None:
    clocks = {"a": 5, "b": 2, "c": 3}
    assert Ssp(2).slow_workers(clocks, 5) == ["b"]
    assert Bsp().slow_workers(clocks, 5) == ["b", "c"]
    assert Asp().slow_workers(clocks, 5) == []


def test_a_quorum_waits_for_its_grace_or_for_all() -> None:
    policy = Quorum(least=2, grace=3.0, patience=10.0)
    assert policy.verdict({}, "abc", 99.0) == "open"
    assert policy.verdict({"a": 1.0}, "abc", 10.9) == "open"
    assert policy.verdict({"a": 1.0}, "abc", 11.0) == "failed"
    assert policy.verdict({"a": 1.0, "b": 5.0}, "abc", 7.9) == "open"
    assert policy.verdict({"a": 1.0, "b": 5.0}, "abc", 8.0) == "close"
    assert policy.verdict({"a": 1.0, "b": 5.0, "c": 5.5}, "abc", 5.5) == "close"


@pytest.mark.parametrize(
    ("text", "policy"),
    [("bsp", Bsp()), ("asp", Asp()), ("ssp(4)", Ssp(4)), ("quorum(3, 0.5)", Quorum(least=3, grace=0.5))],
)
def test_policies_are_written_in_words(text: str, policy: AnyPolicy) -> None:
    assert parse_policy(text) == policy


@pytest.mark.parametrize("text", ["", "ssp", "ssp()", "ssp(-1)", "ssp(1", "bsp(1)", "quorum(0, 1)", "quorum(1, -1)"])
def test_impossible_policies_are_refused(text: str) -> None:
    with pytest.raises(TrainerConfigError, match=re.compile("policy=|staleness=-1|quorum of 0|grace=-1")):
        parse_policy(text)
