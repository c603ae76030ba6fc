"""Which rank this process is: the given one, else torch.distributed's, else torchrun's, else 0 of 1."""

from __future__ import annotations

import os

import torch.distributed

from .errors import ConfigError


def find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size; both must be given or neither.

    Raises:
        ConfigError: one without the other, or a rank outside its world.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError(f"rank={rank}, world_size={world_size}: give both, or neither to use torch.distributed's")
    if rank is None or world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        else:
            rank, world_size = _from_environment("RANK", 0), _from_environment("WORLD_SIZE", 1)
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} of world_size={world_size}: a rank is from 0 to world_size - 1")
    return rank, world_size


def local_world_size() -> int:
    """How many ranks share this machine, according to torchrun; 1 without it."""
    return max(1, _from_environment("LOCAL_WORLD_SIZE", 1))


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError as exc:
        raise ConfigError(f"environment variable {name}={text!r} is not a whole number") from exc
