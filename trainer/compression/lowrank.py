"""PowerSGD: matrices are sent as two thin factors."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from .dense import GradFuture, finished
from .memory import GradientMemory
from .wire import WireCounter, ring_bytes

_LEAST_SAVING = 2.0  # a matrix is sent whole unless its factors are smaller by this much


@dataclass(frozen=True, kw_only=True)
class _Low:
    """A gradient that is sent as factors.

    ``matrix`` is (rows, columns), the gradient plus the error owed; ``right`` is (columns, rank).
    """

    gradient: Tensor
    matrix: Tensor
    owed: Tensor
    right: Tensor
    key: str


class PowerSGDHook:
    """PowerSGD with warm start and error feedback (Vogels et al. 2019, algorithms 1 and 2).

    A gradient of two dimensions or more is a matrix M of its first against the rest. All ranks average P = M Q, make
    its columns orthonormal, average Q = M^T P, and take P Q^T. Vectors and small matrices go whole, with the P's. The
    Q's are the same on all ranks and start the next step. Backward waits for it, because it takes two rounds.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup, wire: WireCounter, memory: GradientMemory) -> None:
        self._rank, self._group, self._wire, self._memory = rank, group, wire, memory

    def __call__(self, bucket: GradBucket) -> GradFuture:
        buffer, gradients, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
        self._wire.plain_bytes += ring_bytes(buffer.nbytes, self._group.size())
        low: list[_Low] = []
        whole: list[Tensor] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if self._is_worth(gradient):
                low.append(self._prepare(parameter, gradient))
            else:
                whole.append(gradient)
        lefts = [one.matrix @ one.right for one in low]
        self._average([*lefts, *whole])
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [one.matrix.T @ left for one, left in zip(low, lefts, strict=True)]
        self._average(rights)
        for one, left, right in zip(low, lefts, rights, strict=True):
            approximation = left @ right.T
            one.owed.copy_((one.matrix - approximation).view_as(one.owed))
            one.gradient.copy_(approximation.view_as(one.gradient))
            self._memory.remember(one.key, right)
        return finished(buffer)

    def _is_worth(self, gradient: Tensor) -> bool:
        if gradient.dim() < 2:
            return False
        rows, columns = gradient.shape[0], gradient[0].numel()
        return (rows + columns) * self._rank * _LEAST_SAVING <= rows * columns

    def _prepare(self, parameter: Tensor, gradient: Tensor) -> _Low:
        (owed,) = self._memory.like("powersgd.owed", [parameter], [gradient])
        matrix = (gradient + owed).view(gradient.shape[0], -1).float()
        name = self._memory.name_of(parameter)
        right = self._memory.recall(f"powersgd.right.{name}")
        if right is None:
            # Seeded by name, so that all ranks begin with the same factor.
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            right = torch.randn((matrix.shape[1], self._rank), generator=generator)
        return _Low(gradient=gradient, matrix=matrix, owed=owed, right=right.to(matrix), key=f"powersgd.right.{name}")

    def _average(self, tensors: list[Tensor]) -> None:
        """Average tensors over the ranks in place, in one collective."""
        if not tensors:
            return
        flat = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
        ranks = self._group.size()
        self._wire.wire_bytes += ring_bytes(flat.nbytes, ranks)
        dist.all_reduce(flat, group=self._group)
        flat /= ranks
        for tensor, mean in zip(tensors, torch.split(flat, [one.numel() for one in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))
