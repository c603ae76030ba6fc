"""Detect this process's rank: the given one, else torch.distributed's, else torchrun's, else 0 of 1; never a guess.

The ranks of a loader are those that share out the data. Where a model is cut too, by tensor, pipeline or context, the
processes that hold parts of one replica need the same samples: they have the same rank here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, SupportsIndex

import torch.distributed
import torch.utils.data

from ...storage.suggestions import did_you_mean
from ..errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Dimensions by the names that torch's documentation, torchtitan, Lightning, Accelerate and NeMo give them. Whether "ep"
# or a flattened "dp_cp" shares out data depends on the model: these are asked for.
_DATA_DIMS = {
    *("dp", "data", "data_parallel", "ddp", "dp_replicate", "dp_shard", "replicate", "shard", "fsdp", "hsdp"),
    *("dp_shard_mod_ep", "dp_shard_in_ep"),
}
PIPELINE_DIMS = ("pp", "pipe", "pipeline", "pipeline_parallel")
CONTEXT_DIMS = ("cp", "context", "context_parallel")
_MODEL_DIMS = {"tp", "tensor", "tensor_parallel", "sp", "sequence", "sequence_parallel", *PIPELINE_DIMS, *CONTEXT_DIMS}


def find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size; both must be given or neither.

    Raises:
        ConfigError: one without the other, or a rank outside its world; or this is a worker process of torch's.
    """
    refuse_worker()
    if (rank is None) != (world_size is None):
        raise ConfigError(f"rank={rank}, world_size={world_size}: give both, or neither to use torch.distributed's")
    if rank is None or world_size is None:
        rank, world_size = _from_torch() or (_from_environment("RANK", 0), _from_environment("WORLD_SIZE", 1))
        if world_size > 1 and not _from_torch() and not os.environ.get("RANK"):
            raise ConfigError(
                f"WORLD_SIZE={world_size} in the environment without RANK: every process would take itself for rank 0. "
                "Give rank= and world_size=, or start the ranks with torchrun; under another launcher that initialises "
                "torch.distributed (Lightning's own does), make the loader after that, as in train_dataloader()"
            )
    for name, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, SupportsIndex):
            raise ConfigError(f"{name}={value!r}: must be a whole number")
    rank, world_size = int(rank), int(world_size)
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} of world_size={world_size}: a rank is from 0 to world_size - 1")
    return rank, world_size


def find_rank_in_mesh(mesh: DeviceMesh, data_dims: Sequence[str] | str | None) -> tuple[int, int]:
    """Rank and world size among the groups of a mesh that get different samples.

    They count the places along ``data_dims``, in the mesh's own order of dimensions; None takes the usual names.

    Raises:
        ConfigError: this process is not in the mesh, or it is not clear which dimensions share out the data.
    """
    refuse_worker()
    names = tuple(mesh.mesh_dim_names or ())
    chosen = _choose_data_dims(mesh, names, data_dims)
    coordinate = _coordinate(mesh)
    places = [place for place, name in enumerate(names) if name in chosen] if names else [0]
    rank = 0
    for place in places:
        rank = rank * mesh.size(place) + coordinate[place]
    return rank, math.prod(mesh.size(place) for place in places)


def find_place_in_mesh(
    mesh: DeviceMesh | None,
    data_dims: Sequence[str] | str | None,
    *,
    argument: str,
    usual: Sequence[str],
    named: str | None = None,
) -> tuple[int, int]:
    """Find this process's coordinate in a mesh dimension along which samples are the same, and that dimension's size.

    It is the dimension ``named``, else the one that has one of the ``usual`` names. ``argument`` is what needs it.

    Raises:
        ConfigError: there is no such dimension, or samples differ along it, or this process is not in the mesh.
    """
    if mesh is None:
        raise ConfigError(f"{argument} without a mesh: give mesh= too, with a dimension named {' or '.join(usual)}")
    names = tuple(mesh.mesh_dim_names or ())
    fitting = [name for name in names if (name in usual if named is None else name == named)]
    if len(fitting) != 1:
        wanted = f"{named!r}" if named is not None else f"{' or '.join(usual)}"
        problem = f"{fitting} are several of" if fitting else "none is"
        raise ConfigError(
            f"{argument} and a mesh with the dimensions {', '.join(names) or '(no names)'}: {problem} {wanted}; give "
            "the whole mesh, not a slice of it, with names from init_device_mesh"
        )
    if fitting[0] in _choose_data_dims(mesh, names, data_dims):
        raise ConfigError(
            f"{argument} along the mesh's dimension {fitting[0]!r}, along which samples differ "
            f"(data_dims={data_dims}); it needs one along which they are the same"
        )
    dim = names.index(fitting[0])
    return _coordinate(mesh)[dim], int(mesh.size(dim))


