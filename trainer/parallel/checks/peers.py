"""Check once that the ranks of a replica compute the same where nothing is cut: a plan that does not fit would not."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ....storage.suggestions import list_some
from ...errors import TrainerConfigError
from ..precision import local_part

_ROUNDING = 1e-2  # of a gradient's norm; equal computations differ by less, and parts of sums by much more


class PeersCheck:
    """Compares a loss, and the gradients of parameters that are plain on all ranks of ``mesh``, along ``tp``.

    All mutable state: whether each has been compared.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self.has_loss = self._has_gradients = False

    def see_loss(self, loss: Tensor) -> None:
        """Compare the first loss; a collective.

        Raises:
            TrainerConfigError: on every rank, if the ranks' losses differ.
        """
        if self.has_loss:
            return
        self.has_loss = True
        least, most = self._range(loss.detach().double().reshape(1))
        if float(most - least) > _ROUNDING * float(most.abs().maximum(least.abs())):
            raise TrainerConfigError(
                f"the {self._mesh.size()} ranks of a replica, of parallel.tp={self._mesh.size()}, have losses from "
                f"{float(least):.6g} to {float(most):.6g} for the same batch: parallel.plan leaves something in parts "
                'that the loss takes for the whole, as scores of a matrix cut by "colwise"; gather it, as by '
                '"colwise_gathered", or cut it by "loss". Or the loader gives them different batches: give it the mesh'
            )

    @torch.no_grad()
    def see_gradients(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Compare the gradients of the first step, once they are exchanged; a collective.

        Raises:
            TrainerConfigError: on every rank, if the gradients of a parameter that is not cut differ.
        """
        if self._has_gradients:
            return
        self._has_gradients = True
        plain = [(name, one) for name, one in named if one.requires_grad and not self._is_cut(one)]
        if not plain:
            return
        found = torch.stack([_digest(one) for _, one in plain])
        least, most = self._range(found)
        apart = ((most - least) > _ROUNDING * most[:, :1]).any(dim=1).tolist()
        wrong = [name for (name, _), differs in zip(plain, apart, strict=True) if differs]
        if wrong:
            raise TrainerConfigError(
                f"the gradients of {list_some(wrong, 5)} differ between the {self._mesh.size()} ranks of a "
                "replica, each of which holds the whole parameter: forward uses it on a part of the activations, so "
                'that each rank\'s gradient is a part of the sum. Name its module in parallel.plan, as by "sequence" '
                "for a norm between layers that cut the sequence, or gather what it takes"
            )

    def _is_cut(self, parameter: nn.Parameter) -> bool:
        """Return whether the engine knows how the parameter lies over these ranks."""
        names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
        return "tp" in (names or ())

    def _range(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest of each value over the ranks; NaN is neither."""
        both = torch.stack([-values, values]).nan_to_num(nan=-math.inf)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._mesh.get_group())
        return -both[0], both[1]


def _digest(parameter: nn.Parameter) -> Tensor:
    """(2,) float64: the norm of the gradient, and its sum over the root of its length, which is no larger."""
    if parameter.grad is None:
        return torch.zeros(2, dtype=torch.float64, device=parameter.device)
    gradient = local_part(parameter.grad)
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    values = gradient.double()
    return torch.stack([values.norm(), values.sum() / math.sqrt(max(1, values.numel()))])
