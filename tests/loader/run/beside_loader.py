"""Loaders with a process of their own, and what must not be left of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from places import FORKED, Nursery
from started_threads import started_threads
from tar_dataset import write_tars

from penstock import DistributedDataLoader

SIZES = [37, 5, 80, 1, 64]


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, SIZES)
    return str(folder)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process outlives its loader, nor a thread, nor a name in shared memory, nor a descriptor."""
    shared, before = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    yield
    assert processes() == []
    left = set(os.listdir("/dev/shm")) - shared  # noqa: PTH208
    assert not [name for name in left if "penstock" in name]
    assert loader_threads() == []
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # noqa: PTH208 - what others opened meanwhile


def loader_threads() -> list[str]:
    """The threads that make batches; those that open a store end by themselves."""
    names = [thread.name for thread in started_threads()]
    return [name for name in names if name.startswith("penstock-") and not name.startswith("penstock-open")]


def processes() -> list[int]:
    """The loaders' processes of this one."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, (task / "children").read_text().split())
    return [pid for pid in found if is_loaders(pid)]


def is_loaders(pid: int) -> bool:
    with suppress(OSError):
        started, name = Path(f"/proc/{pid}/cmdline").read_bytes(), Path(f"/proc/{pid}/comm").read_text()
        return b"run.loader_process" in started or name.strip() == FORKED
    return False


@pytest.fixture
def quickly(nursery: Nursery) -> Iterator[None]:
    """Processes that start in a moment, for tests that say nothing about starts."""
    with nursery.starting():
        yield


def open_loader(source: Any, place: Any = "process", **options: Any) -> DistributedDataLoader[Any]:
    return DistributedDataLoader(source, place=place, **({"batch_size": 8, "with_ids": True} | options))


def ids(batch: Any) -> list[int]:
    return list(batch["__id__"].tolist())
