"""The limits of real processes in nested cgroups."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

MIB = 1 << 20


@pytest.fixture(autouse=True)
def eight_cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real" not in request.node.name:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def own_folder(controller: str) -> Path:
    """The root group of a hierarchy with ``controller`` that this process is in; skips where there is none to write to.

    A group that someone else made for this process is theirs, and stays as it is.
    """
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, names, path = line.split(":", 2)
        for fields in mounts:
            kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
            folder = Path(fields[4])
            if number == "0":
                has = folder / "cgroup.subtree_control"
                fits = kind == "cgroup2" and has.is_file() and controller in has.read_text().split()
            else:
                fits = kind == "cgroup" and controller in names.split(",") and controller in options
            if fits and path == fields[3] == "/" and os.access(folder, os.W_OK):
                return folder
    pytest.skip(f"no cgroup hierarchy with {controller} whose root this process is in and may write to")


@pytest.fixture
def nested(request: pytest.FixtureRequest) -> Iterator[tuple[Path, Path]]:
    """A new group and one inside it, for processes of this test alone."""
    outer = own_folder(request.param) / f"penstock-test-{uuid4().hex[:12]}"
    inner = outer / "inner"
    try:
        outer.mkdir()
        if (outer / "cgroup.subtree_control").exists():
            (outer / "cgroup.subtree_control").write_text(f"+{request.param}")
        inner.mkdir()
    except OSError as exc:
        if outer.exists():
            outer.rmdir()
        pytest.skip(f"may not make cgroups: {exc}")
    yield outer, inner
    deadline = time.monotonic() + 60
    for group in (inner, outer):
        while group.exists():  # busy for a moment after its last process has ended
            try:
                group.rmdir()
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)


def measured_in(group: Path, function: str) -> int:
    """What ``function`` of loader/limits.py returns in a process that has put itself into ``group``."""
    code = f"""
import os, pathlib
pathlib.Path({str(group / "cgroup.procs")!r}).write_text(str(os.getpid()))
from penstock.loader.limits import {function}
print({function}())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("nested", ["memory"], indirect=True)
def test_a_real_process_in_a_nested_group_heeds_the_outer_groups_memory(nested: tuple[Path, Path]) -> None:
    outer, inner = nested
    limit = outer / "memory.max" if (outer / "memory.max").exists() else outer / "memory.limit_in_bytes"
    limit.write_text(str(700 * MIB))
    assert measured_in(inner, "usable_memory") == 700 * MIB


@pytest.mark.parametrize("nested", ["cpu"], indirect=True)
def test_a_real_process_in_a_nested_group_heeds_the_outer_groups_cores(nested: tuple[Path, Path]) -> None:
    outer, inner = nested
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("one core cannot be made fewer")
    if (outer / "cpu.max").exists():
        (outer / "cpu.max").write_text("150000 100000")
    else:
        (outer / "cpu.cfs_quota_us").write_text("150000")
    assert measured_in(inner, "usable_cores") == 1
