"""Our own contenders: each reads what it says it reads."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from penstock.benchmarks.contenders import OURS, UNCHECKED, VIEWS, open_contender
from penstock.benchmarks.harness.job import Job
from penstock.loader import pack
from penstock.loader.errors import ChecksumError


def read(contender: str, folder: Path) -> list[bytes]:
    job = Job(contender=contender, url=str(folder), num_samples=40, scratch="", decode="none", batch_size=8)
    reader = open_contender(job)
    try:
        return sorted(bytes(value) for batch in reader.epoch() for value in batch["bin"])
    finally:
        reader.close()


def test_the_unchecked_contender_alone_does_not_notice_damage(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    samples = [{"__key__": f"{number:03d}", "bin": rng.bytes(5000)} for number in range(40)]
    pack(samples, tmp_path / "data", format="tar", progress=False)
    intact = sorted(sample["bin"] for sample in samples)
    assert [read(each, tmp_path / "data") for each in (OURS, VIEWS, UNCHECKED)] == [intact] * 3

    [shard] = (tmp_path / "data").glob("*.tar")
    was = shard.stat()
    damaged = bytearray(shard.read_bytes())
    at = damaged.index(samples[3]["bin"])
    damaged[at] ^= 1
    shard.write_bytes(damaged)
    os.utime(shard, ns=(was.st_atime_ns, was.st_mtime_ns))  # as a disk that errs leaves it
    for contender in (OURS, VIEWS):
        with pytest.raises(ChecksumError):
            read(contender, tmp_path / "data")
    assert len(set(read(UNCHECKED, tmp_path / "data")) ^ set(intact)) == 2
