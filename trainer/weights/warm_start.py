"""A warm start: weights and buffers of another run or library, and nothing else of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from ..checkpoint.state import load_model_state
from ..errors import CheckpointError, TrainerConfigError
from ..options import check_choice
from ..parallel.pipeline.names import StageNames
from ..parallel.precision import local_part
from ..ranks.control_group import ControlGroup
from ..ranks.mesh import Mesh
from ..ranks.world import World
from ..steps.finite import any_not_finite, find_infinite_constants, name_on_all_ranks
from .names import Allowed, Assignment, TensorFacts, assign, check_rules
from .run_folder import Weights
from .sources import WeightSource, open_source

_EXTRA_STATE = "_extra_state"
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """What of ``init_from`` is loaded, by which names, and which differences are meant."""

    step: Literal["best", "latest"] | int = "latest"
    """Of a run: its newest checkpoint, that of its best metric, or the one of a step."""

    weights: Weights = "model"
    """Of a run: the weights that were trained, or with ema.decay their moving average."""

    rename: tuple[str, ...] = ()
    """Rules PATTERN=>REPLACEMENT (Python's regular expressions) that turn the source's names into the model's."""

    allow_missing: tuple[str, ...] = ()
    """Patterns of the model's names that may be missing there; those keep their initial values."""

    allow_unexpected: tuple[str, ...] = ()
    """Patterns of the source's names that the model may lack."""

    allow_mismatched: tuple[str, ...] = ()
    """Patterns of the model's names that may have another shape there; those keep their initial values."""

    def __post_init__(self) -> None:
        check_rules("warm_start.rename", self.rename)
        check_choice("warm_start.weights", self.weights, ("model", "ema"))
        if isinstance(self.step, int) and self.step < 0:
            raise TrainerConfigError(f"warm_start.step={self.step} is no step; give 'best', 'latest' or a number")

    @property
    def allowed(self) -> Allowed:
        return Allowed(missing=self.allow_missing, unexpected=self.allow_unexpected, mismatched=self.allow_mismatched)


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Result of a warm start: ``loaded`` and ``kept`` are names of the model, ``ignored`` of the source."""

    source: str
    loaded: frozenset[str]
    kept: tuple[str, ...]
    ignored: tuple[str, ...]

    def describe(self) -> str:
        parts = [f"{len(self.loaded)} tensors loaded"]
        for names, what in ((self.kept, "keep their initial values"), (self.ignored, "of the source are left out")):
            if names:
                more = ", ..." if len(names) > _SHOWN else ""
                parts.append(f"{len(names)} {what} ({', '.join(names[:_SHOWN])}{more})")
        return f"weights come from {self.source}: {', '.join(parts)}"


def load_weights(
    model: nn.Module,
    path: str,
    config: WarmStartConfig,
    mesh: Mesh,
    *,
    entered: Callable[[str], None],
    stages: StageNames | None = None,
) -> WarmStart:
    """Load parameters and buffers into a model that is spread over the ranks; a collective.

    Each rank reads what it holds. The model's formats stay: floating point is rounded to them, integers must fit.
    ``entered`` hears of each phase. In a pipeline ``stages`` has the names of this rank's weights.

    Raises:
        CheckpointMismatchError: on every rank, naming all names that differ and are not allowed to.
        CheckpointError: the source cannot be read, is damaged, is not the same on every rank, or not finite.
    """
    entered("warm start")
    what = f"init_from={path!r} cannot be loaded"
    world = mesh.world
    wanted = _describe(model) if stages is None else _describe_stages(model, stages, mesh)
    control = ControlGroup(world)
    opened: list[WeightSource] = []
    try:
        control.gather(what, lambda: opened.append(open_source(path, config.step, config.weights)))
        source = opened[0]
        _refuse_different(what, control.gather(what, source.fingerprint))
        damage = control.gather(what, lambda: source.find_damage(share=world.rank, shares=world.world_size))
        if any(damage):
            found = "; ".join(dict.fromkeys(one for share in damage for one in share))
            raise CheckpointError(f"{what}: {source.name} is damaged: {found}; choose another step")
        constants = find_infinite_constants(model)
        assignment = control.gather(what, lambda: _load(model, source, config, wanted))[world.rank]
        name = source.name
    finally:
        for one in opened:
            one.close()
        control.close()
    _refuse_not_finite(what, model, world, constants)
    ties = [group for group in wanted.ties if group & assignment.sources.keys()]
    return WarmStart(
        source=name,
        loaded=frozenset(assignment.sources).union(*ties),
        kept=assignment.kept,
        ignored=assignment.ignored,
    )


def list_ties(model: nn.Module) -> list[frozenset[str]]:
    """The groups of names that stand for one tensor."""
    names: dict[int, set[str]] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            names.setdefault(id(tensor), set()).add(name)
    return [frozenset(group) for group in names.values() if len(group) > 1]


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """The tensors of a whole model by name, and the groups of names that stand for one of them."""

    tensors: Mapping[str, TensorFacts]
    ties: list[frozenset[str]]


def _describe(model: nn.Module) -> _Wanted:
    tensors = {
        name: TensorFacts(tuple(one.shape), one.dtype, str(one.dtype).removeprefix("torch."))
        for name, one in _own_tensors(get_model_state_dict(model)).items()
    }
    return _Wanted(tensors=tensors, ties=list_ties(model))


def _describe_stages(model: nn.Module, stages: StageNames, mesh: Mesh) -> _Wanted:
    """Tensors and ties of all stages of a pipeline together; a collective of them."""
    everywhere: list[Any] = [None] * mesh.sizes.pp
    dist.all_gather_object(everywhere, (_describe(model), stages.renamed), group=mesh.pipeline_group)
    tensors: dict[str, TensorFacts] = {}
    tied: dict[str, set[str]] = {}
    for own, renamed in everywhere:
        tensors |= own.tensors
        for names in own.ties:
            first = next((renamed[name] for name in names if name in renamed), min(names))
            tied.setdefault(first, set()).update(names)
        for name, first in renamed.items():
            tied.setdefault(first, set()).add(name)
    return _Wanted(tensors=tensors, ties=[frozenset(group) for group in tied.values() if len(group) > 1])


def _own_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        name: value for name, value in state.items() if isinstance(value, Tensor) and not name.endswith(_EXTRA_STATE)
    }


def _load(model: nn.Module, source: WeightSource, config: WarmStartConfig, wanted: _Wanted) -> Assignment:
    """Read what this rank holds; no collective."""
    state = dict(get_model_state_dict(model))
    targets = _own_tensors(state)
    for group in wanted.ties:  # another stage may have the name under which the source has the weight
        held = next((targets[name] for name in group if name in targets), None)
        targets |= {name: held for name in group - targets.keys() if held is not None}
    offered = {name: facts for name, facts in source.describe().items() if not name.endswith(_EXTRA_STATE)}
    found = assign(source.name, wanted.tensors, offered, rules=config.rename, ties=wanted.ties, allowed=config.allowed)
    again = {name: first for name, first in _later_names(found, wanted.ties).items() if name in targets}
    copies = {name: torch.empty_like(targets[name]) for name in again}
    source.read({old: copies.get(name, targets[name]) for name, old in found.sources.items() if name in targets})
    for name, first in again.items():
        if not torch.equal(local_part(copies[name]), local_part(targets[first])):
            raise CheckpointError(
                f"{name} and {first} are one tensor in the model and differ in {source.name}; untie them in the model, "
                "or take one away with warm_start.rename and warm_start.allow_unexpected"
            )
    load_model_state(model, state)
    return found


def _later_names(found: Assignment, ties: list[frozenset[str]]) -> Mapping[str, str]:
    """Of the names of one tensor that the source has, each but the first, and that first."""
    again: dict[str, str] = {}
    for group in ties:
        first, *later = [name for name in found.sources if name in group] or [""]
        again.update(dict.fromkeys(later, first))
    return again


def _refuse_different(what: str, prints: list[str]) -> None:
    other = next((rank for rank, its in enumerate(prints) if its != prints[0]), None)
    if other is not None:
        raise CheckpointError(
            f"{what}: rank {other} sees other bytes there than rank 0; give a path that all nodes share, or copy the "
            "same files to each"
        )


def _refuse_not_finite(what: str, model: nn.Module, world: World, constants: Collection[str]) -> None:
    """Refuse what is not finite; a buffer may be a mask of infinities, and so may one of the ``constants``."""
    named = [(name, one) for name, one in model.named_parameters() if name not in constants]
    bad = any_not_finite((tensor for _, tensor in named), world.device)
    if world.world_size > 1:
        dist.all_reduce(bad, dist.ReduceOp.MAX)
    if bad.item():
        raise CheckpointError(f"{what}: {name_on_all_ranks(named, world)} are not finite; give another source")
