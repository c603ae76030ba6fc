"""What stays mapped of local files for the next epoch counts towards the loader's memory limit."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from penstock.loader import DistributedDataLoader, pack
from penstock.loader.limits import usable_memory
from penstock.storage.memory import mapped

MIB = 1 << 20
SAMPLES, SAMPLE_BYTES = 192, MIB


def mapped_bytes(folder: Path) -> int:
    """Bytes of the folder's files that are resident in this process."""
    entries = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    found = [re.search(r"^Rss: +(\d+) kB", entry, re.MULTILINE) for entry in entries if str(folder) in entry]
    return sum(int(match[1]) for match in found if match) << 10


@pytest.mark.slow
@pytest.mark.parametrize("limit", [96 * MIB, 1 << 30])
def test_pages_that_are_kept_are_within_the_memory_limit(tmp_path: Path, limit: int) -> None:
    if not mapped.can_map(tmp_path.stat().st_dev) or usable_memory() < 4 << 30:
        pytest.skip("nothing is mapped of this file system, or there is little memory")
    rng = np.random.default_rng(0)
    data = tmp_path / "data"
    samples = ({"__key__": f"{number:04d}", "bin": rng.bytes(SAMPLE_BYTES)} for number in range(SAMPLES))
    pack(samples, data, format="tar", shard_bytes=24 * MIB, progress=False)
    options = {"lanes": 2, "window": 2, "batch_size": 4, "decode": None, "seed": 3, "memory_limit": limit}
    most = 0
    with DistributedDataLoader(data, **options) as loader:  # type: ignore[arg-type]
        for _ in range(3):
            for _ in loader:
                most = max(most, mapped_bytes(data))
    assert mapped_bytes(data) == 0
    if limit < SAMPLES * SAMPLE_BYTES:  # batches in the queue, and threads that map, hold some more
        assert most <= limit + 64 * MIB
    else:
        assert most > SAMPLES * SAMPLE_BYTES - 8 * MIB
