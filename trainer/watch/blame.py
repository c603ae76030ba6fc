"""Tell a rank's own errors from those that only show that another rank is gone."""

from __future__ import annotations

import torch.distributed as dist

_COLLECTIVE_MARKS = ("gloo", "Gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "ProcessGroup")


def is_of_a_collective(error: BaseException) -> bool:
    """Return whether an error comes from gloo, NCCL, the store or another rank's loader: another rank likely failed."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, dist.DistError) or getattr(cause, "is_consequence", False):
            return True
        if isinstance(cause, RuntimeError) and any(mark in str(cause) for mark in _COLLECTIVE_MARKS):
            return True
        cause = cause.__cause__
    return False
