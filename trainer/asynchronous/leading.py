"""The life of a learner: its first rank leases batches and talks to servers, and the others do what it says."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..diloco.served import pushes_weights, rate_of_push
from ..ranks.world import World
from ..recipes.recipe import Recipe
from ..server.client import ServerClient
from ..server.leases import Lease
from ..server.services import Begun, DataPlan, Services, Task
from .evaluating import Reader, evaluate, export
from .learner import AbandonedError, Learner
from .member import Member, Pulse, WorkerOptions
from .outer_exchange import CountingCall, OuterExchange
from .setup import build_model

_REPORT_S = 0.25


def run_learner(
    recipe: Recipe,
    name: str,
    services: Services | None,
    world: World,
    options: WorkerOptions | None = None,
    *,
    note: Callable[[str], None] = lambda text: None,
) -> None:
    """Train until the run is over, or is to stop, as one rank of a learner; the first one has ``services``.

    A learner that was given up, because it was silent or is replaced by one of its name, begins anew by itself.

    Raises:
        TrainerConfigError: the recipe cannot be trained so.
        NonFiniteLossError: a loss or a gradient is NaN or infinite; nothing of its lease was pushed since.
        ServerError: servers cannot be reached, or refuse what is pushed.
    """
    orders = Orders(world)
    if services is None:
        learner = Learner(recipe, name, world, tell=lambda **numbers: None, note=lambda text: None)
        follow(learner, orders)
        return
    numbers = Numbers(services, name)
    learner = Learner(recipe, name, world, tell=numbers.tell, note=note)
    try:
        leader = Leader(recipe, name, services, learner, numbers, orders, options or WorkerOptions())
        while not leader.live():
            pass
        orders.give("end")
    finally:
        learner.close()


class Orders:
    """Words by which a learner's first rank has the others call a method of theirs, too; nothing where it is alone."""

    def __init__(self, world: World) -> None:
        self._is_alone = world.world_size == 1

    def give(self, method: str, *values: Any) -> None:
        """Tell the others to call this method."""
        self._broadcast([method, values])

    def take(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for the next order."""
        order: list[Any] = [None, None]
        self._broadcast(order)
        return order[0], order[1]

    def _broadcast(self, order: list[Any]) -> None:
        if not self._is_alone:
            dist.broadcast_object_list(order, src=0, device=torch.device("cpu"))


def follow(learner: Learner, orders: Orders) -> None:
    """Do what a learner's first rank orders, until it ends."""
    try:
        while (order := orders.take())[0] != "end":
            method, values = order
            with suppress(AbandonedError):  # another order follows
                if method == "begin":
                    learner.begin(None)
                elif method == "train":
                    (lease,) = values
                    learner.train(lease, lambda: False)
                else:
                    getattr(learner, method)(*values)
    finally:
        learner.close()


class Numbers:
    """A learner's numbers, told now and then: sums since the last time, and the newest of others, largest staleness.

    All mutable state: what is yet to be told, and when something was.
    """

    def __init__(self, services: Services, name: str) -> None:
        self._services, self._name = services, name
        self._kept: dict[str, float] = {}
        self._reported_s = time.monotonic()

    def tell(self, *, is_due: bool = False, **numbers: float) -> None:
        """Tell these, now if ``is_due``; those that end in ``_sum`` are added up."""
        for name, value in numbers.items():
            if name.endswith("_sum"):
                self._kept[name] = self._kept.get(name, 0.0) + value
            elif name == "staleness":
                self._kept[name] = max(value, self._kept.get(name, 0.0))
            else:
                self._kept[name] = value
        if is_due or time.monotonic() - self._reported_s >= _REPORT_S:
            numbers, self._kept, self._reported_s = self._kept, {}, time.monotonic()
            self._services.report(self._name, numbers)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A lease whose batches before ``upto`` are trained on; ``unit`` is the batch by which its pushes are known."""

    lease: Lease
    upto: int
    unit: int


class Consumption:
    """Consumes leases, in order, once all pushes that have something of theirs count and cannot be lost.

    A fragment whose turn comes before a lease's end is pushed again in the next lease, with what is left of this one.
    All mutable state: the leases of an incarnation that are not consumed, and the number of those that are.
    """

    def __init__(self, consume: Callable[[int, int], int], *, fragments: int) -> None:
        self._consume, self._fragments = consume, fragments
        self._open: list[Trained] = []
        self._done = 0

    @property
    def num_open(self) -> int:
        """The number of leases that are not consumed."""
        return len(self._open)

    def expect(self, trained: Trained) -> None:
        """Expect that a lease, the next one, will count."""
        self._open.append(trained)

    def settle(self, num_exchanged: int, kept: set[int], *, is_flushed: bool = False) -> int | None:
        """Consume what is certain after so many exchanges, where pushes known by ``kept`` units could still be lost.

        ``is_flushed``: nothing is left to push. Returns the first batch of the run that is not known to count, if
        that is news.

        Raises:
            LeaseError: the learner was given up.
        """
        settled = None
        while self._open:
            needed = (self._done + 1) * self._fragments + self._fragments - 1
            units = {one.unit for one in self._open[: 1 + (self._fragments > 1)]}
            if (kept if is_flushed else kept & units) or not (is_flushed or num_exchanged >= needed):
                break
            one = self._open.pop(0)
            self._done += 1
            settled = self._consume(one.lease.number, one.upto)
        return settled


class Leader(Member):
    """The first rank of a learner, through all its incarnations.

    All mutable state: the model that evaluates, and what rounding on the wire owes to servers from one to the next.
    """

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        services: Services,
        learner: Learner,
        numbers: Numbers,
        orders: Orders,
        options: WorkerOptions,
    ) -> None:
        super().__init__(recipe, name, services, options)
        self._learner, self._numbers, self._orders = learner, numbers, orders
        self._judged: nn.Module | None = None
        self._owed: dict[str, Tensor] = {}

    def _prepare(self, begun: Begun) -> None:
        self._order("prepare", begun.plan, begun.run)

    def _order(self, method: str, *values: Any) -> Any:
        """Have all ranks call a method of theirs; returns what this rank's does."""
        self._orders.give(method, *values)
        return getattr(self._learner, method)(*values)

    def _evaluate(self, begun: Begun, task: Task) -> None:
        """Evaluate what the servers hold, on this rank alone, with a model of its own."""
        if self._judged is None:
            self._judged = build_model(self._recipe)
            self._judged.load_state_dict(self._learner.fixed, strict=False)
        model, trainer = self._judged, self._recipe.trainer
        device = self._learner.device
        Reader(self._services, begun, self._learner.schema, self._client_config()).load(model)
        self._services.proceed(self._name, begun.incarnation, task)
        metrics: Mapping[str, float] = {}
        if self._recipe.evaluation is not None:
            metrics = evaluate(self._recipe, model.to(device), device)
            model.to("cpu")
        if task.is_last and trainer.export is not None:
            export(model, Path(trainer.output_dir) / trainer.export, task.step)
        self._services.finish(self._name, begun.incarnation, task, metrics)

    def _train(self, begun: Begun, lease: Lease, pulse: Pulse) -> None:
        """Train on leases until there is none."""
        learner, config, server = self._learner, self._recipe.trainer.parallel.diloco, self._recipe.trainer.server
        calls = CountingCall(self._services.call)
        client = ServerClient(
            self._header(begun, learner.schema),
            learner.schema,
            call=calls,
            placement=self._services.placement,
            wait=pulse.wait,
            config=self._client_config(),
        )
        client.feedback.load_state_dict(self._owed)
        client.join()
        first = self._order("gather")
        client.create({name: one.view(learner.schema.tensor(name).shape) for name, one in first.items()})
        with OuterExchange(
            client,
            learner.schema,
            calls,
            rate=rate_of_push(config, server, begun.plan.workers),
            pushes_weights=pushes_weights(config, server),
            keeps_own=server.rule.merges == "by quorum",
        ) as exchange:
            try:
                self._take_leases(begun, lease, exchange, pulse)
            except BaseException as exc:
                pulse.abandon(exc)  # the exchange may wait for others
                raise
        self._owed = client.feedback.state_dict()
        self._numbers.tell(is_due=True, waits_for_checkpoint=0.0)

    def _take_leases(self, begun: Begun, first: Lease, exchange: OuterExchange, pulse: Pulse) -> None:
        """Train on leases until there is none, and wait until all of it counts."""
        learner, plan = self._learner, begun.plan
        self._orders.give("begin")
        learner.begin(exchange)
        counted = Consumption(
            lambda number, upto: self._services.consume(self._name, begun.incarnation, number, upto),
            fragments=self._recipe.trainer.parallel.diloco.fragments,
        )
        lease: Lease | None = first
        last = 0
        while lease is not None:
            self._orders.give("train", lease)
            upto = learner.train(lease, lambda: pulse.is_stopping)
            last = unit_of(plan, lease.epoch, upto - 1)
            counted.expect(Trained(lease=lease, upto=upto, unit=unit_of(plan, lease.epoch, lease.done)))
            exchange.note_settled(counted.settle(learner.num_exchanged, exchange.kept_units()))
            pulse.check()
            if learner.has_stopped:
                break
            self._order("save")
            lease = self._services.lease(self._name, begun.incarnation, lease.number)
        self._order("finish", last)
        self._order("save", True)
        counted.settle(learner.num_exchanged, exchange.kept_units(), is_flushed=True)
        while counted.num_open:  # until a checkpoint of the servers holds it
            self._numbers.tell(is_due=True, waits_for_checkpoint=1.0)
            pulse.wait(self._options.pause_s)
            exchange.ask()
            counted.settle(learner.num_exchanged, exchange.kept_units(), is_flushed=True)


def unit_of(plan: DataPlan, epoch: int, place: int) -> int:
    """The number of a batch through all epochs."""
    return epoch * plan.batches + place
