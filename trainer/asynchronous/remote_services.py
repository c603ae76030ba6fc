"""``Services`` whose other end is elsewhere: each call becomes a message, and the answer comes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from ..server.leases import Lease
from ..server.messages import Reply, Request
from ..server.placement import Placement
from ..server.services import Begun, Task


class RemoteServices(ABC):
    """``Services`` by name and values; a connection has one call at a time."""

    @abstractmethod
    def _ask(self, method: str, *values: Any) -> Any:
        """Call a method at the other end, and return or raise what it did."""

    def call(self, shard: str, request: Request) -> Reply:
        reply: Reply = self._ask("call", shard, request)
        return reply

    def start(self, shard: str, request: Request) -> Callable[[], Reply]:
        reply = self.call(shard, request)
        return lambda: reply

    def placement(self) -> Placement:
        placement: Placement = self._ask("placement")
        return placement

    def begin(self, worker: str) -> Begun:
        begun: Begun = self._ask("begin", worker)
        return begun

    def leave(self, worker: str, incarnation: int) -> None:
        self._ask("leave", worker, incarnation)

    def lease(self, worker: str, incarnation: int, after: int) -> Lease | None:
        lease: Lease | None = self._ask("lease", worker, incarnation, after)
        return lease

    def consume(self, worker: str, incarnation: int, lease: int, upto: int) -> int:
        settled: int = self._ask("consume", worker, incarnation, lease, upto)
        return settled

    def renew(self, worker: str, incarnation: int) -> None:
        self._ask("renew", worker, incarnation)

    def report(self, worker: str, numbers: Mapping[str, float]) -> None:
        self._ask("report", worker, dict(numbers))

    def task(self, worker: str, incarnation: int) -> Task | None:
        task: Task | None = self._ask("task", worker, incarnation)
        return task

    def proceed(self, worker: str, incarnation: int, task: Task) -> None:
        self._ask("proceed", worker, incarnation, task)

    def finish(self, worker: str, incarnation: int, task: Task, metrics: Mapping[str, float]) -> None:
        self._ask("finish", worker, incarnation, task, dict(metrics))

    def is_stopping(self, worker: str | None = None) -> bool:
        is_stopping: bool = self._ask("is_stopping", worker)
        return is_stopping
