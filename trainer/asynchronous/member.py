"""The life of a worker, or of a learner's first rank: it begins, leases batches, tells that it lives, and leaves."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ...storage.errors import PenstockError
from ...storage.threads.interruptible import Event, Thread
from ..errors import LeaseError, NotJoinedError, ServerError
from ..recipes.recipe import Recipe
from ..server.client import ClientConfig
from ..server.leases import Lease
from ..server.messages import Header
from ..server.schema import Schema
from ..server.services import Begun, Services, Task

_BEATS = 4  # a worker says so many times that it lives in the time after which it would be forgotten


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Waits of a worker, in seconds: before it asks again, and how often without an answer."""

    pause_s: float = 0.02
    attempts: int = 600
    silence_s: float = 30.0
    """As the coordinator has it."""
    seeds_steps: bool = True
    """Seed torch's, NumPy's and Python's generators before each step; several workers of a process would not."""


class Member(ABC):
    """A worker of a run through all its incarnations."""

    def __init__(self, recipe: Recipe, name: str, services: Services, options: WorkerOptions) -> None:
        self._recipe, self._name, self._services, self._options = recipe, name, services, options

    def live(self) -> bool:
        """Live one incarnation: wait for batches, and train until there are none; returns whether the run is over."""
        services, name = self._services, self._name
        begun = services.begin(name)
        try:
            with Pulse(services, name, begun, self._options) as pulse:
                self._prepare(begun)
                lease = self._await_lease(begun, pulse)
                if lease is None:
                    services.leave(name, begun.incarnation)
                    return True
                self._train(begun, lease, pulse)  # beginning anew says goodbye
        except (LeaseError, NotJoinedError):
            pass  # it was given up: others train on its batches now
        except BaseException:
            with suppress(PenstockError):  # so that nobody waits for it
                services.leave(name, begun.incarnation)
            raise
        return False

    def _prepare(self, begun: Begun) -> None:  # noqa: B027 - most need nothing
        """Get ready, now that the plan is known."""

    @abstractmethod
    def _evaluate(self, begun: Begun, task: Task) -> None:
        """Evaluate what the servers hold."""

    @abstractmethod
    def _train(self, begun: Begun, first: Lease, pulse: Pulse) -> None:
        """Train on leases until there is none."""

    def _await_lease(self, begun: Begun, pulse: Pulse) -> Lease | None:
        """Wait for the first lease, and do other work meanwhile; None once the run is over."""
        while True:
            lease = self._services.lease(self._name, begun.incarnation, -1)
            if lease is not None:
                return lease
            task = self._services.task(self._name, begun.incarnation)
            if task is not None:
                self._evaluate(begun, task)
            elif self._services.is_stopping(self._name):
                return None
            else:
                pulse.wait(self._options.pause_s)

    def _header(self, begun: Begun, schema: Schema) -> Header:
        return Header(
            run=begun.run,
            schema=schema.digest,
            worker=self._name,
            incarnation=begun.incarnation,
            token=begun.token,
        )

    def _client_config(self) -> ClientConfig:
        server = self._recipe.trainer.server
        return ClientConfig(
            push=server.push_codec,
            pull=server.pull_codec,
            attempts=self._options.attempts,
            pause=self._options.pause_s,
        )


class Pulse:
    """Says that a worker lives, on a thread of its own; learns that it was given up, or that the run is to stop."""

    def __init__(self, services: Services, name: str, begun: Begun, options: WorkerOptions) -> None:
        self._services, self._name, self._begun = services, name, begun
        self._every_s = min(options.silence_s / _BEATS, 0.5)
        self._ended = Event()
        self._error: BaseException | None = None
        self.is_stopping = False
        self._thread = Thread(target=self._run, name=f"pulse of {name}")

    def check(self) -> None:
        """Raise what the thread met: LeaseError if the worker was given up."""
        if self._error is not None:
            raise self._error

    def abandon(self, error: BaseException) -> None:
        """Have all who wait raise this."""
        self._error = self._error or error

    def wait(self, seconds: float) -> None:
        """Sleep, unless the worker was given up."""
        self.check()
        time.sleep(seconds)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                self._services.renew(self._name, self._begun.incarnation)
                self.is_stopping = self._services.is_stopping(self._name)
            except LeaseError as exc:
                self._error = exc
                return
            except ServerError:
                continue  # the coordinator may come back in time
            except BaseException as exc:  # noqa: BLE001 - raised where the worker waits
                self._error = exc
                return
