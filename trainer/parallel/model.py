"""Distribute the model over the ranks: DDP for zero=0, FSDP2 for zero=1 to 3 (Rajbhandari et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..errors import TrainerConfigError
from ..ranks.mesh import Mesh
from .blocks import find_blocks
from .buckets import choose_bucket_mb, settle_buckets
from .buffers import copy_from_first_rank, copy_tensors, share_buffers, synchronise_batch_norms
from .checks.attributes import carry_attributes
from .checks.forward import EngineEntry, return_no_views
from .checks.in_place import ForwardWrites, check_renormalised, keep_in_place
from .checks.limits import (
    check_exchangeable,
    check_optimizer,
    check_trainable,
    keep_shared,
    keep_ties,
    list_sparse,
    named_if_formats_differ,
    named_if_not_replicated,
)
from .checks.parameters import check_same_model
from .checks.usage import ModuleOrder, ParameterUsage
from .config import ParallelConfig
from .experts import list_spread, shard_experts
from .gathered import list_rounded, set_formats
from .local_exchange import LocalExchange, has_cut_weights, is_cut
from .materialise import Initialiser, Materialiser
from .meta import move_values, own_tensors
from .pipeline.names import StageNames
from .precision import (
    MasterWeights,
    PrecisionConfig,
    build_sharding_policy,
    check_reducible,
    list_batch_norms,
)
from .spread import ReplicaSpread
from .step_numbers import StepNumbers

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of parameters that it is given: those that are trained, as this rank holds them."""


class Prefetch:
    """With ``overlap`` each sharded module's forward begins to gather the weights of the one after it.

    What is gathered for a forward that does not come waits for the next one, or for the end of a backward.
    """

    def __init__(
        self, model: nn.Module, modules: Sequence[FSDPModule], precision: PrecisionConfig, *, overlap: bool
    ) -> None:
        # Batch norms are small: gathering each ahead of its time would only cost calls.
        norms = set() if precision.dtype == "fp32" else set(map(id, list_batch_norms(model)))
        sharded = [module for module in modules if id(module) not in norms]
        self._modules = modules
        self._pairs = list(pairwise(sharded[1:])) if overlap else []
        for module, following in self._pairs:
            module.set_modules_to_forward_prefetch([following])
        for module in [] if overlap else sharded:
            # Prefetching the module itself is a no-op that replaces the implicit prefetch.
            module.set_modules_to_backward_prefetch([module])

    @contextmanager
    def without_backward(self) -> Iterator[None]:
        """Leave no weights gathered after forwards that no backward follows: it would free them, and end what waits.

        Within this nothing is gathered ahead of a forward.
        """
        for module, _ in self._pairs:
            module.set_modules_to_forward_prefetch([])
        try:
            yield
        finally:
            for one in self._modules:  # with zero=1 and 2 forward leaves them whole
                one.reshard()
            for module, following in self._pairs:
                module.set_modules_to_forward_prefetch([following])


