"""Deterministic kernels, where torch has them; what has none is refused by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .errors import TrainerConfigError

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_FIXED_WORKSPACES = (":4096:8", ":16:8")


@contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Within this torch takes deterministic kernels, and cuDNN measures none against each other; then as before.

    Raises:
        TrainerConfigError: the environment keeps cuBLAS from it; or an operation has no deterministic kernel.
    """
    if not enabled:
        yield
        return
    workspace = os.environ.setdefault(_WORKSPACE, _FIXED_WORKSPACES[0])  # cuBLAS reads it when it is first used
    if workspace not in _FIXED_WORKSPACES:
        raise TrainerConfigError(
            f"deterministic=True with {_WORKSPACE}={workspace!r} in the environment: sums in cuBLAS may differ "
            f"from run to run; set {_WORKSPACE}={_FIXED_WORKSPACES[0]}"
        )
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn_before = cudnn.benchmark, cudnn.deterministic
    torch.use_deterministic_algorithms(True)
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    except RuntimeError as exc:
        if "deterministic" not in str(exc):
            raise
        raise TrainerConfigError(
            "deterministic=True: an operation has no deterministic kernel on this device; replace it, or set "
            f"deterministic=False. Torch says: {str(exc).splitlines()[0]}"
        ) from exc
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.benchmark, cudnn.deterministic = cudnn_before
