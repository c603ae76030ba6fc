"""Every position of an epoch is consumed once, whoever dies and whenever."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.trainer.errors import LeaseError, TrainerConfigError
from penstock.trainer.server.leases import Leases


class Journal:
    """What a coordinator has written; it can be cut as a crash cuts it."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, line: bytes) -> None:
        self.data += line


def make(journal: Journal, total: int = 100, span: int = 7, *, seconds: float = 50.0) -> Leases:
    return Leases(total, span, seconds=seconds, write=journal.write)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["work", "work", "work", "die", "restart", "torn restart", "sleep", "resume"]),
        st.integers(0, 3),
        st.integers(1, 9),
    ),
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(ACTIONS, st.integers(0, 60), st.integers(1, 12))
def test_nothing_is_missing_and_nothing_doubled(actions: list[tuple[str, int, int]], total: int, span: int) -> None:
    journal, now = Journal(), 0.0
    leases = make(journal, total, span)
    hands: dict[int, object] = {}
    consumed: list[int] = []

    def work(who: int, count: int) -> None:
        lease = hands.get(who)
        if lease is None:
            lease = hands[who] = leases.lease(f"w{who}", now)
            if lease is None:
                del hands[who]
                return
        upto = min(lease.stop, lease.done + count)  # type: ignore[attr-defined]
        try:
            leases.consume(lease.number, f"w{who}", upto, now)  # type: ignore[attr-defined]
        except LeaseError:
            del hands[who]  # it went back
            return
        consumed.extend(range(lease.done, upto))  # type: ignore[attr-defined]
        held = [one for one in leases.held if one.number == lease.number]  # type: ignore[attr-defined]
        if held:
            hands[who] = held[0]
        else:
            del hands[who]

    for kind, who, count in actions:
        now += 1
        if kind == "work":
            work(who, count)
        elif kind == "die":
            leases.forget(f"w{who}", now)
            hands.pop(who, None)
        elif kind == "sleep":
            now += 60
        elif kind == "resume":
            state = leases.state_dict()
            journal = Journal()
            leases = make(journal, total, span)
            leases.load_state_dict(state, now)
        else:
            whole = journal.data
            journal.data += b'{"op": "lea' if kind == "torn restart" else b""
            leases = make(journal, total, span)
            length = leases.replay(journal.data, now)
            assert journal.data[:length] == whole
            journal.data = whole
    for who in itertools.count():
        if leases.is_finished:
            break
        now += 100
        work(who % 4, 5)
        assert who < 1000
    assert sorted(consumed) == list(range(total))
    leases.begin_epoch(now)
    state = leases.state_dict()
    assert (state["epoch"], state["total"], state["consumed"]) == (1, total, [])


def test_what_a_dead_worker_did_not_consume_is_leased_first() -> None:
    leases = make(Journal())
    first = leases.lease("a", 0.0)
    leases.lease("b", 0.0)
    assert first is not None
    leases.consume(first.number, "a", 3, 0.0)
    assert leases.forget("a", 1.0) == [(3, 7)]
    again = leases.lease("b", 1.0)
    assert again is not None
    assert (again.start, again.stop) == (3, 7)
    assert leases.state_dict()["consumed"] == [[0, 3]]


def test_a_lease_that_went_back_cannot_be_consumed() -> None:
    leases = make(Journal(), seconds=10.0)
    lease = leases.lease("a", 0.0)
    assert lease is not None
    leases.renew("a", 8.0)
    leases.consume(lease.number, "a", 2, 17.0)
    with pytest.raises(LeaseError, match="went back"):
        leases.consume(lease.number, "a", 5, 27.0)


def test_a_lease_is_its_workers_alone() -> None:
    leases = make(Journal())
    lease = leases.lease("a", 0.0)
    assert lease is not None
    with pytest.raises(LeaseError, match="went back"):
        leases.consume(lease.number, "b", 3, 0.0)


def test_positions_outside_of_a_lease_are_refused() -> None:
    leases = make(Journal())
    lease = leases.lease("a", 0.0)
    assert lease is not None
    with pytest.raises(LeaseError, match="positions 0 to 7, and not up to 8"):
        leases.consume(lease.number, "a", 8, 0.0)


def test_a_damaged_journal_is_refused_at_its_line() -> None:
    journal = Journal()
    leases = make(journal)
    for _ in range(3):
        leases.lease("a", 0.0)
    for at in range(len(journal.data)):
        flipped = bytearray(journal.data)
        flipped[at] ^= 1
        fresh = make(Journal())
        try:
            length = fresh.replay(bytes(flipped), 0.0)
        except LeaseError:
            continue
        assert at == len(journal.data) - 1  # the last line's end: it was being written
        assert length < len(flipped)


@pytest.mark.parametrize(
    "state",
    [
        {"epoch": 0, "total": 99, "next_lease": 0, "consumed": []},
        {"epoch": 0, "total": 100, "next_lease": 0, "consumed": [[5, 101]]},
        {"epoch": 0, "total": 100, "next_lease": 0, "consumed": [[0, 9], [8, 20]]},
    ],
)
def test_a_state_that_cannot_be_is_refused(state: dict) -> None:
    with pytest.raises(LeaseError):
        make(Journal()).load_state_dict(state, 0.0)


def test_an_epoch_ends_when_all_is_consumed_only() -> None:
    with pytest.raises(LeaseError, match="nobody has consumed"):
        make(Journal()).begin_epoch(0.0)
    with pytest.raises(TrainerConfigError):
        make(Journal(), span=0)
