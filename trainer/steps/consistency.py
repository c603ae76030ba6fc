"""Check that all ranks train alike: with other options or settings one would train another model, or hang."""

from __future__ import annotations

import numbers
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from operator import attrgetter
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import TrainerConfigError, TrainerError
from ..parallel.experts import list_spread
from ..parallel.precision import local_part
from ..ranks.mesh import Mesh
from ..ranks.world import World
from .totals import Marks

_BITS = 20  # squares, added over all ranks, stay exact in float64
_ROUNDING = 1e-3  # of a weight's norm: kernels of different devices round differently, and that adds up
_LEAST = 1e-6
# Those that no optimizer sets itself.
_SETTINGS = ("lr", "weight_decay", "betas", "momentum", "dampening", "eps", "alpha", "rho")

_requires_grad = attrgetter("requires_grad")

_OPTIONS = (
    *("steps", "epochs", "shares", "shares_every", "average_every", "node_average_every", "step", "schedule"),
    *("precision", "parallel", "compression", "ema", "spike", "evaluate", "checkpoint", "warm_start"),
)
_OWN_OPTIONS = ("checkpoint.folder",)  # which nodes may mount elsewhere


def agree_on_options(config: Any, evaluates: bool, world: World) -> None:
    """See that all ranks have those options of ``config``, a dataclass of such, that decide what they do together.

    ``evaluates`` is whether there is an evaluation. A collective.

    Raises:
        TrainerConfigError: on every rank, if they differ; names the first.
    """
    if world.world_size == 1:
        return
    own = {name: value for key in _OPTIONS for name, value in _flatten(key, getattr(config, key))}
    own["evaluation"] = "one" if evaluates else None
    own["init_from"] = None if config.init_from is None else "given"  # paths may differ between nodes
    everywhere: list[dict[str, Any]] = [{}] * world.world_size
    dist.all_gather_object(everywhere, own)
    for rank, its in enumerate(everywhere):
        for name, value in everywhere[0].items():
            if its.get(name) != value:
                raise TrainerConfigError(
                    f"{name} is {value!r} on rank 0 and {its.get(name)!r} on rank {rank}, and ranks train together; "
                    "give all of them the same"
                )


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not is_dataclass(value):
        yield name, _comparable(value)
        return
    for one in fields(value):
        if (key := f"{name}.{one.name}") not in _OWN_OPTIONS:
            yield from _flatten(key, getattr(value, one.name))


def _comparable(value: Any) -> Any:
    """Return what is equal, and can be sent, where ranks were given the same: of functions and objects, names."""
    if isinstance(value, Mapping):
        return {key: _comparable(one) for key, one in value.items()}
    if isinstance(value, str | int | float | tuple | NoneType):
        return value
    return getattr(value, "__qualname__", None) or repr(value)


