"""The services of a run to its workers, in plain values: by calls in one process, or over a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ..errors import TrainerConfigError
from .leases import Lease
from .messages import Reply, Request
from .placement import Placement


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """The cut of a run's data into batches, and how they are dealt out; fixed however many workers come and go.

    A *unit* is one batch of one epoch: number ``epoch * batches + place``. It is trained on by one worker at a time,
    and its gradients are pushed under its number.
    """

    batches: int
    """Batches of an epoch."""
    units: int
    """Batches of the whole run."""
    rows: int
    """Samples of a batch."""
    span: int
    """Most batches of a lease."""
    workers: int
    """Workers at the run's beginning: so many batches count as a step, by which rates and reports go."""
    deals_in_rounds: bool = False
    """Deal a lease to each worker at a time, in the order of their names, so that steps have the same batches."""
    evaluates: bool = False
    """Evaluate at the end of each epoch."""

    def __post_init__(self) -> None:
        for name in ("batches", "units", "rows", "span", "workers"):
            if getattr(self, name) < 1:
                raise TrainerConfigError(f"a run of {name}={getattr(self, name)} is not possible; it must be 1 or more")

    @property
    def epochs(self) -> int:
        """The number of epochs, of which the last may be cut short."""
        return -(-self.units // self.batches)

    def size_of(self, epoch: int) -> int:
        """Count the batches of an epoch."""
        return max(0, min(self.batches, self.units - epoch * self.batches))

    def step_of(self, unit: int) -> int:
        """The step that a unit belongs to, by which its rate goes."""
        return unit // self.workers

    def steps_after(self, epoch: int) -> int:
        """Count the steps that are done when an epoch ends."""
        return min(self.units, (epoch + 1) * self.batches) // self.workers

    @property
    def steps(self) -> int:
        """The steps of the whole run."""
        return -(-self.units // self.workers)


@dataclass(frozen=True, kw_only=True)
class Begun:
    """The run that a worker joins, and its incarnation: higher than that of any worker of its name before."""

    incarnation: int
    run: str
    plan: DataPlan
    token: str = field(default="", repr=False)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Work for one worker beside training: to evaluate what the servers hold at the end of an epoch."""

    kind: Literal["evaluate"]
    epoch: int
    step: int
    is_last: bool
    """The run ends with it."""


class Services(Protocol):
    """The way from a worker to its run. Each call may be sent again, and is made from several threads of the worker.

    A worker that was silent for too long, or was replaced by one of its name, gets a LeaseError: it must ``begin``
    anew, and what it had leased is no longer its own.
    """

    def call(self, shard: str, request: Request) -> Reply:
        """Send a request to a shard.

        Raises:
            ShardUnreachableError: no answer came, whether or not the request was applied.
            ServerError: what the shard raised.
        """

    def start(self, shard: str, request: Request) -> Callable[[], Reply]:
        """Send a request to a shard, and return what waits for the reply and raises as ``call``."""

    def placement(self) -> Placement:
        """Ask which shard holds which bucket."""

    def begin(self, worker: str) -> Begun:
        """Come to life under a new incarnation; what the worker had leased before goes back."""

    def leave(self, worker: str, incarnation: int) -> None:
        """Say goodbye: nobody waits for the worker any more, and what it had leased goes back."""

    def lease(self, worker: str, incarnation: int, after: int) -> Lease | None:
        """Take the lease that follows number ``after``, -1 for the first; None if there are no batches now.

        All shards know the worker before it gets its first one.
        """

    def consume(self, worker: str, incarnation: int, lease: int, upto: int) -> int:
        """Say that the gradients of a lease's batches before ``upto`` count and cannot be lost.

        Returns the first unit that is not known to count yet.
        """

    def renew(self, worker: str, incarnation: int) -> None:
        """Say that the worker lives."""

    def report(self, worker: str, numbers: Mapping[str, float]) -> None:
        """Tell numbers for the displays: those that end in ``_sum`` are added to what was told before."""

    def task(self, worker: str, incarnation: int) -> Task | None:
        """Take work beside training, if there is some that nobody has."""

    def proceed(self, worker: str, incarnation: int, task: Task) -> None:
        """Say that a task has read what it needs, so that the others may train on."""

    def finish(self, worker: str, incarnation: int, task: Task, metrics: Mapping[str, float]) -> None:
        """Hand in the result of a task."""

    def is_stopping(self, worker: str | None = None) -> bool:
        """Ask whether the run is over, or is to end after the batches that are being trained on; or one worker is."""
