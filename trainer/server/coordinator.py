"""The coordinator of a run: who lives, who has leased which batches, and which are done. It reads no clock.

Every change that must outlive it is a line of its journal before it counts. Of what it does, shards must hear: that a
worker takes part, and that one does not any more. ``take_notices`` returns these requests, to be sent to every shard,
in order, before the answer to the call that made them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import LeaseError, ServerRefusedError, TrainerConfigError
from .bandwidth import Bandwidth
from .leases import Lease, Leases, journal_line, read_journal
from .messages import Header, Join, Leave
from .placement import Placement, moves
from .services import Begun, DataPlan, Task

_VERSION = 1
_EVALUATIONS = 100  # that are kept for those who look now and then
_OWN = ("begin", "take part", "forget", "retire", "admit", "evaluated", "place", "arrived")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The run that requests are of, the digest of its schema, and its secret."""

    run: str
    schema: str
    token: str = field(default="", repr=False)

    def header(self, worker: str, incarnation: int) -> Header:
        """Make the header of a worker's requests."""
        return Header(run=self.run, schema=self.schema, worker=worker, incarnation=incarnation, token=self.token)


@dataclass(frozen=True, kw_only=True)
class Member:
    """A worker that lives; it takes part from its first lease on."""

    incarnation: int
    seen: float
    takes_part: bool = False