def _choose_data_dims(
    mesh: DeviceMesh, names: tuple[str, ...], data_dims: Sequence[str] | str | None
) -> tuple[str, ...]:
    """The dimensions along which samples differ. Raises ConfigError where that is not clear."""
    if not names and mesh.ndim > 1:
        raise ConfigError(f"mesh={mesh}: its dimensions have no names; give mesh_dim_names to init_device_mesh")
    if data_dims is None:
        unknown = [name for name in names if name not in _DATA_DIMS | _MODEL_DIMS]
        chosen = tuple(name for name in names if name in _DATA_DIMS)
        if unknown or (names and not chosen):
            problem = f"whether samples differ along {unknown} is not known" if unknown else "none shares out data"
            raise ConfigError(
                f"mesh with the dimensions {', '.join(names)}: {problem}; name those along which samples differ, as in "
                "data_dims=['dp']; where all get the same samples, make the mesh with a dimension 'dp' of size 1, or "
                "give rank=0, world_size=1 instead of it"
            )
    else:
        chosen = (data_dims,) if isinstance(data_dims, str) else tuple(data_dims)
        missing = [name for name in chosen if name not in names]
        if missing or not chosen:
            raise ConfigError(
                f"data_dims={chosen}: {missing or 'nothing'} is not among the mesh's dimensions, {names}"
                f"{did_you_mean(missing, names)}"
            )
    return chosen


def _coordinate(mesh: DeviceMesh) -> list[int]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(
            f"mesh={mesh}: this process is not in it, so it has no share of the data; make no loader here"
        )
    return [int(place) for place in coordinate]


def own_process() -> int:
    """The number of this process among all of its launch: torch.distributed's rank, else torchrun's, else 0."""
    found = _from_torch()
    return _from_environment("RANK", 0) if found is None else found[0]


def check_rank(rank: int, world_size: int, *, is_given: bool) -> None:
    """Check at a first batch that a rank found when the loader was made is still this process's.

    Raises:
        ConfigError: torch.distributed, initialised since, says otherwise, unless the rank was given; or this is a
            worker process of torch's.
    """
    refuse_worker()
    now = _from_torch()
    if now is not None and now != (rank, world_size) and not is_given:
        raise ConfigError(
            f"the loader was made as rank={rank}, world_size={world_size}, and torch.distributed, initialised since, "
            f"says rank {now[0]} of {now[1]}; make the loader after init_process_group, or give rank= and world_size="
        )


def local_world_size() -> int:
    """Number of ranks that share this machine, according to torchrun; 1 without it."""
    return max(1, _from_environment("LOCAL_WORLD_SIZE", 1))


def is_torch_worker() -> bool:
    """Return whether this is a worker process of a torch DataLoader."""
    return torch.utils.data.get_worker_info() is not None


def refuse_worker() -> None:
    """Raise ConfigError in a worker process of a torch DataLoader."""
    worker = torch.utils.data.get_worker_info()
    if worker is not None:
        raise ConfigError(
            f"a penstock loader in worker process {worker.id} of a torch DataLoader: each of its {worker.num_workers} "
            "workers would deliver all batches of this rank. Iterate over the loader itself, or give the torch "
            "DataLoader num_workers=0; penstock reads and decodes ahead in threads, or in processes of its own "
            "(processes=)"
        )


def _from_torch() -> tuple[int, int] | None:
    """Rank and world size of torch.distributed where it is initialised."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError as exc:
        raise ConfigError(f"environment variable {name}={text!r} is not a whole number") from exc
