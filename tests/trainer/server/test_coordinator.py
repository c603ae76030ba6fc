"""A run's coordinator: each batch is dealt until its gradients count, whoever dies and whenever."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.trainer.errors import LeaseError, ServerRefusedError, TrainerConfigError
from penstock.trainer.server.coordinator import Coordinator, Identity, check_state
from penstock.trainer.server.messages import Join, Leave
from penstock.trainer.server.placement import BUCKETS, Placement, moves
from penstock.trainer.server.services import DataPlan


class Journal:
    """The lines that a coordinator has written."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, line: bytes) -> None:
        self.data += line


def make(plan: DataPlan, journal: Journal | None = None, silence_s: float = 50.0) -> Coordinator:
    identity = Identity(run="r", schema="s")
    write = (Journal() if journal is None else journal).write
    return Coordinator(plan, identity, shards={"shard-0": 1.0}, silence_s=silence_s, write=write)


def plan(**changes: object) -> DataPlan:
    values = {"batches": 10, "units": 20, "rows": 4, "span": 3, "workers": 2}
    return DataPlan(**{**values, **changes})  # type: ignore[arg-type]


class Worker:
    """A worker that trains and consumes, and counts what it consumed; it begins anew when it was forgotten."""

    def __init__(self, name: str, consumed: list[int]) -> None:
        self.name, self.consumed = name, consumed
        self.incarnation, self.after = -1, -1
        self.leases: list[list[int]] = []

    def work(self, coordinator: Coordinator, count: int, now: float) -> None:
        try:
            if self.incarnation < 0:
                self.incarnation, self.leases, self.after = coordinator.begin(self.name, now).incarnation, [], -1
            if not self.leases:
                self._fetch(coordinator, now)
            if self.leases:
                number, epoch, done, stop = self.leases[0]
                upto = min(stop, done + count)
                coordinator.consume(self.name, self.incarnation, number, upto, now)
                self.consumed.extend(epoch * coordinator.plan.batches + place for place in range(done, upto))
                self.leases[0][2] = upto
                if upto == stop:
                    self.leases.pop(0)
            elif (task := coordinator.task(self.name, self.incarnation, now)) is not None:
                coordinator.finish(self.name, self.incarnation, task, {"loss": 1.0}, now)
        except LeaseError:
            self.incarnation = -1

    def _fetch(self, coordinator: Coordinator, now: float) -> None:
        lease = coordinator.lease(self.name, self.incarnation, self.after, now)
        if lease is not None:
            assert coordinator.lease(self.name, self.incarnation, self.after, now) == lease  # as if a reply was lost
            self.after = lease.number
            self.leases.append([lease.number, lease.epoch, lease.done, lease.stop])


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["work", "work", "work", "work", "die", "restart", "torn restart", "sleep", "resume"]),
        st.integers(0, 3),
        st.integers(1, 9),
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS, st.integers(1, 12), st.integers(1, 30), st.integers(1, 5), st.booleans(), st.booleans())
def test_each_batch_of_each_epoch_is_consumed_once(
    actions: list[tuple[str, int, int]], batches: int, units: int, span: int, in_rounds: bool, evaluates: bool
) -> None:
    data = plan(batches=batches, units=units, span=span, deals_in_rounds=in_rounds, evaluates=evaluates)
    journal, now = Journal(), 0.0
    coordinator = make(data, journal)
    consumed: list[int] = []
    workers = [Worker(f"w{index}", consumed) for index in range(4)]
    for kind, who, count in actions:
        now += 1
        if kind == "work":
            workers[who].work(coordinator, count, now)
        elif kind == "die":
            workers[who] = Worker(f"w{who}", consumed)
        elif kind == "sleep":
            now += 60
        elif kind == "resume":
            state = check_state(json.dumps(coordinator.state_dict()), "here")
            journal = Journal()
            coordinator = make(data, journal)
            coordinator.load_state_dict(state, now)
        else:
            before, whole = coordinator, journal.data
            coordinator = make(data, journal)
            length = coordinator.replay(whole + (b'{"op": "lea' if kind == "torn restart" else b""), now)
            assert journal.data[:length] == whole
            assert coordinator.state_dict() == before.state_dict()
            assert coordinator.held == before.held
        assert coordinator.settled <= coordinator.consumed <= units
        assert set(range(coordinator.settled)) <= set(consumed)
    for turn in range(3000):
        if coordinator.is_done:
            break
        now += 40
        workers[turn % 4].work(coordinator, 5, now)
    assert coordinator.is_done
    assert sorted(consumed) == list(range(units))
    assert coordinator.evaluated == (data.epochs if evaluates else 0)


