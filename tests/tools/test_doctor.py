"""``penstock doctor``: each fault of a machine is named, with what to mend; facts are made up, and some are real."""

from __future__ import annotations

import dataclasses
import http.server
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import Any

import pytest
from free_port import free_port
from made_machine import GIB, machine, space

from penstock.tools.doctor import probes
from penstock.tools.doctor.checks import Finding, diagnose, is_older, worst
from penstock.tools.doctor.facts import GpuFacts, Library, MachineFacts, RankFacts, SpaceFacts, StoreFacts
from penstock.tools.doctor.probes import ask_store, examine, measure_space, read_libraries, read_tested_pythons
from penstock.tools.doctor.ranks import compare_ranks

MIB = 1 << 20


def finding(facts: MachineFacts, check: str) -> Finding:
    (found,) = [each for each in diagnose(facts) if each.check == check]
    return found


def test_of_a_good_machine_every_check_is_ok_and_mends_nothing() -> None:
    findings = diagnose(machine())
    assert {each.level for each in findings} == {"ok"}
    assert {each.mend for each in findings} == {""}
    assert [each.check for each in findings] == [
        "python", "libraries", "cuda", "cores", "memory", "open files", "/dev/shm", "/tmp", "cache", "store", "clock",
        "network",
    ]  # fmt: skip


def test_without_a_url_and_ranks_neither_store_nor_network_is_judged() -> None:
    checks = {each.check for each in diagnose(machine(store=None, ranks=None))}
    assert not checks & {"store", "clock", "network"}


