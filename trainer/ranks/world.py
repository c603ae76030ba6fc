"""World of a run: ranks, nodes, this process's device. Only this file opens or closes the process group."""

from __future__ import annotations

import gc
import importlib
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

from ...storage.store_link import START_KEY, limit_silence
from ...storage.suggestions import unknown_choice
from ..errors import WorldError
from .rendezvous import agree_on_start

_opened_here = False


@dataclass(frozen=True, kw_only=True)
class World:
    """The place of this process among all; ``backend`` carries the device's collectives."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    device: torch.device
    backend: str

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise WorldError(f"rank={self.rank} is not in [0, world_size={self.world_size})")
        if not 0 <= self.local_rank < self.local_world_size:
            raise WorldError(f"local_rank={self.local_rank} is not in [0, local_world_size={self.local_world_size})")
        if not 0 <= self.node_rank < self.num_nodes:
            raise WorldError(f"node_rank={self.node_rank} is not in [0, num_nodes={self.num_nodes})")

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, which decides, prints and writes what is written once."""
        return self.rank == 0


def open_world(*, device: str = "auto", timeout_s: float = 1800.0) -> World:
    """Join the ranks that torchrun started, or be a world of one without torchrun.

    An existing process group is used as it is, and ``close_world`` leaves it open. ``device`` is "auto" (CUDA if there
    is a device), "cpu" or "cuda"; on CUDA the group also carries CPU tensors, through gloo. ``timeout_s`` bounds a
    single collective.

    Raises:
        WorldError: no such device, more local ranks than devices, or an environment that describes no possible world.
    """
    global _opened_here
    world_size = _read_env("WORLD_SIZE", 1)
    rank = _read_env("RANK", 0)
    if dist.is_initialized():
        world_size, rank = dist.get_world_size(), dist.get_rank()
    local_world_size = _read_env("LOCAL_WORLD_SIZE", world_size if "LOCAL_RANK" not in os.environ else 1)
    local_rank = _read_env("LOCAL_RANK", rank % local_world_size)
    num_nodes = _read_env("GROUP_WORLD_SIZE", -(-world_size // local_world_size))
    node_rank = _read_env("GROUP_RANK", rank // local_world_size)
    place = _choose_device(device, local_rank)
    world = World(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        device=place,
        backend="nccl" if place.type == "cuda" else "gloo",
    )
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        _join(world, timeout_s)
        _opened_here = True
    return world


def close_world() -> None:
    """Leave the process group if ``open_world`` made it; closing twice is allowed.

    Call it when the trainer and everything else that uses the group are out of scope: a group that is still referenced
    keeps its threads, and a gloo thread that drops the last reference to a tensor while Python exits ends the process
    with SIGABRT ("terminate called without an active exception").
    """
    global _opened_here
    if _opened_here and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
    _opened_here = False


def _join(world: World, timeout_s: float) -> None:
    # Every optimizer imports this; an import after the process group exists would keep the group's threads alive.
    importlib.import_module("torch._dynamo")
    backend = "cpu:gloo,cuda:nccl" if world.backend == "nccl" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    try:
        if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
            store, rank, world_size = next(rendezvous("env://", world.rank, world.world_size, timeout=timeout))
            limit_silence(store)
            start = agree_on_start(store, rank, world_size, timeout_s=timeout_s)
            store = PrefixStore(f"penstock/{start}", store)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
            _get_default_store().set(START_KEY, start)
        elif world.world_size == 1:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        else:
            raise WorldError(
                f"WORLD_SIZE={world.world_size} but RANK or MASTER_ADDR is not set; start the ranks with torchrun, "
                "or unset WORLD_SIZE to train in this process alone"
            )
    except (RuntimeError, ValueError) as exc:
        raise WorldError(
            f"rank {world.rank} of {world.world_size} could not join the {backend} process group at "
            f"{os.environ.get('MASTER_ADDR', 'this process')}:{os.environ.get('MASTER_PORT', '-')}: {exc}"
        ) from exc


def _choose_device(device: str, local_rank: int) -> torch.device:
    if device not in ("auto", "cpu", "cuda"):
        raise WorldError(unknown_choice("device", device, ("auto", "cpu", "cuda")))
    found = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and not found):
        return torch.device("cpu")
    if local_rank >= found:
        raise WorldError(
            f"local rank {local_rank} has no CUDA device: {found} found; start at most that many ranks on a node, "
            "or use device='cpu'"
        )
    return torch.device("cuda", local_rank)


def _read_env(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise WorldError(f"the environment has {name}={text!r}, which is not a number; torchrun sets it") from None