class Coordinator:
    """A state machine over leases, members, tasks and the placement of buckets.

    ``silence_s`` is how long a worker may say nothing before it is forgotten. ``write`` puts a line into the journal,
    and returns when it is safe. All mutable state: the leases, members, the last incarnation of each name, the epochs
    that are evaluated with the newest metrics, who evaluates, the placement, notices, numbers for displays, whether
    the run was asked to stop, when it began, whether it has dealt since, who is to leave, and the speed of shards.

    Raises:
        TrainerConfigError: ``silence_s`` is no time, or there is no shard.
    """

    def __init__(
        self,
        plan: DataPlan,
        identity: Identity,
        *,
        shards: Mapping[str, float],
        silence_s: float,
        write: Callable[[bytes], None] = lambda line: None,
    ) -> None:
        if not silence_s > 0:
            raise TrainerConfigError(f"silence_s={silence_s} must be above 0: seconds until a worker is forgotten")
        self.plan, self.identity, self.silence_s = plan, identity, silence_s
        self.placement = Placement(shards)
        self.members: dict[str, Member] = {}
        self.numbers: dict[str, dict[str, float]] = {}
        """What each worker told last, and its sums."""
        self.metrics: dict[str, float] = {}
        """Those of the newest evaluation."""
        self.evaluations: dict[int, dict[str, float]] = {}
        """The metrics of the newest evaluations, by epoch."""
        self.evaluated = 0
        """Epochs that are evaluated."""
        self.is_asked_to_stop = False
        self.expected = plan.workers
        """The workers that the first round waits for; ``silence_s`` at most."""
        self._began: float | None = None
        self._has_dealt = False
        self._write = write
        self._leases = self._make_leases(0)
        self._incarnations: dict[str, int] = {}
        self._evaluator: tuple[str, int] | None = None
        self._notices: list[Join | Leave] = []
        self._retiring: set[str] = set()
        self._bandwidth = Bandwidth()
        self._pace: tuple[float, int] | None = None

    def _make_leases(self, epoch: int) -> Leases:
        """Make the leases of an epoch; they end with their worker, and not by themselves."""
        size = self.plan.size_of(epoch)
        return Leases(size, self.plan.span, seconds=math.inf, write=self._write, epoch=epoch)

    # What is true

    @property
    def epoch(self) -> int:
        """The epoch whose batches are dealt out."""
        return self._leases.epoch

    @property
    def consumed(self) -> int:
        """Count the batches of the whole run whose gradients count."""
        return self.epoch * self.plan.batches + self._leases.num_consumed

    @property
    def step(self) -> int:
        """The steps that are done: so many batches as there were workers at the beginning are one."""
        return self.plan.steps if self.consumed >= self.plan.units else self.consumed // self.plan.workers

    @property
    def settled(self) -> int:
        """The first unit that is not known to count."""
        return self.epoch * self.plan.batches + self._leases.first_left

    @property
    def is_done(self) -> bool:
        """Return whether all batches are trained on, and the last evaluation is in."""
        is_trained = self._leases.is_finished and self.epoch + 1 >= self.plan.epochs
        return is_trained and (not self.plan.evaluates or self.evaluated >= self.plan.epochs)

    @property
    def is_stopping(self) -> bool:
        """Return whether workers are to end."""
        return self.is_asked_to_stop or self.is_done

    @property
    def held(self) -> tuple[Lease, ...]:
        """The leases that are out."""
        return self._leases.held

    # Members

    def begin(self, worker: str, now: float) -> Begun:
        """Let a worker in under a new incarnation."""
        self.forget_silent(now)
        if worker in self._incarnations:  # also where it was forgotten, and came back to a shard that forgot that
            self._forget(worker, now)
        self._began = now if self._began is None else self._began
        incarnation = self._incarnations.get(worker, -1) + 1
        self._commit({"op": "begin", "worker": worker, "incarnation": incarnation}, now)
        return Begun(incarnation=incarnation, run=self.identity.run, token=self.identity.token, plan=self.plan)

    def leave(self, worker: str, incarnation: int, now: float) -> None:
        """Forget a worker that says goodbye; again, or of an incarnation that was replaced, it changes nothing."""
        member = self.members.get(worker)
        if member is not None and member.incarnation == incarnation:
            self._forget(worker, now)

    def renew(self, worker: str, incarnation: int, now: float) -> None:
        """Note that a worker lives.

        Raises:
            LeaseError: it was forgotten, or replaced by one of its name.
        """
        self.forget_silent(now, sparing=worker)
        member = self.members.get(worker)
        if member is None or member.incarnation != incarnation:
            raise LeaseError(
                f"worker {worker!r}, incarnation {incarnation}, was silent for {self.silence_s:g} s or was replaced; "
                "its batches went back: begin anew"
            )
        self.members[worker] = replace(member, seen=now)

    def forget_silent(self, now: float, *, sparing: str | None = None) -> list[str]:
        """Forget the workers that said nothing for too long; returns their names. To be called from time to time."""
        silent = [
            name for name, member in self.members.items() if name != sparing and now - member.seen > self.silence_s
        ]
        for name in silent:
            self._forget(name, now)
        return silent

    def _forget(self, worker: str, now: float) -> None:
        self._leases.forget(worker, now)
        self._commit({"op": "forget", "worker": worker}, now)

    def take_notices(self) -> list[Join | Leave]:
        """Take what every shard must hear before the answer to the last call is given."""
        notices, self._notices = self._notices, []
        return notices

    def recall_notices(self) -> list[Join | Leave]:
        """Make what a shard must hear that came back from an older state: who takes part, and who does not."""
        gone = {name: last for name, last in self._incarnations.items() if name not in self.members}
        # One that lives and takes no part yet may soon: only those of its name before it are gone.
        gone |= {name: one.incarnation - 1 for name, one in self.members.items() if not one.takes_part}
        return [self._say_leave(name, last) for name, last in sorted(gone.items()) if last >= 0] + [
            self._say_join(name) for name, member in sorted(self.members.items()) if member.takes_part
        ]

    def _say_join(self, worker: str) -> Join:
        return Join(header=self.identity.header(worker, self.members[worker].incarnation), clock=0)

    def _say_leave(self, worker: str, incarnation: int) -> Leave:
        return Leave(header=self.identity.header(worker, incarnation), worker=worker)

    def retire(self, worker: str, now: float) -> None:
        """Have a worker leave after the batch that it is training on; it gets no lease any more."""
        if worker not in self._retiring:
            self._commit({"op": "retire", "worker": worker}, now)

    def admit(self, worker: str, now: float) -> None:
        """Let a worker of this name train again."""
        if worker in self._retiring:
            self._commit({"op": "admit", "worker": worker}, now)

    def is_leaving(self, worker: str) -> bool:
        """Return whether a worker is to end: with the run, or before."""
        return self.is_stopping or worker in self._retiring

    # Batches

    def lease(self, worker: str, incarnation: int, after: int, now: float) -> Lease | None:
        """Lease batches to a worker; None if there are none now, or the run is to stop.

        ``after`` is the number of the last lease that it got, -1 for none: one whose reply was lost is returned again.

        Raises:
            LeaseError: as ``renew``.
        """
        self.renew(worker, incarnation, now)
        if self.is_leaving(worker):
            return None
        found = self._next_lease(worker, after)
        if found is None and not self._is_gathering(now):
            self._has_dealt = True
            others = sorted(self.members.keys() - self._retiring)
            for name in others if self.plan.deals_in_rounds else [worker]:
                if self._leases.lease(name, now) is None:
                    break
                if not self.members[name].takes_part:
                    self._commit({"op": "take part", "worker": name}, now)
            found = self._next_lease(worker, after)
        return found

    def _is_gathering(self, now: float) -> bool:
        """Return whether a round has to wait: at first for all workers, at an epoch's beginning for those of the last.

        These have finished it, and begin anew.
        """
        if not self.plan.deals_in_rounds:
            return False
        if not self._has_dealt and len(self.members) < self.expected:
            return self._began is None or now < self._began + self.silence_s
        return self._leases.is_untouched and any(member.takes_part for member in self.members.values())

    def _next_lease(self, worker: str, after: int) -> Lease | None:
        return next((one for one in self._leases.held if one.worker == worker and one.number > after), None)

    def consume(self, worker: str, incarnation: int, lease: int, upto: int, now: float) -> int:
        """Note that the gradients of a lease's batches before ``upto`` count; returns the first unit that is open.

        Raises:
            LeaseError: as ``renew``, or the lease is not the worker's.
        """
        self.renew(worker, incarnation, now)
        self._leases.consume(lease, worker, upto, now)
        if self._leases.is_finished and not self.plan.evaluates:
            self._begin_next(now)
        return self.settled

    def _begin_next(self, now: float) -> None:
        if self.epoch + 1 < self.plan.epochs:
            self._leases.begin_epoch(now, total=self.plan.size_of(self.epoch + 1))

    # Tasks

    def task(self, worker: str, incarnation: int, now: float) -> Task | None:
        """Give a worker the evaluation of the epoch that has ended, unless another has it or it is done.

        Raises:
            LeaseError: as ``renew``.
        """
        self.renew(worker, incarnation, now)
        is_others = self._evaluator not in (None, (worker, incarnation))
        if not self.plan.evaluates or is_others or worker in self._retiring or not self._is_evaluation_due():
            return None
        self._evaluator = worker, incarnation
        is_last = self.evaluated + 1 >= self.plan.epochs
        step = self.plan.steps_after(self.evaluated)
        return Task(kind="evaluate", epoch=self.evaluated, step=step, is_last=is_last)

    def _is_evaluation_due(self) -> bool:
        return self.evaluated < self.epoch or (self._leases.is_finished and self.evaluated == self.epoch)

    def proceed(self, worker: str, incarnation: int, task: Task, now: float) -> None:
        """Begin the next epoch while a task goes on; said again it changes nothing.

        Raises:
            LeaseError: as ``renew``.
        """
        self.renew(worker, incarnation, now)
        if self.epoch == task.epoch and self._leases.is_finished:
            self._begin_next(now)

    def finish(self, worker: str, incarnation: int, task: Task, metrics: Mapping[str, float], now: float) -> None:
        """Take the metrics of an evaluation; those of one that is done already change nothing.

        Raises:
            LeaseError: as ``renew``.
        """
        self.proceed(worker, incarnation, task, now)
        if task.epoch == self.evaluated:
            self._commit({"op": "evaluated", "epoch": task.epoch, "metrics": dict(metrics)}, now)

    # Placement, displays

    def place(self, shards: Mapping[str, float], now: float) -> None:
        """Have buckets lie on these shards, by their weights; each stays where it is until it has ``arrived``.

        Raises:
            TrainerConfigError: there is none, or a weight is no positive number.
        """
        if Placement(shards).weights != self.placement.weights:
            self._commit({"op": "place", "shards": dict(shards)}, now)

    def arrived(self, buckets: Collection[int], now: float) -> None:
        """Note that buckets lie where the weights say; said again it changes nothing."""
        new = sorted(self.placement.elsewhere.keys() & set(buckets))
        if new:
            self._commit({"op": "arrived", "buckets": new}, now)

    def measure(self, found: Mapping[str, tuple[float, float]], now: float) -> None:
        """Take bytes and seconds of a worker's calls since it last told, by shard."""
        self._pace = self._pace or (now, self.consumed)
        for shard, (count, seconds) in found.items():
            self._bandwidth.note(shard, count, seconds, now)

    @property
    def speeds(self) -> dict[str, float]:
        """The bandwidth of shards as workers measure it, in MB/s."""
        return {shard: speed for shard, speed in self._bandwidth.speeds.items() if shard in self.placement.weights}

    def weigh(self, held_bytes: float, now: float) -> dict[str, float] | None:
        """Weights by which the slowest shard would take less time, if that saves more of it than moving costs.

        ``held_bytes`` are those of all buckets, of which some would move.
        """
        began, before = self._pace or (now, self.consumed)
        done = self.consumed - before
        left_s = (now - began) * (self.plan.units - self.consumed) / done if done else 0.0
        return self._bandwidth.weigh(self.placement, held_bytes=held_bytes, left_s=left_s, now=now)

    def report(self, worker: str, numbers: Mapping[str, float]) -> None:
        """Keep a worker's numbers; those that end in ``_sum`` are added up."""
        kept = self.numbers.setdefault(worker, {})
        for name, value in numbers.items():
            kept[name] = kept.get(name, 0.0) + value if name.endswith("_sum") else value

    def stop(self) -> None:
        """Ask workers to end after the batches that they are training on."""
        self.is_asked_to_stop = True

    # States and the journal

    def state_dict(self) -> dict[str, Any]:
        """Return all that a run of any number of workers and shards needs to go on, as JSON.

        Take it before the snapshots of buckets that are saved with it: what is consumed by then is in all of them.
        """
        plan = {name: getattr(self.plan, name) for name in ("batches", "rows", "span", "workers")}
        return {
            "version": _VERSION,
            "plan": plan,
            "leases": self._leases.state_dict(),
            "incarnations": dict(self._incarnations),
            "evaluated": self.evaluated,
            "metrics": dict(self.metrics),
            "shards": dict(self.placement.weights),
        }

    def load_state_dict(self, state: Mapping[str, Any], now: float) -> None:
        """Continue from a state; all who were there when it was saved are gone.

        Raises:
            LeaseError: the state is of another version, or its batches are cut otherwise.
        """
        if state.get("version") != _VERSION:
            raise LeaseError(f"a state of version {state.get('version')!r} cannot be read; this reads {_VERSION}")
        for name, value in state["plan"].items():
            if value != getattr(self.plan, name):
                raise LeaseError(
                    f"the state is of a run with {name}={value}, and this one has {getattr(self.plan, name)}: a run "
                    f"keeps the batches it began with"
                )
        for worker in list(self.members):
            self._forget(worker, now)
        for worker, incarnation in state["incarnations"].items():
            last = max(incarnation, self._incarnations.get(worker, -1))
            self._commit({"op": "begin", "worker": worker, "incarnation": last}, now)
            self._commit({"op": "forget", "worker": worker}, now)
        leases = state["leases"]
        self._leases.load_state_dict(leases, now, total=self.plan.size_of(leases["epoch"]))
        self._commit({"op": "evaluated", "epoch": state["evaluated"] - 1, "metrics": dict(state["metrics"])}, now)
        if self._leases.is_finished and (not self.plan.evaluates or self.evaluated > self.epoch):
            self._begin_next(now)

    def replay(self, journal: bytes, now: float) -> int:
        """Make the changes of a journal; returns the bytes that hold whole lines, after which to write on.

        Those who lived by it get their full time again; who is evaluating does so once more.

        Raises:
            LeaseError: a line is damaged.
        """
        length = 0
        for change, stop in read_journal(journal):
            length = stop
            if change["op"] in _OWN:
                self._make(change, now)
            else:
                self._leases.make(change, now)
        self._has_dealt = bool(self._leases.held)
        self._notices = self.recall_notices()
        return length

    def _commit(self, change: dict[str, Any], now: float) -> None:
        """Write a change to the journal, and then make it."""
        self._write(journal_line(change))
        self._make(change, now)

    def _make(self, change: Mapping[str, Any], now: float) -> None:
        kind = change["op"]
        if kind == "begin":
            worker = change["worker"]
            self._incarnations[worker] = change["incarnation"]
            self.members[worker] = Member(incarnation=change["incarnation"], seen=now)
        elif kind == "take part":
            worker = change["worker"]
            self.members[worker] = replace(self.members[worker], takes_part=True)
            self._notices.append(self._say_join(worker))
        elif kind == "forget":
            worker = change["worker"]
            self.members.pop(worker, None)
            self._notices.append(self._say_leave(worker, self._incarnations[worker]))
            if self._evaluator is not None and self._evaluator[0] == worker:
                self._evaluator = None
        elif kind == "evaluated":
            self.evaluated, self.metrics, self._evaluator = change["epoch"] + 1, dict(change["metrics"]), None
            self.evaluations[change["epoch"]] = self.metrics
            self.evaluations.pop(change["epoch"] - _EVALUATIONS, None)
        elif kind == "retire":
            self._retiring.add(change["worker"])
        elif kind == "admit":
            self._retiring.discard(change["worker"])
        elif kind == "arrived":
            self.placement = self.placement.after(set(change["buckets"]))
        else:
            on_their_way = moves(self.placement, Placement(change["shards"]))
            self.placement = Placement(change["shards"], {move.bucket: move.source for move in on_their_way})


def check_state(text: str, place: str) -> dict[str, Any]:
    """Read the state of a coordinator from JSON.

    Raises:
        ServerRefusedError: it is no state; the message names ``place``.
    """
    try:
        state = json.loads(text)
    except ValueError as exc:
        raise ServerRefusedError(f"{place} is no state of a coordinator; restore an older checkpoint") from exc
    if not isinstance(state, dict) or not {"version", "plan", "leases", "incarnations"} <= state.keys():
        raise ServerRefusedError(f"{place} is no state of a coordinator; restore an older checkpoint")
    return state
