"""A learner's model on its ranks: inner steps on leased batches, and the fragments that are exchanged between them.

All ranks of a learner call the same methods in the same order; its first rank alone has an exchange with servers, and
tells the others whether that went well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..config import TrainerConfig
from ..data.batches import move_batch
from ..diloco.served import Fragment, cut_schema, due_after
from ..errors import TrainerConfigError, TrainerError
from ..parallel.diloco_config import DilocoConfig
from ..parallel.ema import bare_name
from ..parts import Parts, make_parts
from ..ranks.mesh import Mesh
from ..ranks.world import World
from ..recipes.recipe import Recipe
from ..reproducibility import seed_step
from ..server.config import ParameterServerConfig
from ..server.leases import Lease
from ..server.services import DataPlan
from ..steps.step import StepResult
from ..stopwatch import Stopwatch
from ..weights.warm_start import load_weights
from .batches import seek
from .learner_state import read_state, write_state
from .outer_exchange import Change, OuterExchange
from .setup import build_model, make_schema, open_learner_data

Numbers = Callable[..., None]


class AbandonedError(TrainerError):
    """The first rank of a learner gave up what its ranks were doing."""


class Learner:
    """One learner through all its incarnations. ``note`` gets sentences for people.

    All mutable state: the model and the inner optimizer; the position of the loader; the steps that were taken, what
    each fragment counts since it was exchanged last, and the fragment whose exchange is under way.
    """

    def __init__(self, recipe: Recipe, name: str, world: World, *, tell: Numbers, note: Callable[[str], None]) -> None:
        self.num_exchanged = 0
        """The exchanges of this incarnation whose result is used, or was not wanted."""
        self.has_stopped = False
        """Training ended within a lease, as it was asked to."""
        self.fixed: dict[str, Tensor] = {}
        """What is not trained of the model, buffers and frozen parameters, by name."""
        self._recipe, self._name, self._world, self._tell, self._note = recipe, name, world, tell, note
        self._config = recipe.trainer.parallel.diloco
        self._model = build_model(recipe)
        self.schema = make_schema(self._model)
        self._fragments = cut_schema(self.schema, self._config.fragments)
        self._whole = cut_schema(self.schema, 1)[0]
        self._plan: DataPlan | None = None
        self._run = ""
        self._loader: Any = None
        self._at: tuple[int, int] | None = None
        self._batches: Iterator[Any] = iter(())
        self._parts: Parts
        self._parameters: dict[str, nn.Parameter] = {}
        self._buffers: dict[str, Tensor] = {}
        self._exchange: OuterExchange | None = None
        self._counts = [0.0] * self._config.fragments
        self._steps = 0
        self._pending: tuple[int, int] | None = None  # fragment, and after which step its result is used
        self._saved_at = 0

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return self._world.device

    def prepare(self, plan: DataPlan, run: str) -> None:
        """Make all that needs the plan of the run, the first time that this is called.

        Raises:
            TrainerConfigError: the data cannot be shared out, or the model not laid out, among the learner's ranks.
            CheckpointError: the weights of ``init_from`` cannot be read.
        """
        if self._plan is not None:
            return
        recipe, config = self._recipe, inner_config(self._recipe.trainer)
        self._loader = open_learner_data(recipe, plan, self._world)
        self._parts = make_parts(
            config,
            Mesh(self._world),
            Stopwatch(),
            self._model,
            partial(recipe.make_optimizer, self._model),
            self._loader,
            loss=recipe.loss.resolve(2),
            initialise=None,
            total_steps=plan.steps,
            clock=None,
        )
        inner = self._parts.parallel.inner
        named = {bare_name(name): one for name, one in inner.named_parameters() if one.requires_grad}
        self._parameters = {spec.name: named[spec.name] for spec in self.schema.tensors}
        if config.init_from is not None:
            mesh = self._parts.parallel.mesh
            found = load_weights(inner, config.init_from, config.warm_start, mesh, entered=lambda phase: None)
            self._note(found.describe())
        self._buffers = {name: one.detach().clone() for name, one in inner.named_buffers()}
        self.fixed = {bare_name(name): one for name, one in self._buffers.items()}
        for name, one in inner.named_parameters():
            if not one.requires_grad:
                self.fixed[bare_name(name)] = whole_of(one).clone()
        self._plan, self._run = plan, run
        if self._state_path.exists() and recipe.trainer.checkpoint.every_steps:
            problem = read_state(self._state_path, self._named_state, run=run, schema=self.schema.digest)
            self._note(problem or f"{self._name} goes on with the inner optimizer of its last exchange")

    def gather(self) -> dict[str, Tensor]:
        """Copies of all trained weights on the first rank, flat fp32 on the CPU by name; empty on others."""
        return self._gather(self._whole)

    def begin(self, exchange: OuterExchange | None) -> None:
        """Begin an incarnation from the common weights; the first rank has an exchange."""
        self._exchange, self._pending, self.num_exchanged = exchange, None, 0
        self.has_stopped = False
        self._counts = [0.0] * len(self._fragments)
        self._load(self._whole, self._agreed(None if exchange is None else exchange.pull), alpha=0.0)

    def train(self, lease: Lease, is_stopping: Callable[[], bool]) -> int:
        """Train on the batches of a lease, and exchange what is due; returns the place up to which they are trained on.

        That may be before the lease's end: the run is to stop. Then ``has_stopped``, and all changes are pushed.

        Raises:
            NonFiniteLossError: a loss or a gradient is NaN or infinite, and that is to stop a run.
            AbandonedError: on other ranks, where the first one raises what it met at an exchange.
        """
        assert self._plan is not None, "the learner is prepared"
        plan, overlap = self._plan, self._config.overlap
        first = lease.epoch * plan.batches + lease.done
        for place in range(lease.done, lease.stop):
            result = self._step(plan, lease.epoch, place, is_stopping())
            self._steps += 1
            self._counts = [count + result.count for count in self._counts]
            self._use(self._steps)
            done, length = place + 1 - lease.done, lease.stop - lease.done
            for fragment in due_after(done, length, every=plan.span, fragments=len(self._fragments)):
                self._use()
                self._start(fragment, first)
                self._use(self._steps - overlap)
            if result.stop_requested:
                self.has_stopped = True
                last = lease.epoch * plan.batches + place
                self._push_rest(first if len(self._fragments) == 1 else last)
                return place + 1
        return lease.stop

    def finish(self, unit: int) -> None:
        """Use what is under way, and push what is left of fragments that wait for their turn, known by ``unit``."""
        self._use()
        self._push_rest(unit)

    def save(self, is_due: bool = False) -> None:
        """Save the inner optimizer, if so many steps went by as between checkpoints, or ``is_due``."""
        every = self._recipe.trainer.checkpoint.every_steps
        if not every or self._steps == self._saved_at or not (is_due or self._steps - self._saved_at >= every):
            return
        problem = write_state(self._state_path, self._named_state, run=self._run, schema=self.schema.digest)
        if problem:
            self._note(problem)
        self._saved_at = self._steps

    def close(self) -> None:
        """Close the loader."""
        if hasattr(self._loader, "close"):
            self._loader.close()

    # Inner steps

    def _step(self, plan: DataPlan, epoch: int, place: int, is_stopping: bool) -> StepResult:
        parts, seed = self._parts, self._recipe.trainer.seed
        slot, step = find_step(plan, epoch, place)
        batch = move_batch(self._read(plan, epoch, place), self._world.device)
        microbatches = parts.microbatches.make([batch], self._note)
        seed_step(seed, step, slot * self._world.world_size + self._world.rank, self._world.device)
        parts.schedule.set_rates(step)
        result = parts.steps.run(step, microbatches, stop_requested=is_stopping, epoch=epoch)
        loss = result.loss * result.count if result.count else 0.0
        self._tell(batches_sum=1, rows_sum=result.rows, loss_sum=loss, count_sum=result.count, rate=parts.schedule.rate)
        return result

    def _read(self, plan: DataPlan, epoch: int, place: int) -> Any:
        if self._at != (epoch, place):
            self._batches = seek(self._loader, epoch, place)
        try:
            batch = next(self._batches)
        except StopIteration:
            raise TrainerError(
                f"data.use makes a {type(self._loader).__name__} that has no batch {place} in epoch {epoch}, of "
                f"{plan.batches} that it told of"
            ) from None
        self._at = epoch, place + 1
        return batch

    # Exchanges

    def _start(self, fragment: int, unit: int, *, pulls: bool = True) -> None:
        weights = self._gather(self._fragments[fragment])
        if self._exchange is not None:
            change = Change(
                fragment=self._fragments[fragment],
                weights=weights,
                weight=self._counts[fragment],
                unit=unit,
                pulls=pulls,
            )
            self._exchange.start(change)
        self._counts[fragment] = 0.0
        self._pending = fragment, self._steps + self._config.overlap

    def _use(self, step: int | None = None) -> None:
        """Use the result of the exchange under way, if it is due after ``step`` steps; without that, in any case."""
        if self._pending is None or (step is not None and step < self._pending[1]):
            return
        fragment, self._pending = self._fragments[self._pending[0]], None
        self._load(fragment, self._settle(), alpha=self._config.alpha)

    def _settle(self) -> Mapping[str, Tensor]:
        found = self._agreed(None if self._exchange is None else self._exchange.wait)
        self.num_exchanged += 1
        if self._exchange is not None:
            self._tell_exchange(self._exchange)
        return found

    def _push_rest(self, unit: int) -> None:
        """Push what each fragment has not pushed, and pull nothing."""
        self._use()
        for fragment, count in enumerate(self._counts):
            if count:
                self._start(fragment, unit, pulls=False)
                self._settle()
                self._pending = None

    def _agreed(self, ask: Callable[[], Mapping[str, Tensor]] | None) -> Mapping[str, Tensor]:
        """Ask on the first rank, and tell the others whether that went well.

        Raises:
            AbandonedError: on other ranks, where it did not.
        """
        error: BaseException | None = None
        found: Mapping[str, Tensor] = {}
        if ask is not None:
            try:
                found = ask()
            except BaseException as exc:  # noqa: BLE001 - raised below
                error = exc
        is_well = [error is None]
        if self._world.world_size > 1:
            dist.broadcast_object_list(is_well, src=0, device=torch.device("cpu"))
        if error is not None:
            raise error
        if not is_well[0]:
            raise AbandonedError("the first rank of this learner gave up its exchange; it says why")
        return found

    def _tell_exchange(self, exchange: OuterExchange) -> None:
        waited, exchange.waited_s = exchange.waited_s, 0.0
        client = exchange.client
        self._tell(
            waited_s_sum=waited,
            outer_bytes_sum=exchange.calls.take_bytes(),
            outer_norm=exchange.norm,
            staleness=client.staleness,
            clock=client.clock,
        )
        client.staleness = 0

    # Weights

    @torch.no_grad()
    def _gather(self, fragment: Fragment) -> dict[str, Tensor]:
        """Copies of the tensors of which a fragment has parts, on the first rank; a collective where they are sharded.

        Raises:
            NonFiniteLossError: on every rank, if the last step's gradients were not finite.
            TrainerConfigError: forward has changed a buffer.
        """
        self._parts.steps.settle()
        self._refuse_changed_buffers()
        found = {}
        for name in fragment.parts:
            whole = whole_of(self._parameters[name])
            if self._world.is_first:
                found[name] = torch.empty(whole.numel()).copy_(whole.reshape(-1))
        return found

    @torch.no_grad()
    def _load(self, fragment: Fragment, tensors: Mapping[str, Tensor], *, alpha: float) -> None:
        """Bring a fragment's weights to those that the first rank has, but for a share ``alpha`` of their own."""
        device = self._world.device
        if self._world.is_first:
            flat = torch.cat([tensors[name][start:stop] for name, start, stop in _spans(fragment)]).to(device)
        else:
            flat = torch.empty(fragment.size, device=device)
        if self._world.world_size > 1:
            dist.broadcast(flat, src=0)
        values = iter(torch.split(flat, [stop - start for _, start, stop in _spans(fragment)]))
        for name, parts in fragment.parts.items():
            parameter = self._parameters[name]
            own = torch.empty(parameter.numel(), dtype=parameter.dtype, device=device)
            if alpha or sum(stop - start for start, stop in parts) < own.numel():
                own.copy_(whole_of(parameter).reshape(-1))
            for start, stop in parts:
                if alpha:
                    own[start:stop].mul_(alpha).add_(next(values), alpha=1.0 - alpha)
                else:
                    own[start:stop] = next(values)
            _write(parameter, own.view(parameter.shape))

    def _refuse_changed_buffers(self) -> None:
        for name, one in self._parts.parallel.inner.named_buffers():
            if name not in self._buffers or not torch.equal(one, self._buffers[name]):
                raise TrainerConfigError(
                    f"forward changes the buffer {name!r}, which each learner would have of its own batches: servers "
                    "hold parameters alone; use a layer without statistics, or parallel.diloco.over='allreduce'"
                )

    @property
    def _state_path(self) -> Path:
        folder = Path(self._recipe.trainer.output_dir) / "learners"
        rank, ranks = self._world.rank, self._world.world_size
        return folder / f"{self._name}-{rank}-of-{ranks}.safetensors"

    @property
    def _named_state(self) -> Mapping[str, tuple[nn.Parameter, dict[str, Any]]]:
        """The inner optimizer's state of each parameter by name."""
        state = self._parts.optimizer.state
        return {name: (one, state[one]) for name, one in self._parameters.items()}


