"""A loader's process on a machine, and with functions, that do it harm: each is named in words, and nothing hangs."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import row_functions
from beside_loader import ids, nothing_left, open_loader, tars
from tar_dataset import write_tars

from penstock import PenstockError
from penstock.loader.errors import ConfigError, WorkerError

__all__ = ["nothing_left", "tars"]
pytestmark = pytest.mark.full

KEEPER = """
import json, os, resource, sys
import numpy as np
from penstock import DistributedDataLoader

MEGABYTES = 4

def widen(sample):
    return {"number": int(sample["txt"]), "values": np.full(MEGABYTES << 20, 1, np.uint8)}

if __name__ == "__main__":
    loader = DistributedDataLoader(sys.argv[1], batch_size=8, place="process", transform=widen, memory_limit="2GiB")
    kept = [batch for _, batch in zip(range(10), loader)]
    assert all(int(batch["values"].sum()) == 8 * (MEGABYTES << 20) for batch in kept)
    shm = os.statvfs("/dev/shm")
    size, used = shm.f_blocks * shm.f_frsize, (shm.f_blocks - shm.f_bfree) * shm.f_frsize
    print(json.dumps({"kept": len(kept), "shm_bytes": size, "used_bytes": used}))
"""


def test_a_transform_without_memory_names_the_sample(tars: str) -> None:
    with open_loader(tars, transform=row_functions.take_memory, batch_size=4, shuffle=False) as loader:
        batches = iter(loader)
        first = next(batches)
        process = loader.metrics().loader_process
        used = int(Path(f"/proc/{process}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(process, resource.RLIMIT_AS, (used + (96 << 20), used + (96 << 20)))
        started = time.monotonic()
        with pytest.raises((MemoryError, WorkerError)) as caught:
            list(batches)
        assert time.monotonic() - started < 60
        assert ids(first) == [0, 1, 2, 3]
        said = [str(caught.value), *getattr(caught.value, "__notes__", ())]
        assert any("in transform= of sample" in text or f"loader process {process}" in text for text in said)


def test_a_batch_that_no_memory_is_left_for_is_an_error_and_no_wait(tars: str) -> None:
    with open_loader(tars, transform=row_functions.grow_much, batch_size=4, shuffle=False, threads=1) as loader:
        batches = iter(loader)
        next(batches)
        process = loader.metrics().loader_process
        used = int(Path(f"/proc/{process}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(process, resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
        with pytest.raises((MemoryError, WorkerError)):
            list(batches)


def test_a_process_without_descriptors_is_an_error_and_no_wait(tars: str) -> None:
    with open_loader(tars, transform=row_functions.rest_a_moment, batch_size=4) as loader:
        batches = iter(loader)
        kept = [next(batches)]
        process = loader.metrics().loader_process
        held = len(list(Path(f"/proc/{process}/fd").iterdir()))
        resource.prlimit(process, resource.RLIMIT_NOFILE, (held, held))
        with pytest.raises(WorkerError, match=f"loader process {process} has no room for a batch.*ulimit -n"):
            kept.extend(batches)


def test_a_training_process_without_descriptors_is_told_so(tars: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open_loader(tars, transform=row_functions.keep) as loader:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 1, limits[1]))  # noqa: PTH208
            with pytest.raises(WorkerError, match=r"a loader process cannot be started: .*place='threads'"):
                next(iter(loader))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert next(iter(loader))["__id__"].shape == (8,)


def test_a_system_without_memory_without_names_uses_threads(tars: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ConfigError, match="memfd_create"):
        open_loader(tars)
    with open_loader(tars, "auto", transform=row_functions.keep) as loader:
        assert next(iter(loader))["__id__"].shape == (8,)
        assert "memfd_create" in loader.describe()


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare, of util-linux")
def test_a_small_shared_memory_folder_is_not_used_at_all(tars: str, tmp_path: Path) -> None:
    script = tmp_path / "keeper.py"
    script.write_text(KEEPER)
    shell = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" "$@"'
    command = ["unshare", "--mount", "sh", "-c", shell, sys.executable, script, tars]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mounts of its own: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"kept": 10, "shm_bytes": 64 << 20, "used_bytes": 0}


def test_a_loop_that_keeps_all_batches_is_told_what_that_costs(tars: str, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"transform": row_functions.grow_much, "batch_size": 4, "memory_limit": "64MiB"}
    with open_loader(tars, **options) as loader, caplog.at_level(logging.WARNING):
        kept = list(loader)
    assert sum(len(ids(batch)) for batch in kept) == len(set(sum(map(ids, kept), [])))  # noqa: RUF017
    assert all((row == number).all() for b in kept for row, number in zip(b["values"], b["number"], strict=True))
    told = [record.getMessage() for record in caplog.records if "keeps so many batches" in record.getMessage()]
    assert len(told) == 1


def test_a_transform_that_starts_threads_and_leaks_ends_with_its_process(tars: str) -> None:
    with open_loader(tars, transform=row_functions.start_a_thread_and_leak) as loader:
        assert sum(len(ids(batch)) for batch in loader) > 0
        process = loader.metrics().loader_process
        assert len(list(Path(f"/proc/{process}/task").iterdir())) > 50
    assert not Path(f"/proc/{process}").exists()


def test_a_file_that_is_cut_short_after_it_was_indexed_is_named(tmp_path: Path) -> None:
    write_tars(tmp_path, [40, 40])
    second = sorted(tmp_path.glob("*.tar"))[1]
    with open_loader(str(tmp_path), batch_size=4, shuffle=False, transform=row_functions.keep) as loader:
        os.truncate(second, second.stat().st_size // 2)
        batches = iter(loader)
        found = [ids(next(batches)) for _ in range(10)]
        with pytest.raises(PenstockError, match=second.name):
            next(batches)
        assert sum(found, []) == list(range(40))  # noqa: RUF017
