"""Parameters of a model as a rank of a layout has them, from shapes; what the planner counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from ..errors import TrainerConfigError
from ..ranks.mesh import MeshSizes
from .activation import ActivationConfig
from .blocks import find_blocks
from .config import ParallelConfig
from .gathered import list_rounded
from .precision import PrecisionConfig
from .trace import Record


@dataclass(frozen=True, kw_only=True)
class Work:
    """A step's computation: a model of shapes, the trace of its forward (none: not known), and the step's rows.

    ``optimizer`` has the bytes of each parameter's state, by name.
    ``rows`` gives the rows of a batch on each of so many replicas, and raises TrainerConfigError where there are none.
    """

    model: nn.Module
    records: Sequence[Record]
    optimizer: Mapping[str, int]
    precision: PrecisionConfig
    activation: ActivationConfig
    rows: Callable[[int], int]
    accumulate: int = 1
    microbatch: int | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """A parameter as a rank of its stage has it, before ZeRO."""

    name: str
    names: tuple[str, ...]
    """All names of the weight, of which each stage that has one has a copy."""

    weight: int
    """The same for all of them."""

    shape: tuple[int, ...]
    nbytes: float
    gathered: float
    """Bytes of a number, in the format that sharded weights are gathered in."""

    reduced: float
    """Bytes of a number of its gradient, in the format that sharded gradients are reduced in."""

    state: float
    trained: bool
    is_spread: bool
    shard_dim: int
    """The dimension that ZeRO cuts, for which it is filled up."""

    block: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def padded(self, shards: int) -> int:
        """Numbers of the whole weight as ``shards`` ranks gather it: each has as much."""
        size = self.shape[self.shard_dim] if self.shape else 1
        return self.numel // max(1, size) * (-(-size // shards) * shards)


def count_shards(one: Part, config: ParallelConfig, sizes: MeshSizes) -> int:
    """Ranks over which ZeRO shards a parameter, or over which its gradient is averaged."""
    return sizes.dp * sizes.cp // sizes.learners // (config.ep if one.is_spread else 1)


def cut_dims(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> dict[str, int]:
    """The dimension along which each parameter that a plan cuts is cut, by name."""
    found = {}
    modules = dict(model.named_modules())
    for name, style in styles.items():
        if not isinstance(style, ColwiseParallel | RowwiseParallel):
            continue
        is_linear = isinstance(modules[name], nn.Linear)
        dim = int(is_linear != isinstance(style, ColwiseParallel))
        for key, _ in modules[name].named_parameters(recurse=False):
            if key == "weight":
                found[f"{name}.{key}"] = dim
            elif is_linear and dim == 0:
                found[f"{name}.{key}"] = 0
    return found


def list_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose experts ``ep`` spreads, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "num_experts") and hasattr(module, "exchange")
    }


def cut_parameters(
    work: Work, config: ParallelConfig, styles: Mapping[str, ParallelStyle], sizes: MeshSizes
) -> Iterator[Part]:
    """Yield each parameter under each of its names.

    Raises:
        TrainerConfigError: there are no experts to spread, or more ranks than experts.
    """
    cut = cut_dims(work.model, styles)
    experts = {id(one) for module in list_experts(work.model).values() for one in module.parameters()}
    if config.ep > 1 and not experts:
        raise TrainerConfigError(f"parallel.ep={config.ep} spreads experts, and the model has none; leave it out")
    for name, module in list_experts(work.model).items():
        number: int = module.num_experts  # type: ignore[assignment]
        if number % config.ep:
            raise TrainerConfigError(
                f"parallel.ep={config.ep} does not divide the {number} experts of {name!r}; use a divisor"
            )
    rounded = list_rounded(work.model, work.precision)
    blocks = names_of(work.model, find_blocks(work.model, config.blocks, "parallel.blocks"))
    names: dict[int, list[str]] = {}
    for name, one in work.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(one), []).append(name)
    replicas = sizes.dp * sizes.cp // config.ep
    spread_by_outputs = {
        id(one)
        for module in list_experts(work.model).values()
        for one in module.parameters()
        if all(weight.shape[1] % replicas == 0 for weight in module.parameters())
    }
    for name, one in work.model.named_parameters(remove_duplicate=False):
        shape = list(one.shape)
        share = 1
        if name in cut:
            share, shape[cut[name]] = config.tp, shape[cut[name]] // config.tp
        is_spread = config.ep > 1 and id(one) in experts
        if is_spread:
            share, shape[0] = share * config.ep, shape[0] // config.ep
        yield Part(
            name=name,
            names=tuple(names[id(one)]),
            weight=id(one),
            shape=tuple(shape),
            nbytes=one.nbytes / share,
            gathered=2 if name in rounded else one.element_size(),
            reduced=_reduced_size(one.dtype, work.precision),
            state=work.optimizer.get(names[id(one)][0], 0) / share,
            trained=one.requires_grad,
            is_spread=is_spread,
            shard_dim=int(is_spread and id(one) in spread_by_outputs),
            block=block_of(name, blocks),
        )


def _reduced_size(dtype: torch.dtype, precision: PrecisionConfig) -> int:
    is_own = precision.dtype == precision.reduce_dtype == "fp32" or dtype != torch.float32
    return dtype.itemsize if is_own else precision.reduced_dtype.itemsize


def names_of(model: nn.Module, chosen: Sequence[nn.Module]) -> frozenset[str]:
    """Names of chosen modules."""
    found = set(map(id, chosen))
    return frozenset(name for name, module in model.named_modules() if id(module) in found)


def block_of(name: str, blocks: Collection[str]) -> str:
    """The innermost block around a name; empty outside of all."""
    while name:
        name = name.rpartition(".")[0]
        if name in blocks:
            return name
    return ""
