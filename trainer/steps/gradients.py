"""The gradients of a step, once they are reduced: one look at each for their norm and whether they are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import TrainerConfigError
from ..parallel.model import ParallelModel
from ..parallel.precision import local_part


@dataclass(frozen=True)
class Measured:
    """Result of one reading of the gradients; tensors are on the device, and nothing has waited for them.

    ``norm`` is the Euclidean norm of all as one vector, () float64: not finite where an element is not, or where it
    overflows. ``local`` are this rank's parts. ``used`` says how many ranks used each parameter, (n,) float64, or is
    None where this rank used all, or the model is not sharded.
    """

    norm: Tensor
    local: list[Tensor]
    used: Tensor | None

    def scale(self, factor: Tensor | float) -> None:
        """Multiply the optimizer's gradients by ``factor``; a tensor is () and may be on any device."""
        if isinstance(factor, float) and factor == 1.0:
            return
        for (device, dtype), alike in _by_kind(self.local).items():
            torch._foreach_mul_(alike, factor.to(device, dtype) if isinstance(factor, Tensor) else factor)


class Gradients:
    """The gradients of a model's parameters; holds the parameters, and no gradient.

    Those of ``optimizer`` make the norm; the model's others are only checked for being finite.
    """

    def __init__(self, parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
        self._parallel = parallel
        self._mesh = parallel.mesh
        self._world = parallel.world
        self._optimizer = optimizer
        self._is_first = True
        trained = [one for group in optimizer.param_groups for one in group["params"]]
        holders = {one: parallel.count_holders(one) for one in trained}
        self._copies = math.gcd(*holders.values())  # ranks of this stage that hold each part, at least
        self._more_copies = {one: count // self._copies for one, count in holders.items()}
        self._named = list(parallel.inner.named_parameters())
        updated = set(map(id, trained))
        self._not_updated = [one for _, one in self._named if id(one) not in updated]
        self._frozen = [(name, one) for name, one in self._named if id(one) not in updated and not one.requires_grad]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients that there are, by the names of their parameters."""
        return ((name, one.grad) for name, one in self._named if one.grad is not None)

    def clear(self) -> None:
        """Forget all gradients, also of parameters that the optimizer has not: those would add up from step to step."""
        self._optimizer.zero_grad(set_to_none=True)
        for one in self._not_updated:
            one.grad = None

    @torch.no_grad()
    def measure(self, losses: Sequence[Tensor | float]) -> Measured:
        """Look at each gradient once; a collective where the model is sharded, or cut. Does not wait for the device.

        ``losses`` are those that the gradients are of, () each: of all ranks, where they exchange gradients.

        Raises:
            TrainerConfigError: a parameter was unfrozen that the optimizer lacks, and would stay as it is; or the first
                loss depends on none that it has.
        """
        unfrozen = [name for name, one in self._frozen if one.grad is not None]
        if unfrozen:
            raise TrainerConfigError(
                f"the parameters {', '.join(unfrozen[:5])} were frozen when the trainer was made, and have a gradient "
                "now that the optimizer lacks them for; give an optimizer over all parameters, as "
                "AdamW(model.parameters()), which leaves frozen ones alone, or make a new trainer after unfreezing"
            )
        by_copies = self._gather()
        local = [one for parts in by_copies.values() for one in parts]
        self._check_first(local, losses)
        others = [local_part(one.grad) for one in self._not_updated if one.grad is not None]
        if not (self._parallel.is_sharded or self._mesh.is_spread):
            norm = self._norm(local)
            return Measured(norm + 0.0 * self._norm(others) if others else norm, local, None)
        squares = [self._norm(parts).square() / copies for copies, parts in by_copies.items()]
        square = sum(squares[1:], start=squares[0]) if squares else self._norm([])
        square = square + 0.0 * self._norm(others) if others else square  # NaN and infinity come through
        found = torch.cat((square.reshape(1), self._parallel.used_flags()))
        if self._mesh.stage_ranks > 1:
            dist.all_reduce(found, group=self._mesh.stage_group)
        square = found[0] / self._copies
        if self._mesh.sizes.pp > 1:  # each stage has flags of its own
            dist.all_reduce(square, group=self._mesh.pipeline_group)
        return Measured(square.sqrt(), local, None if self._parallel.uses_all else found[1:])

    def _check_first(self, local: list[Tensor], losses: Sequence[Tensor | float]) -> None:
        """A later step may be without gradients; where the first one is, the loss was cut off from the model.

        A loss of 0 says nothing: functions return one made from a number for a batch in which all is masked.
        """
        is_alone = self._mesh.gradient_ranks == 1
        usage = self._parallel.usage if is_alone else None  # alone, zeros stand for what is unused
        may_train_nothing = self._mesh.sizes.pp > 1  # a stage of frozen modules
        if may_train_nothing or not self._is_first or (local and (usage is None or usage.uses_any)):
            self._is_first = False
        elif any(one != 0 for one in losses):
            raise TrainerConfigError(
                "no parameter of the optimizer got a gradient in the first step, so that nothing would be trained: the "
                "sum that the loss function returns does not depend on them; is it detached, or made from numbers, and "
                "was the optimizer made from this model's parameters?"
            )

    def _gather(self) -> dict[int, list[Tensor]]:
        """This rank's parts of the gradients, by how much more ranks hold the same part than ``_copies``."""
        found: dict[int, list[Tensor]] = {}
        for group in self._optimizer.param_groups:
            for one in group["params"]:
                gradient = one.grad
                if gradient is None:
                    continue
                if gradient.is_sparse:
                    one.grad = gradient = gradient.coalesce()  # each element once: the norm is that of the sums
                found.setdefault(self._more_copies.get(one, 1), []).append(local_part(gradient))
        return found

    def _norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """() float64 on the world's device."""
        norms: list[Tensor] = [
            torch.linalg.vector_norm(torch.stack(torch._foreach_norm(alike, 2.0)), dtype=torch.float64)
            for alike in _by_kind(gradients).values()
        ]
        if len(norms) == 1:
            return norms[0].to(self._world.device)
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for one in norms:
            total = torch.hypot(total, one.to(total.device))
        return total


def _by_kind(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for one in tensors:
        if one.numel():
            found.setdefault((one.device, one.dtype), []).append(one)
    return found
