"""This rank's learner among the others: what it trained on, what is exchanged when, and its part of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..compression.dense import pad_to_parts
from ..compression.wire import WireCounter, all_gather_flat
from ..errors import TrainerConfigError
from ..parallel.averaging import StateMean, tensors_in
from ..parallel.ema import WeightEma, bare_name
from ..parallel.model import ParallelModel
from .exchange import Exchange, average
from .outer import OuterOptimizer, flatten, part_of, split_like
from .schedule import ExchangeSchedule, cut_fragments


class Learners:
    """Lets learners train apart and brings them together, after each step; its methods are collectives.

    A learner is some ranks that exchange gradients: what they exchange with others is shared out among them where each
    has a whole replica, and is their shards elsewhere. Outer gradients are averaged in fp32, weighted by what the
    learners' losses counted since the same weights were exchanged last; floating-point buffers are averaged with the
    last fragment. The state of the inner optimizer stays a learner's own.

    All mutable state besides the outer optimizer's: what is owed to others (int8), the counts since each fragment's
    last exchange, the exchange that is under way, and the fragment whose result is known and not yet used.
    """

    def __init__(self, parallel: ParallelModel, optimizer: Optimizer, ema: WeightEma | None, wire: WireCounter) -> None:
        self._config = parallel.config.diloco
        self._parallel = parallel
        self._mesh = parallel.mesh
        self._model = parallel.inner
        self._optimizer = optimizer
        self._ema = ema
        self._wire = wire
        trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
        named = self._model.named_parameters()
        self._parameters = {bare_name(name): one for name, one in named if id(one) in trained}
        if len(self._parameters) < self._config.fragments:
            raise TrainerConfigError(
                f"parallel.diloco.fragments={self._config.fragments} is more than the {len(self._parameters)} "
                "parameters that are trained, which are exchanged as wholes; use fewer fragments"
            )
        self._schedule = ExchangeSchedule(
            every=self._config.every, fragments=self._config.fragments, overlap=self._config.overlap
        )
        self._names = self._cut(self._config.fragments)
        self._outer = OuterOptimizer(self._parameters, self._config)
        self._owed: dict[str, Tensor] = {}
        if self._config.codec == "int8" and self._mesh.learners > 1:
            self._owed = {name: torch.zeros_like(one) for name, one in self._outer.weights.items()}
        # Own count and that of all learners, since each fragment's last exchange.
        self._counts = torch.zeros(2, self._config.fragments, dtype=torch.float64)
        self._exchange: Exchange | None = None
        self._pending: tuple[int, int] | None = None  # fragment, and after which step its result is used
        self._sent = WireCounter()
        self._norm: float | None = None
        self._waited_s = 0.0
        self._mean = StateMean(
            self._model,
            optimizer,
            parallel.world,
            option="parallel.mode='diloco'",
            otherwise="use parallel.mode='allreduce' with parallel.unused_parameters=True",
            also=tuple if ema is None else ema.parts,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of this in a checkpoint, of all learners together, with an optimizer that keeps two moments."""
        weights = sum(one.numel() * one.element_size() for one in self._outer.weights.values())
        shared = sum(one.numel() * one.element_size() for one in self._outer.tensors().values())
        own = (3 + bool(self._owed)) * weights + (0 if self._ema is None else self._ema.nbytes)
        return shared + (self._mesh.learners * own if self._mesh.learners > 1 else 0)

    def end_step(self, step: int, *, own_count: float, count: float) -> None:
        """Start and use what is due after ``step``, in which this learner and all of them counted so much."""
        self._counts[0] += own_count
        self._counts[1] += count
        self._use_if_due(step)
        fragment = self._schedule.starting_after(step)
        if fragment is not None:
            self._start(fragment)
            self._pending = fragment, self._schedule.used_after(step)
            self._use_if_due(step)

    def describe(self) -> dict[str, float]:
        """Numbers for the record of steps; waiting is counted from record to record."""
        waited, self._waited_s = self._waited_s, 0.0
        norm = {} if self._norm is None else {"outer_norm": self._norm}
        return {**norm, "outer_bytes": self._sent.wire_bytes, "outer_wait_s": waited}

    def settle(self) -> None:
        """Wait for the exchange that is under way; its result is used when it is due."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        assert self._pending is not None, "an exchange was started"
        found = exchange.wait()
        self._waited_s += exchange.waited_s
        for counter in (self._sent, self._wire):
            counter.wire_bytes += found.wire.wire_bytes
            counter.plain_bytes += found.wire.plain_bytes
        names = self._names[self._pending[0]]
        mean = self._join(found.mean, names)
        if found.owed is not None:
            self._keep_owed(names, found.owed)
        self._measure(self._outer.step(names, mean))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this all learners have the mean of their states; after it each has its own again, bit by bit."""
        self.settle()
        if self._mesh.learners == 1:
            yield
            return
        with self._mean.averaged(self._mesh.learner_group, self._mesh.learners):
            yield

    def average_all(self) -> None:
        """Set the states of all learners to their mean now."""
        self.settle()
        self._mean.average(self._mesh.learner_group, self._mesh.learners)

    def begin(self) -> None:
        """Start anew from the weights as they are."""
        self._exchange, self._pending = None, None
        self._outer.begin()
        self._counts.zero_()
        for one in self._owed.values():
            part_of(one).zero_()

    def close(self) -> None:
        """Leave the exchange that is under way; closing twice is allowed."""
        if self._exchange is not None:
            self._exchange.close()

    def state_dict(self) -> dict[str, Any]:
        """JSON, the same on every rank: what the tensors do not tell."""
        return {
            "learners": self._mesh.learners,
            "every": self._config.every,
            "fragments": self._config.fragments,
            "pending": None if self._pending is None else list(self._pending),
            "sent": self._sent.state_dict(),
        }

    def shared_tensors(self) -> dict[str, Tensor]:
        """The weights and momenta that all learners have in common, by name."""
        return self._outer.tensors()

    def own_tensors(self) -> dict[str, Tensor]:
        """This learner's state by name, empty where there is one learner; a checkpoint may be read into it."""
        if self._mesh.learners == 1:
            return {}
        found = {f"weights.{name}": one.detach() for name, one in self._parameters.items()}
        found |= {
            f"buffers.{bare_name(name)}": one.detach()
            for name, one in self._model.state_dict(keep_vars=True).items()
            if isinstance(one, Tensor) and not isinstance(one, nn.Parameter) and not name.endswith("_extra_state")
        }
        for name, parameter in self._parameters.items():
            state = self._optimizer.state.get(parameter, {})
            found |= {f"optimizer.{name}.{number}": one for number, one in enumerate(tensors_in(state))}
        if self._ema is not None:
            found |= {f"ema.{name}": one for name, one in self._ema.named().items()}
        found |= {f"owed.{name}": one for name, one in self._owed.items()}
        return found | {f"counts.{self._config.fragments}": self._counts}

    def copy_own(self) -> dict[str, Tensor]:
        """Copies of ``own_tensors``, whole on each rank, for a checkpoint of which another part is the mean."""
        self.settle()
        copies = {name: one.clone() for name, one in self.own_tensors().items()}
        if self._owed and self._sharing > 1:
            for names in self._names:
                whole = torch.zeros_like(flatten([part_of(self._owed[name]) for name in names]))
                self._slice(whole).copy_(self._slice(flatten([part_of(self._owed[name]) for name in names])))
                dist.all_reduce(whole, group=self._mesh.gradient_group)
                _write({name: copies[f"owed.{name}"] for name in names}, whole)
        return copies

    def resume(self, saved: Mapping[str, Any]) -> list[str]:
        """Continue from what ``state_dict`` returned, once tensors were read; returns notes for people."""
        notes = []
        self._sent.load_state_dict(saved["sent"])
        if saved["learners"] != self._mesh.learners:
            notes.append(
                f"the checkpoint is of {saved['learners']} learners, and there are {self._mesh.learners}: each "
                "continues from the mean of their weights and of their optimizers; the outer optimizer stays"
            )
        pending = saved["pending"]
        if pending is None:
            return notes
        is_same = (saved["learners"], saved["every"], saved["fragments"]) == (
            self._mesh.learners,
            self._config.every,
            self._config.fragments,
        )
        if is_same:
            self._pending = pending[0], pending[1]
        else:
            self._outer.merge(self._cut(saved["fragments"])[pending[0]])
        return notes

    def _cut(self, fragments: int) -> list[list[str]]:
        names = list(self._parameters)
        return [
            [names[index] for index in cut]
            for cut in cut_fragments([one.numel() for one in self._parameters.values()], fragments)
        ]

    @property
    def _sharing(self) -> int:
        """Number of this learner's ranks that have the same to exchange, of which each takes its part."""
        return 1 if self._parallel.is_sharded or self._mesh.learners == 1 else self._mesh.stage_ranks

    def _slice(self, flat: Tensor) -> Tensor:
        """A view of this rank's part of what the ranks of a learner share out."""
        part = -(-flat.numel() // self._sharing)
        return flat[part * self._mesh.learner_rank : part * (self._mesh.learner_rank + 1)]

    def _start(self, fragment: int) -> None:
        names = self._names[fragment]
        flat = self._outer.propose(names).to(self._parallel.world.device)
        own, count = self._counts[:, fragment].tolist()
        self._counts[:, fragment] = 0.0
        weight = own * self._mesh.learners / count if count else 1.0
        if weight != 1.0:
            flat *= weight
        if self._owed:
            flat += flatten([part_of(self._owed[name]) for name in names]).to(flat)
        if fragment == self._config.fragments - 1 and self._mesh.learners > 1:
            buffers = [part_of(one) for one in self._model.buffers()]
            self._mean.average_tensors(buffers, self._mesh.learner_group, self._mesh.learners)
        if self._sharing > 1:
            flat = pad_to_parts(flat, self._sharing)[self._mesh.learner_rank].clone()
        work = partial(average, flat, self._config.codec, self._mesh.learner_group)
        self._exchange = Exchange(work, flat.device, behind=self._config.overlap > 0 and self._mesh.learners > 1)

    def _use_if_due(self, step: int) -> None:
        if self._pending is not None and step >= self._pending[1]:
            self.settle()
            self._outer.merge(self._names[self._pending[0]])
            self._pending = None

    def _join(self, mean: Tensor, names: list[str]) -> Tensor:
        """The mean of all of a fragment, where the ranks of this learner have parts of it."""
        if self._sharing == 1:
            return mean
        group = self._mesh.gradient_group
        assert group is not None, "there are several learners"
        whole = torch.empty((self._sharing, mean.numel()), dtype=mean.dtype, device=mean.device)
        all_gather_flat(whole, mean, group, async_op=False)
        return whole.reshape(-1)[: sum(part_of(self._outer.weights[name]).numel() for name in names)]

    def _keep_owed(self, names: list[str], owed: Tensor) -> None:
        if self._sharing > 1:
            whole = torch.zeros_like(flatten([part_of(self._owed[name]) for name in names]))
            own = self._slice(whole)
            own.copy_(owed[: own.numel()])
            owed = whole
        _write({name: self._owed[name] for name in names}, owed)

    def _measure(self, squares: Tensor) -> None:
        """Keep the norm of the outer gradient, whose parts on this rank have these squares."""
        squares = squares.to(self._parallel.world.device)
        if self._parallel.is_sharded:
            squares /= self._parallel.count_holders(next(iter(self._parameters.values())))
            if self._mesh.stage_ranks > 1:
                dist.all_reduce(squares, group=self._mesh.stage_group)
        self._norm = math.sqrt(float(squares))


@torch.no_grad()
def _write(tensors: Mapping[str, Tensor], flat: Tensor) -> None:
    parts = [part_of(one) for one in tensors.values()]
    for part, one in zip(parts, split_like(flat, parts), strict=True):
        part.copy_(one)
