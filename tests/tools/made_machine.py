"""Facts of a machine on which all is well, for tests to spoil."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.tools.doctor.facts import GpuFacts, Library, MachineFacts, RankFacts, SpaceFacts, StoreFacts

GIB = 1 << 30


def space(path: str, free: int = 100 * GIB, **others: Any) -> SpaceFacts:
    return SpaceFacts(path=path, free_bytes=free, total_bytes=200 * GIB, **others)


def machine(**others: Any) -> MachineFacts:
    facts = MachineFacts(
        python="3.12.4",
        tested_pythons=("3.11", "3.12", "3.13"),
        libraries=(
            Library(name="torch", found="2.13.0+cu130", least="2.11"),
            Library(name="numpy", found="2.3.1", least="1.26"),
            Library(name="wandb", found=None, least="0.18", extra="wandb"),
        ),
        gpus=GpuFacts(present=8, usable=8, torch_cuda="13.0"),
        open_files=65536,
        open_files_most=1 << 20,
        address_bytes=None,
        memory_bytes=512 * GIB,
        memory_free=400 * GIB,
        machine_memory=512 * GIB,
        cores=96,
        machine_cores=96,
        numa_nodes=2,
        shm=space("/dev/shm", 64 * GIB),
        tmp=space("/tmp"),
        cache=space("/home/me/.cache/penstock"),
        store=StoreFacts(url="s3://bucket/train/", seconds=0.08, skew_s=0.3),
        ranks=RankFacts(world_size=16, hosts=2, backend="nccl", latency_s=0.00004, bytes_per_s=20e9),
    )
    return dataclasses.replace(facts, **others)