def test_in_rounds_each_worker_gets_the_batch_of_its_place() -> None:
    coordinator = make(plan(span=1, deals_in_rounds=True, workers=3, batches=9, units=9))
    names = ["b", "c", "a"]
    incarnations = {name: coordinator.begin(name, 0.0).incarnation for name in names}
    dealt: dict[str, list[int]] = {name: [] for name in names}
    last = dict.fromkeys(names, -1)
    for name in ["c", "c", "b", "a", "b", "a", "a", "c", "b"]:
        lease = coordinator.lease(name, incarnations[name], last[name], 0.0)
        assert lease is not None
        last[name] = lease.number
        dealt[name].append(lease.start)
    assert dealt == {"a": [0, 3, 6], "b": [1, 4, 7], "c": [2, 5, 8]}


def test_the_first_round_waits_for_all_workers_and_an_epoch_for_those_of_the_last() -> None:
    coordinator = make(plan(span=1, deals_in_rounds=True, batches=2, units=4), silence_s=10.0)
    coordinator.begin("a", 0.0)
    assert coordinator.lease("a", 0, -1, 9.0) is None
    coordinator.begin("b", 9.5)
    first, second = coordinator.lease("a", 0, -1, 9.5), coordinator.lease("b", 0, -1, 9.5)
    assert first is not None
    assert second is not None
    coordinator.consume("a", 0, first.number, 1, 9.5)
    coordinator.consume("b", 0, second.number, 2, 9.5)
    assert coordinator.epoch == 1
    coordinator.begin("a", 10.0)
    assert coordinator.lease("a", 1, -1, 10.0) is None
    coordinator.begin("b", 10.0)
    third = coordinator.lease("b", 1, -1, 10.0)
    assert third is not None
    assert (third.epoch, third.start) == (1, 1)


def test_a_round_begins_without_a_worker_that_never_came() -> None:
    coordinator = make(plan(span=1, deals_in_rounds=True), silence_s=10.0)
    coordinator.begin("a", 0.0)
    assert coordinator.lease("a", 0, -1, 9.0) is None
    assert coordinator.lease("a", 0, -1, 11.0) is not None


def test_shards_hear_of_a_worker_before_its_first_lease_and_after_its_end() -> None:
    coordinator = make(plan())
    assert coordinator.take_notices() == []
    coordinator.begin("a", 0.0)
    assert coordinator.take_notices() == []
    coordinator.lease("a", 0, -1, 0.0)
    [join] = coordinator.take_notices()
    assert isinstance(join, Join)
    assert (join.header.worker, join.header.incarnation) == ("a", 0)
    coordinator.begin("b", 60.0)
    [leave] = coordinator.take_notices()
    assert isinstance(leave, Leave)
    assert (leave.worker, leave.header.incarnation) == ("a", 0)


def test_a_forgotten_worker_is_told_to_begin_anew_and_its_batches_go_to_another() -> None:
    coordinator = make(plan(), silence_s=10.0)
    coordinator.begin("a", 0.0)
    lost = coordinator.lease("a", 0, -1, 0.0)
    coordinator.begin("b", 0.0)
    coordinator.renew("b", 0, 9.0)
    assert coordinator.forget_silent(11.0) == ["a"]
    again = coordinator.lease("b", 0, -1, 11.0)
    assert lost is not None
    assert again is not None
    assert (again.start, again.stop) == (lost.start, lost.stop)
    with pytest.raises(LeaseError, match="begin anew"):
        coordinator.consume("a", 0, lost.number, 1, 11.0)
    assert coordinator.begin("a", 12.0).incarnation == 1


def test_an_epoch_waits_for_its_evaluation_and_the_evaluator_may_die() -> None:
    coordinator = make(plan(batches=2, units=4, span=2, evaluates=True), silence_s=10.0)
    coordinator.begin("a", 0.0)
    coordinator.begin("b", 0.0)
    lease = coordinator.lease("a", 0, -1, 0.0)
    assert lease is not None
    assert coordinator.task("b", 0, 0.0) is None
    coordinator.consume("a", 0, lease.number, 2, 0.0)
    assert coordinator.lease("b", 0, -1, 0.0) is None
    task = coordinator.task("b", 0, 0.0)
    assert task is not None
    assert not task.is_last
    assert coordinator.task("a", 0, 0.0) is None
    coordinator.renew("a", 0, 9.0)
    assert coordinator.task("a", 0, 12.0) == task
    coordinator.proceed("a", 0, task, 12.0)
    lease = coordinator.lease("a", 0, lease.number, 12.0)
    assert lease is not None
    assert lease.epoch == 1
    coordinator.finish("a", 0, task, {"loss": 0.5}, 13.0)
    coordinator.consume("a", 0, lease.number, 2, 13.0)
    assert not coordinator.is_done
    last = coordinator.task("a", 0, 13.0)
    assert last is not None
    assert last.is_last
    coordinator.finish("a", 0, last, {"loss": 0.25}, 13.0)
    coordinator.finish("a", 0, last, {"loss": 9.0}, 13.0)
    assert coordinator.is_done
    assert coordinator.metrics == {"loss": 0.25}


