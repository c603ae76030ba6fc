"""Real ranks for tests: processes forked from a server that has imported torch once, joined over a store."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from penstock.trainer import World

_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",  # which making an optimizer imports
        "torch.distributed.fsdp",
        "penstock.trainer.checkpoint.checkpointer",
        "penstock.trainer.compression.compression",
        "sklearn.datasets",
    ]
)


@dataclass
class Outcome:
    """How a rank ended: what its function returned, or the exit code (negative: the signal) of one that did not."""

    value: Any
    exit_code: int | None
    ended_at: float


class Ranks:
    """Ranks that run ``function(world, *arguments)``; ``host_in_rank0`` puts the store into rank 0's process."""

    def __init__(
        self,
        function: Callable[..., Any],
        world_size: int,
        *arguments: Any,
        local_world_size: int | None = None,
        host_in_rank0: bool = False,
    ) -> None:
        self._store = None if host_in_rank0 else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._addresses = _CONTEXT.Queue() if host_in_rank0 else None
        self.processes = []
        self._ends: list[Connection] = []
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            place = (rank, world_size, local_world_size or world_size)
            port = self._store.port if self._store else None
            process = _CONTEXT.Process(
                target=_run, args=(theirs, place, port, self._addresses, function, arguments), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._ends.append(ours)

    def join(self, timeout_s: float, *, expect: set[int] | None = None) -> list[Outcome]:
        """Wait for the ranks (those expected to end), kill the rest, and return how each ended, in rank order."""
        deadline = time.monotonic() + timeout_s
        outcomes = [Outcome(None, None, 0.0) for _ in self.processes]
        pending = dict(enumerate(self._ends))
        while (pending.keys() & expect if expect is not None else pending) and time.monotonic() < deadline:
            ready = wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
            for rank in [rank for rank, end in pending.items() if end in ready]:
                outcomes[rank].ended_at = time.time()
                try:
                    outcomes[rank].value = pickle.loads(pending[rank].recv_bytes())
                except EOFError:
                    outcomes[rank].value = None
                pending.pop(rank)
        for rank, process in enumerate(self.processes):
            process.join(timeout=0.0 if rank in pending else 20.0)
            outcomes[rank].exit_code = process.exitcode
            if process.is_alive():
                process.kill()
                process.join()
            self._ends[rank].close()
        return outcomes


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 90.0, **options: Any
) -> list[Any]:
    """Run the function on ranks that must all return; returns what they return, in rank order."""
    outcomes = Ranks(function, world_size, *arguments, **options).join(timeout_s)
    traces = [f"rank {rank} raised:\n{one.value.trace}" for rank, one in enumerate(outcomes) if _raised(one)]
    # A rank that lost its peer is a consequence; the one that left first is the cause.
    assert not traces, min(traces, key=lambda trace: "Connection closed" in trace)
    assert [outcome.exit_code for outcome in outcomes] == [0] * world_size
    return [outcome.value for outcome in outcomes]


@dataclass
class _Raised:
    trace: str


def _raised(outcome: Outcome) -> bool:
    return isinstance(outcome.value, _Raised)


def _run(
    end: Connection,
    place: tuple[int, int, int],
    port: int | None,
    addresses: Any,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    rank, world_size, local_world_size = place
    torch.set_num_threads(1)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    is_host = port is None and rank == 0
    if is_host:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _ in range(world_size - 1):
            addresses.put(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", addresses.get() if port is None else port, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
    world = World(
        rank=rank,
        world_size=world_size,
        local_rank=rank % local_world_size,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size,
        num_nodes=world_size // local_world_size,
        device=torch.device("cpu"),
        backend="gloo",
    )
    try:
        value = function(world, *arguments)
        if world_size > 1:
            dist.barrier()  # the one that holds the store must not leave first
    except Exception:  # noqa: BLE001 - the test that launched it raises it
        value = _Raised(traceback.format_exc())
        end.send_bytes(pickle.dumps(value))  # torch would share memory that goes with the sender
        os._exit(1)
    end.send_bytes(pickle.dumps(value))
    end.close()
    dist.destroy_process_group()
