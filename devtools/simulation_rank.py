"""One rank of a job that the simulation is compared with: its step is a sleep, and all ranks meet after each.

torchrun ... -m devtools simulation_rank     with the case as JSON in PENSTOCK_SIMULATED
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.benchmarks.child_arguments import take_arguments
from penstock.loader import DistributedDataLoader

_CASE = "PENSTOCK_SIMULATED"


def main() -> None:
    take_arguments("", "python -m devtools simulation", variable=_CASE)
    job = json.loads(os.environ[_CASE])
    dist.init_process_group("gloo")
    rank, flag = dist.get_rank(), torch.zeros(1)
    took: list[float] = []
    waits: list[float] = []
    with DistributedDataLoader(
        job["url"],
        global_batch_size=job["batch_size"] * dist.get_world_size(),
        memory_limit=job["memory_limit"],
        decode=None,
        storage_options=job["options"],
        cache_dir=None,
        fetch_threads=16,  # as many as simulated ranks have, which do not tune themselves
        autotune=False,
    ) as loader:
        dist.all_reduce(flag)
        started = ended = time.perf_counter()
        for number, _ in enumerate(loader):
            arrived = time.perf_counter()
            if not number:
                first_s = arrived - started
            time.sleep(job["step_s"])
            dist.all_reduce(flag)
            now = time.perf_counter()
            waits.append(arrived - ended)
            took.append(now - ended)
            ended = now
            if number + 1 == job["steps"]:
                break
        counts = loader.metrics()
    report = {"took": took, "waits": waits, "first_batch_s": first_s}
    report |= {"fetch_s": counts.fetch_s, "fetches": counts.fetched_chunks}
    Path(job["folder"], f"rank-{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