def test_a_stopping_run_deals_nothing_more() -> None:
    coordinator = make(plan())
    coordinator.begin("a", 0.0)
    coordinator.stop()
    assert coordinator.is_stopping
    assert coordinator.lease("a", 0, -1, 0.0) is None


def test_a_state_of_other_batches_is_refused() -> None:
    state = make(plan()).state_dict()
    with pytest.raises(LeaseError, match="span=3, and this one has 4"):
        make(plan(span=4)).load_state_dict(state, 0.0)
    with pytest.raises(ServerRefusedError, match="no state of a coordinator"):
        check_state("{", "the checkpoint")
    with pytest.raises(TrainerConfigError):
        make(plan(), silence_s=0)
    with pytest.raises(TrainerConfigError):
        plan(rows=0)


def test_sums_that_workers_report_are_added_and_other_numbers_replaced() -> None:
    coordinator = make(plan())
    coordinator.report("a", {"rows_sum": 2.0, "staleness": 3.0})
    coordinator.report("a", {"rows_sum": 5.0, "staleness": 1.0})
    assert coordinator.numbers == {"a": {"rows_sum": 7.0, "staleness": 1.0}}


def test_buckets_lie_where_they_were_until_they_arrive_also_after_a_restart() -> None:
    journal = Journal()
    one = make(plan(), journal)
    before = Placement({"shard-0": 1.0})
    one.place({"shard-0": 1.0, "shard-1": 1.0}, 0.0)
    one.place({"shard-0": 1.0, "shard-1": 1.0}, 0.0)  # as if the reply was lost
    moved = [move.bucket for move in moves(before, Placement({"shard-0": 1.0, "shard-1": 1.0}))]
    assert {one.placement.shard_of(bucket) for bucket in moved} == {"shard-0"}
    one.arrived(moved[:10], 0.0)
    one.arrived(moved[:5], 0.0)
    again = make(plan())
    again.replay(journal.data, 1.0)
    for found in (one, again):
        assert found.placement.shards == ("shard-0", "shard-1")
        assert [bucket for bucket in moved if found.placement.shard_of(bucket) == "shard-1"] == moved[:10]
    again.arrived(moved, 1.0)
    assert again.placement.is_settled
    again.place({"shard-1": 1.0}, 2.0)
    assert again.placement.shards == ("shard-0", "shard-1")  # who is left is still asked, and told who takes part
    again.arrived(range(BUCKETS), 2.0)
    assert again.placement.shards == ("shard-1",)


def test_a_worker_that_is_to_leave_gets_no_lease_and_nobody_waits_for_it() -> None:
    journal = Journal()
    one = make(plan(deals_in_rounds=True, span=1), journal)
    workers = {name: one.begin(name, 0.0).incarnation for name in ("a", "b")}
    leases = {name: one.lease(name, number, -1, 0.0) for name, number in workers.items()}
    assert all(leases.values())
    one.retire("b", 0.0)
    one.retire("b", 0.0)
    again = make(plan(deals_in_rounds=True, span=1))
    again.replay(journal.data, 1.0)
    for found in (one, again):
        assert found.is_leaving("b")
        assert not found.is_leaving("a")
        assert found.lease("b", workers["b"], leases["b"].number, 1.0) is None
        found.consume("a", workers["a"], leases["a"].number, leases["a"].stop, 1.0)
        assert found.lease("a", workers["a"], leases["a"].number, 1.0) is not None
        assert {lease.worker for lease in found.held} == {"a", "b"}  # what b has is not done
        found.leave("b", workers["b"], 1.0)
        assert {lease.worker for lease in found.held} == {"a"}
        found.admit("b", 1.0)
        assert not found.is_leaving("b")


def test_a_shard_that_comes_back_does_not_shut_out_who_is_about_to_take_part() -> None:
    one = make(plan())
    one.begin("a", 0.0)
    one.begin("a", 0.0)
    one.begin("b", 0.0)
    assert [(type(notice), notice.header.incarnation) for notice in one.recall_notices()] == [(Leave, 0)]
    one.lease("a", 1, -1, 0.0)
    assert [(type(notice), notice.header.incarnation) for notice in one.recall_notices()] == [(Join, 1)]
