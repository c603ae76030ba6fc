"""Number formats: FP32 master weights always, compute in fp32, bf16 or fp16, and the loss scale that fp16 needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _apply_to_tensors

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

    fp32_modules: tuple[str, ...] = ()
    """With zero=1..3, class names of modules whose weights come in fp32, as forward uses them outside of autocast."""

    rounded_modules: tuple[str, ...] = ()
    """With zero=1..3, class names of own modules whose weights come in ``dtype``, as matrix products alone use them."""

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
        both = sorted(set(self.fp32_modules) & set(self.rounded_modules))
        if both:
            raise TrainerConfigError(
                f"precision.fp32_modules and precision.rounded_modules both name {both[0]!r}; take it out of one"
            )
        check_range("precision.init_scale", self.init_scale, low=0.0, above=True)
        check_range("precision.growth_factor", self.growth_factor, low=1.0, above=True)
        check_range("precision.growth_interval", self.growth_interval, low=1)
        check_range("precision.backoff_factor", self.backoff_factor, low=0.0, above=True, high=1.0)
        if self.backoff_factor == 1.0:
            raise TrainerConfigError("precision.backoff_factor=1.0 never shrinks the scale; give less, such as 0.5")

    @property
    def compute_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def reduced_dtype(self) -> torch.dtype:
        return _DTYPES[self.reduce_dtype]


class MasterWeights:
    """The parameters of a model that are rounded, which must be frozen, and may be unfrozen at any time.

    Updates below half a unit in the last place would be lost; a frozen one has none, and keeps its format.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._rounded = [
            (name, one) for name, one in model.named_parameters() if one.is_floating_point() and one.element_size() < 4
        ]

    def check(self) -> None:
        """Raise a TrainerConfigError where one of them is trained."""
        for name, one in self._rounded:
            if one.requires_grad:
                raise TrainerConfigError(
                    f"parameter {name!r} is {one.dtype} and trained; master weights are float32: build the model, or "
                    "this part of it, in float32 and choose the compute format with precision.dtype, or freeze it with "
                    "requires_grad_(False): frozen parameters keep their format"
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
    """The policy of each sharded module: it casts no input and no output, and weights come as ``gathered.py`` says."""
    # None is the gradient's own format, which is float64 where the weights are.
    is_own = config.dtype == config.reduce_dtype == "fp32"
    return MixedPrecisionPolicy(
        reduce_dtype=None if is_own else _DTYPES[config.reduce_dtype], cast_forward_inputs=False
    )


def list_batch_norms(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules with running statistics and weights, each of which is sharded by itself, below the model itself."""
    return [
        module
        for module in model.modules()
        if module is not model
        and isinstance(module, torch.nn.modules.batchnorm._NormBase)
        and module.track_running_stats
        and module.affine
    ]


@contextmanager
def compute_context(config: PrecisionConfig, device: torch.device, model: torch.nn.Module) -> Iterator[None]:
    """Run a loss or a metric, at every zero stage: in autocast, and in fp32 for the output of the whole model.

    Autocast sums some losses in fp32, others in the format of what they are made of, and not the same on each device.
    """
    if config.dtype == "fp32":
        yield
        return
    hook = model.register_forward_hook(_raise_outputs, prepend=True)
    try:
        with torch.autocast(device.type, dtype=config.compute_dtype):
            yield
    finally:
        hook.remove()


def _raise_outputs(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
    return _apply_to_tensors(_raise_half, output)


def _raise_half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


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
            tell(f"precision.{key}={getattr(config, key)!r}; the checkpoint had {saved.get(key)!r}")


def tell_device(config: PrecisionConfig, device: torch.device, tell: Callable[[str], None]) -> None:
    """Tell of a format that the device has no use for."""
    if config.dtype == "bf16" and device.type == "cpu":
        tell(
            "precision.dtype='bf16' (the default) on a CPU: most CPUs compute it no faster than fp32, and it keeps "
            "only 3 digits; set precision.dtype='fp32' to train on CPUs"
        )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, or a sparse tensor's values, sharing the memory; any other tensor as it is."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor._values() if tensor.is_sparse else tensor
