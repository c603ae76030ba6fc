"""The field's benchmark as it runs: peers that fail or are slow, interrupts, stores that are gone, settings kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from measured_runs import measured

from penstock.benchmarks.contenders import LIMIT, OURS
from penstock.benchmarks.field import runner, settings, workload
from penstock.benchmarks.field.cells import Cell, FieldConfig
from penstock.benchmarks.field.places import Places
from penstock.benchmarks.field.table import line_of
from penstock.benchmarks.harness import prepare
from penstock.benchmarks.harness.job import Job, Measurement
from penstock.benchmarks.harness.subprocesses import MeasurementError, run_module
from penstock.benchmarks.peers.environments import PeerUnavailableError
from penstock.benchmarks.stores import server
from penstock.loader import ConfigError


class _Silent:
    """Hears what is said, and shows nothing."""

    def __init__(self) -> None:
        self.cells: list[str] = []

    def say(self, text: str) -> None:
        pass

    def done(self, cell: Cell, result: Mapping[str, Any]) -> None:
        self.cells.append(cell.name)


Runs = Callable[..., Measurement]


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> Callable[[Runs], None]:
    """Has the runner measure by a function, on prepared peers; "spdl" cannot be prepared."""

    def prepare(name: str, config: Any, manifest: Any, ours: Job, *_: Any, **__: Any) -> Job:
        if name == "spdl":
            raise PeerUnavailableError("it could not be installed: (a URL)")
        return replace(ours, contender=name)

    def use(runs: Runs) -> None:
        monkeypatch.setattr(runner, "run_job", runs)
        monkeypatch.setattr(runner, "settle", lambda job, *_: job)
        monkeypatch.setattr(workload, "prepare_peer", prepare)
        monkeypatch.setattr(workload, "check_ours", lambda ours: measured(OURS, []))
        monkeypatch.setattr(workload, "check_delivery", lambda *_, **__: None)

    return use


def test_peers_that_fail_are_reported_and_the_others_go_on(tmp_path: Path, canned: Callable[[Runs], None]) -> None:
    order: list[str] = []

    def runs(job: Job, *, timeout_s: float) -> Measurement:
        order.append(job.contender)
        if job.contender == "litdata" and order.count("litdata") == 2:
            raise MeasurementError("litdata: the process ended with exit code -9:\nKilled")
        return measured(job.contender, [(job.num_samples, 0.0, 1.0)])

    canned(runs)
    config = FieldConfig(
        workloads=("tokens",), stores=("local",), ranks=(1,), against=("litdata", "spdl", "torch"), scale=0.001,
        rounds=3, workers=0, resume=False,
    )  # fmt: skip
    place, progress = tmp_path / "deep" / "field.json", _Silent()
    found = runner.run_field(config, data=tmp_path / "data", report=place, command="penstock bench", progress=progress)
    [result] = found["cells"]
    assert sorted(result["contenders"]) == [LIMIT, OURS, "torch"]
    assert all(len(each["rounds"]) == 3 for each in result["contenders"].values())
    assert "exit code -9" in result["refused"]["litdata"]
    assert result["refused"]["spdl"] == "it could not be installed: (a URL)"
    assert order[:4] == [OURS, LIMIT, "litdata", "torch"]  # and the next round begins with another
    assert order[4] == LIMIT
    assert len(result["loads"]) == 3
    assert json.loads(place.read_text()) == json.loads(json.dumps(found))
    # The same command again has nothing left to do; another store, which is not there, is added and told.
    order.clear()
    assert runner.run_field(config, data=tmp_path / "data", report=place, command="x", progress=progress)["cells"] == [
        result
    ]
    assert order == []
    assert progress.cells == ["tokens · local · 1 rank"]
    more = replace(config, ranks=(2,))
    found = runner.run_field(more, data=tmp_path / "data", report=place, command="y", progress=progress)
    assert found["cells"][0] == result
    assert (found["command"], found["settings"]["ranks"], len(found["cells"])) == ("penstock bench; y", [1, 2], 2)


def test_slow_peers_are_left_out_after_a_round_and_it_is_noted(tmp_path: Path, canned: Callable[[Runs], None]) -> None:
    def runs(job: Job, *, timeout_s: float) -> Measurement:
        took = {"torch": 10.0, "litdata": 0.5}.get(job.contender, 1.0)
        passes = [(job.num_samples, 0.0, took)]
        return measured(job.contender, passes, samples_per_s=job.num_samples / took)

    canned(runs)
    config = FieldConfig(
        workloads=("tokens",), stores=("local",), ranks=(1,), against=("litdata", "torch"), scale=0.001, rounds=3,
        workers=0, resume=False, drop_slower=5.0,
    )  # fmt: skip
    place = tmp_path / "field.json"
    found = runner.run_field(config, data=tmp_path / "data", report=place, command="x", progress=_Silent())
    [result] = found["cells"]
    rounds = {name: len(each["rounds"]) for name, each in result["contenders"].items()}
    assert rounds == {OURS: 3, LIMIT: 3, "litdata": 3, "torch": 1}
    assert result["notes"] == {"torch": "left out after 1 round, 20x slower than the fastest peer"}
    # What was measured in another way is neither taken nor overwritten.
    before = place.read_bytes()
    with pytest.raises(ConfigError, match="other settings \\(rounds 3 and now 2\\): give another folder as --results"):
        runner.run_field(
            replace(config, rounds=2), data=tmp_path / "data", report=place, command="x", progress=_Silent()
        )
    assert place.read_bytes() == before
    place.write_text("[]")
    with pytest.raises(ConfigError, match="is no report"):
        runner.run_field(config, data=tmp_path / "data", report=place, command="x", progress=_Silent())


def test_an_interrupt_keeps_what_was_measured_and_the_same_command_goes_on(
    tmp_path: Path, canned: Callable[[Runs], None]
) -> None:
    order: list[str] = []

    def runs(job: Job, *, timeout_s: float) -> Measurement:
        order.append(job.contender)
        if len(order) == 4:
            raise KeyboardInterrupt
        return measured(job.contender, [(job.num_samples, 0.0, 1.0)])

    canned(runs)
    config = FieldConfig(
        workloads=("tokens",), stores=("local",), ranks=(1, 2), against=("torch",), scale=0.001, rounds=1, workers=0,
        resume=False,
    )  # fmt: skip
    place, progress = tmp_path / "field.json", _Silent()
    with pytest.raises(KeyboardInterrupt):
        runner.run_field(config, data=tmp_path / "data", report=place, command="x", progress=progress)
    assert [each["ranks"] for each in json.loads(place.read_text())["cells"]] == [1]
    found = runner.run_field(config, data=tmp_path / "data", report=place, command="x", progress=progress)
    assert [each["ranks"] for each in found["cells"]] == [1, 2]
    assert order == [OURS, LIMIT, "torch", OURS, OURS, LIMIT, "torch"]


def test_a_number_of_workers_that_fails_is_none_of_the_best(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def runs(job: Job, *, timeout_s: float) -> Measurement:
        if job.workers == wrong:
            raise MeasurementError("grain: took longer than 300 s")
        return measured(job.contender, [(job.num_samples, 0.0, 1.0 / (1 + job.workers))])

    monkeypatch.setattr(prepare, "run_job", runs)
    job = Job(contender="grain", url="x", num_samples=10, scratch="", workers=2)
    wrong = 4
    assert prepare.choose_workers(job, 1.0, lambda text: None).workers == 2
    monkeypatch.setattr(prepare, "run_job", lambda job, *, timeout_s: runs(replace(job, workers=wrong), timeout_s=1.0))
    with pytest.raises(MeasurementError, match="took longer"):
        prepare.choose_workers(job, 1.0, lambda text: None)


def test_two_workers_a_core_are_tried_only_where_one_a_core_is_better_than_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried: list[int] = []

    def runs(job: Job, *, timeout_s: float) -> Measurement:
        tried.append(job.workers)
        return measured(job.contender, [(job.num_samples, 0.0, takes[job.workers])])

    monkeypatch.setattr(prepare, "run_job", runs)
    monkeypatch.setattr(settings, "_with_modules", lambda job, *_: job)
    job = Job(contender="grain", url="x", num_samples=10, scratch="", workers=2)
    place = Cell(workload="tokens", store="local", ranks=1)

    def settled() -> int:
        return settings.settle(job, place, FieldConfig(), tmp_path, lambda text: None).workers

    takes = {0: 1.0, 2: 1.5, 4: 0.5}
    assert settled() == 0
    takes = {0: 1.0, 2: 0.9, 4: 0.5}
    assert settled() == 0  # as it was found before, until that is forgotten
    assert tried == [0, 2]
    settings.forget(tmp_path)
    assert settled() == 4
    assert tried == [0, 2, 0, 2, 4]


def test_what_a_loader_imports_late_is_imported_before_the_clock_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    glances: list[Job] = []

    def runs(job: Job, *, timeout_s: float) -> Measurement:
        glances.append(job)
        return replace(measured(job.contender, []), late_modules=["wave"])

    monkeypatch.setattr(settings, "run_job", runs)
    job = Job(contender="torch", url="x", num_samples=10, scratch="", workers=2, world_size=4)
    place = Cell(workload="tokens", store="local", ranks=4)
    for _ in range(2):  # the second time it is known
        ready = settings.settle(job, place, FieldConfig(workers=3), tmp_path, lambda text: None)
        assert (ready.modules, ready.workers, ready.world_size) == (["wave"], 3, 4)
    assert [(each.workers, each.world_size) for each in glances] == [(0, 1)]
    again = settings.with_late_modules(ready, replace(measured("torch", []), late_modules=["chunk"]))
    assert again.modules == ["wave", "chunk"]


def test_a_store_that_does_not_answer_is_told_for_each_of_its_cells(
    tmp_path: Path, canned: Callable[[Runs], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    canned(lambda job, *, timeout_s: measured(job.contender, [(job.num_samples, 0.0, 1.0)]))
    monkeypatch.setenv("PENSTOCK_TEST_S3_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    config = FieldConfig(workloads=("tokens",), ranks=(1,), against=("torch",), scale=0.001, rounds=1, workers=0)
    found = runner.run_field(
        config, data=tmp_path / "data", report=tmp_path / "r.json", command="x", progress=_Silent()
    )
    by_store = {each["store"]: each for each in found["cells"]}
    assert set(by_store["local"]["contenders"]) == {OURS, LIMIT, "torch"}
    assert by_store["local"]["notes"] == dict.fromkeys(
        (OURS, "torch"), "it cannot be resumed inside an epoch"
    )  # as the canned runs have no state
    for store in ("s3", "s3-delay", "s3-tls"):
        assert by_store[store]["contenders"] == {}
        assert all("does not answer" in reason for reason in by_store[store]["refused"].values())
        assert OURS in by_store[store]["refused"]
    text = json.dumps(found)
    assert "hush" not in text
    assert str(tmp_path) not in text
    # The same command tries the store again, as it may answer now, and measures nothing twice.
    progress = _Silent()
    again = runner.run_field(config, data=tmp_path / "data", report=tmp_path / "r.json", command="x", progress=progress)
    assert progress.cells == ["tokens · s3 · 1 rank", "tokens · s3-delay · 1 rank", "tokens · s3-tls · 1 rank"]
    assert sorted(each["store"] for each in again["cells"]) == ["local", "s3", "s3-delay", "s3-tls"]
    assert line_of(by_store["s3"]) == "tokens, s3: penstock was not measured"


def test_an_endpoint_that_is_gone_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_S3_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    with Places(20.0, lambda text: None) as places:
        assert places.options_of("local") == {}
        for store in ("s3", "s3-delay", "s3-tls"):
            with pytest.raises(ConfigError, match="does not answer"):
                places.options_of(store)  # type: ignore[arg-type]


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_on_one_core_the_command_measures_and_leaves_report_and_page(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "penstock.cli", "bench", "--full", "--workloads", "tokens", "--stores", "local",
        "--ranks", "1", "--against", "none", "--rounds", "1", "--seconds", "0.2", "--scale", "0.002",
        "--data", str(tmp_path / "data"), "--results", str(tmp_path / "results"),
    ]  # fmt: skip
    core = min(os.sched_getaffinity(0))
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=1100,
        env={**os.environ, "COLUMNS": "80"},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    assert done.returncode == 0, done.stderr
    assert "tokens, local: " in done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80 + len(str(tmp_path))
    found = json.loads((tmp_path / "results" / "field.json").read_text())
    [result] = found["cells"]
    assert found["machine"]["cores"] == 1
    assert str(tmp_path) not in found["command"]
    for name in (OURS, LIMIT):
        [one] = result["contenders"][name]["rounds"]
        assert one["first_pass_per_s"] > 0
        assert one["peak_rss_bytes"] > 50 << 20
    assert result["contenders"][LIMIT]["settings"]["threads"] == 1
    assert result["contenders"][OURS]["settings"]["threads"] == "auto"  # as users have it
    assert result["contenders"][OURS]["rounds"][0]["resumed_s"] > 0
    assert "<svg" in (tmp_path / "results" / "field.html").read_text()


def test_an_interrupt_amid_a_conversion_ends_its_process(
    canned: Callable[[Runs], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    canned(lambda *_, **__: measured(OURS, []))
    converter, started = tmp_path / "converter", tmp_path / "pid"
    converter.write_text(f"#!/bin/sh\necho $$ > {started}.part\nmv {started}.part {started}\nexec sleep 600\n")
    converter.chmod(0o755)

    def convert(name: str, *_: Any, **__: Any) -> Job:
        if name == "litdata":
            with pytest.raises(MeasurementError, match="was killed"):
                run_module("convert", "", "a conversion", timeout_s=500.0, python=str(converter))
            run_module("convert", "", "the next, which is not begun", timeout_s=500.0, python=str(converter))
        while not started.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    start = subprocess.Popen

    def start_slowly(*args: Any, **kwargs: Any) -> Any:
        process = start(*args, **kwargs)
        time.sleep(0.3)  # it runs, and is interrupted before it is known
        return process

    monkeypatch.setattr(subprocess, "Popen", start_slowly)
    monkeypatch.setattr(workload, "prepare_peer", convert)
    against = ("torch", "litdata")
    config = FieldConfig(workloads=("tokens",), stores=("local",), ranks=(1,), against=against, scale=0.001)
    place = tmp_path / "field.json"
    with pytest.raises(KeyboardInterrupt):
        runner.run_field(config, data=tmp_path / "data", report=place, command="x", progress=_Silent())
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_without_a_server_in_the_environment_that_of_the_tests_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def start(command: list[Any], **_: Any) -> subprocess.CompletedProcess[str]:
        assert os.access(command[0], os.X_OK), f"there is no script {command[0]}"
        calls.append([Path(command[0]).name, *map(str, command[1:])])
        return subprocess.CompletedProcess(command, 0, "http://127.0.0.1:1\n", "")

    monkeypatch.delenv("PENSTOCK_TEST_S3_ENDPOINT", raising=False)
    monkeypatch.setattr(server.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(server.subprocess, "run", start)
    with server.serve_s3() as options:
        assert options["endpoint"] == "http://127.0.0.1:1"
    folder = calls[0][2]
    assert calls == [["s3_server.sh", "start", folder], ["s3_server.sh", "stop", folder]]
