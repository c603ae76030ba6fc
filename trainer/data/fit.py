"""See that a loader hands out the batches that its rank's place in the mesh needs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..errors import TrainerConfigError
from ..ranks.mesh import Mesh
from .batches import list_tensors, sample_ids

_NOTHING = "nothing"


def check_share(loader: Any, mesh: Mesh, key: str = "loader") -> None:
    """Refuse a loader that shares out samples over ranks where these are parts of replicas, as far as it tells.

    It tells by ``rank`` and ``world_size``, or as torch's ``DistributedSampler`` does. ``key`` names it.

    Raises:
        TrainerConfigError: its share is not that of this rank's replica.
    """
    if not mesh.is_spread:
        return
    for rank, size, size_key in _shares(loader):
        if (rank, size) != (mesh.replica, mesh.replicas):
            raise TrainerConfigError(
                f"{key}={type(loader).__name__} has rank={rank}, {size_key}={size}, and {mesh.describe()} is of "
                f"replica {mesh.replica} of {mesh.replicas}, whose ranks need the same samples; give it "
                f"rank=mesh.replica, {size_key}=mesh.replicas, or penstock's loader mesh=mesh.device_mesh, with "
                "mesh = open_mesh(config.parallel, world)"
            )


def _shares(loader: Any) -> Iterator[tuple[int, int, str]]:
    """The rank and the number of shares that a loader, or its sampler, tells, and the name of the number."""
    for owner, size_key in ((loader, "world_size"), (getattr(loader, "sampler", None), "num_replicas")):
        rank, size = getattr(owner, "rank", None), getattr(owner, size_key, None)
        if isinstance(rank, int) and isinstance(size, int):
            yield rank, size, size_key


def must_check_peers(loader: Any, mesh: Mesh) -> bool:
    """Return whether first batches are to be compared: not where all ranks' loaders tell their share; a collective.

    Comparing makes each rank wait for the others' first batch, of which a watchdog then blames all.
    """
    if mesh.world.world_size == 1 or mesh.is_spread:
        return mesh.is_spread
    everyones = [False] * mesh.world.world_size
    dist.all_gather_object(everyones, any(size == mesh.replicas for _, size, _ in _shares(loader)))
    return not all(everyones)


def check_peers(batch: Any, mesh: Mesh) -> str | None:
    """See that the ranks of a replica got the same batch, as far as they should, and replicas others; a collective.

    Ranks that differ in ``tp`` alone need the same tensors. Stages may have other fields, and cuts of a sequence other
    tokens: of these the sample ids are compared, where a loader adds them. Returns a note if all replicas got the same.

    Raises:
        TrainerConfigError: on every rank, naming two that differ.
    """
    if mesh.world.world_size == 1:
        return None
    ids = sample_ids(batch)
    own = (_digest(batch), None if ids is None else _digest(torch.tensor(ids)))
    everyones: list[tuple[str, str | None]] = [own] * mesh.world.world_size
    dist.all_gather_object(everyones, own)
    seen: dict[tuple[object, ...], int] = {}
    for rank, (whole, some) in enumerate(everyones):
        place = mesh.sizes.place(rank)
        peers: list[tuple[tuple[object, ...], int]] = [(("batch", place["dp"], place["pp"], place["cp"]), 0)]
        peers += [(("ids", place["dp"]), 1)] if some is not None else []
        for group, part in peers:
            other = seen.setdefault(group, rank)
            if everyones[other][part] != (whole, some)[part]:
                raise TrainerConfigError(
                    f"{mesh.describe(other)} and {mesh.describe(rank)} got different first batches, and both are of "
                    f"replica {place['dp']}, whose ranks need the same samples; let the loader share them out over "
                    "mesh.replicas by mesh.replica, or give penstock's loader mesh=mesh.device_mesh, and seed what it "
                    "draws alike on ranks of a replica"
                )
    return _describe_same([whole for whole, _ in everyones], mesh)


def _describe_same(digests: list[str], mesh: Mesh) -> str | None:
    """A sentence for a loader that knows no ranks, as a list or a DataLoader without a sampler of its own."""
    places = [mesh.sizes.place(rank) for rank in range(len(digests))]
    parts = {(place["pp"], place["cp"], place["tp"], digest) for place, digest in zip(places, digests, strict=True)}
    if mesh.replicas == 1 or _NOTHING in digests or len(parts) > mesh.replica_ranks:
        return None
    who = "replicas" if mesh.is_spread else "ranks"
    return (
        f"all {mesh.replicas} {who} got the same first batch, so that each sample may be trained on, and counted, "
        f"{mesh.replicas} times: share the samples out, as penstock's loader does, or torch's DistributedSampler with "
        f"num_replicas={mesh.replicas} and rank={'mesh.replica' if mesh.is_spread else 'world.rank'}"
    )


def _digest(batch: Any) -> str:
    mixed = hashlib.sha256()
    # Nested, sparse and other kinds of tensors have no bytes to compare.
    tensors = [one for one in list_tensors(batch) if type(one) is torch.Tensor and one.layout is torch.strided]
    if not any(tensor.numel() for tensor in tensors):
        return _NOTHING
    for tensor in tensors:
        # Cloned, since one value is contiguous with any stride, and not every stride can be viewed as bytes.
        values = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        mixed.update(f"{values.dtype} {tuple(values.shape)} ".encode())
        mixed.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return mixed.hexdigest()
