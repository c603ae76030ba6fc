"""A worker: it leases batches, trains on them, and pushes what it found, until the run is over."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.batches import count_rows, move_batch
from ..errors import NonFiniteLossError, TrainerConfigError
from ..parallel.precision import compute_context
from ..recipes.recipe import Recipe, opened
from ..reproducibility import seed_step
from ..server.client import ServerClient
from ..server.embedding import find_tables
from ..server.leases import Lease
from ..server.services import Begun, DataPlan, Services, Task
from ..steps.loss import check_loss
from ..steps.schedule import Schedule
from .batches import LeasedBatch, LeasedBatches
from .evaluating import Reader, evaluate, export
from .exchange import Exchange, Gradients
from .member import Member, Pulse, WorkerOptions
from .setup import build_model, make_optimizer, make_schema, open_worker_data, trained_parameters

_BUILDING = threading.Lock()  # seeds are the process's
_REPORT_S = 0.25


def run_worker(recipe: Recipe, name: str, services: Services, options: WorkerOptions | None = None) -> None:
    """Train until the run is over, or is to stop; returns when what this worker did counts.

    A worker that was given up, because it was silent or is replaced by one of its name, begins anew by itself.

    Raises:
        TrainerConfigError: the recipe cannot be trained so.
        NonFiniteLossError: a loss or a gradient is NaN or infinite; nothing of it was pushed.
        ServerError: servers cannot be reached, or refuse what is pushed.
    """
    options = WorkerOptions() if options is None else options
    with _BUILDING:
        model = build_model(recipe)
        optimizer = make_optimizer(recipe, model)
    device = find_device(recipe.trainer.device)
    with opened(_Loader(recipe)) as loader:
        worker = Worker(recipe, name, services, options, model.to(device), optimizer, loader, device)
        while not worker.live():
            pass


class _Loader:
    """A worker's loader, opened when the plan is known."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._opened: Any = None

    def open(self, plan: DataPlan) -> Any:
        if self._opened is None:
            self._opened = open_worker_data(self._recipe, plan)
        return self._opened

    def close(self) -> None:
        if hasattr(self._opened, "close"):
            self._opened.close()


