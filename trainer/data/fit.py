"""See that a loader hands out the batches that its rank's place in the mesh needs."""

from __future__ import annotations

from typing import Any

from ..errors import TrainerConfigError
from ..ranks.mesh import Mesh


def check_share(loader: Any, mesh: Mesh, key: str = "loader") -> None:
    """Refuse a loader that shares out samples over ranks where these are parts of replicas, as far as it tells.

    It tells by ``rank`` and ``world_size``, or as torch's ``DistributedSampler`` does. ``key`` names it.

    Raises:
        TrainerConfigError: its share is not that of this rank's replica.
    """
    if not mesh.is_spread:
        return
    sampler = getattr(loader, "sampler", None)
    for owner, rank_key, size_key in ((loader, "rank", "world_size"), (sampler, "rank", "num_replicas")):
        rank, size = getattr(owner, rank_key, None), getattr(owner, size_key, None)
        if isinstance(rank, int) and isinstance(size, int) and (rank, size) != (mesh.replica, mesh.replicas):
            raise TrainerConfigError(
                f"{key}={type(loader).__name__} has {rank_key}={rank}, {size_key}={size}, and {mesh.describe()} is of "
                f"replica {mesh.replica} of {mesh.replicas}, whose ranks need the same samples; give it "
                f"{rank_key}=mesh.replica, {size_key}=mesh.replicas, or penstock's loader mesh=mesh.device_mesh, with "
                "mesh = open_mesh(config.parallel, world)"
            )
