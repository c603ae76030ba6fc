"""The actor of a run's coordinator: it writes the journal, knows the time, and tells the shards who takes part.

Ray starts it anew when it dies; it then reads its journal. It has one thread, so that calls come one after another.
"""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...storage.errors import PenstockError
from ...storage.files import sync_folder
from ...storage.ray_cluster import import_ray
from ..errors import ServerRefusedError, ShardUnreachableError
from ..server.coordinator import Coordinator, Identity
from ..server.messages import Join, Leave
from ..server.services import DataPlan
from .calls import Refused, find_actor, wait_for

NAME = "coordinator"
# What workers ask; each takes the time as its last argument, but for those in the second set.
_TIMED = frozenset(
    {"begin", "leave", "lease", "consume", "renew", "task", "proceed", "finish"}
    | {"place", "arrived", "retire", "admit", "measure", "weigh"}
)
_UNTIMED = frozenset({"report", "stop", "state_dict", "recall_notices"})
_ANSWER_S = 10.0
_PATIENCE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class CoordinatorSettings:
    """All that a coordinator is started with, and started anew; without a journal it begins with ``state``."""

    plan: DataPlan
    identity: Identity
    weights: Mapping[str, float]
    silence_s: float
    expected: int
    journal: str
    state: Mapping[str, Any] | None = None


class RunCoordinator:
    """A coordinator as an actor. Errors of ours are returned as ``Refused``. All mutable state: the journal's file."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._start = time.time_ns()
        path = Path(settings.journal)
        self._coordinator = Coordinator(
            settings.plan,
            settings.identity,
            shards=settings.weights,
            silence_s=settings.silence_s,
            write=self._write,
        )
        self._coordinator.expected = settings.expected
        data = path.read_bytes() if path.exists() else b""
        length = self._coordinator.replay(data, time.time()) if data else 0
        self._file = path.open("r+b" if data else "wb")
        self._file.truncate(length)
        self._file.seek(length)
        sync_folder(path.parent)
        if not length and settings.state is not None:
            self._coordinator.load_state_dict(settings.state, time.time())
        self._tell_shards()

    def _write(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())

    def ask(self, token: str, name: str, *values: Any) -> Any:
        """Call a method of the coordinator by name; shards have heard of what it changed when this returns."""
        try:
            self._check(token)
            if name == "begin":  # what its last incarnation waited for is over
                self._coordinator.report(values[0], {"waits_for_checkpoint": 0.0})
            if name in _TIMED:
                reply = getattr(self._coordinator, name)(*values, time.time())
            elif name in _UNTIMED:
                reply = getattr(self._coordinator, name)(*values)
            else:
                raise ServerRefusedError(f"a coordinator has no {name!r}")
            self._tell_shards()
        except PenstockError as exc:
            return Refused.of(exc)
        return reply

    def where(self) -> tuple[dict[str, float], dict[int, str]]:
        """The placement: the shards by name with their weights, and the buckets that lie elsewhere for now."""
        placement = self._coordinator.placement
        return dict(placement.weights), dict(placement.elsewhere)

    def is_stopping(self, worker: str | None = None) -> bool:
        """Return whether workers are to end, or one is."""
        one = self._coordinator
        return one.is_stopping if worker is None else one.is_leaving(worker)

    def forget(self, token: str, worker: str) -> Refused | None:
        """Forget a worker that is known to have died, before it has been silent for long."""
        try:
            self._check(token)
            member = self._coordinator.members.get(worker)
            if member is not None:
                self._coordinator.leave(worker, member.incarnation, time.time())
            self._tell_shards()
        except PenstockError as exc:
            return Refused.of(exc)
        return None

    def tick(self, token: str) -> dict[str, Any] | Refused:
        """Forget workers that are silent, and tell where the run stands."""
        try:
            self._check(token)
            one = self._coordinator
            one.forget_silent(time.time())
            self._tell_shards()
        except PenstockError as exc:
            return Refused.of(exc)
        return {
            "pid": os.getpid(),
            "start": self._start,
            "epoch": one.epoch,
            "consumed": one.consumed,
            "step": one.step,
            "settled": one.settled,
            "is_done": one.is_done,
            "is_stopping": one.is_stopping,
            "metrics": dict(one.metrics),
            "evaluations": {epoch: dict(metrics) for epoch, metrics in one.evaluations.items()},
            "evaluated": one.evaluated,
            "weights": dict(one.placement.weights),
            "speeds": one.speeds,
            "members": {
                name: {
                    "incarnation": member.incarnation,
                    "silent_s": max(0.0, time.time() - member.seen),
                    "leases": sum(lease.worker == name for lease in one.held),
                }
                for name, member in one.members.items()
            },
            "numbers": {name: dict(numbers) for name, numbers in one.numbers.items()},
        }

    def _check(self, token: str) -> None:
        if not hmac.compare_digest(token.encode(), self._settings.identity.token.encode()):
            raise ServerRefusedError("the coordinator: the caller has not the token of the run")

    def _tell_shards(self) -> None:
        notices = self._coordinator.take_notices()
        for shard in self._coordinator.placement.shards if notices else ():
            self._send(shard, notices)

    def _send(self, shard: str, notices: list[Join | Leave]) -> None:
        """Send notices to a shard until it has them: it may be starting anew."""
        deadline = time.monotonic() + _PATIENCE_S
        for notice in notices:
            while True:
                try:
                    wait_for(find_actor(shard).handle.remote(notice), shard, timeout_s=_ANSWER_S)
                    break
                except ShardUnreachableError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.2)


def make_actor_class() -> Any:
    """The class as Ray wants it."""
    return import_ray().remote(max_restarts=-1, max_task_retries=0)(RunCoordinator)