class Worker(Member):
    """One worker of a run, through all its incarnations. All mutable state: the model, and what is yet to be told."""

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        services: Services,
        options: WorkerOptions,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: _Loader,
        device: torch.device,
    ) -> None:
        super().__init__(recipe, name, services, options)
        self._model, self._optimizer, self._loader, self._device = model, optimizer, loader, device
        self._parameters = trained_parameters(model)
        self._tables = find_tables(model)
        self._schema = make_schema(model)
        self._loss = recipe.loss.resolve(2)
        self._first = {key: value.detach().cpu().clone() for key, value in self._parameters.items()}
        self._schedule: Schedule | None = None
        self._reported_s = time.monotonic()
        self._numbers: dict[str, float] = {}

    def _evaluate(self, begun: Begun, task: Task) -> None:
        reader = Reader(self._services, begun, self._schema, self._client_config())
        reader.load(self._model)
        if not self._tables:  # of these rows are read while it goes on
            self._services.proceed(self._name, begun.incarnation, task)
        metrics = evaluate(self._recipe, self._model, self._device) if self._recipe.evaluation else {}
        if task.is_last and self._recipe.trainer.export is not None:
            export(self._model, Path(self._recipe.trainer.output_dir) / self._recipe.trainer.export, task.step)
        self._services.finish(self._name, begun.incarnation, task, metrics)

    def _train(self, begun: Begun, first: Lease, pulse: Pulse) -> None:
        """Train on leases until there is none."""
        client = ServerClient(
            self._header(begun, self._schema),
            self._schema,
            call=self._services.call,
            placement=self._services.placement,
            wait=pulse.wait,
            start=self._services.start,
            config=self._client_config(),
        )
        client.join()
        client.create(self._first)
        schedule = self._find_schedule(begun.plan)
        is_ahead = self._recipe.trainer.server.rule.merges != "by clock"
        loader = self._loader.open(begun.plan)
        with (
            LeasedBatches(loader, self._services, self._name, begun, first, ahead=begun.plan.span + 1) as batches,
            Exchange(client, self._tables, is_ahead=is_ahead) as exchange,
        ):
            try:
                self._take_steps(begun, client, schedule, batches, exchange, pulse)
            except BaseException as exc:
                pulse.abandon(exc)  # the exchange may wait for others
                raise
        self._tell(is_due=True, waits_for_checkpoint=0.0)

    def _take_steps(
        self,
        begun: Begun,
        client: ServerClient,
        schedule: Schedule,
        batches: LeasedBatches,
        exchange: Exchange,
        pulse: Pulse,
    ) -> None:
        """Train on batches until there are no more, and wait until all of it counts."""
        counted = Counted(lambda lease, upto: self._services.consume(self._name, begun.incarnation, lease, upto))
        one = batches.next()
        exchange.begin(self._parameters, self._look_up(one))
        while one is not None:
            schedule.set_rates(begun.plan.step_of(one.unit))
            exchange.read_ahead(self._look_up(batches.peek()))
            gradients = self._compute(one, schedule.rate)
            counted.expect(one)
            started = time.monotonic()
            exchange.exchange(gradients, self._parameters, self._look_up(batches.peek(int(exchange.is_ahead))))
            self._tell(waited_s_sum=time.monotonic() - started, clock=client.clock, staleness=client.staleness)
            client.staleness = 0
            client.settled = counted.settle(exchange.take_counted())
            pulse.check()
            one = None if pulse.is_stopping else batches.next()
        exchange.wait()
        while exchange.num_uncounted:  # until a checkpoint of the servers holds it
            self._tell(is_due=True, waits_for_checkpoint=1.0)
            pulse.wait(self._options.pause_s)
            exchange.ask()
            counted.settle(exchange.take_counted())
        counted.settle(exchange.take_counted(), is_end=True)

    def _find_schedule(self, plan: DataPlan) -> Schedule:
        if self._schedule is None:
            self._schedule = Schedule(
                self._recipe.trainer.schedule,
                self._optimizer,
                total_updates=plan.steps,
                effective_batch_size=plan.rows * plan.workers,
            )
        return self._schedule

    def _look_up(self, one: LeasedBatch | None) -> Mapping[str, NDArray[np.int64]]:
        """Ask the model which rows a batch needs, by table; nothing where it does not say."""
        find = getattr(self._model, "lookups", None)
        if one is None or not self._tables or find is None:
            return {}
        return {table: np.asarray(ids, np.int64).ravel() for table, ids in find(one.batch).items()}

    def _compute(self, one: LeasedBatch, rate: float) -> Gradients:
        """Compute the gradients of a batch's mean loss."""
        trainer = self._recipe.trainer
        if self._options.seeds_steps:
            seed_step(trainer.seed, one.unit, 0, self._device)
        batch = move_batch(one.batch, self._device)
        for parameter in self._parameters.values():
            parameter.grad = None
        before = self._mark_buffers()
        with compute_context(trainer.precision, self._device, self._model):
            total, count = check_loss(self._loss(self._model, batch))
        if before != (after := self._mark_buffers()):
            changed = sorted(name for name in after if after[name] != before.get(name))
            raise TrainerConfigError(
                f"forward changes the buffer {changed[0]!r}, which each worker would have of its own batches: servers "
                "hold parameters alone; use a layer without statistics, or parallel.mode='allreduce'"
            )
        weight, loss = float(count), float(total.detach())
        if not math.isfinite(loss):
            raise NonFiniteLossError(
                f"worker {self._name!r}: the loss of batch {one.place} of epoch {one.lease.epoch} is {loss}; nothing "
                "of it was pushed. Look at that batch, or lower the rate"
            )
        if weight:
            (total * (1.0 / weight)).backward()  # type: ignore[no-untyped-call]
        tensors = {name: one.grad.cpu() for name, one in self._parameters.items() if one.grad is not None}
        rows = {
            table: found for table, module in self._tables.items() if (found := module.take_gradients()) is not None
        }
        if trainer.step.clip_norm is not None:
            _clip([*tensors.values(), *(gradients for _, gradients in rows.values())], trainer.step.clip_norm)
        self._tell(batches_sum=1, rows_sum=float(count_rows(batch)), loss_sum=loss, count_sum=weight, rate=rate)
        return Gradients(tensors=tensors, rows=rows, weight=weight, rate=rate, unit=one.unit)

    def _mark_buffers(self) -> dict[str, tuple[int, int]]:
        return {name: (id(buffer), buffer._version) for name, buffer in self._model.named_buffers()}

    def _tell(self, *, is_due: bool = False, **numbers: float) -> None:
        """Tell numbers now and then: sums since the last time, and the newest of others, of staleness the largest."""
        for name, value in numbers.items():
            if name.endswith("_sum"):
                self._numbers[name] = self._numbers.get(name, 0.0) + value
            elif name == "staleness":
                self._numbers[name] = max(value, self._numbers.get(name, 0.0))
            else:
                self._numbers[name] = value
        if is_due or time.monotonic() - self._reported_s >= _REPORT_S:
            numbers, self._numbers, self._reported_s = self._numbers, {}, time.monotonic()
            self._services.report(self._name, numbers)


class Counted:
    """Consumes leases as their batches count: as far as there is no gap, at a lease's end, or at the end of all.

    All mutable state: by lease the place up to which it is consumed and the places that count, and what is open.
    """

    def __init__(self, consume: Callable[[int, int], int]) -> None:
        self._consume = consume
        self._open: dict[int, tuple[Lease, int, set[int]]] = {}
        self._by_unit: dict[int, LeasedBatch] = {}
        self._settled = 0

    def expect(self, one: LeasedBatch) -> None:
        """Expect that a batch will count."""
        self._by_unit[one.unit] = one
        self._open.setdefault(one.lease.number, (one.lease, one.lease.done, set()))

    def settle(self, units: Iterable[int], *, is_end: bool = False) -> int:
        """Take the units that count by now; returns the first one of the run that is not known to.

        Raises:
            LeaseError: the worker was given up.
        """
        for unit in units:
            one = self._by_unit.pop(unit)
            self._open[one.lease.number][2].add(one.place)
        for number, (lease, done, places) in list(self._open.items()):
            upto = done
            while upto in places:
                upto += 1
            if upto > done and (is_end or upto == lease.stop):
                self._settled = max(self._settled, self._consume(number, upto))
                self._open[number] = lease, upto, places
                if upto == lease.stop:
                    del self._open[number]
        return self._settled


def find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _clip(gradients: Sequence[Tensor], limit: float) -> None:
    """Scale gradients so that their norm is no more than a limit."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in gradients]))
    for one in gradients:
        one.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
