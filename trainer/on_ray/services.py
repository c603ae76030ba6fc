"""The way from a worker to its run by calls of actors, which are made again until they are answered."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ShardUnreachableError
from ..server.bandwidth import LEAST_CALL_BYTES
from ..server.leases import Lease
from ..server.messages import Reply, Request, count_bytes
from ..server.placement import Placement
from ..server.services import Begun, Task
from .calls import find_actor, wait_for
from .coordinator_actor import NAME

_SHARD_S = 60.0
_COORDINATOR_S = 150.0
_PATIENCE_S = 180.0
_FRESH_S = 0.5
_PAUSE_S = 0.2


class RayServices:
    """``Services`` of a run whose actors have names in this namespace. For several threads.

    All mutable state: handles of actors, whether a worker is to stop, as heard a moment ago, the bytes and seconds of
    calls of each shard that were not told yet, and when each last replied.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._lock = threading.Lock()
        self._actors: dict[str, Any] = {}
        self._stopping: dict[str | None, tuple[float, bool]] = {}
        self._calls: dict[str, tuple[float, float]] = {}
        self._replied: dict[str, float] = {}

    def call(self, shard: str, request: Request) -> Reply:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            started = time.monotonic()
            try:
                reply: Reply = wait_for(self._actor(shard).handle.remote(request), shard, timeout_s=_SHARD_S)
            except ShardUnreachableError:  # it may be starting anew; sent again, requests do no harm
                self._lose(shard)
                if time.monotonic() > deadline or shard not in self.placement().shards:
                    raise
                time.sleep(_PAUSE_S)
            else:
                self._measure(shard, count_bytes(request) + count_bytes(reply), started)
                return reply

    def start(self, shard: str, request: Request) -> Callable[[], Reply]:
        started = time.monotonic()
        reply = self._actor(shard).handle.remote(request)

        def take() -> Reply:
            found: Reply = wait_for(reply, shard, timeout_s=_SHARD_S)
            self._measure(shard, count_bytes(request) + count_bytes(found), started)
            return found

        return take

    def _measure(self, shard: str, count: int, started: float) -> None:
        """Note the bytes of a call, and its seconds since the shard's last reply: several may have been under way."""
        now = time.monotonic()
        with self._lock:
            seconds = now - max(started, self._replied.get(shard, started))
            self._replied[shard] = now
            if count >= LEAST_CALL_BYTES:
                before = self._calls.get(shard, (0.0, 0.0))
                self._calls[shard] = before[0] + count, before[1] + seconds

    def placement(self) -> Placement:
        return Placement(*self._ask("where"))

    def begin(self, worker: str) -> Begun:
        begun: Begun = self._ask("ask", self._token, "begin", worker)
        return begun

    def leave(self, worker: str, incarnation: int) -> None:
        self._ask("ask", self._token, "leave", worker, incarnation)

    def lease(self, worker: str, incarnation: int, after: int) -> Lease | None:
        lease: Lease | None = self._ask("ask", self._token, "lease", worker, incarnation, after)
        return lease

    def consume(self, worker: str, incarnation: int, lease: int, upto: int) -> int:
        settled: int = self._ask("ask", self._token, "consume", worker, incarnation, lease, upto)
        return settled

    def renew(self, worker: str, incarnation: int) -> None:
        self._ask("ask", self._token, "renew", worker, incarnation)

    def report(self, worker: str, numbers: Mapping[str, float]) -> None:
        with self._lock:
            calls, self._calls = self._calls, {}
        if calls:
            self._ask("ask", self._token, "measure", calls)
        self._ask("ask", self._token, "report", worker, dict(numbers))

    def task(self, worker: str, incarnation: int) -> Task | None:
        task: Task | None = self._ask("ask", self._token, "task", worker, incarnation)
        return task

    def proceed(self, worker: str, incarnation: int, task: Task) -> None:
        self._ask("ask", self._token, "proceed", worker, incarnation, task)

    def finish(self, worker: str, incarnation: int, task: Task, metrics: Mapping[str, float]) -> None:
        self._ask("ask", self._token, "finish", worker, incarnation, task, dict(metrics))

    def is_stopping(self, worker: str | None = None) -> bool:
        at, is_stopping = self._stopping.get(worker, (-math.inf, False))
        if not is_stopping and time.monotonic() - at > _FRESH_S:
            is_stopping = self._ask("is_stopping", worker)
            self._stopping[worker] = time.monotonic(), is_stopping
        return is_stopping

    def _actor(self, name: str) -> Any:
        with self._lock:
            if name not in self._actors:
                self._actors[name] = find_actor(name)
            return self._actors[name]

    def _lose(self, name: str) -> None:
        """Look for an actor anew the next time: another one may have its name by then."""
        with self._lock:
            self._actors.pop(name, None)

    def _ask(self, method: str, *values: Any) -> Any:
        """Call the coordinator until it answers; it may be starting anew."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                reply = getattr(self._actor(NAME), method).remote(*values)
                return wait_for(reply, "the coordinator", timeout_s=_COORDINATOR_S)
            except ShardUnreachableError:
                self._lose(NAME)
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_S)
