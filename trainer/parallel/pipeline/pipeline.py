"""A model as a pipeline of stages: cut, rehearsed before the first step, and run batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from ...errors import TrainerConfigError
from ...ranks.mesh import Mesh
from ..config import ParallelConfig
from .cut import Cut, cut_model
from .names import StageNames, agree_on_names
from .orders import SPLIT, Order, count_stages, make_flush, make_order, place_stages
from .runner import Contexts, Runner
from .staged import Crossing, Layout, Rehearsal, StagedModel
from .ties import exchange_ties, find_ties


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Findings of a stage in its rehearsal; ``sent_without`` where nothing that comes in has a gradient."""

    received: dict[int, Layout]
    sent: dict[int, tuple[Layout, bool] | None]
    sent_without: dict[int, tuple[Layout, bool] | None]
    draws: list[str]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Functions of batches: number of ``rows``, and ``cut`` into so many parts of consecutive rows."""

    count: Callable[[Any], int]
    cut: Callable[[Any, int], list[Any]]


class Pipeline:
    """The stages of a model on this rank, and what the ranks of its replica agreed on about them.

    Made with the whole model, before blocks recompute or are compiled and before anything is sharded; ``spread`` then
    leaves the rank its stages. Mutable state: what crosses between stages, once the first batch was rehearsed.

    Raises:
        TrainerConfigError: stages or a schedule that cannot be.
    """

    def __init__(self, model: nn.Module, config: ParallelConfig, mesh: Mesh, rows: Rows) -> None:
        self._schedule, self.parts = config.schedule, config.microbatches
        self._ranks = mesh.sizes.pp
        self._rank = mesh.place["pp"]
        self._mesh = mesh
        self._rows = rows
        lists = bool(config.stages) and not isinstance(config.stages[0], str)
        named = len(config.stages) + (not lists) if config.stages else 0
        stages = count_stages(self._schedule, self._ranks, named)
        self._rank_of = place_stages(self._schedule, self._ranks, stages)
        self._order = make_order(self._schedule, self._ranks, stages, self.parts)
        self.formula = self._order.idle_share()
        self.cut = cut_model(model, config.stages, stages)
        self.ties = find_ties(model, self.cut)
        self.own = [stage for stage, rank in enumerate(self._rank_of) if rank == self._rank]
        self._check_trained(model)
        self._check_losses(model)
        self._whole = list(model.state_dict())
        self.staged = StagedModel(model, self.cut, mesh.world.device)
        self._most_rows = 0
        self._crossings: dict[str, dict[int, Crossing]] = {}
        self._runners: dict[str, Runner] = {}
        self._rehearsals: dict[Hashable, Rehearsal] = {}

    def _check_trained(self, model: nn.Module) -> None:
        trained = {name for name, one in model.named_parameters(remove_duplicate=False) if one.requires_grad}
        for rank in range(self._ranks):
            stages = [stage for stage, its in enumerate(self._rank_of) if its == rank]
            if not any(self.cut.parameters[name] in stages for name in trained):
                found = "; ".join(self.cut.describe(stage) for stage in stages)
                raise TrainerConfigError(
                    f"parallel.stages: nothing is trained on pipeline rank {rank} ({found}); cut the model such that "
                    "each rank has something to train"
                )

    def _check_losses(self, model: nn.Module) -> None:
        adding = next((name for name, one in model.named_modules() if getattr(one, "adds_loss", False)), None)
        if adding is not None:
            raise TrainerConfigError(
                f"parallel.pp={self._ranks}: {adding!r} has an auxiliary loss, which the loss on the last stage cannot "
                "add for other stages; balance experts by balance='bias', or leave parallel.pp out"
            )

    def has(self, name: str) -> bool:
        """Return whether a module of the whole model is in one of this rank's stages."""
        return self.staged.stage_of(name) in self.own

    def spread(self, modules: Collection[nn.Module] | None = None) -> None:
        """Leave ``modules`` the parameters and buffers of this rank's stages; the model, last, or all by default."""
        self.staged.keep(self.own, modules)
        if modules is None or self.staged.model in modules:
            self.staged.gate()

    def stages_of(self) -> dict[str, int]:
        """Number of ranks of a pipeline, by name, for weights that several of them have."""
        counts = {tie: len({self._rank_of[stage] for stage in tie.stages}) for tie in self.ties}
        return {name: count for tie, count in counts.items() for name in tie.names}

    def agree_on_names(self, optimizer: Optimizer) -> StageNames:
        """The names of this rank's stages in a checkpoint; a collective of the pipeline."""
        return agree_on_names(self.staged.model, self._whole, self.ties, optimizer, self._mesh)

    def check_split(self, recomputes: int, *, compiled: bool) -> None:
        """Refuse what a pipeline, or one that runs a backward in two pieces, does not go with.

        Raises:
            TrainerConfigError: blocks that are compiled, or recompute their activations.
        """
        if compiled:
            raise TrainerConfigError(
                f"compile.enabled=True with parallel.pp={self._ranks} is not there yet: a block asks which stage runs; "
                "use compile.enabled=False, or leave parallel.pp out"
            )
        if recomputes and self._schedule in SPLIT:
            raise TrainerConfigError(
                f"activation.every={recomputes} runs the backward of a block in one piece, and "
                f"parallel.schedule={self._schedule!r} that of inputs and that of weights apart; use "
                "activation.every=0, or parallel.schedule='1F1B'"
            )

    def cut_batch(self, batch: Any) -> list[Any]:
        """The parts of a batch; of the last one of an epoch, which may have fewer rows, maybe fewer.

        Raises:
            TrainerConfigError: the parts do not divide the rows of the largest batch so far.
        """
        rows = self._rows.count(batch)
        parts = self.parts
        if rows >= self._most_rows and rows % parts:
            divisors = [number for number in range(1, rows + 1) if rows % number == 0]
            raise TrainerConfigError(
                f"parallel.microbatches={parts} does not divide the {rows} rows of a batch; use one of "
                f"{', '.join(map(str, divisors))}, or another batch size"
            )
        self._most_rows = max(rows, self._most_rows)
        while rows % parts:
            parts -= 1
        return list(self._rows.cut(batch, parts))

    def train(
        self,
        parts: Sequence[Any],
        loss: Callable[[nn.Module, Any], Any],
        module: nn.Module,
        *,
        found: Callable[[int, Any], Tensor],
        weigh: Callable[[Tensor], Tensor],
        forward: Contexts = nullcontext,
        backward: Contexts = nullcontext,
    ) -> None:
        """Add the gradients of all parts to those there are; a collective of the pipeline.

        ``found`` takes, on the last stage, the number of a part and what ``loss`` returned, and returns what ``weigh``
        takes, from whose result backward runs. Each forward is in a context of ``forward``, and so on.
        """
        order = self._order if len(parts) == self.parts else make_flush(self._rank_of, len(parts))
        self._run("train", order, parts, loss, module, found=found, weigh=weigh, contexts=(forward, backward))

    def measure(self, batch: Any, metrics: Callable[[nn.Module, Any], Any], module: nn.Module) -> Any:
        """Return the results of ``metrics`` for a whole batch on the last stage, None on others; a collective."""
        results: list[Any] = []
        order = make_flush(self._rank_of, 1)
        self._run("measure", order, [batch], metrics, module, found=lambda _, one: results.append(one), weigh=None)
        return results[0] if results else None

    def exchange_ties(self) -> None:
        """Add up the gradients of weights that several stages have, so that all make equal updates; a collective.

        Ranks that hold the same part of them exchange it, after gradients were averaged over replicas.
        """
        exchange_ties(self.staged.model, self.ties, self._rank_of, self._rank, self._mesh.pipeline_group)

    def take_times(self) -> tuple[float, float]:
        """Seconds of this rank's schedules in training since the last call, and those in which it computed."""
        taken = {kind: runner.times.take() for kind, runner in self._runners.items()}
        return taken.get("train", (0.0, 0.0))

    def rehearse(self, parts: Sequence[Any], programme: Callable[[nn.Module, Any], Any], kind: str = "train") -> None:
        """Find what crosses between stages, on all ranks of the pipeline alike; a collective of these, once a ``kind``.

        Raises:
            TrainerConfigError: on each of them, where a stage needs what only another one has.
        """
        if kind in self._crossings:
            return
        own: dict[int, Facts] = {}
        error = ""
        try:
            for stage in self.own:
                found = self._rehearse(stage, parts[0], programme)
                other = self.staged.rehearse(stage, lambda model: programme(model, parts[0]), have_gradients=False)
                own[stage] = Facts(received=found.received, sent=found.sent, sent_without=other.sent, draws=found.draws)
        except Exception as exc:  # noqa: BLE001 - whatever a user's loss raises, all ranks are told
            error = f"{'' if isinstance(exc, TrainerConfigError) else f'{type(exc).__name__}: '}{exc}"
        everywhere: list[Any] = [None] * self._ranks
        dist.all_gather_object(everywhere, (error, own), group=self._mesh.pipeline_group)
        for rank, (problem, _) in enumerate(everywhere):
            if problem:
                raise TrainerConfigError(f"{problem} (found by pipeline rank {rank}, before the first step)")
        facts = {stage: fact for _, its in everywhere for stage, fact in its.items()}
        self._crossings[kind] = agree_on_crossings(self.cut, facts)
        self._runners[kind] = Runner(
            self.staged, self._crossings[kind], self._mesh.pipeline_group, self._mesh.world.device
        )

    def _run(
        self,
        kind: str,
        order: Order,
        parts: Sequence[Any],
        programme: Callable[[nn.Module, Any], Any],
        module: nn.Module,
        *,
        found: Callable[[int, Any], Any],
        weigh: Callable[[Tensor], Tensor] | None,
        contexts: tuple[Contexts, Contexts] = (nullcontext, nullcontext),
    ) -> None:
        self.rehearse(parts, programme, kind)
        rehearsals = {
            (stage, at): self._rehearse(stage, part, programme) for at, part in enumerate(parts) for stage in self.own
        }
        self._runners[kind].run(
            order, self._rank, parts, programme, module, rehearsals, found=found, weigh=weigh, contexts=contexts
        )

    def _rehearse(self, stage: int, part: Any, programme: Callable[[nn.Module, Any], Any]) -> Rehearsal:
        key = (stage, self.staged.model.training, torch.is_grad_enabled(), _signature(part))
        if key not in self._rehearsals:
            self._rehearsals[key] = self.staged.rehearse(stage, lambda model: programme(model, part))
        return self._rehearsals[key]


