"""How long one try may take, when a second request is sent, and how many are."""

from __future__ import annotations

import pytest

from penstock.storage.retrying.adaptive_timeout import MAX_FACTOR, ROW, AdaptiveTimeout, TimeLimit
from penstock.storage.retrying.hedge import ENOUGH, FIRST_HEDGES, HedgeBudget, LatencyBook

MIB = 1 << 20
LONG_S = 1e9


def make_timeout() -> AdaptiveTimeout:
    return AdaptiveTimeout(idle_s=8.0, min_bytes_per_s=float(MIB))


@pytest.mark.parametrize(
    ("size", "total_s"), [(0, 12), (4 * MIB, 12), (16 * MIB, 24), (None, 24), (40 * MIB, 48), (1000 * MIB, 1536)]
)
def test_the_first_try_may_take_the_idle_time_and_the_size_at_the_floor(size: int | None, total_s: float) -> None:
    assert make_timeout().limit(size, 1, LONG_S) == TimeLimit(total_s, 8)


def test_each_try_has_twice_the_time_but_ends_within_the_deadline_where_it_can() -> None:
    timeout = make_timeout()
    assert [timeout.limit(16 * MIB, tries, LONG_S).total_s for tries in (1, 2, 3, 4)] == [24, 48, 96, 192]
    assert timeout.limit(16 * MIB, 4, 100) == TimeLimit(96, 32)
    assert timeout.limit(16 * MIB, 4, 1) == TimeLimit(24, 8)


def test_there_is_time_for_another_try_whatever_the_size() -> None:
    timeout = make_timeout()
    for size in (0, MIB, 16 * MIB, 100 * MIB, 1000 * MIB):
        first_s = timeout.limit(size, 1, LONG_S).total_s
        assert first_s * 1.5 <= timeout.deadline_s(120.0, size)


def test_one_bad_response_in_a_while_changes_no_other_request() -> None:
    timeout = make_timeout()
    for _ in range(50):
        assert not timeout.note_timeout()
        timeout.note_success(0.1, TimeLimit(12, 8))
    assert timeout.limit(0, 1, LONG_S).total_s == 12


def test_time_outs_without_a_success_give_all_requests_more_time_until_responses_are_fast_again() -> None:
    timeout = make_timeout()
    assert [timeout.note_timeout() for _ in range(ROW)] == [False] * (ROW - 1) + [True]
    assert timeout.limit(0, 1, LONG_S) == TimeLimit(24, 16)
    timeout.note_success(20.0, TimeLimit(24, 16))
    assert timeout.limit(0, 1, LONG_S).total_s == 24
    timeout.note_success(1.0, TimeLimit(24, 16))
    assert timeout.limit(0, 1, LONG_S).total_s == 12
    for _ in range(ROW * 20):
        timeout.note_timeout()
    assert timeout.limit(0, 1, LONG_S).total_s == 12 * MAX_FACTOR


def test_healthy_responses_are_not_late() -> None:
    book = LatencyBook()
    for i in range(ENOUGH * 5):
        book.add(MIB, 0.10 + 0.001 * (i * 37 % 100))
    assert book.late_s(MIB, 6.0) == pytest.approx(3 * 0.195, abs=0.01)


def test_a_response_can_be_late_before_much_is_known() -> None:
    book = LatencyBook()
    assert book.late_s(MIB, 6.0) == 6.0
    for _ in range(5):
        book.add(MIB, 0.1)
    assert book.late_s(MIB, 6.0) == pytest.approx(0.4)
    book.add(MIB, 100.0)
    assert book.late_s(MIB, 6.0) == 6.0


def count_allowed(budget: HedgeBudget, *, every: int, wins: bool, throttled: bool = False) -> int:
    """Second requests among 1000 requests, of which each ``every``-th is late."""
    for requests in range(1, 1001):
        if requests % every == 0 and budget.allows(requests, throttled=throttled):
            budget.sent += 1
            budget.won += wins
    return budget.sent


def test_second_requests_that_do_not_win_keep_to_their_share_and_those_that_win_do_not_count() -> None:
    assert count_allowed(HedgeBudget(0.05), every=10, wins=False) <= 50 + FIRST_HEDGES
    assert count_allowed(HedgeBudget(0.05), every=10, wins=True) == 100
    assert count_allowed(HedgeBudget(0.05), every=10, wins=True, throttled=True) <= 50 + FIRST_HEDGES
    assert count_allowed(HedgeBudget(0.05), every=1, wins=True) <= 250 + FIRST_HEDGES
    assert count_allowed(HedgeBudget(0.0), every=1, wins=True) == 0
