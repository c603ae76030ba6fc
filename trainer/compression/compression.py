"""Gradient compression: which scheme, installed on which engine, and the bytes that it puts on the wire.

DDP takes all schemes, as comm hooks. ``fully_shard`` takes those that work on any part of a gradient, as a custom
reduce-scatter. What a scheme remembers (errors it owes, momenta) belongs to one rank, is kept by parameter name, and
can be saved in a checkpoint as that rank's state. In a world of another size it starts from nothing, which costs a few
steps of accuracy and no correctness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...storage.suggestions import unknown_choice
from ..computing import ComputeClock
from ..errors import CompressionError
from ..ranks.world import World
from .dense import CastHook, Int8Hook, finished
from .lowrank import PowerSGDHook
from .memory import GradientMemory
from .sharded import CastReduceScatter, Int8ReduceScatter
from .sparse import TopKHook
from .wire import WireCounter, ring_bytes

Scheme = Literal["none", "bf16", "fp16", "int8", "powersgd", "topk"]
SCHEMES: tuple[Scheme, ...] = ("none", "bf16", "fp16", "int8", "powersgd", "topk")
REMEMBERING_SCHEMES: tuple[Scheme, ...] = ("int8", "powersgd", "topk")
SHARDED_SCHEMES: tuple[Scheme, ...] = ("none", "bf16", "fp16", "int8")


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """How gradients are compressed.

    bf16, fp16: a cast (50% fewer bytes). int8: per-block scales and error feedback (75% fewer). powersgd: factors of
    low rank and error feedback (Vogels et al. 2019). topk: the largest gradients of each bucket, with error feedback
    and momentum correction (deep gradient compression, Lin et al. 2018).
    """

    scheme: Literal["none", "bf16", "fp16", "int8", "powersgd", "topk"] = "none"
    """How gradients are compressed for the wire."""

    rank: int = 2
    """powersgd: rank of the factors."""

    density: float = 0.01
    """topk: share of each bucket's gradients that is sent."""

    momentum: float = 0.9
    """topk: its own momentum, in place of the optimizer's, which must have none."""

    warmup_steps: int = 0
    """topk: steps in which the density falls from 25%."""

    @property
    def remembers(self) -> bool:
        """Return whether a step's unsent gradients are added to the next."""
        return self.scheme in REMEMBERING_SCHEMES

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise CompressionError(f"compression {unknown_choice('scheme', self.scheme, SCHEMES)}")
        if self.rank < 1:
            raise CompressionError(f"compression rank={self.rank} must be 1 or more")
        if not 0 < self.density <= 1:
            raise CompressionError(f"compression density={self.density} must be more than 0 and at most 1")
        if not 0 <= self.momentum < 1:
            raise CompressionError(f"compression momentum={self.momentum} must be at least 0 and less than 1")
        if self.warmup_steps < 0:
            raise CompressionError(f"compression warmup_steps={self.warmup_steps} must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class CompressionStats:
    """Bytes of gradients that this rank sent since training began, and would have sent uncompressed.

    Local SGD sends weights instead, and they count. Counted as the algorithms send them: a ring all-reduce of n bytes
    on W ranks 2(W-1)/W n, and so gloo's reduce-scatter, which is one; any other reduce-scatter and an all-to-all
    (W-1)/W n, an all-gather (W-1) times what each rank contributes. Where ``fully_shard`` shards within a
    node and replicates across nodes, the all-reduce across nodes is neither compressed nor counted.
    """

    wire_bytes: int
    plain_bytes: int


class Compression:
    """A scheme on one model, installed when this is made; it lives as long as the model.

    Raises:
        CompressionError: the scheme cannot work with this way of sharding, or with this optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: CompressionConfig,
        world: World,
        *,
        clock: ComputeClock | None = None,
    ) -> None:
        self.config = config
        self._waiting: Callable[[], AbstractContextManager[None]] = nullcontext if clock is None else clock.waiting
        self.wire = WireCounter()
        self._steps = 0
        self._memory = GradientMemory(_bare(model))
        self._plain_step_bytes = 0
        self._topk: TopKHook | None = None
        if isinstance(model, DistributedDataParallel):
            self._install_hook(model, optimizer)
        elif isinstance(model, FSDPModule):
            self._install_reduce_scatter(model)
        elif config.scheme != "none" and world.world_size > 1:
            raise CompressionError(
                f"compression scheme={config.scheme!r} needs gradients that are exchanged by DDP (zero=0) or "
                f"fully_shard (zero=1 to 3), and {type(model).__name__} is neither; use scheme='none'"
            )

    @property
    def stats(self) -> CompressionStats:
        """The bytes since training began."""
        return CompressionStats(wire_bytes=self.wire.wire_bytes, plain_bytes=self.wire.plain_bytes)

    def begin_exchange(self, correction: float | None) -> None:
        """Multiply the gradients that are exchanged next by ``correction``, which makes them those of the mean loss.

        What is owed from other steps is of their mean losses, and is not multiplied. None: the step counts nothing, so
        that nothing is sent, and what is owed stays.
        """
        self._memory.correction = correction

    def end_step(self) -> None:
        """Count an optimizer step that is done."""
        self._steps += 1
        self.wire.add(self._plain_step_bytes)
        if self._topk is not None:
            self._topk.steps = self._steps

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the tensors that this rank remembers, by name; empty for schemes that remember nothing."""
        return self._memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], *, steps: int = 0) -> None:
        """Continue from what ``state_dict`` returned, or from nothing, after ``steps`` steps.

        Tensors are matched with parameters when the scheme first uses them. The step that finds one of another shape
        raises a CompressionError; those of another scheme are not used.
        """
        self._memory.load_state_dict(state)
        self._steps = steps
        if self._topk is not None:
            self._topk.steps = steps

    def _install_hook(self, model: DistributedDataParallel, optimizer: Optimizer) -> None:
        config, group = self.config, model.process_group
        if config.scheme == "none":
            # No hook, so that DDP's own path is taken; what it sends is known beforehand.
            nbytes = sum(one.nbytes for one in model.module.parameters() if one.requires_grad)
            self._plain_step_bytes = ring_bytes(nbytes, dist.get_world_size(group))
            return
        if config.scheme in ("bf16", "fp16"):
            hook: CastHook | Int8Hook | PowerSGDHook | TopKHook = CastHook(config.scheme, group, self.wire)
        elif config.scheme == "int8":
            hook = Int8Hook(group, self.wire, self._memory)
        elif config.scheme == "powersgd":
            hook = PowerSGDHook(config.rank, group, self.wire, self._memory)
        else:
            _refuse_second_momentum(optimizer, config)
            hook = self._topk = TopKHook(
                density=config.density,
                momentum=config.momentum,
                warmup_steps=config.warmup_steps,
                group=group,
                wire=self.wire,
                memory=self._memory,
            )

        def exchange(state, bucket):  # type: ignore[no-untyped-def] # DDP wants annotations as objects, or none
            with self._waiting():
                correction = self._memory.correction
                if correction is None:
                    return finished(bucket.buffer().zero_())
                if correction != 1.0:
                    bucket.buffer().mul_(correction)
                return hook(bucket)

        model.register_comm_hook(None, exchange)

    def _install_reduce_scatter(self, model: nn.Module) -> None:
        scheme = self.config.scheme
        if scheme == "powersgd" or scheme == "topk":
            raise CompressionError(
                f"compression scheme={scheme!r} needs whole gradients on each rank, which fully_shard (zero=1 to 3) "
                f"does not keep; use one of {', '.join(SHARDED_SCHEMES)}, or zero=0"
            )
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                if scheme == "int8":
                    module.set_custom_reduce_scatter(Int8ReduceScatter(name, self.wire, self._memory))
                else:
                    module.set_custom_reduce_scatter(CastReduceScatter(scheme, self.wire))


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _refuse_second_momentum(optimizer: Optimizer, config: CompressionConfig) -> None:
    for group in optimizer.param_groups:
        if config.momentum and (group.get("momentum") or "betas" in group):
            raise CompressionError(
                f"compression momentum={config.momentum} takes the place of the optimizer's, but "
                f"{type(optimizer).__name__} has its own; use SGD with momentum=0, or set compression momentum=0"
            )
