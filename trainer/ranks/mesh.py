"""The ranks as a mesh: which of them hold parts of one replica of the model, and which hold the same part of others.

A replica is trained on samples of its own; the ranks of one replica see the same samples. The dimensions, outermost
first, have the field's usual order and names, which ``DistributedDataLoader(mesh=)`` knows: ``pp`` (pipeline stages),
``dp`` (replicas), ``cp`` (cuts of the sequence), ``tp`` (cuts of the weights). Experts lie along ``ep``, which is a
part of ``dp``. Replicas may be divided into ``learners``, which exchange gradients among themselves alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import TrainerConfigError
from .world import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DIMS = ("pp", "dp", "cp", "tp")
"""Dimensions of a mesh, outermost first."""

MODEL_DIMS = ("pp", "cp", "tp")
"""Those along which ranks take the same samples."""

_DP = DIMS.index("dp")  # torch 2.11 unflattens by number alone


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """Ranks along each dimension; their product, without ``ep`` and ``learners``, is the number of ranks."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    learners: int = field(default=1, repr=False)
    """Groups of consecutive replicas that train apart; more than one only where each replica is one rank."""

    @classmethod
    def fill(
        cls, world_size: int, *, pp: int = 1, cp: int = 1, tp: int = 1, ep: int = 1, learners: int = 1
    ) -> MeshSizes:
        """The mesh of all ranks, whose ``dp`` is what the other dimensions leave.

        Raises:
            TrainerConfigError: they do not divide the ranks, or ``ep`` or ``learners`` do not divide ``dp``.
        """
        replica = pp * cp * tp
        if world_size % replica:
            asked = ", ".join(f"{name}={size}" for name, size in (("pp", pp), ("cp", cp), ("tp", tp)) if size > 1)
            raise TrainerConfigError(
                f"parallel: {asked} needs {replica} ranks for each replica of the model, and {world_size} "
                f"{'rank is' if world_size == 1 else 'ranks are'} not a multiple of that; start "
                f"{-(-world_size // replica) * replica} ranks, or choose sizes whose product divides {world_size}"
            )
        dp = world_size // replica
        if dp % ep:
            raise TrainerConfigError(
                f"parallel.ep={ep} spreads the experts over replicas, and there are {dp} of them ({world_size} ranks, "
                f"{replica} for each replica); use a divisor of {dp}, or start another number of ranks"
            )
        if dp % learners:
            raise TrainerConfigError(
                f"parallel.diloco.learners={learners} divides the ranks into equal groups, and there are {dp}; use a "
                f"divisor of {dp}, or start another number of ranks"
            )
        return cls(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, learners=learners)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def place(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank, by dimension."""
        place = {}
        for name in reversed(DIMS):
            rank, place[name] = divmod(rank, getattr(self, name))
        return {name: place[name] for name in DIMS}

    @property
    def is_spread(self) -> bool:
        """Return whether a replica of the model, or its experts, lie on several ranks."""
        return (self.pp, self.cp, self.tp, self.ep) != (1, 1, 1, 1)

    def describe_place(self, rank: int) -> str:
        """A rank's place along dimensions that have more than one, ``pp 1, tp 1``; empty where ranks are replicas."""
        place = (f"{name} {at}" for name, at in self.place(rank).items() if getattr(self, name) > 1)
        return ", ".join(place) if self.is_spread else ""

    def describe(self, rank: int) -> str:
        """The rank in words, with its place: ``rank 5 (pp 1, tp 1)``."""
        place = self.describe_place(rank)
        return f"rank {rank} ({place})" if place else f"rank {rank}"

    def to_dict(self) -> dict[str, int]:
        """Ranks by dimension, of those with more than one, where replicas lie on several; else empty."""
        sizes = {name: getattr(self, name) for name in (*DIMS, "ep")}
        return {name: size for name, size in sizes.items() if size > 1} if self.is_spread else {}


class Mesh:
    """This process's place in the mesh, and the groups that its collectives go over; making it is a collective.

    Where each replica is one rank (``is_spread`` is false) there is nothing but the world: ``device_mesh`` and all
    groups are None, which torch takes for all ranks. Constant after construction.
    """

    def __init__(self, world: World, sizes: MeshSizes | None = None) -> None:
        self.world = world
        self.sizes = MeshSizes(dp=world.world_size) if sizes is None else sizes
        if self.sizes.world_size != world.world_size:
            raise TrainerConfigError(
                f"a mesh of {self.sizes} does not have the {world.world_size} ranks that there are"
            )
        self.place = self.sizes.place(world.rank)
        self.device_mesh: DeviceMesh | None = None
        self.gradient_group: ProcessGroup | None = None
        """Ranks with the same part of the model and other tokens: (dp, cp), of this learner. Gradients are averaged
        over them."""
        self.stage_group: ProcessGroup | None = None
        """Ranks of one pipeline stage, of this learner: (dp, cp, tp). They run the same modules."""
        self.pipeline_group: ProcessGroup | None = None
        """Stages of one replica: (pp)."""
        self.expert_mesh: DeviceMesh | None = None
        """Ranks over which experts are spread: (ep), a part of dp; None where they are not."""
        self.expert_replicas: DeviceMesh | None = None
        """Ranks with the same experts and other tokens: what of (dp, cp) is not ep."""
        self.learner_group: ProcessGroup | None = None
        """Ranks with this rank's place in each of several learners."""
        if self.sizes.learners > 1:
            self._divide_learners()
        if not self.is_spread:
            return
        shape = tuple(getattr(self.sizes, name) for name in DIMS)
        self.device_mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=DIMS)
        self.pipeline_group = self.device_mesh.get_group("pp")
        self.gradient_group = self._group("pp", "tp")
        self.stage_group = self._group("pp")
        if self.sizes.ep > 1:
            inside = (self.sizes.dp // self.sizes.ep, self.sizes.ep)
            whole = self.device_mesh._unflatten(_DP, inside, ("edp", "ep"))
            self.expert_mesh = whole["ep"]
            self.expert_replicas = whole["edp", "cp"]._flatten("edp_cp") if self.sizes.cp > 1 else whole["edp"]

    @property
    def is_spread(self) -> bool:
        """Return whether a replica of the model lies on several ranks."""
        return self.sizes.is_spread

    @property
    def replicas(self) -> int:
        """Number of replicas of the model, each with samples of its own."""
        return self.sizes.dp

    @property
    def replica(self) -> int:
        """Number of this rank's replica: its rank among those that share out the samples."""
        return self.place["dp"]

    @property
    def replica_ranks(self) -> int:
        """Number of ranks of each replica."""
        return self.world.world_size // self.sizes.dp

    @property
    def gradient_ranks(self) -> int:
        """Number of ranks whose gradients are averaged."""
        return self.sizes.dp * self.sizes.cp // self.sizes.learners

    @property
    def learners(self) -> int:
        """Number of groups of replicas that train apart."""
        return self.sizes.learners

    @property
    def learner(self) -> int:
        """The group of this rank, from 0."""
        return self.place["dp"] * self.sizes.learners // self.sizes.dp

    @property
    def learner_rank(self) -> int:
        """This rank's place in its learner."""
        return self.place["dp"] % (self.sizes.dp // self.sizes.learners)

    @property
    def gradient_rank(self) -> int:
        """This rank's place among those of all learners: ranks that compute the same have the same."""
        return self.place["dp"] * self.sizes.cp + self.place["cp"]

    @property
    def drawing_rank(self) -> int:
        """Number by which ranks draw random numbers: those that compute the same draw the same."""
        return self.gradient_rank + self.sizes.dp * self.sizes.cp * self.stage

    @property
    def stage(self) -> int:
        """This rank's pipeline stage, from 0."""
        return self.place["pp"]

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of each pipeline stage of a learner."""
        return self.world.world_size // (self.sizes.pp * self.sizes.learners)

    @property
    def parts(self) -> int:
        """Number of groups of ranks that run the same modules together: stages, or learners."""
        return self.sizes.pp * self.sizes.learners

    @property
    def part(self) -> int:
        """The group of this rank, from 0."""
        return self.stage + self.learner

    @property
    def leads_stage(self) -> bool:
        """Return whether this is the first rank of its stage, whose buffers all of the stage take."""
        return (self.learner_rank, self.place["cp"], self.place["tp"]) == (0, 0, 0)

    @property
    def is_last_stage(self) -> bool:
        return self.place["pp"] == self.sizes.pp - 1

    @property
    def counts(self) -> bool:
        """Return whether this rank's losses and counts enter sums over all ranks, so that each enters once.

        Of the ranks of a replica these are the last stage's first ones along ``tp``; each cut of a sequence counts its
        own tokens.
        """
        return self.is_last_stage and self.place["tp"] == 0

    @property
    def counts_rows(self) -> bool:
        """Return whether this rank's rows enter sums over all ranks: one rank of each replica."""
        return self.counts and self.place["cp"] == 0

    def rank_in_stage(self, place: int, stage: int | None = None) -> int:
        """The rank at a place of the stage group of this rank's part, or of another."""
        return place + (self.part if stage is None else stage) * self.stage_ranks

    def describe(self, rank: int | None = None) -> str:
        """A rank in words, with its place; None is this one."""
        return self.sizes.describe(self.world.rank if rank is None else rank)

    def sharding_mesh(self, *, hybrid: bool) -> DeviceMesh:
        """The ranks over which ``fully_shard`` shards what a rank has of the model; a collective where it makes groups.

        With ``hybrid`` it has two dimensions: nodes, which hold the same, and the ranks of a node.

        Raises:
            TrainerConfigError: the replicas cannot be split by nodes.
        """
        kind, world = self.world.device.type, self.world
        if self.learners > 1:
            return self._shard_learner(hybrid=hybrid)
        if hybrid and world.world_size % world.local_world_size:
            raise TrainerConfigError(
                f"parallel.hybrid=True needs equal nodes: {world.world_size} ranks are not a multiple of the "
                f"{world.local_world_size} on this node; start as many on each, or leave parallel.hybrid out"
            )
        if self.device_mesh is None:
            if not hybrid:
                return init_device_mesh(kind, (world.world_size,), mesh_dim_names=("shard",))
            shape = (world.world_size // world.local_world_size, world.local_world_size)
            return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
        if not hybrid:
            return self.device_mesh["dp", "cp"]._flatten("shard") if self.sizes.cp > 1 else self.device_mesh["dp"]
        inside, left = divmod(world.local_world_size, self.sizes.cp * self.sizes.tp)
        if left or not inside or self.sizes.dp % inside:
            raise TrainerConfigError(
                f"parallel.hybrid=True shards within a node and replicates across nodes, and the {self.sizes.dp} "
                f"replicas of a stage, of {self.sizes.cp * self.sizes.tp} ranks each, do not split evenly into nodes "
                f"of {world.local_world_size} ranks; choose tp and cp that divide the ranks of a node, or leave "
                "parallel.hybrid out"
            )
        whole = self.device_mesh._unflatten(_DP, (self.sizes.dp // inside, inside), ("replicate", "shard"))
        shard = whole["shard", "cp"]._flatten("shard_cp") if self.sizes.cp > 1 else whole["shard"]
        return DeviceMesh._concatenate([whole["replicate"], shard])

    def _shard_learner(self, *, hybrid: bool) -> DeviceMesh:
        kind, ranks = self.world.device.type, self.stage_ranks
        inside = min(self.world.local_world_size, ranks) if hybrid else ranks
        if ranks % inside:
            raise TrainerConfigError(
                f"parallel.hybrid=True shards within a node and replicates across nodes, and the {ranks} ranks of a "
                f"learner do not split evenly into nodes of {inside}; start as many on each, choose "
                "parallel.diloco.learners otherwise, or leave parallel.hybrid out"
            )
        if not hybrid:
            return init_device_mesh(kind, (self.learners, ranks), mesh_dim_names=("learner", "shard"))["shard"]
        shape = (self.learners, ranks // inside, inside)
        return init_device_mesh(kind, shape, mesh_dim_names=("learner", "replicate", "shard"))["replicate", "shard"]

    def _divide_learners(self) -> None:
        """Make the groups of learners, and those of ranks with the same place; every rank makes all."""
        if self.is_spread:
            raise TrainerConfigError(f"a mesh of {self.sizes} spreads replicas, which {self.learners} learners cannot")
        ranks = range(self.world.world_size)
        inside = [list(ranks[first : first + self.stage_ranks]) for first in ranks[:: self.stage_ranks]]
        across = [list(ranks[place :: self.stage_ranks]) for place in range(self.stage_ranks)]
        self.gradient_group, _ = dist.new_subgroups_by_enumeration(inside)  # type: ignore[no-untyped-call]
        self.stage_group = self.gradient_group
        self.learner_group, _ = dist.new_subgroups_by_enumeration(across)  # type: ignore[no-untyped-call]

    def _group(self, *fixed: str) -> ProcessGroup:
        """The ranks whose places along ``fixed`` are this one's; every rank makes all groups of that kind."""
        by_place: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world.world_size):
            place = self.sizes.place(rank)
            by_place.setdefault(tuple(place[name] for name in fixed), []).append(rank)
        own, _ = dist.new_subgroups_by_enumeration(list(by_place.values()))  # type: ignore[no-untyped-call]
        assert isinstance(own, dist.ProcessGroup)
        assert dist.get_world_size(own) == self.world.world_size // math.prod(getattr(self.sizes, one) for one in fixed)
        return own