class Settings:
    """Settings of ``optimizer`` that act on gradients, by group, and the parameters that it trains; holds no state.

    Settings that are tensors are not compared. Shapes of the buffers of ``model``, which ranks share, are: a forward
    may assign others, as for a cache that grows with the longest row. The ranks of each stage are compared, and all
    learners.
    """

    def __init__(self, optimizer: Optimizer, mesh: Mesh, model: nn.Module | None = None) -> None:
        self._optimizer = optimizer
        self._mesh = mesh
        self._world = mesh.world
        self._model = model
        self._buffers = [] if model is None else [module._buffers for module in model.modules()]

    @property
    def _size(self) -> int:
        """Number of ranks whose settings must be alike."""
        return self._mesh.stage_ranks * self._mesh.learners

    def mark(self) -> int:
        """A number of 20 bits that is equal on ranks whose settings are, and hardly on others; 0 for a rank alone."""
        if self._world.world_size == 1:
            return 0
        given, trained = array("d"), bytearray()
        others: list[Any] = [type(self._optimizer).__name__]
        for group in self._optimizer.param_groups:  # there may be one for each parameter
            for value in map(_plain, map(group.get, _SETTINGS)):
                if type(value) is float:
                    given.append(value)
                elif value is not None and not _has_tensor(value):
                    others.append(value)
            given.append(len(group["params"]))
            trained.extend(map(_requires_grad, group["params"]))
        shapes = hash(tuple(one.shape for held in self._buffers for one in held.values() if one is not None))
        mark = zlib.crc32(shapes.to_bytes(8, "little", signed=True), zlib.crc32(repr(others).encode()))
        mark = zlib.crc32(trained, zlib.crc32(given.tobytes(), mark))
        return mark & ((1 << _BITS) - 1)

    def check(self, stages: Sequence[Marks]) -> None:
        """Compare the ranks' marks, by their sums over each stage; a collective if they differ.

        Raises:
            TrainerError: on every rank, if they differ.
        """
        size = self._size
        if self._mesh.learners > 1:
            stages = [Marks(total=sum(one.total for one in stages), squares=sum(one.squares for one in stages))]
        if all(one.squares * size == one.total * one.total for one in stages):
            return
        shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in range(self._world.world_size)]
        dist.all_gather_object(shapes, self._shapes())
        for rank, its in enumerate(shapes):
            first = self._mesh.rank_in_stage(0, rank // size)
            for name in (name for name in {**shapes[first], **its} if shapes[first].get(name) != its.get(name)):
                raise TrainerError(
                    f"buffer {name!r} has shape {shapes[first].get(name)} on {self._mesh.describe(first)} and "
                    f"{its.get(name)} on {self._mesh.describe(rank)}, and {self._mesh.describe(first)}'s buffers go to "
                    "all ranks; no weight was changed. Give it one shape on all ranks, or keep what forward makes anew "
                    "in an attribute that is no buffer"
                )
        everywhere: list[list[dict[str, Any]]] = [[] for _ in range(self._world.world_size)]
        dist.all_gather_object(everywhere, self._describe())
        found = self._first_difference(everywhere)
        raise TrainerError(
            f"the ranks would train other models, and no weight was changed: {found}. Make "
            "the optimizer alike on all ranks; an observer, which is on rank 0 alone, must not change it"
        )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {} if self._model is None else {name: tuple(one.shape) for name, one in self._model.named_buffers()}

    def _describe(self) -> list[dict[str, Any]]:
        return [
            {"class": type(self._optimizer).__name__}
            | {name: _plain(group[name]) for name in _SETTINGS if name in group and not _has_tensor(group[name])}
            | {
                "parameters": len(group["params"]),
                "frozen parameters": [number for number, one in enumerate(group["params"]) if not one.requires_grad],
            }
            for group in self._optimizer.param_groups
        ]

    def _first_difference(self, everywhere: list[list[dict[str, Any]]]) -> str:
        for rank, groups in enumerate(everywhere):
            first = self._mesh.rank_in_stage(0, rank // self._size)
            for number, (ours, theirs) in enumerate(zip(everywhere[first], groups, strict=False)):
                for name in {**ours, **theirs}:
                    if ours.get(name) != theirs.get(name):
                        places = [self._mesh.describe(one) for one in (first, rank)]
                        found = f"{ours.get(name)} on {places[0]} and {theirs.get(name)} on {places[1]}"
                        return f"{name!r} of the optimizer's group {number} is {found}"
        return f"the optimizers have {[len(groups) for groups in everywhere]} groups"


@torch.no_grad()
def refuse_unlike_weights(model: nn.Module, mesh: Mesh) -> None:
    """See that trained weights have the same norms on all ranks that hold the same parts; a collective.

    Raises:
        TrainerError: on every rank, if one differs by more than rounding explains.
    """
    experts = {one for module in list_spread(model) for one in module.parameters()}
    trained = [(name, one, local_part(one)) for name, one in model.named_parameters() if one.requires_grad]
    named = [(name, part) for name, one, part in trained if part.numel() and one not in experts]
    if mesh.gradient_ranks == 1 or not (named or mesh.is_spread):
        return
    unlike = _find_unlike(named, mesh.world.device, mesh.gradient_group)
    if mesh.expert_replicas is not None:
        spread = [(name, part) for name, one, part in trained if part.numel() and one in experts]
        unlike = _find_unlike(spread, mesh.world.device, mesh.expert_replicas.get_group()) or unlike
    if mesh.is_spread or mesh.learners > 1:  # each part of the model is compared by ranks of its own
        everywhere: list[tuple[str, float, float] | None] = [None] * mesh.world.world_size
        dist.all_gather_object(everywhere, unlike)
        unlike = next(filter(None, everywhere), None)
    if unlike is not None:
        name, high, low = unlike
        raise TrainerError(
            f"the ranks train different models: the norm of {name} is {high:.6g} on one rank and {low:.6g} on "
            "another. Was a weight changed by an observer, which is on rank 0 alone, or by a function that does "
            "otherwise on each rank? Change weights on all ranks alike; the checkpoints before this step stay"
        )


def _has_tensor(value: object) -> bool:
    several = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(one, Tensor) for one in several)


def _plain(value: Any) -> Any:
    """The value as all ranks spell it: 0 is 0.0, and a list of numbers a tuple."""
    if value is None or type(value) is float:
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return float(value) if isinstance(value, numbers.Real) else value


def _find_unlike(
    named: Sequence[tuple[str, torch.Tensor]], device: torch.device, group: dist.ProcessGroup | None
) -> tuple[str, float, float] | None:
    """Name, largest and least norm of the first tensor that differs between the ranks of a group; a collective."""
    norms = torch.zeros(0, dtype=torch.float64, device=device)
    if named:
        norms = torch.stack([norm.double() for norm in torch._foreach_norm([one.detach() for _, one in named], 2.0)])
    ends = torch.cat((norms, -norms)).to(device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    largest, least = ends[: len(named)].tolist(), ends[len(named) :].neg().tolist()
    bounds = ((name, high, low) for (name, _), high, low in zip(named, largest, least, strict=True))
    return next((one for one in bounds if one[1] - one[2] > _ROUNDING * one[1] + _LEAST), None)
