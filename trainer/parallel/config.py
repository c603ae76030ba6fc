"""Options of how the model and its training are spread over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import TrainerConfigError
from ..options import check_choice, check_range
from ..ranks.mesh import Mesh, MeshSizes
from ..ranks.world import World
from .diloco_config import DilocoConfig
from .pipeline.orders import check_schedule

PlanSource = Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]
"""How layers are cut: names of modules to styles, the import path of that, or a function of the model that returns it.

The import path is ``{"use": "package.module:name"}``, with "args" for a function that takes more than the model.
"""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """What each rank keeps, and how ranks exchange gradients and weights."""

    mode: Literal["allreduce", "parameter_server", "diloco"] = "allreduce"
    """allreduce: gradients, at each step; parameter_server: as trainer.server says; diloco: as parallel.diloco says."""

    zero: Literal[0, 1, 2, 3] = 0
    """0: replicate everything; 1: shard the optimizer state; 2: and gradients; 3: and weights."""

    overlap: bool = True
    """Exchange while computing; false: one bucket (zero=0), no prefetch (zero=1..3)."""

    bucket_mb: float = 25.0
    """With zero=0, largest size of the buckets in which gradients are exchanged, in MiB; small models have smaller."""

    unused_parameters: bool = False
    """With zero=0, allow steps in which some parameters get no gradient."""

    blocks: tuple[str, ...] = ()
    """With zero=1..3, class names of the modules to shard one by one; none: the items of each ModuleList."""

    cpu_offload: bool = False
    """With zero=1..3, keep weights, gradients and optimizer state in host memory."""

    hybrid: bool = False
    """With zero=1..3, shard within a node and replicate across nodes."""

    sync_batchnorm: bool = False
    """Take the statistics of batch norms over all ranks; CUDA only."""

    tp: int = 1
    """Tensor parallelism: ranks over which the weights of each layer are cut, as ``plan`` says."""

    plan: PlanSource | None = None
    """With tp, { use = "package.module:plan" }, or names of modules to styles; none: the model's parallelize_plan."""

    pp: int = 1
    """Pipeline parallelism: stages, one after another, that the model is cut into."""

    schedule: str = "1F1B"
    """With pp, the order of forwards and backwards, by torch's names: GPipe, 1F1B, Interleaved1F1B, ..."""

    microbatches: int = 8
    """With pp, parts that each batch is cut into."""

    stages: tuple[str | tuple[str, ...], ...] = ()
    """With pp, names of the modules that stages after the first begin with, or for each stage the list of all its
    modules; none: stages of about equal parameters."""

    cp: int = 1
    """Context parallelism: ranks over which each sequence is cut."""

    ep: int = 1
    """Expert parallelism: replicas over which the experts of mixtures of experts are spread."""

    diloco: DilocoConfig = field(default_factory=DilocoConfig)

    def __post_init__(self) -> None:
        check_choice("parallel.mode", self.mode, ("allreduce", "parameter_server", "diloco"))
        self._check_diloco()
        check_choice("parallel.zero", self.zero, (0, 1, 2, 3))
        check_range("parallel.bucket_mb", self.bucket_mb, low=0.0, above=True)
        for key in ("tp", "pp", "cp", "ep", "microbatches"):
            check_range(f"parallel.{key}", getattr(self, key), low=1)
        check_schedule(self.schedule)
        for key in ("cp", "ep"):
            if self.pp > 1 and getattr(self, key) > 1:
                raise TrainerConfigError(
                    f"parallel.pp={self.pp} with parallel.{key}={getattr(self, key)} is not there yet; leave one of "
                    "them out"
                )
        if self.plan is not None and self.tp == 1:
            raise TrainerConfigError(
                "parallel.plan says how layers are cut over parallel.tp ranks, and parallel.tp=1 cuts none; set "
                "parallel.tp, or leave parallel.plan out"
            )
        if self.zero == 0:
            for key in ("cpu_offload", "hybrid", "blocks"):
                if getattr(self, key):
                    raise TrainerConfigError(
                        f"parallel.{key}={getattr(self, key)!r} needs sharding, and parallel.zero=0 has none; "
                        f"use parallel.zero=1, 2 or 3, or leave parallel.{key} out"
                    )
        elif self.hybrid and self.ep > 1:
            raise TrainerConfigError(
                f"parallel.hybrid=True with parallel.ep={self.ep}: experts are sharded over the replicas ep leaves "
                "alone, not by nodes; leave parallel.hybrid out"
            )
        elif self.unused_parameters:
            raise TrainerConfigError(
                f"parallel.unused_parameters=True is an option of zero=0, and parallel.zero={self.zero}; leave it out: "
                "sharded parameters may stay unused"
            )

    def _check_diloco(self) -> None:
        if self.mode != "diloco":
            if self.diloco != DilocoConfig():
                raise TrainerConfigError(
                    f"parallel.diloco says how learners train apart, and parallel.mode={self.mode!r} has none; set "
                    "parallel.mode='diloco', or leave parallel.diloco out"
                )
            return
        for key in ("tp", "pp", "cp", "ep"):
            if getattr(self, key) > 1:
                raise TrainerConfigError(
                    f"parallel.mode='diloco' with parallel.{key}={getattr(self, key)}: the ranks of a learner hold "
                    f"whole replicas (zero=0) or shards of one (zero=1 to 3); leave parallel.{key} out"
                )

    @property
    def uses_servers(self) -> bool:
        """Return whether weights lie on a parameter server."""
        return self.mode == "parameter_server" or (self.mode == "diloco" and self.diloco.over == "server")

    @property
    def is_spread(self) -> bool:
        """Return whether a replica of the model, or its experts, lie on several ranks."""
        return (self.pp, self.cp, self.tp, self.ep) != (1, 1, 1, 1)

    def fill(self, world_size: int, num_nodes: int = 1) -> MeshSizes:
        """The mesh of ``world_size`` ranks. Raises TrainerConfigError where the sizes do not divide them."""
        learners = self.diloco.count_learners(world_size, num_nodes) if self.mode == "diloco" else 1
        return MeshSizes.fill(world_size, pp=self.pp, cp=self.cp, tp=self.tp, ep=self.ep, learners=learners)


def open_mesh(config: ParallelConfig, world: World) -> Mesh:
    """Make the mesh that ``config`` spreads a run over, and its groups; a collective.

    Give its ``device_mesh``, where it has one, to ``DistributedDataLoader(mesh=)``, and itself to
    ``DistributedTrainer(mesh=)``.

    Raises:
        TrainerConfigError: the sizes do not divide the ranks that there are.
    """
    return Mesh(world, config.fill(world.world_size, world.num_nodes))