class ParallelModel:
    """A model spread over the ranks, and when its gradients are exchanged.

    ``module`` is what the loss calls; ``inner`` is the model as given. The mutable state is PyTorch's, and whether the
    last microbatch exchanged gradients. Without ``exchange`` each rank trains its own copy, with the same initial
    weights. ``scheme`` is the compression of the gradients; with ``exchange_once`` they are exchanged once a step,
    whatever the zero stage. What of the model is on the meta device is made here, with ``seed`` and ``initialise``.
    ``spread`` then cuts the model over the ranks of each replica, and what it leaves on a rank is sharded, or
    replicated, over the replicas. ``stages_of`` has the number of stages for parameters that several of them have.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ParallelConfig,
        precision: PrecisionConfig,
        mesh: Mesh,
        *,
        exchange: bool = True,
        exchange_once: bool = False,
        scheme: str = "none",
        seed: int = 0,
        initialise: Initialiser | None = None,
        spread: ReplicaSpread | None = None,
        stages_of: Mapping[str, int] | None = None,
    ) -> None:
        world = mesh.world
        check_trainable(model)
        MasterWeights(model).check()
        check_same_model(model, world)
        self.config = config
        self.mesh = mesh
        self.world = world
        self.inner = model
        self.exchanges = exchange and mesh.gradient_ranks > 1
        self.trains_alone = not exchange and mesh.gradient_ranks > 1
        self._exchanges_once = exchange_once or config.zero == 1
        check_exchangeable(model, config.zero, scheme, world)
        check_reducible(model, precision, config.zero)
        check_renormalised(model, config.zero, exchanges=self.exchanges)
        self.materialiser = Materialiser(model, world, seed=seed, initialise=initialise)
        if spread is None:
            move_values(model, world.device)
        if config.sync_batchnorm:
            synchronise_batch_norms(model, mesh)
        before = dict(model.named_parameters(remove_duplicate=False))
        self._spread = spread
        self.module: nn.Module
        self._local_exchange: LocalExchange | None = None
        if spread is not None:
            _spread(model, spread, mesh, self.materialiser)
        if config.zero:
            if spread is None:
                copy_from_first_rank(model, world)
            self.module = _shard(model, config, precision, mesh, self.materialiser)
        elif has_cut_weights(model) or (mesh.sizes.pp > 1 and self.exchanges):
            self.module = model
            self._local_exchange = LocalExchange(model, config, mesh)
        elif self.exchanges:
            self.materialiser.materialise(model)
            if mesh.learners > 1:  # DDP does it in its own group alone
                copy_from_first_rank(model, world)
            self.module = _replicate(model, config, mesh)
        else:
            if spread is None:
                self.materialiser.materialise(model)
                copy_from_first_rank(model, world)
            self.module = model
        self.stages: StageNames | None = None
        """Names of what this rank of a pipeline has, and others; set once there is an optimizer."""
        self._entry = EngineEntry(
            self.module, model, may_be_unused=config.unused_parameters, rounds=precision.dtype != "fp32"
        )
        self._master_weights = MasterWeights(model)
        self._exchanges_last: bool | None = None
        self._numbers = StepNumbers(model)
        accounting = ("after_update", "forget_step")
        self._accountants: list[Any] = [
            one for one in model.modules() if all(hasattr(type(one), name) for name in accounting)
        ]
        self.usage: ParameterUsage | None = None
        self.order: ModuleOrder | None = None
        after = dict(model.named_parameters())
        self._stages_of = {one: (stages_of or {}).get(name, 1) for name, one in after.items()}
        self._replaced: dict[int, nn.Parameter | None] = {id(one): None for one in before.values()}
        # Of a weight with several names a stage may have one that is not the first.
        self._replaced |= {id(one): after[name] for name, one in before.items() if name in after}
        carry_attributes((one, after[name]) for name, one in before.items() if name in after)
        sharded = list(_sharded_modules(model))
        self._prefetch = Prefetch(model, sharded, precision, overlap=config.overlap)
        if config.zero:
            with named_if_formats_differ(model, config.zero):
                self.usage = ParameterUsage(model, sharded)
            self.order = ModuleOrder(model, sharded, mesh)
        self._writes = ForwardWrites({} if self.usage is None else self.usage.whole)

    @property
    def is_sharded(self) -> bool:
        return self.config.zero > 0

    @property
    def sharded_by(self) -> str:
        """The option, with its value, by which a rank keeps parts of weights; empty where it keeps whole ones."""
        if self.config.zero:
            return f"parallel.zero={self.config.zero}"
        for key in ("tp", "ep"):
            if getattr(self.config, key) > 1:
                return f"parallel.{key}={getattr(self.config, key)}"
        return ""

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer | OptimizerFactory) -> torch.optim.Optimizer:
        """The optimizer over the distributed parameters: a factory is called with them, a fresh optimizer gets them.

        Raises:
            TrainerConfigError: an optimizer with state already, or over parameters that are not the model's.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            made = optimizer(parameter for parameter in self.inner.parameters() if parameter.requires_grad)
            if not isinstance(made, torch.optim.Optimizer):
                raise TrainerConfigError(
                    f"optimizer is a function that returned a {type(made).__name__}, not a torch.optim.Optimizer; give "
                    "one from parameters to an optimizer"
                )
            check_optimizer(made, self.sharded_by)
            return made
        check_optimizer(optimizer, self.sharded_by)
        if optimizer.state and self.sharded_by:
            raise TrainerConfigError(
                f"optimizer={type(optimizer).__name__} has a state already, because it has made updates or, as "
                f"Adagrad, makes it when it is built, and {self.sharded_by} must shard it; give a "
                "function that makes the optimizer, as torch.optim.Adagrad, and load its state from a checkpoint"
            )
        for index, group in enumerate(optimizer.param_groups):
            strangers = sum(id(parameter) not in self._replaced for parameter in group["params"])
            if strangers:
                raise TrainerConfigError(
                    f"optimizer={type(optimizer).__name__}: {strangers} parameters of group {index} are not the "
                    "model's; build the optimizer from the parameters of the model that is trained"
                )
            replaced = (self._replaced[id(parameter)] for parameter in group["params"])
            group["params"] = [parameter for parameter in replaced if parameter is not None]  # other stages have theirs
        return optimizer

    def exchange_when(self, *, last: bool) -> AbstractContextManager[Any]:
        """The context for forward and backward of one microbatch; with zero=0 and 1 gradients wait for the last one.

        With zero=2 and 3 they wait with ``exchange_once`` alone: waiting keeps whole ones on each rank.
        """
        if self._local_exchange is not None:
            return self._local_exchange.exchanging() if last else nullcontext()
        if isinstance(self.module, DistributedDataParallel):
            return nullcontext() if last else self.module.no_sync()
        if isinstance(self.module, FSDPModule) and self._exchanges_once and last != self._exchanges_last:
            self._exchanges_last = last  # each call walks all modules
            self.module.set_requires_gradient_sync(last)
            if self.config.zero == 1:
                self.module.set_reshard_after_backward(last)
                self.module.set_is_last_backward(last)
        return nullcontext()

    def exchange_now(self) -> None:
        """Exchange gradients that several backwards have added up, where the model is not sharded; a collective."""
        if self._local_exchange is not None:
            self._local_exchange.exchange()

    def begin_step(self) -> None:
        """Give all ranks the first one's buffers before forward, as DDP does; a collective where DDP does not.

        Raises:
            TrainerConfigError: a parameter that was frozen in a format of less than fp32 is trained now.
        """
        self._master_weights.check()
        for module in self._accountants:
            module.forget_step()  # forwards that tried how much memory a step takes are none of it
        if self._local_exchange is not None and self.exchanges:
            share_buffers(self.inner.buffers(), self.mesh)
        if self.usage is not None and self.order is not None:
            share_buffers(self.inner.buffers(), self.mesh)
            self.usage.begin_step()
            self.order.begin_step()

    def end_step(self, *, updated: bool) -> None:
        """Tell modules that keep account of a step of its update; a collective then, where there are such modules.

        They have ``after_update(add_up)``, which gets a function that sums a tensor over all ranks that exchange
        gradients, and ``forget_step()``, which precedes each step. Numbers of modules that have ``describe_step()``
        are gathered after an update.
        """
        if not updated:
            return
        for module in self._accountants:
            module.after_update(self._add_up)
        self._numbers.gather()

    def describe_steps(self) -> dict[str, float]:
        """Numbers that this rank's modules add to the record of the steps since the last call; waits for the device."""
        return self._numbers.take()

    def _add_up(self, amount: torch.Tensor) -> torch.Tensor:
        if self.exchanges:
            dist.all_reduce(amount, group=self.mesh.gradient_group)
        return amount

    def activity(self) -> dict[str, str]:
        """The sharded module that forward is in: where ranks run different ones, each waits for the others' weights."""
        return {"module": self.order.running} if self.order is not None and self.order.running else {}

    @contextmanager
    def watched_forward(self) -> Iterator[None]:
        """Run a loss so that one that bypasses forward, or runs other modules on other ranks, is found."""
        if self.order is not None:
            self.order.begin_forward()
        with self._entry.watched(), self._writes.watched():
            yield
        if self.order is not None:
            self.order.end_forward()

    def computing(self, batch: Any) -> AbstractContextManager[None]:
        """The context of forward and backward of a batch, or of metrics of it; a collective of a replica's ranks."""
        return nullcontext() if self._spread is None else self._spread.computing(batch)

    def order_marks(self) -> tuple[float, float]:
        """Two numbers of this step's order of modules, to be added over the stage and given to ``check_order``."""
        return (0.0, 0.0) if self.order is None else self.order.marks()

    def check_order(self, stages: Iterable[tuple[float, float]]) -> None:
        """Raise a TrainerError, on every rank, where ranks of a stage ran different sharded modules.

        ``stages`` has the sums of both marks over the ranks of each.
        """
        if self.order is not None:
            self.order.check(stages)

    def watched_backward(self) -> AbstractContextManager[None]:
        """Run a backward so that missing weights raise an error in words."""
        return self._entry.watched_backward()

    def check_gradients(self) -> None:
        """Raise a TrainerConfigError where the engine lacks a gradient, or has one that it does not exchange."""
        self._entry.check_gradients()
        if self._spread is not None:
            self._spread.check_gradients(self.inner)
        if self.usage is not None:
            self.usage.check_reduced()

    @property
    def copies(self) -> int:
        """Number of ranks that hold each shard of what a rank has of the model."""
        return self.world.world_size // self.world.local_world_size if self.config.hybrid else 1

    def count_holders(self, parameter: nn.Parameter) -> int:
        """Number of ranks of the stages that have a parameter that hold each element of it, and of its gradient."""
        parts = 1
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            parts = math.prod(mesh.size(dim) for dim, placed in enumerate(parameter.placements) if is_cut(placed))
        return self.mesh.stage_ranks * self._stages_of.get(parameter, 1) // parts

    @property
    def uses_all(self) -> bool:
        """Return whether this rank has used every parameter in this step, as far as that is counted."""
        return self.usage is None or self.usage.uses_all

    def used_flags(self) -> torch.Tensor:
        """(n,) float64: which parameters this rank used, where the model is sharded; empty elsewhere."""
        empty = torch.zeros(0, dtype=torch.float64, device=self.world.device)
        return empty if self.usage is None else self.usage.flags(self.world.device)

    def drop_unused(self, used_anywhere: Sequence[float]) -> None:
        """Take the zeros away that stand for the gradients of parameters that no rank used."""
        if self.usage is not None:
            self.usage.drop_unused(used_anywhere)

    def agree_on_buffers(self) -> None:
        """Give all ranks rank 0's buffers, so that all evaluate, and save, one model; a collective.

        The next step begins with that anyway, so training is the same with and without. Ranks that exchange no
        gradients average their buffers with their weights instead.
        """
        if self.exchanges:
            share_buffers(self.inner.buffers(), self.mesh)

    def without_backward(self) -> AbstractContextManager[None]:
        """Run forwards without a backward, and free the weights that were gathered for one."""
        return self._prefetch.without_backward()


