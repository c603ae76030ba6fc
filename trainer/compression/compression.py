"""Gradient compression: which scheme, installed on which engine, and the bytes that it puts on the wire.

DDP takes all schemes, as comm hooks. ``fully_shard`` takes those that work on any part of a gradient, as a custom
reduce-scatter. What a scheme remembers (errors it owes, momenta) is of one rank, kept by parameter name, and can be put
into a checkpoint as that rank's state; in a world of another size it starts from nothing, which costs a few steps of
accuracy and no correctness. DDP lays out its buckets anew after its first step, so int8 and topk, which round and
choose by bucket, owe nothing after a resume that they did not owe before, but are not bit-equal to an unbroken run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..errors import CompressionError
from ..ranks.world import World
from .dense import CastHook, Int8Hook
from .lowrank import PowerSGDHook
from .memory import GradientMemory
from .sharded import CastReduceScatter, Int8ReduceScatter
from .sparse import TopKHook
from .wire import WireCounter, ring_bytes

Scheme = Literal["none", "bf16", "fp16", "int8", "powersgd", "topk"]
SCHEMES: tuple[Scheme, ...] = ("none", "bf16", "fp16", "int8", "powersgd", "topk")
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

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise CompressionError(f"compression scheme={self.scheme!r} is not known; use one of {', '.join(SCHEMES)}")
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
    """Bytes that this rank sent for gradients, and would have sent with none made small, since training began.

    Counted as the algorithms send them: a ring all-reduce of n bytes on W ranks 2(W-1)/W n, a reduce-scatter or an
    all-to-all (W-1)/W n, an all-gather (W-1) times what each rank gives. Where ``fully_shard`` shards within a node and
    replicates across nodes, the all-reduce across them is neither made small nor counted.
    """

    steps: int
    wire_bytes: int
    plain_bytes: int

    @property
    def saved(self) -> float:
        """Share of the bytes that was spared, 0 to 1."""
        return 1 - self.wire_bytes / self.plain_bytes if self.plain_bytes else 0.0


class Compression:
    """A scheme at work on one model, installed at its making; it lives as long as the model does.

    Raises:
        CompressionError: the scheme cannot work with this way of sharding, or with this optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: CompressionConfig, world: World) -> None:
        self.config = config
        self._wire = WireCounter()
        self._steps = 0
        self._last = CompressionStats(steps=0, wire_bytes=0, plain_bytes=0)
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
        """The bytes since the beginning."""
        return CompressionStats(
            steps=self._steps,
            wire_bytes=self._wire.wire_bytes + self._steps * self._plain_step_bytes,
            plain_bytes=self._wire.plain_bytes + self._steps * self._plain_step_bytes,
        )

    def end_step(self) -> CompressionStats:
        """Tell that an optimizer step is done; returns the bytes of that step alone."""
        self._steps += 1
        if self._topk is not None:
            self._topk.steps = self._steps
        before, self._last = self._last, self.stats
        return CompressionStats(
            steps=1,
            wire_bytes=self._last.wire_bytes - before.wire_bytes,
            plain_bytes=self._last.plain_bytes - before.plain_bytes,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """What this rank remembers, copied, by name; empty for schemes that remember nothing."""
        return self._memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], *, steps: int = 0) -> None:
        """Take up what ``state_dict`` gave, or nothing, after so many steps.

        Raises:
            CompressionError: the state is of another model or scheme.
        """
        self._memory.load_state_dict(state)
        self._steps = steps
        if self._topk is not None:
            self._topk.steps = steps
        self._last = self.stats

    def _install_hook(self, model: DistributedDataParallel, optimizer: Optimizer) -> None:
        config, group = self.config, model.process_group
        if config.scheme == "none":
            # No hook, so that DDP's own path is taken; what it sends is known beforehand.
            nbytes = sum(one.nbytes for one in model.module.parameters() if one.requires_grad)
            self._plain_step_bytes = ring_bytes(nbytes, dist.get_world_size(group))
            return
        if config.scheme in ("bf16", "fp16"):
            hook: CastHook | Int8Hook | PowerSGDHook | TopKHook = CastHook(config.scheme, group, self._wire)
        elif config.scheme == "int8":
            hook = Int8Hook(group, self._wire, self._memory)
        elif config.scheme == "powersgd":
            hook = PowerSGDHook(config.rank, group, self._wire, self._memory)
        else:
            _refuse_second_momentum(optimizer, config)
            hook = self._topk = TopKHook(
                density=config.density,
                momentum=config.momentum,
                warmup_steps=config.warmup_steps,
                group=group,
                wire=self._wire,
                memory=self._memory,
            )
        # DDP insists on seeing annotations as objects, or none.
        model.register_comm_hook(None, lambda state, bucket: hook(bucket))

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
                    module.set_custom_reduce_scatter(Int8ReduceScatter(name, self._wire, self._memory))
                else:
                    module.set_custom_reduce_scatter(CastReduceScatter(scheme, self._wire))


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _refuse_second_momentum(optimizer: Optimizer, config: CompressionConfig) -> None:
    for group in optimizer.param_groups:
        if config.momentum and (group.get("momentum") or "betas" in group):
            raise CompressionError(
                f"compression momentum={config.momentum} takes the place of the optimizer's, but "
                f"{type(optimizer).__name__} has its own; use SGD with momentum=0, or set compression momentum=0"
            )
