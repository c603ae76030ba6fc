"""Hosts of the bench of faults: what falls silent is named on every host that is left, and nothing stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from devtools.faults.__main__ import _merge_rows, choose_cases
from devtools.faults.case import Outcome
from devtools.faults.cases import CASES
from devtools.faults.hosts import scene as host_scene
from devtools.faults.hosts.cases import HOST_CASES
from devtools.faults.hosts.hosts import Hosts, why_no_hosts
from devtools.faults.hosts.scene import HostCase, play_on_hosts
from devtools.faults.hosts.wire import Weather
from devtools.faults.stage import StageError

needs_hosts = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "hosts can be made")


def find_case(name: str) -> HostCase:
    return next(case for case in HOST_CASES if case.name == name)


@needs_hosts
@pytest.mark.full
@pytest.mark.parametrize("name", ["host-cut", "host-power-first"])
def test_a_host_that_is_cut_off_ends_the_ranks_of_all_hosts_with_its_name_and_the_job_goes_on_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(host_scene, "LAUNCHER_S", 0.0)
    outcome = play_on_hosts(find_case(name), tmp_path)
    assert outcome.failures == []
    assert outcome.ended == "error"
    assert (outcome.missing, outcome.repeated) == (0, 0)
    assert namespaces() == []


@needs_hosts
@pytest.mark.slow
def test_frames_pass_are_lost_or_late_as_the_weather_says() -> None:
    with Hosts(2) as hosts:
        assert connect(hosts, timeout_s=20.0) == "refused"  # there is nobody, which a host that is reached says
        hosts.cut_one_way(1, 0)
        assert connect(hosts) == "silent"
        hosts.mend()
        assert connect(hosts, timeout_s=20.0) == "refused"
        hosts.cut(1)
        assert connect(hosts) == "silent"
        hosts.mend()
        hosts.set_weather(loss=1.0)
        assert connect(hosts) == "silent"
        hosts.set_weather(delay_s=0.2)
        assert connect(hosts, timeout_s=20.0) == "refused"
        sleeper = hosts.start(0, ["sleep", "600"], subprocess.DEVNULL, os.environ)
    assert sleeper.wait(timeout=20) != 0
    assert namespaces() == []


def connect(hosts: Hosts, timeout_s: float = 1.5) -> str:
    code = (
        "import socket, sys\n"
        "try: socket.create_connection((sys.argv[1], 9), float(sys.argv[2]))\n"
        "except ConnectionRefusedError: print('refused')\n"
        "except TimeoutError: print('silent')\n"
        "except OSError as exc: print('silent' if exc.errno == 113 else exc)"  # no answer to ARP
    )
    command = ["ip", "netns", "exec", hosts.names[0], sys.executable, "-c", code, hosts.address(1), str(timeout_s)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def namespaces() -> list[str]:
    return [path.name for path in Path("/run/netns").glob(f"penstock-{os.getpid()}-*")]


@needs_hosts
def test_hosts_that_cannot_all_be_made_leave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StageError, match="the wire between the hosts could not be laid"), Hosts(2):
        raise AssertionError("unreachable")
    assert namespaces() == []


def test_weather_cuts_single_directions_and_loses_about_the_share_that_it_is_told() -> None:
    weather = Weather(cut=[[0, 1]], loss=0.25)
    assert not any(weather.passes(0, 1) for _ in range(100))
    passed = sum(weather.passes(1, 0) for _ in range(4000))
    assert 2850 < passed < 3150


def test_who_is_not_root_is_told_why_nothing_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert play_on_hosts(find_case("host-cut"), tmp_path).skipped == "network namespaces need root"


def test_results_of_hosts_come_beside_those_of_the_others() -> None:
    chosen = choose_cases(["host-"])
    assert {case.name for case in chosen} == {case.name for case in HOST_CASES}
    rows = [{"name": case.name} for case in CASES if not isinstance(case, HostCase)]
    known = {"command": "all", "date": "2026-01-01", "machine": {}, "rows": rows}
    fresh = [{"name": case.name} for case in HOST_CASES]
    run = {"command": "--only host-", "date": "2026-02-02T00:00", "machine": {"cores": 2}}
    merged = _merge_rows(known, run | {"versions": {}}, fresh)
    assert [row["name"] for row in merged["rows"]] == [case.name for case in CASES]
    assert (merged["command"], merged["also"]) == ("all", [run])


def test_what_a_case_between_hosts_expects_fails_it_where_it_does_not_come() -> None:
    case = find_case("host-cut")
    good = {"ended": "error", "error": "StallError", "error_s": 9.0, "delivered": 480}
    about = {"name": case.name, "group": "hosts", "fault": "", "sees": ""}
    assert host_scene._list_failures(case, Outcome(**about, **good)) == []
    for worse in (
        {"missing": 1}, {"repeated": 1}, {"wrong": 1}, {"delivered": 0}, {"ended": "finished", "error_s": None},
        {"error_s": 26.0},
    ):  # fmt: skip
        assert len(host_scene._list_failures(case, Outcome(**about, **(good | worse)))) == 1, worse
