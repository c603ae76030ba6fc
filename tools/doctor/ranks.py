"""Measurements by the ranks of a torchrun: how they reach one another, how fast, and where they differ."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .checks import Finding, diagnose
from .facts import MachineFacts, RankFacts

_SMALL_ROUNDS, _LARGE_ROUNDS = 20, 3
_LARGE_BYTES = 32 << 20
_COMPARED = ("torch", "numpy", "pyarrow", "obstore")


def count_ranks() -> tuple[int, int, int]:
    """(rank, world size, ranks on this host) from torchrun's environment; (0, 1, 1) outside of it."""
    rank, size, here = (
        int(os.environ.get(name) or least) for name, least in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1))
    )
    return rank, size, here


def is_first_here() -> bool:
    """Tell whether this rank is the first on its host, which examines it for all."""
    return int(os.environ.get("LOCAL_RANK") or 0) == 0


def diagnose_together(facts: MachineFacts, *, timeout_s: float) -> tuple[RankFacts, list[tuple[str, list[Finding]]]]:
    """Measure the network, and gather the findings of every host; collective.

    Returns what was measured, and for each host in the order of its first rank its name and findings, on every rank.
    Of ranks that cannot meet, each returns the problem, and no hosts.
    """
    import torch.distributed as dist

    rank, size, _ = count_ranks()
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
        try:
            own = (platform.node(), time.time(), _versions(facts), diagnose(facts))
            gathered: list[Any] = [None] * size
            dist.barrier()
            dist.all_gather_object(gathered, own)
            measured = _measure_fastest(timeout_s)
        finally:
            dist.destroy_process_group()
    except Exception as exc:  # noqa: BLE001 - torch and its backends raise what they like
        problem = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        return RankFacts(world_size=size, problem=f"rank {rank}: {problem}"), []
    return compare_ranks(gathered, measured)


def compare_ranks(
    gathered: Sequence[tuple[str, float, Mapping[str, str], list[Finding]]], measured: tuple[str, float, float]
) -> tuple[RankFacts, list[tuple[str, list[Finding]]]]:
    """Join what ranks told: (host, clock, versions by library, findings) of each, and (backend, latency, bytes/s)."""
    hosts = dict[str, list[Finding]]()
    for host, _, _, findings in gathered:
        hosts.setdefault(host, findings)
    different = []
    for name in sorted({name for _, _, versions, _ in gathered for name in versions}):
        found = tuple(sorted({versions.get(name, "none") for _, _, versions, _ in gathered}))
        if len(found) > 1:
            different.append((name, found))
    clocks = [clock for _, clock, _, _ in gathered]
    backend, latency_s, bytes_per_s = measured
    ranks = RankFacts(
        world_size=len(gathered),
        hosts=len(hosts),
        backend=backend,
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        spread_s=max(clocks) - min(clocks),
        versions=tuple(different),
    )
    return ranks, list(hosts.items())


def _versions(facts: MachineFacts) -> dict[str, str]:
    found = {library.name: library.found or "none" for library in facts.libraries if library.name in _COMPARED}
    return {"python": facts.python, "cuda": facts.gpus.torch_cuda or "none", **found}


def _measure_fastest(timeout_s: float) -> tuple[str, float, float]:
    """(backend, seconds for one number, bytes a second): NCCL if every rank has a GPU, else Gloo; collective."""
    import torch
    import torch.distributed as dist

    local = int(os.environ.get("LOCAL_RANK") or 0)
    has_gpu = torch.tensor([int(local < torch.cuda.device_count())])
    dist.all_reduce(has_gpu, op=dist.ReduceOp.MIN)
    if not has_gpu.item():
        return ("gloo", *_measure(None, torch.device("cpu"), lambda: None))
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    group = dist.new_group(backend="nccl", timeout=datetime.timedelta(seconds=timeout_s))
    try:
        return ("nccl", *_measure(group, device, torch.cuda.synchronize))
    finally:
        dist.destroy_process_group(group)


def _measure(group: Any, device: Any, wait: Callable[[], None]) -> tuple[float, float]:
    import torch
    import torch.distributed as dist

    def timed(tensor: torch.Tensor, rounds: int) -> float:
        seconds = []
        for _ in range(rounds):
            started = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            wait()
            seconds.append(time.perf_counter() - started)
        return sorted(seconds)[len(seconds) // 2]

    one, many = torch.zeros(1, device=device), torch.zeros(_LARGE_BYTES // 4, device=device)
    timed(one, 2)  # connections are made
    timed(many, 1)
    size = dist.get_world_size()
    # Each rank sends 2 (n - 1) / n of the tensor, in a ring.
    return timed(one, _SMALL_ROUNDS), 2 * (size - 1) / size * _LARGE_BYTES / timed(many, _LARGE_ROUNDS)