def _replicate(model: nn.Module, config: ParallelConfig, mesh: Mesh) -> DistributedDataParallel:
    device = mesh.world.device
    whole_mb = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad) / 2**20
    with named_if_not_replicated(model):
        replicated = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=mesh.gradient_group,
            # One bucket is complete only when backward is: nothing overlaps.
            bucket_cap_mb=choose_bucket_mb(whole_mb, config.bucket_mb) if config.overlap else whole_mb + 1,
            gradient_as_bucket_view=True,
            find_unused_parameters=config.unused_parameters,
        )
    if not config.unused_parameters:  # with them DDP keeps its first layout
        settle_buckets(replicated, list_sparse(model).values())
    return replicated


def _spread(model: nn.Module, spread: ReplicaSpread, mesh: Mesh, materialiser: Materialiser) -> None:
    """Make, and cut, one block after another: no rank has more than its part and a whole block. A collective."""
    done: set[int] = set()
    for part in [*keep_shared(model, keep_ties(model, find_blocks(model, (), "parallel.blocks"))), model]:
        modules = [one for one in part.modules() if id(one) not in done]
        done.update(map(id, modules))
        for module in modules:
            move_values(module, mesh.world.device, recurse=False)
        materialiser.materialise(part)
        tensors = {id(one): one for module in modules for one in own_tensors(module).values()}
        copy_tensors(tensors.values(), mesh.world)
        spread.cut(modules, mesh)


