from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

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


MIB = 1 << 20
NO_LIMIT_V1 = "9223372036854771712\n"
MOUNT_V2 = "31 23 0:28 {root} {at} rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
MOUNT_V1 = "35 31 0:32 {root} {at} rw,relatime - cgroup cgroup rw,{controller}\n"


def mount_v2(at: str = "/sys/fs/cgroup", root: str = "/") -> str:
    return MOUNT_V2.format(root=root, at=at)


def mount_v1(controller: str, at: str = "", root: str = "/") -> str:
    return MOUNT_V1.format(controller=controller, at=at or f"/sys/fs/cgroup/{controller}", root=root)


def write_tree(root: Path, cgroup: str, mounts: str, files: Mapping[str, object]) -> Path:
    """A recorded system below ``root``: what /proc/self says, and files below /sys/fs/cgroup."""
    contents = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n{mounts}"}
    contents |= {f"sys/fs/cgroup/{name}": f"{content}\n" for name, content in files.items()}
    for name, content in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.fixture(autouse=True)
def eight_cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real" not in request.node.name:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


JOB = "system.slice/slurmstepd.scope/job_7"
TREES: dict[str, tuple[str, str, dict[str, object], int | None, int]] = {
    # name: /proc/self/cgroup, mounts, files, MiB of memory (None: the machine's), cores
    "version 2, limits of the own group": (
        "0::/job\n",
        mount_v2(),
        {"job/memory.max": 300 * MIB, "job/memory.high": "max", "job/cpu.max": "250000 100000"},
        300,
        2,
    ),
    "version 2, the smallest limit is an ancestor's": (
        "0::/a/b/c\n",
        mount_v2(),
        {
            "a/memory.max": 900 * MIB,
            "a/b/memory.max": 200 * MIB,
            "a/b/c/memory.max": 400 * MIB,
            "a/cpu.max": "100000 50000",
            "a/b/cpu.max": "max 100000",
            "a/b/c/cpu.max": "700000 100000",
            "other/memory.max": MIB,
            "other/cpu.max": "1000 100000",
        },
        200,
        2,
    ),
    "version 2, memory.high is below memory.max": (
        "0::/job\n",
        mount_v2(),
        {"job/memory.max": 300 * MIB, "job/memory.high": 250 * MIB},
        250,
        8,
    ),
    "version 2, nothing but max": (
        "0::/job\n",
        mount_v2(),
        {"job/memory.max": "max", "job/memory.high": "max", "job/cpu.max": "max 100000"},
        None,
        8,
    ),
    "systemd: a scope in a limited slice": (
        "0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-u1.scope\n",
        mount_v2(),
        {
            "user.slice/memory.max": "max",
            "user.slice/user-1000.slice/memory.max": 512 * MIB,
            "user.slice/user-1000.slice/cpu.max": "350000 100000",
            "user.slice/user-1000.slice/user@1000.service/app.slice/run-u1.scope/memory.max": "max",
        },
        512,
        3,
    ),
    "Slurm, version 2: the job's limit over a task's": (
        f"0::/{JOB}/step_0/user/task_0\n",
        mount_v2(),
        {
            f"{JOB}/memory.max": 700 * MIB,
            f"{JOB}/cpu.max": "400000 100000",
            f"{JOB}/step_0/memory.max": 700 * MIB,
            f"{JOB}/step_0/user/memory.max": "max",
            f"{JOB}/step_0/user/task_0/memory.max": "max",
        },
        700,
        4,
    ),
    "Slurm, version 1": (
        "6:memory:/slurm/uid_1000/job_7/step_0/task_0\n4:cpu,cpuacct:/slurm/uid_1000/job_7\n1:name=systemd:/x\n",
        mount_v1("memory") + mount_v1("cpu,cpuacct"),
        {
            "memory/memory.limit_in_bytes": NO_LIMIT_V1,
            "memory/slurm/uid_1000/job_7/memory.limit_in_bytes": 600 * MIB,
            "memory/slurm/uid_1000/job_7/step_0/memory.limit_in_bytes": 650 * MIB,
            "memory/slurm/uid_1000/job_7/step_0/task_0/memory.limit_in_bytes": NO_LIMIT_V1,
            "cpu,cpuacct/slurm/uid_1000/job_7/cpu.cfs_quota_us": -1,
            "cpu,cpuacct/slurm/uid_1000/job_7/cpu.cfs_period_us": 100000,
            "cpu,cpuacct/slurm/uid_1000/cpu.cfs_quota_us": 600000,
            "cpu,cpuacct/slurm/uid_1000/cpu.cfs_period_us": 100000,
        },
        600,
        6,
    ),
    "version 1, the host's limit is only in hierarchical_memory_limit": (
        "6:memory:/\n",
        mount_v1("memory"),
        {
            "memory/memory.limit_in_bytes": NO_LIMIT_V1,
            "memory/memory.stat": f"cache 1\nhierarchical_memory_limit {MIB}",
        },
        1,
        8,
    ),
    "hybrid: version 1 has the controllers, version 2 has none": (
        "5:memory:/box\n4:cpu:/box\n0::/box\n",
        mount_v1("memory") + mount_v1("cpu") + mount_v2("/sys/fs/cgroup/unified"),
        {
            "memory/box/memory.limit_in_bytes": 128 * MIB,
            "cpu/box/cpu.cfs_quota_us": 150000,
            "cpu/box/cpu.cfs_period_us": 100000,
            "unified/box/cgroup.procs": "1",
        },
        128,
        1,
    ),
    "hybrid: memory in version 2, cores in version 1": (
        "4:cpu:/box\n0::/box\n",
        mount_v1("cpu") + mount_v2("/sys/fs/cgroup/unified"),
        {
            "unified/box/memory.max": 128 * MIB,
            "cpu/box/cpu.cfs_quota_us": 500000,
            "cpu/box/cpu.cfs_period_us": 100000,
        },
        128,
        5,
    ),
    "version 2, whose memory.stat sums up all cores and tells no limit": (
        "0::/\n",
        mount_v2(),
        {"memory.max": 256 * MIB, "memory.stat": f"hierarchical_memory_limit {MIB}"},
        256,
        8,
    ),
    "Docker, version 2: the namespace shows /": (
        "0::/\n",
        mount_v2(),
        {"memory.max": 256 * MIB, "cpu.max": "150000 100000"},
        256,
        1,
    ),
    "Docker, version 1: the mount's root is the container's group": (
        "5:memory:/docker/f00\n4:cpu,cpuacct:/docker/f00\n",
        mount_v1("memory", root="/docker/f00") + mount_v1("cpu,cpuacct", root="/docker/f00"),
        {
            "memory/memory.limit_in_bytes": 256 * MIB,
            "cpu,cpuacct/cpu.cfs_quota_us": 200000,
            "cpu,cpuacct/cpu.cfs_period_us": 100000,
        },
        256,
        2,
    ),
    "Docker in Docker: a group inside the namespace": (
        "0::/docker/f00\n",
        mount_v2(),
        {"memory.max": 256 * MIB, "docker/f00/memory.max": 64 * MIB, "docker/cpu.max": "300000 100000"},
        64,
        3,
    ),
    "a process outside of what the mount shows": (
        "0::/../elsewhere\n",
        mount_v2(),
        {"memory.max": 256 * MIB, "cpu.max": "150000 100000"},
        256,
        1,
    ),
    "a mount that shows another group does not count": (
        "0::/box\n",
        mount_v2() + mount_v2("/sys/fs/cgroup/shown", root="/other"),
        {"box/memory.max": 256 * MIB, "shown/memory.max": MIB, "shown/cpu.max": "100000 100000"},
        256,
        8,
    ),
    "names with a colon, a space and a backslash": (
        "0::/a:b/c d\\x2d\n",
        mount_v2("/sys/fs/cgroup/my\\040mount", root="/a:b"),
        {"my mount/c d\\x2d/memory.max": 256 * MIB},
        256,
        8,
    ),
    "no files": ("0::/box\n", mount_v2(), {}, None, 8),
    "files that make no sense": (
        "what\n0::/box\n",
        "is this\n" + mount_v2(),
        {"box/memory.max": "lots", "box/memory.high": "", "box/cpu.max": "1 2 3", "cpu.max": "100000 0"},
        None,
        8,
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_the_smallest_limit_of_the_own_group_and_its_ancestors_counts(tmp_path: Path, name: str) -> None:
    cgroup, mounts, files, mib, cores = TREES[name]
    root = write_tree(tmp_path, cgroup, mounts, files)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert usable_memory(root) == (machine if mib is None else mib * MIB)
    assert usable_cores(root) == cores


def test_affinity_limits_the_cores_where_the_quota_is_larger(tmp_path: Path) -> None:
    assert usable_cores(write_tree(tmp_path, "0::/\n", mount_v2(), {"cpu.max": "1600000 100000"})) == 8


def test_there_is_always_one_core(tmp_path: Path) -> None:
    assert usable_cores(write_tree(tmp_path, "0::/\n", mount_v2(), {"cpu.max": "20000 100000"})) == 1


def test_files_that_cannot_be_read_set_no_limit_and_hide_no_other(tmp_path: Path) -> None:
    root = write_tree(tmp_path, "0::/a/b\n", mount_v2(), {"a/memory.max": 256 * MIB, "a/cpu.max": "300000 100000"})
    for name in ("memory.max", "memory.high", "cpu.max"):
        (root / "sys/fs/cgroup/a/b" / name).mkdir(parents=True)  # what even root cannot read
    assert (usable_memory(root), usable_cores(root)) == (256 * MIB, 3)


def test_without_proc_the_usual_mount_points_are_read(tmp_path: Path) -> None:
    root = write_tree(tmp_path, "", "", {"memory/memory.limit_in_bytes": 300 * MIB, "cpu.max": "300000 100000"})
    for name in ("cgroup", "mountinfo"):
        (root / "proc/self" / name).unlink()
    assert (usable_memory(root), usable_cores(root)) == (300 * MIB, 3)
