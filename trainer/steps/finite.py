"""Find what is not finite: one flag for many tensors, names once something is wrong, and the policy for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..data.batches import count_rows, known_rows, sample_ids
from ..errors import NonFiniteLossError
from ..ranks.mesh import Mesh
from ..ranks.world import World


def any_not_finite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return (1,) float64 on ``device``: 1 where an element of this rank's parts is NaN or infinite, else 0.

    Reads each element once and writes none; the caller decides when to wait for the result.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        values = _values(tensor)
        if values.numel() and (values.is_floating_point() or values.is_complex()):
            by_device.setdefault(values.device, []).append(values)
    flag = torch.zeros(1, dtype=torch.float64, device=device)
    for same_device in by_device.values():
        # The largest magnitude of each: NaN and infinity come through, and nothing else overflows.
        largest = torch._foreach_norm(same_device, float("inf"))
        found = torch.stack([one.float() for one in largest]).isfinite().all()
        flag += (~found).to(device)
    return flag.clamp_(max=1.0)


def name_not_finite(named: Iterable[tuple[str, Tensor]], *, at_most: int = 5) -> list[str]:
    """Return the names of the first few tensors that are not finite; waits for the device."""
    names: list[str] = []
    for name, tensor in named:
        if not bool(torch.isfinite(_values(tensor)).all()):
            names.append(name)
            if len(names) == at_most:
                break
    return names


def name_on_all_ranks(named: Iterable[tuple[str, Tensor]], world: World) -> str:
    """Return the first few names of what is not finite on any rank, joined by commas; a collective."""
    found = name_not_finite(named)
    everywhere = [found]
    if world.world_size > 1:
        everywhere = [[] for _ in range(world.world_size)]
        dist.all_gather_object(everywhere, found)
    return ", ".join(dict.fromkeys(name for names in everywhere for name in names))


def find_infinite_constants(model: nn.Module) -> frozenset[str]:
    """The names of frozen parameters with infinities, such as a mask of -inf, and no NaN, as this rank holds them."""
    frozen = [(name, one) for name, one in model.named_parameters() if not (one.requires_grad or one.is_meta)]
    infinite = name_not_finite(frozen, at_most=len(frozen))
    return frozenset(name for name, one in frozen if name in infinite and not bool(_values(one).isnan().any()))


def refuse_weights(
    model: nn.Module,
    step: int,
    world: World,
    averages: Mapping[str, Tensor] | None = None,
    constants: Collection[str] = (),
) -> None:
    """Raise a NonFiniteLossError, on every rank, where a weight or an average is not finite on any; a collective.

    ``constants`` are frozen parameters that had infinities on this rank from the beginning.
    """
    named: list[tuple[str, Tensor]] = list(_but(constants, model.named_parameters()))
    named += [(f"{name} (its average)", average) for name, average in (averages or {}).items()]
    bad = any_not_finite((parameter for _, parameter in named), world.device)
    if world.world_size > 1:
        dist.all_reduce(bad, dist.ReduceOp.MAX)
    if bad.item():
        raise NonFiniteLossError(
            f"step {step}: the weights {name_on_all_ranks(named, world)} are not finite and are not saved; the "
            "checkpoints before this one stay. Lower the rate, or set step.clip_norm, and resume"
        )


def _but(constants: Collection[str], named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
    return ((name, one) for name, one in named if one.requires_grad or name not in constants)


class NonFinitePolicy:
    """Policy for losses or gradients that are not finite: an error, or up to ``max_skipped`` skipped steps."""

    def __init__(self, mesh: Mesh, *, may_skip: bool, max_skipped: int) -> None:
        self._mesh = mesh
        self._world = mesh.world
        self._may_skip = may_skip
        self._max_skipped = max_skipped
        self.skipped = 0
        self.last_problem = ""

    def meet_losses(self, step: int, microbatches: Sequence[Any], losses: Sequence[Tensor]) -> None:
        """Skip a step whose losses are not finite on some rank, or raise, with the samples; a collective.

        A microbatch without rows is no bad sample: a loss that is not finite there is always an error.
        """
        found = [
            (self._world.rank, index, sample_ids(batch), known_rows(batch) is None or bool(count_rows(batch)))
            for index, (batch, loss) in enumerate(zip(microbatches, losses, strict=True))
            if self._mesh.counts and not bool(torch.isfinite(loss))
        ]
        everywhere: list[list[tuple[int, int, list[int] | None, bool]]] = [found]
        if self._world.world_size > 1:
            everywhere = [[] for _ in range(self._world.world_size)]
            dist.all_gather_object(everywhere, found)
        bad = [one for there in everywhere for one in there]
        without = ((self._mesh.describe(rank), index) for rank, index, _, has_rows in bad if not has_rows)
        empty = "; ".join(f"{place}, microbatch {index}" for place, index in without)
        if empty:
            raise NonFiniteLossError(
                f"step {step}: the loss of a microbatch without rows is not finite ({empty}). Where fewer rows are "
                "left than there are ranks or microbatches, some get none, and a mean over none is NaN: the loss "
                "function must return the sum of the losses, which is then 0, and the count: losses.sum(), len(losses)"
            )
        places = "; ".join(
            f"{self._mesh.describe(rank)}, microbatch {index}, "
            + ("sample ids unknown (with_ids=True adds them)" if ids is None else f"sample ids {ids}")
            for rank, index, ids, _ in bad
        )
        self._count(f"step {step}: the loss is not finite ({places})")

    def meet_gradients(self, step: int, gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Skip a step whose gradients are not finite on some rank, or raise, with the parameters; a collective."""
        names = name_on_all_ranks(gradients, self._world)
        what = f"the gradient of {names} is not" if names else "the norm of the gradients overflows"
        self._count(f"step {step}: the loss is finite and {what}")

    def refuse_late(self, step: int, weights: Iterable[tuple[str, Tensor]]) -> NoReturn:
        """Raise for the gradients of a step whose update is made; a collective."""
        names = name_on_all_ranks([(name, one) for name, one in weights if one.requires_grad], self._world)
        what = f"the gradient of {names} was not" if names else "the norm of the gradients overflowed"
        raise NonFiniteLossError(
            f"step {step}: the loss was finite and {what}; the weights have taken it, which on CUDA is known one step "
            "later, and are not saved. Lower the rate, set step.clip_norm, or set step.on_nan='skip', which waits for "
            "the device in every step"
        )

    def _count(self, problem: str) -> None:
        if not self._may_skip:
            raise NonFiniteLossError(
                f"{problem}; look at these samples, lower the rate, set step.clip_norm, or set step.on_nan='skip' "
                "to skip such steps"
            )
        self.last_problem = problem
        self.skipped += 1
        if self.skipped > self._max_skipped:
            raise NonFiniteLossError(
                f"{problem}; with it {self.skipped} steps were skipped, and step.max_skipped={self._max_skipped}"
            )


def _values(tensor: Tensor) -> Tensor:
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    return local._values() if local.is_sparse else local