def _shard(
    model: nn.Module, config: ParallelConfig, precision: PrecisionConfig, mesh: Mesh, materialiser: Materialiser
) -> nn.Module:
    blocks = [block for block in find_blocks(model, config.blocks, "parallel.blocks") if block is not model]
    if mesh.sizes.pp > 1:  # the blocks of other stages are empty here
        blocks = [block for block in blocks if any(True for _ in block.parameters())]
    blocks = keep_ties(model, blocks)
    rounded = list_rounded(model, precision)
    arguments: dict[str, Any] = {
        "mesh": mesh.sharding_mesh(hybrid=config.hybrid),
        "reshard_after_forward": config.zero == 3,
        "mp_policy": build_sharding_policy(precision),
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        if config.cpu_offload
        else OffloadPolicy(),
    }
    for experts in list_spread(model):
        shard_experts(experts, mesh, arguments)
    apart = [] if precision.dtype == "fp32" else keep_ties(model, list_batch_norms(model))
    for part in [*apart, *reversed([block for block in blocks if block not in apart]), model]:
        materialiser.materialise(part)  # whole for a moment, as in forward, and then in shards
        return_no_views(part)
        fully_shard(part, **arguments)
    set_formats(model, rounded, precision)
    keep_in_place(model)
    return model


def _sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))
