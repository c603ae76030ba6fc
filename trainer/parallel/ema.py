"""The exponential moving average of the weights (Polyak and Juditsky 1992; Tarvainen and Valpola 2017), in shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TrainerConfigError
from ..options import check_range
from .precision import local_part

_WRAPPED = ("_orig_mod.", "_checkpoint_wrapped_module.")  # what torch puts into names, and leaves out of checkpoints


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """Whether an average of the weights is kept beside them, and over how many updates it reaches."""

    decay: float | None = None
    """Share of the average that stays at each update, such as 0.999; none: no average is kept."""

    warmup: bool = False
    """Begin with a small decay: min(decay, (1 + t) / (10 + t)) at the average's update t."""

    every: int = 1
    """Updates between averages; each then counts decay to the power of this."""

    def __post_init__(self) -> None:
        check_range("ema.decay", self.decay, low=0.0)
        check_range("ema.every", self.every, low=1)
        if self.decay is not None and self.decay >= 1.0:
            raise TrainerConfigError(f"ema.decay={self.decay} would keep the first weights for ever; give less than 1")
        if self.decay is None and (self.warmup or self.every != 1):
            key = "warmup=True" if self.warmup else f"every={self.every}"
            raise TrainerConfigError(f"ema.{key} needs an average; set ema.decay, such as 0.999")


def bare_name(name: str) -> str:
    """The name of a parameter or buffer as checkpoints have it."""
    for prefix in _WRAPPED:
        name = name.replace(prefix, "")
    return name


def decay_at(config: EmaConfig, update: int) -> float:
    """The share of the average that stays at its ``update``, counted from 1 and a multiple of ``every``.

    The warm-up is that of TensorFlow's ``tf.train.ExponentialMovingAverage`` with ``num_updates``.
    """
    assert config.decay is not None, "there is no average without"
    decay = min(config.decay, (1 + update) / (10 + update)) if config.warmup else config.decay
    return float(decay**config.every)


class WeightEma:
    """The average of a model's trained parameters, each on the rank and in the shards that hold the parameter.

    Parameters that are frozen have no average: their own value stands for it, and so do buffers. A parameter that is
    unfrozen later is averaged from then on. Nothing here is a collective, and nothing waits for the device. All mutable
    state: the averages, in the parameters' format (fp32 or wider), and ``updates``, the updates of weights seen so far.
    """

    def __init__(self, model: nn.Module, config: EmaConfig) -> None:
        self.updates = 0
        self._config = config
        self._names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(parameter, []).append(bare_name(name))
        self._frozen: list[nn.Parameter] = list(self._names)
        self._averaged: list[nn.Parameter] = []
        self._shadows: list[Tensor] = []
        self._adopt_unfrozen()

    def update(self) -> None:
        """Let the average follow the weights, after an update of them."""
        self._adopt_unfrozen()
        self.updates += 1
        if self.updates % self._config.every == 0:
            with torch.no_grad():
                weights = [local_part(parameter) for parameter in self._averaged]
                torch._foreach_lerp_(self.parts(), weights, 1.0 - decay_at(self._config, self.updates))

    def begin(self) -> None:
        """Start anew from the weights as they are."""
        self.updates = 0
        with torch.no_grad():
            for parameter, part in zip(self._averaged, self.parts(), strict=True):
                part.copy_(local_part(parameter))

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Within this the model's weights are the averages; after it, also after an error, its own bit by bit.

        Takes the memory of one more shard of the largest parameter. Weights must not be gathered when it is entered
        and left.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def named(self) -> dict[str, Tensor]:
        """The averages by the parameters' names, tied ones under each of their names; sharded as the parameters are."""
        return {
            name: shadow
            for parameter, shadow in zip(self._averaged, self._shadows, strict=True)
            for name in self._names[parameter]
        }

    def parts(self) -> list[Tensor]:
        """Parts of the averages on this rank, in the same order on every rank."""
        with torch.no_grad():
            return [local_part(shadow) for shadow in self._shadows]

    @property
    def nbytes(self) -> int:
        """Bytes of all ranks' averages together, in a checkpoint."""
        return sum(shadow.numel() * shadow.element_size() for shadow in self.named().values())

    def state_dict(self) -> dict[str, Any]:
        """JSON, and the same for any number of ranks: what the averages themselves do not tell."""
        return {"updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates = state["updates"]

    def _adopt_unfrozen(self) -> None:
        if not any(parameter.requires_grad for parameter in self._frozen):
            return
        for parameter in self._frozen:
            if parameter.requires_grad:
                self._averaged.append(parameter)
                self._shadows.append(parameter.detach().clone())
        self._frozen = [parameter for parameter in self._frozen if not parameter.requires_grad]

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, shadow in zip(self._averaged, self.parts(), strict=True):
            weight = local_part(parameter)
            kept = weight.clone()
            weight.copy_(shadow)
            shadow.copy_(kept)
