"""A run whose workers are the ranks of a launcher: shards and coordinator are threads of rank 0, called over TCP."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch.distributed as dist

from ...storage.threads.interruptible import Event, Thread
from ..errors import ShardUnreachableError, StallError
from ..ranks.world import World
from ..recipes.recipe import Recipe
from ..watch.stop_flag import StopFlag
from .local_run import train_locally
from .member import WorkerOptions
from .tcp_services import ServicesHost, TcpServices
from .worker import run_worker

_GLANCE_S = 0.2


def train_on_ranks(recipe: Recipe, world: World, *, shards: int) -> bool:
    """Train with a worker in each rank; returns whether the run goes on when it is started again, asked by others.

    Rank 0 has the shards, too, and saves. A collective at its beginning and end.

    Raises:
        TrainerConfigError: the recipe, or the numbers, cannot work.
        StallError: rank 0 did not answer for ``stall_timeout_s``.
        TrainerError: what this rank met; the launcher then ends the others.
    """
    with ExitStack() as stack:
        flag = stack.enter_context(StopFlag())
        if world.is_first:
            host = ServicesHost(_own_address())
            stack.callback(host.close)
            _share([host.address, host.key])
            summary = train_locally(recipe, workers=world.world_size, shards=shards, host=host, flag=flag)
            (is_over,) = _share([not summary.stopped_early])
        else:
            address, key = _share([None, None])
            services = TcpServices(address, key, patience_s=recipe.trainer.stall_timeout_s)
            with _heeding(flag, services.stop):
                options = WorkerOptions(silence_s=recipe.trainer.server.silence_s)
                run_worker(recipe, f"worker-{world.rank:03d}", services, options)
            (is_over,) = _share([None])
        return not is_over and flag.reason is None


def _own_address() -> str:
    """The address at which other ranks reach this one: that of the launcher's rendezvous, so a local one if that is."""
    return socket.gethostbyname(os.environ.get("MASTER_ADDR", "localhost"))


def _share(values: list[Any]) -> list[Any]:
    """Send values of rank 0 to all."""
    dist.broadcast_object_list(values, src=0)
    return values


@contextmanager
def _heeding(flag: StopFlag, stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` once a signal asks to stop, from a thread of its own."""
    ended = Event()

    def watch() -> None:
        while not ended.wait(_GLANCE_S):
            if flag.reason is not None:
                with suppress(ShardUnreachableError, StallError):
                    stop()
                    return

    thread = Thread(target=watch, name="signals")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
