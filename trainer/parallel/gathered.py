"""In which format each sharded weight comes to forward, so that what it computes is what autocast makes of whole ones.

Autocast converts weights where an operation asks for the compute format, and keeps fp32 for all others (norms, lookups,
scales). A weight that is converted at each of its uses may as well be gathered converted, for half of the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from ..errors import TrainerConfigError
from ..options import suggest
from .meta import join_name
from .precision import PrecisionConfig

_BIAS = ("weight", "bias")
_CONVERTED: Mapping[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: _BIAS,
    nn.Conv1d: _BIAS,
    nn.Conv2d: _BIAS,
    nn.Conv3d: _BIAS,
    nn.ConvTranspose1d: _BIAS,
    nn.ConvTranspose2d: _BIAS,
    nn.ConvTranspose3d: _BIAS,
    nn.MultiheadAttention: ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
}
"""By class, the parameters that its own forward uses in nothing but what autocast computes in the compute format."""


def list_rounded(model: nn.Module, config: PrecisionConfig) -> frozenset[str]:
    """The names of the parameters that may be gathered in ``config.dtype``; of tied ones, where that holds for all.

    Raises:
        TrainerConfigError: ``config`` names a class that no module of the model has.
    """
    known = {type(module).__name__ for module in model.modules()}
    for key, given in (("fp32_modules", config.fp32_modules), ("rounded_modules", config.rounded_modules)):
        for name in given:
            if name not in known:
                raise TrainerConfigError(
                    f"precision.{key}={name!r} is not a module class of the model; {suggest(name, known)}"
                )
    if config.dtype == "fp32":
        return frozenset()
    found: dict[nn.Parameter, dict[str, bool]] = {}
    for name, one, is_rounded in _walk(model, "", None, config):
        found.setdefault(one, {})[name] = is_rounded
    return frozenset(name for names in found.values() if all(names.values()) for name in names)


def _walk(
    module: nn.Module, name: str, given: bool | None, config: PrecisionConfig
) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """Yield every parameter under each name, and whether it is rounded; ``given`` is the choice for a part."""
    kind = type(module).__name__
    given = False if kind in config.fp32_modules else True if kind in config.rounded_modules else given
    converted = next((keys for one, keys in _CONVERTED.items() if type(module).forward is one.forward), ())
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield join_name(name, key), parameter, key in converted if given is None else given
    for key, child in module._modules.items():
        if child is not None:
            yield from _walk(child, join_name(name, key), given, config)


def set_formats(model: nn.Module, rounded: frozenset[str], config: PrecisionConfig) -> None:
    """Have the shards of ``rounded`` parameters gathered in ``config.dtype``, before any are gathered.

    ``fully_shard`` has one format for all parameters of a module, or else a group of its own for each that differs,
    which it gathers by itself.
    """
    if config.dtype == "fp32":
        return
    names = {id(one): name for name, one in model.named_parameters()}
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        shards: Any = () if group is None else group.fsdp_params
        for one in shards:
            is_rounded = names[id(one.sharded_param)] in rounded
            one.__class__ = _Shard
            one.computed = config.compute_dtype if is_rounded else None
        if group is not None:
            _agree_on_gradients(shards, config.reduced_dtype)


def _agree_on_gradients(shards: Iterable[_Shard], reduced: torch.dtype) -> None:
    """The format in which the gradients of one module are reduced: together, so all of them have it before."""
    shards = list(shards)
    formats = {one.sharded_param.dtype for one in shards if one.sharded_param.requires_grad}
    is_wide = not formats <= {torch.float32}  # they keep their own
    before = {one.gathered for one in shards if one.sharded_param.dtype == torch.float32}
    for one in shards:
        one.reduced = None if is_wide else reduced
        one.is_cast_before = len(before) > 1 and not is_wide


class _Shard(FSDPParam):
    """A shard with a format of its own in which it is gathered, and one in which its gradient is given to be reduced.

    ``computed`` is the compute format if it is gathered in that, else None. Torch makes instances of the base class,
    and these are told to be of this one.
    """

    computed: torch.dtype | None
    reduced: torch.dtype | None
    is_cast_before: bool

    @property
    def gathered(self) -> torch.dtype:
        """The format in which it comes to forward: its own where it is another than fp32, as a frozen base in bf16."""
        own: torch.dtype = self.sharded_param.dtype
        return self.computed if self.computed is not None and own == torch.float32 else own

    def init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
        self.orig_dtype = self.sharded_param.dtype
        self.param_dtype = None if self.gathered == self.orig_dtype else self.gathered
        self.reduce_dtype = self.reduced

    @property
    def unsharded_grad_data(self) -> Tensor:
        return self._given(super().unsharded_grad_data)

    @property
    def unsharded_zero_grad_data(self) -> Tensor:
        return self._given(super().unsharded_zero_grad_data)

    def _given(self, gradient: Tensor) -> Tensor:
        return gradient.to(self.reduced) if self.is_cast_before else gradient