def agree_on_crossings(cut: Cut, facts: Mapping[int, Facts]) -> dict[int, Crossing]:
    """Find what crosses into each stage, by its number, of what rehearsals found on all of them.

    Raises:
        TrainerConfigError: a stage needs what the one before it does not have.
    """
    drawing = [stage for stage in sorted(facts) if facts[stage].draws]
    if len(drawing) > 1:
        raise TrainerConfigError(
            f"parallel.pp: {facts[drawing[0]].draws[0]} draws random numbers outside of the modules of stages, and "
            f"stages {', '.join(map(str, drawing))} each would draw their own; draw inside of a module of one stage"
        )
    crossings: dict[int, Crossing] = {}
    have_gradients = False
    for stage in range(1, cut.stages):
        name = cut.begins[stage - 1]
        received, before = facts[stage].received, facts[stage - 1]
        sent = before.sent if have_gradients else before.sent_without
        if not received:
            raise TrainerConfigError(
                f"parallel.stages: {name!r}, with which stage {stage} begins, is called with nothing that comes "
                "from the stages before; let stages begin with modules one after another"
            )
        flags = []
        for place, layout in received.items():
            there = sent.get(place)
            if there is None:
                raise TrainerConfigError(
                    f"parallel.stages: {name!r}, with which stage {stage} begins, is called with a value from "
                    f"stages before {stage - 1} that stage {stage - 1} was not called with itself; pass it on from "
                    "module to module, or choose other parallel.stages"
                )
            if there[0] != layout:
                raise TrainerConfigError(
                    f"parallel.stages: {name!r}, with which stage {stage} begins, would be sent {there[0]} "
                    f"and takes {layout}; choose other parallel.stages"
                )
            flags.append(there[1])
        crossings[stage] = Crossing(tuple(received), tuple(flags))
        have_gradients = any(flags)
    return crossings


def _signature(part: Any) -> Hashable:
    """All of a batch on which shapes may depend."""
    leaves, spec = tree_flatten(part)
    marks: list[Hashable] = [str(spec)]
    for one in leaves:
        if isinstance(one, Tensor):
            marks.append((tuple(one.shape), one.dtype))
        elif one is None or isinstance(one, bool | int | str):
            marks.append(one)
    return tuple(marks)