GPUS = GpuFacts(present=8, usable=8, torch_cuda="13.0")
RANKS = RankFacts(world_size=16, hosts=2, backend="nccl", latency_s=0.00004, bytes_per_s=20e9)
STORE = StoreFacts(url="s3://bucket/train/", seconds=0.1, skew_s=0.0)
# What is spoiled, the check that says so, its level, and words of what it found and of what to do.
FAULTS: dict[str, tuple[dict[str, Any], str, str, str, str]] = {
    "full disk": ({"tmp": space("/tmp", 0)}, "/tmp", "fail", "0 KiB free of 200.0 GiB", "TMPDIR"),
    "little disk": ({"cache": space("/c", 500 * MIB)}, "cache", "warn", "500.0 MiB free", "PENSTOCK_CACHE"),
    "no inodes": ({"tmp": space("/tmp", free_files=3)}, "/tmp", "fail", "only 3 more files", "remove small files"),
    "read-only": ({"cache": space("/c", problem="Read-only file system")}, "cache", "fail", "Read-only", "cache_dir="),
    "tmp in memory": ({"tmp": space("/tmp", is_memory=True)}, "/tmp", "warn", "in memory", "TMPDIR"),
    "no store": (
        {"store": dataclasses.replace(STORE, problem="no connection to 10.0.0.9")},
        "store", "fail", "no connection to 10.0.0.9", "endpoint",
    ),
    "slow store": ({"store": dataclasses.replace(STORE, seconds=9.0)}, "store", "warn", "9.00 s", "same region"),
    "wrong clock": (
        {"store": dataclasses.replace(STORE, skew_s=3600.0)}, "clock", "fail", "3,600 s behind", "chronyd",
    ),
    "clock ahead": ({"store": dataclasses.replace(STORE, skew_s=-90.0)}, "clock", "warn", "90 s ahead of", "chronyd"),
    "low ulimit": ({"open_files": 128}, "open files", "fail", "a process may open 128", "ulimit -n 65536"),
    "low hard limit": (
        {"open_files": 512, "open_files_most": 512}, "open files", "warn", "512", "--ulimit nofile=65536",
    ),
    "small shm": ({"shm": space("/dev/shm", 64 * MIB)}, "/dev/shm", "fail", "64.0 MiB free", "--shm-size"),
    "narrow shm": ({"shm": space("/dev/shm", 512 * MIB)}, "/dev/shm", "warn", "512.0 MiB free", "emptyDir"),
    "no shm": (
        {"shm": SpaceFacts(path="/dev/shm", free_bytes=0, total_bytes=0, problem="No such file")},
        "/dev/shm", "fail", "No such file", "--shm-size",
    ),
    "old torch": (
        {"libraries": (Library(name="torch", found="2.4.1", least="2.11"),)},
        "torch", "fail", "2.4.1; at least 2.11 is needed", "pip install --upgrade 'torch>=2.11'",
    ),
    "missing library": (
        {"libraries": (Library(name="xxhash", found=None, least="3.4"),)},
        "xxhash", "fail", "not installed", "pip install 'xxhash>=3.4'",
    ),
    "old extra": (
        {"libraries": (Library(name="wandb", found="0.12", least="0.18", extra="wandb"),)},
        "wandb", "warn", "penstock[wandb]", "--upgrade",
    ),
    "old python": ({"python": "3.10.2"}, "python", "fail", "3.10.2", "3.11 to 3.13"),
    "new python": ({"python": "3.14.0"}, "python", "warn", "newer than all", "no wheels"),
    "torch for CPUs": ({"gpus": dataclasses.replace(GPUS, usable=0, torch_cuda=None)}, "cuda", "fail", "CPUs", "torch"),
    "old driver": ({"gpus": dataclasses.replace(GPUS, usable=0)}, "cuda", "fail", "can use none", "nvidia-smi"),
    "hidden": (
        {"gpus": dataclasses.replace(GPUS, usable=0, is_hidden=True)}, "cuda", "warn", "hidden", "CUDA_VISIBLE_DEVICES",
    ),
    "no GPU": ({"gpus": GpuFacts(torch_cuda="13.0")}, "cuda", "warn", "no GPU", "--gpus all"),
    "broken torch": (
        {"gpus": GpuFacts(problem="torch cannot be imported: libcudart.so")}, "cuda", "fail", "libcudart", "reinstall",
    ),
    "few cores": ({"cores": 8, "ranks_here": 8}, "cores", "warn", "8 of the machine's 96", "CPU limit"),
    "small cgroup": (
        {"memory_bytes": 256 * MIB}, "memory", "fail", "256.0 MiB of the machine's 512.0 GiB", "memory limit",
    ),
    "much memory taken": ({"memory_free": GIB}, "memory", "warn", "1.0 GiB free", "ps aux"),
    "ulimit -v": ({"address_bytes": 8 * GIB}, "memory", "warn", "address 8.0 GiB", "ulimit -v unlimited"),
    "no network": (
        {"ranks": RankFacts(world_size=16, problem="timed out")}, "network", "fail", "timed out", "GLOO_SOCKET_IFNAME",
    ),
    "slow network": (
        {"ranks": dataclasses.replace(RANKS, bytes_per_s=11e6)}, "network", "warn", "11 MB/s a rank", "interface",
    ),
    "unlike ranks": (
        {"ranks": dataclasses.replace(RANKS, versions=(("torch", ("2.12.0", "2.13.0")),))},
        "torch", "fail", "2.12.0, 2.13.0", "one image",
    ),
    "clocks of ranks": ({"ranks": dataclasses.replace(RANKS, spread_s=40.0)}, "clocks", "warn", "40 s", "chronyd"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_what_to_mend_and_nothing_else_is_found(fault: str) -> None:
    changes, check, level, words, mend = FAULTS[fault]
    facts = machine(**changes)
    found = finding(facts, check)
    assert found.level == level
    assert words in found.found
    assert mend in found.mend
    assert [each.check for each in diagnose(facts) if each.level != "ok"] == [check]
    assert worst(diagnose(facts)) == level


def test_a_small_dev_shm_fails_only_where_gpus_need_it() -> None:
    facts = machine(shm=space("/dev/shm", 64 * MIB), gpus=GpuFacts())
    assert finding(facts, "/dev/shm").level == "warn"


def test_six_faults_at_once_are_six_findings() -> None:
    names = ("full disk", "no store", "low ulimit", "small shm", "old torch")
    changes = {name: value for fault in names for name, value in FAULTS[fault][0].items()}
    changes["store"] = dataclasses.replace(changes["store"], skew_s=7200.0)
    failed = {each.check for each in diagnose(machine(**changes)) if each.level == "fail"}
    assert failed == {"/tmp", "store", "clock", "open files", "/dev/shm", "torch"}


@pytest.mark.parametrize(
    ("version", "least", "older"),
    [("2.9.1", "2.11", True), ("2.11", "2.11.0", False), ("2.13.0+cpu", "2.13", False), ("3.0rc1", "2.11", False)],
)
def test_versions_are_compared_by_their_numbers(version: str, least: str, older: bool) -> None:
    assert is_older(version, least) is older


def test_ranks_that_differ_are_told_apart_and_hosts_listed_once() -> None:
    bad = [Finding(check="/tmp", level="fail", found="full", mend="free it")]
    gathered = [
        ("one", 100.0, {"torch": "2.13.0"}, []),
        ("one", 100.5, {"torch": "2.13.0"}, []),
        ("two", 130.0, {"torch": "2.12.0"}, bad),
    ]
    ranks, hosts = compare_ranks(gathered, ("gloo", 0.001, 1e9))
    assert ranks.versions == (("torch", ("2.12.0", "2.13.0")),)
    assert (ranks.world_size, ranks.hosts, ranks.spread_s) == (3, 2, 30.0)
    assert hosts == [("one", []), ("two", bad)]


def test_this_machine_is_examined_and_its_libraries_suffice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "not" / "yet"))
    facts = examine(url=str(tmp_path), storage_options=None, timeout_s=5)
    assert facts.cache.path == str(tmp_path / "not" / "yet")
    assert facts.cache.total_bytes > 0
    assert not (tmp_path / "not").exists()
    assert facts.store is not None
    assert facts.store.problem == ""
    assert {each.name for each in facts.libraries} >= {"torch", "numpy", "pyarrow", "simplejpeg"}
    assert {each.level for each in diagnose(facts) if each.check in ("python", "libraries", "store")} == {"ok"}


