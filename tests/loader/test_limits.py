from __future__ import annotations

import os

import numpy as np
import pytest

from penstock.loader import limits
from penstock.loader.errors import ConfigError
from penstock.loader.limits import parse_bytes, usable_cores, usable_memory


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (1.5, 1),
        (np.int64(7), 7),
        ("512MiB", 512 << 20),
        ("2GB", 2 * 10**9),
        ("1.5 GiB", 3 << 29),
        (" 3 kib ", 3 << 10),
        ("10k", 10_000),
        ("4Ti", 4 << 40),
        ("17", 17),
        ("17B", 17),
    ],
)
def test_sizes_are_read_as_people_write_them(value, expected):
    assert parse_bytes(value, "memory_limit") == expected


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        0.4,
        float("nan"),
        float("inf"),
        True,
        None,
        [],
        "",
        "MiB",
        "-5MB",
        "5ib",
        "1e9",
        "0",
        "0.2",
        "5 XB",
        "1.GB",
    ],
)
def test_what_is_no_size_is_refused_by_name_and_value(value):
    with pytest.raises(ConfigError, match="memory_limit=") as refused:
        parse_bytes(value, "memory_limit")
    assert repr(value) in str(refused.value)


@pytest.fixture
def cgroup(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    files: dict[str, str] = {}
    monkeypatch.setattr(limits, "_read", lambda path: files.get(path.removeprefix("/sys/fs/cgroup/"), ""))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return files


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [("", 8), ("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)],
)
def test_cores_are_cut_by_the_cgroups_quota(cgroup, cpu_max, cores):
    cgroup["cpu.max"] = cpu_max
    assert usable_cores() == cores


def test_memory_is_cut_by_the_cgroups_limit_of_either_version(cgroup):
    machine = usable_memory()
    assert machine == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cgroup["memory.max"] = "max"
    assert usable_memory() == machine
    cgroup["memory.max"] = str(1 << 20)
    assert usable_memory() == 1 << 20
    del cgroup["memory.max"]
    cgroup["memory/memory.limit_in_bytes"] = str(2 << 20)
    assert usable_memory() == 2 << 20
    cgroup["memory/memory.limit_in_bytes"] = str(9223372036854771712)  # version 1 says "no limit" so
    assert usable_memory() == machine


def test_a_file_that_cannot_be_read_sets_no_limit(tmp_path):
    assert limits._read(str(tmp_path / "absent")) == ""