def inner_config(config: TrainerConfig) -> TrainerConfig:
    """The options of a learner by itself: its ranks exchange gradients at each step."""
    parallel = replace(config.parallel, mode="allreduce", diloco=DilocoConfig())
    checkpoint = replace(config.checkpoint, every_steps=0, keep_best=0)
    evaluate = replace(config.evaluate, every=None, best=None)
    return replace(
        config,
        parallel=parallel,
        server=ParameterServerConfig(),
        checkpoint=checkpoint,
        evaluate=evaluate,
        export=None,
    )


def find_step(plan: DataPlan, epoch: int, place: int) -> tuple[int, int]:
    """The learner in whose turn a batch is, by its lease's place among all, and its step, by which rates go.

    Where learners take turns, as when they are synchronous, these are the learner's own.
    """
    index = place // plan.span
    before = epoch * plan.batches // plan.workers
    return index % plan.workers, before + index // plan.workers * plan.span + place % plan.span


def whole_of(parameter: Tensor) -> Tensor:
    """All of a parameter; a collective where it is sharded."""
    found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return found.detach()


def _write(parameter: Tensor, whole: Tensor) -> None:
    """Write a whole tensor, which each rank has, to what this rank holds of it."""
    if isinstance(parameter, DTensor):
        cut = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(cut.to_local())
    else:
        parameter.copy_(whole)


def _spans(fragment: Fragment) -> Sequence[tuple[str, int, int]]:
    return [(name, start, stop) for name, parts in fragment.parts.items() for start, stop in parts]
