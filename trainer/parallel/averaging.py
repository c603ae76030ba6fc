"""Local SGD: ranks step independently and average their parameters periodically (Stich 2019; Lin et al. 2020).

Hierarchical averaging averages often within a node, where links are fast, and seldom across nodes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..errors import TrainerConfigError
from ..ranks.world import World
from .buffers import distinct
from .precision import local_part


@dataclass(frozen=True, kw_only=True)
class AveragingConfig:
    """All ranks average every ``average_every`` steps; with ``node_every`` those of a node also do, more often."""

    average_every: int
    node_every: int | None = None

    def __post_init__(self) -> None:
        if self.average_every < 1:
            raise TrainerConfigError(f"average_every={self.average_every} must be 1 or more")
        if self.node_every is not None and not 1 <= self.node_every < self.average_every:
            raise TrainerConfigError(
                f"node_every={self.node_every} must be at least 1 and less than average_every={self.average_every}"
            )


class StateMean:
    """The mean of several ranks' states of model and optimizer; averaging is a collective of these ranks.

    Parameters, floating-point buffers (a batch norm's statistics) and the optimizer's floating-point state become the
    exact mean, summed in fp32 or better, and are then bit-equal on these ranks; integer buffers and counters become the
    largest. Of what is sharded these are the ranks with the same shards. ``also`` returns further tensors that are a
    state of the ranks; ``option`` is what errors call this, with what else there is to do. ``count_sum`` hears of each
    sum, of so many bytes and ranks. Holds no state of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        world: World,
        *,
        option: str,
        otherwise: str,
        also: Callable[[], Iterable[Tensor]] = tuple,
        count_sum: Callable[[int, int], None] | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._world = world
        self._option = option
        self._otherwise = otherwise
        self._also = also
        self._count_sum = count_sum

    @contextmanager
    def averaged(self, group: dist.ProcessGroup | None, ranks: int) -> Iterator[None]:
        """Within this the ranks have the mean of their states; after it each has its own again, bit by bit.

        Takes the memory of one more copy.
        """
        kept = [(tensor, tensor.detach().clone()) for tensor in self._tensors()]
        self.average(group, ranks)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, own in kept:
                    tensor.copy_(own)

    @torch.no_grad()
    def average(self, group: dist.ProcessGroup | None, ranks: int) -> None:
        """Set the states of the ranks to their mean."""
        if ranks == 1:
            return
        self._check_alike(group, ranks)
        self.average_tensors(self._tensors(), group, ranks)

    @torch.no_grad()
    def average_tensors(self, tensors: Iterable[Tensor], group: dist.ProcessGroup | None, ranks: int) -> None:
        """Set tensors that are whole on each of the ranks to their mean, integers to the largest."""
        for wide, members in _group_by_kind(tensors).items():
            # On the ranks' device: a group that was there before may have no backend for the CPU's counters.
            flat = torch.cat([tensor.detach().reshape(-1).to(self._world.device, wide) for tensor in members])
            floating = flat.is_floating_point()
            dist.all_reduce(flat, op=dist.ReduceOp.SUM if floating else dist.ReduceOp.MAX, group=group)
            if self._count_sum is not None:
                self._count_sum(flat.nbytes, ranks)
            if floating:
                flat /= ranks
            for tensor, mean in zip(members, torch.split(flat, [one.numel() for one in members]), strict=True):
                tensor.copy_(mean.view_as(tensor))

    @torch.no_grad()
    def _tensors(self) -> list[Tensor]:
        state = (tensor for _, tensor in _optimizer_tensors(self._optimizer))
        found = (*self._model.parameters(), *self._model.buffers(), *state, *self._also())
        return [real_part(distinct(local_part(one))) for one in found]

    def _check_alike(self, group: dist.ProcessGroup | None, ranks: int) -> None:
        """Raise a TrainerConfigError, on all of these ranks, where their optimizers have other states; a collective.

        An optimizer has no state of a parameter before its first gradient, which ranks may meet at different times.
        """
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        mine = sorted({names[id(parameter)] for parameter, _ in _optimizer_tensors(self._optimizer)})
        mark = zlib.crc32(json.dumps(mine).encode()) & 0xFFFFF  # so small that squares are exact in float64
        marks = torch.tensor([mark, mark * mark], dtype=torch.float64, device=self._world.device)
        dist.all_reduce(marks, group=group)
        total, of_squares = marks.tolist()
        if of_squares * ranks == total * total:
            return
        everywhere: list[set[str]] = [set() for _ in range(ranks)]
        dist.all_gather_object(everywhere, set(mine), group=group)
        lacking = sorted({name for one in everywhere for other in everywhere for name in one - other})
        raise TrainerConfigError(
            f"{self._option} averages the optimizer's state, and some ranks have none yet "
            f"of {', '.join(lacking[:5])}, which got no gradient there; use all parameters on every rank, or "
            f"{self._otherwise}"
        )


class PeriodicAverager:
    """Averages model and optimizer over the ranks every ``average_every`` steps; all its methods are collectives.

    The model must be bare: under DDP or ``fully_shard`` the gradients are exchanged already. Parameters, floating-point
    buffers (a batch norm's statistics) and the optimizer's floating-point state become the exact mean over the ranks,
    summed in fp32 or better, and are then bit-equal on all ranks, so a checkpoint taken there is complete; integer
    buffers and counters become the largest. Between two averages each rank has a state of its own: save and
    evaluate within ``averaged``. ``also`` returns further tensors that are a state of the ranks. ``count_sum`` hears of
    each sum, of so many bytes and ranks. All mutable state besides theirs: whether the ranks' states are alike now.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: AveragingConfig,
        world: World,
        *,
        also: Callable[[], Iterable[Tensor]] = tuple,
        count_sum: Callable[[int, int], None] | None = None,
    ) -> None:
        if isinstance(model, DistributedDataParallel | FSDPModule):
            raise TrainerConfigError(
                f"average_every={config.average_every} does not work with a model under {type(model).__name__}, which "
                "exchanges gradients at each step; use zero=0 with average_every, or leave average_every out"
            )
        if config.node_every is not None and world.world_size != world.local_world_size * world.num_nodes:
            raise TrainerConfigError(
                f"node_every={config.node_every} needs equal nodes, but {world.world_size} ranks are not "
                f"{world.num_nodes} nodes of {world.local_world_size}; leave node_every out"
            )
        self._mean = StateMean(
            model,
            optimizer,
            world,
            option=f"average_every={config.average_every}",
            otherwise="leave average_every out and set parallel.unused_parameters=True",
            also=also,
            count_sum=count_sum,
        )
        self._config = config
        self._world = world
        self._node_group: dist.ProcessGroup | None = None
        if config.node_every is not None:
            width = world.local_world_size
            nodes = [list(range(first, first + width)) for first in range(0, world.world_size, width)]
            self._node_group, _ = dist.new_subgroups_by_enumeration(nodes)  # type: ignore[no-untyped-call]
        self.are_alike = True

    def average_if_due(self, step: int) -> bool:
        """Average what is due after ``step`` (counted from 1); return whether all ranks now have the same state.

        To be called after every step: ``are_alike`` is then true where nothing was trained since the last average.
        """
        if step % self._config.average_every == 0:
            self._mean.average(None, self._world.world_size)
            self.are_alike = True
            return True
        self.are_alike = False
        if self._config.node_every is not None and step % self._config.node_every == 0:
            self._mean.average(self._node_group, self._world.local_world_size)
        return False

    def average_all(self) -> None:
        """Set the state of all ranks to their mean now."""
        self._mean.average(None, self._world.world_size)
        self.are_alike = True

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this, all ranks have the mean of their states; after it each has its own again, bit by bit.

        So evaluating or saving between two averages changes no training. Takes the memory of one more copy.
        """
        if self.are_alike or self._world.world_size == 1:
            yield
            return
        with self._mean.averaged(None, self._world.world_size):
            yield

    def close(self) -> None:
        """Leave the node's group; closing twice is allowed."""
        group, self._node_group = self._node_group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def real_part(tensor: Tensor) -> Tensor:
    """A view of a complex tensor as real numbers; any other tensor as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _optimizer_tensors(optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter with the tensors of its state, in the order of the parameters, the same on every rank."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        yield from ((parameter, one) for one in tensors_in(state))


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in lists, tuples and mappings of any depth, in an order that is the same on every rank."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for name in sorted(value, key=str):
            yield from tensors_in(value[name])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)


def _group_by_kind(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """Group tensors by the type that they are summed in: one collective for each group."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        else:
            wide = torch.int64
        groups.setdefault(wide, []).append(tensor)
    return groups
