"""Average the gradients of a model whose weights are cut over a replica's ranks: DDP takes no DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from ...storage.suggestions import list_some
from ..errors import TrainerConfigError
from ..ranks.mesh import Mesh
from .buckets import choose_bucket_mb
from .checks.limits import list_sparse
from .config import ParallelConfig
from .experts import list_spread
from .precision import local_part

_SHOWN = 5


def is_cut(placement: Placement) -> bool:
    """Return whether a placement, of whatever kind, gives each rank another part."""
    return not (placement.is_replicate() or placement.is_partial())


def has_cut_weights(model: nn.Module) -> bool:
    """Return whether weights of the model are DTensors."""
    return any(isinstance(one, DTensor) for one in model.parameters())


class LocalExchange:
    """Averages each rank's parts of the gradients over the ranks that hold the same parts, in buckets, as DDP does.

    A bucket goes on its way when backward has made its last gradient and all buckets before it are on theirs. What
    torch leaves as summands of a weight's gradient on the ranks of a replica is added up before. Mutable state: of a
    backward that is under way, which gradients are there and what is sent.
    """

    def __init__(self, model: nn.Module, config: ParallelConfig, mesh: Mesh) -> None:
        sparse = list_sparse(model)
        if sparse:
            raise TrainerConfigError(
                f"parallel.tp={config.tp} with parallel.pp={config.pp} cannot exchange the sparse gradients of "
                f"embedding {next(iter(sparse))!r}; build it with sparse=False"
            )
        self._mesh = mesh
        self._overlaps = config.overlap
        self._may_be_unused = config.unused_parameters
        self._names = {one: name for name, one in model.named_parameters() if one.requires_grad}
        spread = {one for module in list_spread(model) for one in module.parameters()}
        trained = list(self._names)
        experts = _fill_buckets([one for one in trained if one in spread], config)
        self._buckets = _fill_buckets([one for one in trained if one not in spread], config)
        self._dense = len(self._buckets)  # those before this place; experts come after, and go to other ranks
        self._buckets += experts
        self._is_exchanging = False
        self._there: set[nn.Parameter] = set()
        self._sent: list[tuple[list[nn.Parameter], Tensor | None, dist.Work | None]] = []
        for parameter in self._names:
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Run forward and backward of a step's last microbatch, and leave averaged gradients; a collective.

        Raises:
            TrainerConfigError: a parameter got no gradient in it, and ``unused_parameters`` is not set.
        """
        self._there, self._sent, self._is_exchanging = set(), [], True
        try:
            yield
        finally:
            self._is_exchanging = False
        self._finish()

    def exchange(self) -> None:
        """Leave averaged gradients after backwards of which nothing was sent yet; a collective.

        Raises:
            TrainerConfigError: a parameter got no gradient in them, and ``unused_parameters`` is not set.
        """
        self._there = {one for one in self._names if one.grad is not None}
        self._sent = []
        self._finish()

    def _finish(self) -> None:
        missing = [name for one, name in self._names.items() if one not in self._there]
        if missing and not self._may_be_unused:
            raise TrainerConfigError(
                f"the parameters {list_some(missing, _SHOWN)} got no gradient in a step's last microbatch, and "
                "the ranks wait for it; set parallel.unused_parameters=True, or freeze them with "
                "requires_grad_(False) before the trainer is made"
            )
        used = self._list_used() if self._may_be_unused else dict.fromkeys(self._names, True)
        while len(self._sent) < len(self._buckets):
            self._send(self._buckets[len(self._sent)])
        for bucket, flat, work in self._sent:
            if work is not None:
                work.wait()
            for one in bucket:
                if not used[one]:
                    one.grad = None
            if flat is None:  # no other rank has the same parts
                continue
            parts = torch.split(flat, [local_part(one).numel() for one in bucket])
            for one, part in zip(bucket, parts, strict=True):
                if one.grad is not None:
                    values = local_part(one.grad)
                    values.copy_(part.view_as(values))
        self._sent = []

    def _note(self, parameter: nn.Parameter) -> None:
        if not self._is_exchanging:
            return
        self._there.add(parameter)
        while self._overlaps and len(self._sent) < len(self._buckets):
            bucket = self._buckets[len(self._sent)]
            if not self._there.issuperset(bucket):
                return
            self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: list[nn.Parameter]) -> None:
        for one in bucket:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
            if isinstance(one, DTensor) and isinstance(one.grad, DTensor) and one.grad.placements != one.placements:
                one.grad = one.grad.redistribute(placements=one.placements)
        group, ranks = self._mesh.gradient_group, self._mesh.gradient_ranks
        if len(self._sent) >= self._dense:
            assert self._mesh.expert_replicas is not None, "experts are spread"
            group, ranks = self._mesh.expert_replicas.get_group(), self._mesh.expert_replicas.size()
        flat = work = None
        if ranks > 1:
            flat = torch.cat([local_part(one.grad).reshape(-1) for one in bucket if one.grad is not None])
            flat.div_(ranks)
            work = dist.all_reduce(flat, group=group, async_op=True)
        self._sent.append((bucket, flat, work))

    def _list_used(self) -> dict[nn.Parameter, bool]:
        """By parameter, whether a rank that holds the same part has a gradient of it; a collective."""
        flags = torch.tensor([one.grad is not None for one in self._names], dtype=torch.int32)
        flags = flags.to(self._mesh.world.device)
        if self._mesh.gradient_ranks > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._mesh.gradient_group)
        return dict(zip(self._names, map(bool, flags.tolist()), strict=True))


def _fill_buckets(parameters: list[nn.Parameter], config: ParallelConfig) -> list[list[nn.Parameter]]:
    """Parameters by bucket, in about the order in which backward makes their gradients; each of one format."""
    sizes = [local_part(one).nbytes for one in parameters]
    largest = choose_bucket_mb(sum(sizes) / 2**20, config.bucket_mb) * 2**20
    buckets: list[list[nn.Parameter]] = []
    held = 0
    for one, size in reversed(list(zip(parameters, sizes, strict=True))):
        kind = (one.dtype, one.device)
        if not buckets or held + size > largest or (buckets[-1][0].dtype, buckets[-1][0].device) != kind:
            buckets.append([])
            held = 0
        buckets[-1].append(one)
        held += size
    return buckets
