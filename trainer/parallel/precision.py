"""Number formats: FP32 master weights always, compute in fp32, bf16 or fp16, and the loss scale that fp16 needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from ..errors import TrainerConfigError
from ..options import check_choice, check_range
from ..ranks.world import World

_SCALING = ("growth_factor", "growth_interval", "backoff_factor")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The format of the computation and of the gradients on the wire."""

    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Format of forward and backward; weights stay fp32."""

    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Format in which zero=1..3 reduces gradients."""

    init_scale: float = 65536.0
    """fp16: initial loss scale."""

    growth_factor: float = 2.0
    """fp16: factor by which the loss scale grows."""

    growth_interval: int = 2000
    """fp16: updates without overflow before the loss scale grows."""

    backoff_factor: float = 0.5
    """fp16: factor by which the loss scale shrinks on an overflow."""

    def __post_init__(self) -> None:
        check_choice("precision.dtype", self.dtype, _DTYPES)
        check_choice("precision.reduce_dtype", self.reduce_dtype, _DTYPES)
        check_range("precision.init_scale", self.init_scale, low=0.0, above=True)
        check_range("precision.growth_factor", self.growth_factor, low=1.0, above=True)
        check_range("precision.growth_interval", self.growth_interval, low=1)
        check_range("precision.backoff_factor", self.backoff_factor, low=0.0, above=True, high=1.0)
        if self.backoff_factor == 1.0:
            raise TrainerConfigError("precision.backoff_factor=1.0 never shrinks the scale; give less, such as 0.5")

    @property
    def compute_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]


def check_master_weights(model: torch.nn.Module) -> None:
    """Refuse a model whose weights are already rounded: updates below half a unit in the last place would be lost."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.element_size() < 4:
            raise TrainerConfigError(
                f"parameter {name!r} is {parameter.dtype}; master weights are float32: build the model in float32 and "
                "choose the compute format with precision.dtype"
            )


def check_reducible(model: torch.nn.Module, config: PrecisionConfig, zero: int) -> None:
    """Refuse complex parameters whose gradients ``fully_shard`` would have to turn into real ones to reduce them."""
    found = [name for name, one in model.named_parameters() if one.is_complex() and one.requires_grad]
    if zero and found and config.reduce_dtype != config.dtype:  # where they are the same, torch converts nothing
        raise TrainerConfigError(
            f"precision.reduce_dtype={config.reduce_dtype!r} with precision.dtype={config.dtype!r} and "
            f"parallel.zero={zero} converts gradients before they are reduced, and those of the complex parameters "
            f"{', '.join(found)} cannot be; set precision.reduce_dtype={config.dtype!r}, or use parallel.zero=0"
        )


def build_sharding_policy(config: PrecisionConfig) -> MixedPrecisionPolicy:
    """The policy of one sharded block: gathered weights in the compute format, gradients reduced in another."""
    if config.dtype == "fp32":
        # None is the gradient's own format, which is float64 where the weights are.
        return MixedPrecisionPolicy(
            reduce_dtype=None if config.reduce_dtype == "fp32" else _DTYPES[config.reduce_dtype]
        )
    return MixedPrecisionPolicy(param_dtype=config.compute_dtype, reduce_dtype=_DTYPES[config.reduce_dtype])


def build_root_policy(config: PrecisionConfig) -> MixedPrecisionPolicy:
    """The policy of the whole model: that of a block, but what comes out, of which losses are made, is fp32."""
    policy = build_sharding_policy(config)
    return policy if config.dtype == "fp32" else replace(policy, output_dtype=torch.float32)


def list_batch_norms(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules with running statistics and weights, which torch wants in one format, below the model itself."""
    return [
        module
        for module in model.modules()
        if module is not model
        and isinstance(module, torch.nn.modules.batchnorm._NormBase)
        and module.track_running_stats
        and module.affine
    ]


def build_norm_policy(config: PrecisionConfig) -> MixedPrecisionPolicy:
    """The policy of a sharded batch norm: as autocast has it, fp32 weights and statistics on any input."""
    return MixedPrecisionPolicy(reduce_dtype=_DTYPES[config.reduce_dtype])


def compute_context(config: PrecisionConfig, device: torch.device, *, sharded: bool) -> AbstractContextManager[Any]:
    """The context of a loss: autocast for whole weights; nothing for sharded ones, whose policies cast them."""
    if config.dtype == "fp32" or sharded:
        return nullcontext()
    return torch.autocast(device.type, dtype=config.compute_dtype)


class LossScaler(torch.amp.GradScaler):
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2) that also holds for sharded gradients.

    An overflow in one rank's shard must skip the update on all ranks, and sharded gradients are unscaled as local
    tensors. Enabled for fp16 only; otherwise it costs and changes nothing.
    """

    def __init__(self, config: PrecisionConfig, world: World) -> None:
        super().__init__(
            world.device.type,
            init_scale=config.init_scale,
            growth_factor=config.growth_factor,
            backoff_factor=config.backoff_factor,
            growth_interval=config.growth_interval,
            enabled=config.dtype == "fp16",
        )
        self._world = world

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the scale, and the updates since it changed; how it changes stays as it is given now."""
        since = min(state_dict["_growth_tracker"], self.get_growth_interval() - 1)  # torch compares for equality
        super().load_state_dict({**self.state_dict(), "scale": state_dict["scale"], "_growth_tracker": since})

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        # CUDA's kernel takes the first one's format for that of all.
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    local = local_part(parameter.grad)
                    local = torch.view_as_real(local) if local.is_complex() else local
                    by_kind.setdefault((local.device, local.dtype), []).append(local)
        overflow = found_inf.clone()
        for (device, _), gradients in by_kind.items():
            found_there = torch.zeros_like(found_inf, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_there, inv_scale.to(device))
            overflow += found_there.to(overflow.device)
        if self._world.world_size > 1:
            dist.all_reduce(overflow, dist.ReduceOp.MAX)
        return {overflow.device: overflow}

    def step_and_update(self, optimizer: torch.optim.Optimizer) -> bool:
        """Make the update unless a gradient overflowed, adapt the scale, and return whether the update was made."""
        if not self.is_enabled():
            optimizer.step()
            return True
        before = self.get_scale()
        self.step(optimizer)
        self.update()
        return bool(self.get_scale() >= before)


def tell_scaling(config: PrecisionConfig, saved: Mapping[str, Any] | None, tell: Callable[[str], None]) -> None:
    """Tell of each setting of the loss scale that a checkpoint's scaler had otherwise."""
    for key in _SCALING if config.dtype == "fp16" and saved else ():
        if saved and saved.get(key) != getattr(config, key):
            tell(f"precision.{key}={getattr(config, key)!r}, where the checkpoint had {saved.get(key)!r}")


def tell_device(config: PrecisionConfig, device: torch.device, tell: Callable[[str], None]) -> None:
    """Tell of a format that the device has no use for."""
    if config.dtype == "bf16" and device.type == "cpu":
        tell(
            "precision.dtype='bf16', the default, on a CPU: most CPUs compute it no faster than fp32, and it rounds to "
            "3 digits; set precision.dtype='fp32' for runs on CPUs alone"
        )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, or a sparse tensor's values, sharing the memory; any other tensor as it is."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor._values() if tensor.is_sparse else tensor
