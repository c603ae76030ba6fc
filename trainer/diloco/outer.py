"""Outer optimizer: SGD with Nesterov momentum over what the learners' weights have changed by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..parallel.averaging import real_part
from ..parallel.diloco_config import DilocoConfig
from ..parallel.precision import local_part


class OuterOptimizer:
    """The weights that all learners have in common, by name, and their momenta: fp32 or wider, sharded as the weights.

    A step is that of ``torch.optim.SGD(nesterov=True)``. With ``is_average`` of the config the weights become the mean
    that is exchanged, so that nothing is rounded but the mean itself. Nothing here is a collective.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: DilocoConfig) -> None:
        self._config = config
        self._parameters = parameters
        self.weights = {name: _widen(one.detach().clone()) for name, one in parameters.items()}
        self.momenta: dict[str, Tensor] = {}
        if config.momentum:
            self.momenta = {name: torch.zeros_like(one) for name, one in self.weights.items()}

    @torch.no_grad()
    def begin(self) -> None:
        """Start anew from the weights of the model as they are."""
        for name, one in self.weights.items():
            part_of(one).copy_(part_of(self._parameters[name]))
        for one in self.momenta.values():
            part_of(one).zero_()

    def tensors(self) -> dict[str, Tensor]:
        """All of this by name, for a checkpoint."""
        weights = {f"weights.{name}": one for name, one in self.weights.items()}
        return weights | {f"momenta.{name}": one for name, one in self.momenta.items()}

    @torch.no_grad()
    def propose(self, names: Sequence[str]) -> Tensor:
        """(n,) in fp32, or fp64 where a weight is: what is averaged over the learners, for ``step``."""
        own = flatten([part_of(self._parameters[name]) for name in names])
        return own if self._config.is_average else flatten([part_of(self.weights[name]) for name in names]) - own

    @torch.no_grad()
    def step(self, names: Sequence[str], mean: Tensor) -> Tensor:
        """Take the learners' mean; returns the sum of the squares of the outer gradient, () float64, of this rank."""
        weights = [part_of(self.weights[name]) for name in names]
        means = split_like(mean, weights)
        if self._config.is_average:
            gradients = [weight - one for weight, one in zip(weights, means, strict=True)]
            for weight, one in zip(weights, means, strict=True):
                weight.copy_(one)
            return _sum_squares(gradients, mean)
        steps = means
        if self._config.momentum:
            momenta = [part_of(self.momenta[name]) for name in names]
            torch._foreach_mul_(momenta, self._config.momentum)
            torch._foreach_add_(momenta, means)
            steps = list(torch._foreach_add(means, momenta, alpha=self._config.momentum))
        torch._foreach_add_(weights, steps, alpha=-self._config.rate)
        return _sum_squares(means, mean)

    @torch.no_grad()
    def merge(self, names: Sequence[str]) -> None:
        """Bring the model's weights to the common ones, but for a share ``alpha`` of their own."""
        alpha = self._config.alpha
        for name in names:
            own, common = part_of(self._parameters[name]), part_of(self.weights[name])
            if alpha:
                own.mul_(alpha).add_(common, alpha=1.0 - alpha)
            else:
                own.copy_(common)


def part_of(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, as real numbers, sharing the memory."""
    return real_part(local_part(tensor.detach()))


def flatten(parts: Sequence[Tensor]) -> Tensor:
    """(n,) copy of tensors, fp32, or fp64 where one of them is."""
    wide = torch.float64 if any(one.dtype == torch.float64 for one in parts) else torch.float32
    return torch.cat([one.reshape(-1).to(wide) for one in parts])


def split_like(flat: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Undo ``flatten``: tensors of these shapes and formats."""
    cut = torch.split(flat, [one.numel() for one in parts])
    return [one.view_as(part).to(part) for one, part in zip(cut, parts, strict=True)]


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


def _sum_squares(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=like.device)
    for one in parts:
        total += one.double().square().sum().to(total.device)
    return total