def test_a_temporary_folder_that_is_full_or_missing_is_named_though_python_takes_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    facts = examine(url=None, storage_options=None, timeout_s=5)
    assert facts.tmp.problem == "there is no such folder"
    real = os.statvfs

    def full(path: str | Path) -> Any:
        space = real(path)
        return SimpleNamespace(
            f_bavail=0, f_frsize=space.f_frsize, f_blocks=space.f_blocks, f_files=space.f_files, f_favail=space.f_favail
        )

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(os, "statvfs", full)
    facts = examine(url=None, storage_options=None, timeout_s=5)
    assert finding(facts, "/tmp").level == "fail"
    assert finding(facts, "/tmp").found.startswith(f"{tmp_path}: 0 KiB free of")


def test_the_developers_extras_are_not_what_a_machine_needs() -> None:
    assert not {each.extra for each in read_libraries()} & {"test", "lint", "fuzz"}
    assert read_tested_pythons()[0] == "3.11"


def test_a_mismatched_version_beside_the_real_one_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "numpy-1.21.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.21.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert finding(machine(libraries=read_libraries()), "numpy").found.startswith("1.21.0; at least 1.26")


@pytest.mark.skipif(os.geteuid() == 0 and not os.path.ismount("/proc"), reason="needs /proc")
def test_a_folder_that_takes_no_file_is_a_problem() -> None:
    found = measure_space(Path("/proc/nothing"))
    assert "1 MiB cannot be written" in found.problem or found.free_bytes == 0


def test_a_store_that_no_one_serves_is_unreachable() -> None:
    facts = ask_store(f"http://127.0.0.1:{free_port()}/data/", {}, timeout_s=5)
    assert facts.problem
    assert facts.skew_s is None
    assert facts.seconds < 30


class _Late(http.server.BaseHTTPRequestHandler):
    off_s = 0.0

    def do_GET(self) -> None:
        self.send_response_only(403)
        self.send_header("Date", formatdate(time() + self.off_s, usegmt=True))
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def server_with_clock(off_s: float) -> Iterator[str]:
    handler = type("Handler", (_Late,), {"off_s": off_s})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("off_s", [-4000.0, 0.0, 4000.0])
def test_the_clock_is_compared_with_the_date_of_an_answer_that_refuses(off_s: float) -> None:
    with server_with_clock(off_s) as address:
        facts = ask_store(f"{address}/data/", {}, timeout_s=5)
        assert facts.skew_s == pytest.approx(off_s, abs=5)
        skew = probes.compare_clocks("s3", "s3://bucket/x/", {"endpoint": address})
        assert skew == pytest.approx(off_s, abs=5)


def test_secrets_of_a_url_are_not_shown(tmp_path: Path) -> None:
    facts = ask_store(f"http://me:hunter2@127.0.0.1:{free_port()}/", {}, timeout_s=2)
    assert "hunter2" not in repr(facts)
