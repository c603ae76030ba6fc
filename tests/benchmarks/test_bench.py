"""The bench tool: its arithmetic by itself, and tiny runs of every contender through the real tool."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import pack
from penstock.benchmarks.contenders import OURS
from penstock.benchmarks.harness import comparison, subprocesses
from penstock.benchmarks.harness.batch_stats import batch_stats, checksum
from penstock.benchmarks.harness.config import BenchConfig
from penstock.benchmarks.harness.convert import group_scalars
from penstock.benchmarks.harness.job import Job, Measurement
from penstock.benchmarks.harness.layout import _describe
from penstock.benchmarks.harness.plot import caption, is_wide, plot_ratios
from penstock.benchmarks.harness.ratios import best_peer, median_ratio, round_ratios, summarize
from penstock.benchmarks.harness.report import format_duration
from penstock.benchmarks.harness.subprocesses import MeasurementError, find_tree, memory_of, run_job
from penstock.benchmarks.peers.catalogue import PEERS
from penstock.cli import run
from penstock.cli.bench import _without_secrets
from penstock.loader import ConfigError

SAMPLES = 150


def measured(name: str, rate: float, *, first_s: float = 1.0, bottleneck: str | None = None) -> Measurement:
    return Measurement(
        contender=name,
        mode="epoch",
        samples=100,
        payload_bytes=1000,
        batches=10,
        seconds=1.0,
        samples_per_s=rate,
        mb_per_s=rate / 10,
        first_batch_s=first_s,
        wait_p50_ms=1.0,
        wait_p99_ms=2.0,
        wait_share=0.5,
        cpu_s=0.2,
        peak_bytes=1 << 20,
        bottleneck=bottleneck,
    )


def runs_of(
    name: str, rates: list[float], *, resumed_s: list[float] | None = None, bottleneck: str | None = None
) -> dict[str, list[Measurement]]:
    epoch = [measured(name, rate, bottleneck=bottleneck) for rate in rates]
    resumed = [measured(name, 1.0, first_s=seconds) for seconds in resumed_s or []]
    return {"epoch": epoch, "fresh": epoch, "resumed": resumed}


def test_the_ratio_is_that_of_the_medians_that_are_shown() -> None:
    assert round_ratios([300.0, 150.0, 600.0], [100.0, 50.0, 200.0]) == [3.0, 3.0, 3.0]
    # Of the rounds' ratios, 1, 4 and 2, the median would be 2.
    assert median_ratio([100.0, 400.0, 200.0], [100.0, 100.0, 100.0]) == 2.0
    assert median_ratio([100.0, 400.0, 300.0], [100.0, 100.0, 300.0]) == 3.0
    assert round_ratios([1.0], [0.0]) == [float("inf")]


def test_the_summary_names_the_peer_that_comes_closest_and_the_usual_bottleneck() -> None:
    summary = summarize(
        {
            OURS: runs_of(OURS, [100.0, 200.0, 300.0], resumed_s=[1.1, 1.1, 9.0], bottleneck="decode"),
            "webdataset": runs_of("webdataset", [10.0, 20.0, 30.0]),
            "litdata": runs_of("litdata", [50.0, 50.0, 50.0], resumed_s=[2.0, 2.0, 2.0]),
        }
    )
    assert summary[OURS]["samples_per_s"] == 200.0
    assert summary[OURS]["bottleneck"] == "decode"
    assert summary[OURS]["resume_ratio"] == pytest.approx(1.1)
    assert summary[OURS]["cpu_us_per_sample"] == pytest.approx(2000)
    assert summary["webdataset"]["ratios"] == [10.0, 10.0, 10.0]
    assert summary["litdata"]["ratio"] == 4.0
    assert "resume_ratio" not in summary["webdataset"]
    assert best_peer(summary) == "litdata"
    assert best_peer({OURS: summary[OURS]}) is None


def test_samples_and_payload_are_counted_without_the_loaders_own_fields() -> None:
    batch = {"__key__": ["a", "b"], "jpg": [b"123", b"4567"], "x": torch.zeros(2, 3, dtype=torch.float32)}
    assert batch_stats(batch) == (2, 7 + 24)
    assert batch_stats([{"__key__": "a", "jpg": b"123"}, {"__key__": "b", "jpg": b"4567"}]) == (2, 7)


def test_the_checksum_sees_a_changed_sample_but_no_order_and_no_grouping() -> None:
    a, b = np.arange(6, dtype=np.float32), np.arange(6, dtype=np.float32) * 7
    apart = {"a": torch.from_numpy(a), "b": torch.from_numpy(b)}
    grouped = {"ab": torch.from_numpy(np.stack([a, b], axis=1)[::-1].copy())}
    assert checksum(apart) == checksum(grouped)
    assert checksum({"jpg": [b"x", b"y"]}) == checksum({"jpg": [b"y", b"x"]})
    assert checksum({"jpg": [b"x", b"y"]}) != checksum({"jpg": [b"x", b"x"]})


def test_scalar_columns_of_one_type_become_one_array_for_peers() -> None:
    scalar = {"kind": "array", "shape": [], "mean_bytes": 4.0}
    layout = {"a": scalar | {"dtype": "float32"}, "b": scalar | {"dtype": "float32"}, "n": scalar | {"dtype": "int32"}}
    grouped, groups = group_scalars(layout)
    assert groups == {"float32s": ["a", "b"]}
    assert grouped["float32s"] == {"kind": "array", "dtype": "float32", "shape": [2], "mean_bytes": 8.0}
    assert list(grouped) == ["n", "float32s"]


def test_durations_are_short_enough_for_a_table() -> None:
    assert [format_duration(value) for value in (2e-5, 0.0123, 1.5)] == ["20 us", "12.3 ms", "1.50 s"]


def test_the_kept_command_line_holds_no_storage_option_values() -> None:
    words = _without_secrets(["s3://b/x", "--storage-option", "secret_key=hush", "--storage-option=token=hush"])
    assert words[2:] == ["s3://b/x", "--storage-option", "secret_key=...", "--storage-option=token=..."]


@pytest.mark.parametrize("wrong", [{"against": ("dali",)}, {"rounds": 0}, {"workers": 0}, {"against": (OURS,)}])
def test_a_comparison_that_cannot_be_made_is_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BenchConfig(source="x", **wrong)


def test_the_process_tree_and_its_memory_are_found_from_outside() -> None:
    code = "import subprocess, sys, time; x = bytearray(64 << 20); p = subprocess.Popen(['sleep', '60']); print(p.pid,"
    code += " flush=True); sys.stdin.read(); p.kill(); p.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        assert set(find_tree(parent.pid)) == {parent.pid, child}
        assert memory_of(parent.pid) > 64 << 20
        parent.stdin.close()
    assert memory_of(child) == 0


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "pictures"
    rng = np.random.default_rng(0)
    samples = ({"__key__": f"{i:06d}", "bin": rng.bytes(500 + i), "cls": i % 10} for i in range(SAMPLES))
    pack(samples, folder, shard_bytes=40_000, progress=False)
    return folder


def run_tool(*arguments: str, cache: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "penstock.cli", "bench", *arguments, "--json"]
    environment = {**os.environ, "PENSTOCK_CACHE": str(cache)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_peer_delivers_every_sample_once_and_is_measured(tmp_path: Path) -> None:
    """A sample has a field of each kind: numbers, text, a vector, bytes, and one of two kinds of image."""
    rng = np.random.default_rng(0)
    rows = (
        {"n": i, "cls": i % 10, "word": f"w{i}", "v": [i / 2] * 8, "bin": rng.bytes(500 + i)}
        | {"jpg": b"\xff\xd8\xff" + bytes([i]) if i % 2 else None, "png": None if i % 2 else b"\x89PNG" + bytes([i])}
        for i in range(SAMPLES)
    )
    pack(rows, tmp_path / "rows", format="parquet", shard_bytes=40_000, progress=False)
    peers = [name for name, peer in PEERS.items() if importlib.util.find_spec(peer.imports.partition(".")[0])]
    missing = sorted(set(PEERS) - {*peers})
    if not peers:
        pytest.skip(f"{', '.join(missing)}: not installed; pip install 'penstock[bench]'")
    plot, out = tmp_path / "ratios.png", tmp_path / "deep" / "result.json"
    result = run_tool(
        str(tmp_path / "rows"), "--against", ",".join(peers + missing),
        "--rounds", "1", "--workers", "1", "--no-startup",
        "--batch-size", "32", "--decode", "none", "--environments", "here", "--plot", str(plot), "--out", str(out),
        cache=tmp_path / "cache",
    )  # fmt: skip
    assert sorted(result["refused"]) == missing
    assert json.loads(out.read_text()) == result
    for name in (OURS, *peers):
        [run] = result["contenders"][name]["epoch"]
        assert run["samples"] == SAMPLES
        assert run["samples_per_s"] > 0
        assert run["peak_bytes"] > 1 << 20
        assert run["cpu_s"] > 0
        assert 0 <= run["wait_p50_ms"] <= run["wait_p99_ms"]
        assert run["payload_bytes"] == result["contenders"][OURS]["epoch"][0]["payload_bytes"]
    assert all(result["summary"][peer]["ratio"] > 0 for peer in peers)
    assert plot.stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_alone_it_reports_rate_start_resume_and_what_bounds_it(pictures: Path, tmp_path: Path) -> None:
    result = run_tool(str(pictures), "--rounds", "1", "--batch-size", "32", cache=tmp_path / "cache")
    summary = result["summary"][OURS]
    assert summary["samples"] == SAMPLES
    assert summary["bottleneck"] in ("consumer", "storage", "open", "assemble", "decode")
    assert summary["first_batch_s"] > 0
    assert summary["resume_ratio"] > 0
    assert {"cpu", "cores", "memory_bytes"} <= set(result["machine"])
    assert {"python", "torch", "numpy"} <= set(result["versions"])


@pytest.mark.slow
def test_a_contender_that_fails_is_reported_with_its_last_words(tmp_path: Path) -> None:
    job = Job(contender=OURS, url=str(tmp_path / "nothing"), num_samples=1, scratch="")
    with pytest.raises(MeasurementError, match=r"^penstock: there is no folder .*nothing"):
        run_job(replace(job, mode="first-batch"))


def test_a_peer_that_fails_in_a_round_is_not_measured_and_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def measure(job: Job, *, timeout_s: float) -> Measurement:
        limits.append(timeout_s)
        if job.contender == failing and len(limits) > 3:
            raise MeasurementError(f"{failing}: the process was killed, as the kernel does where memory is short")
        return measured(job.contender, 10.0)

    monkeypatch.setattr(comparison, "run_job", measure)
    jobs = {name: Job(contender=name, url="", num_samples=1, scratch="") for name in (OURS, "torch", "litdata")}
    refused: dict[str, str] = {}
    failing = "torch"
    runs = comparison._run_rounds(jobs, 2, startup=False, timeout_s=9.0, say=print, refused=refused)
    assert {name: len(done["epoch"]) for name, done in runs.items()} == {OURS: 2, "litdata": 2}
    assert refused == {
        "torch": "failed in round 2 of 2: torch: the process was killed, as the kernel does where memory is short"
    }
    assert set(limits) == {9.0}
    failing = OURS
    with pytest.raises(MeasurementError, match="was killed"):
        comparison._run_rounds(jobs, 2, startup=False, timeout_s=9.0, say=print, refused={})


@pytest.mark.slow
def test_what_cannot_be_plotted_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for plot, said in (("x.xyz", "not as .xyz"), (str(tmp_path), "is a folder")):
        assert run(["bench", "nowhere", "--against", "torch", "--plot", plot]) == 2
        assert said in capsys.readouterr().err


def test_a_failing_look_at_memory_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def look(pid: int) -> list[int]:
        looks.append(pid)
        if len(looks) == 1:
            raise PermissionError("no")
        return [pid]

    monkeypatch.setattr(subprocesses, "find_tree", look)
    monkeypatch.setattr(subprocesses, "_SAMPLE_EVERY_S", 0.001)
    with subprocesses._MemoryWatch(os.getpid()) as watch:
        deadline = time.monotonic() + 30
        while not watch.peak_bytes and time.monotonic() < deadline:
            time.sleep(0.001)
    assert watch.peak_bytes > 0
    assert len(looks) > 1


def test_a_process_that_fails_for_a_known_reason_says_it_in_one_sentence() -> None:
    log = f"Traceback (most recent call last):\n  File x\n\n{subprocesses.REASON}decoding images needs OpenCV\n"
    assert subprocesses._last_words(1, log) == "decoding images needs OpenCV"
    assert "exit code 3" in subprocesses._last_words(3, "Traceback\nKeyError: 1")


@pytest.mark.parametrize("told", ["", subprocesses.REASON])
def test_last_words_leave_out_what_signs_a_url(told: str) -> None:
    url = "http://h/b/x.tar?X-Amz-Credential=who%2F1&X-Amz-Expires=60&X-Amz-Security-Token=tok&X-Amz-Signature=5ec7e7"
    words = subprocesses._last_words(1, f"{told}OSError: (('curl -sfL '{url}',), 22) @ pipe:curl '{url}'\n")
    assert "X-Amz-Credential=...&X-Amz-Expires=60&X-Amz-Security-Token=...&X-Amz-Signature=..." in words
    assert not any(secret in words for secret in ("who", "=tok", "5ec7e7"))


def test_fields_that_samples_lack_and_lists_of_numbers_have_a_layout() -> None:
    some = _describe([None, b"\xff\xd8\xff1"])
    assert (some["kind"], some["image"], some["missing"]) == ("bytes", True, True)
    assert "missing" not in _describe([b"1", b"2"])
    assert _describe([[1, 2], [3]]) == {"kind": "vector", "dtype": "int64", "mean_bytes": 12.0}
    assert _describe([[1.5], []])["dtype"] == "float64"
    assert _describe([["a"], [1]])["kind"] == "object"
    batch = {"jpg": [None, b"x"], "v": [[1.0, 2.0], [3.0]]}
    assert batch_stats(batch) == (2, 1 + 24)
    theirs = {"jpg": [b"x", b""], "v": [np.array([3.0]), np.array([1.0, 2.0])]}
    assert checksum(batch) == checksum(theirs)


@pytest.mark.slow
def test_a_plot_tells_where_when_and_how_and_is_logarithmic_where_rates_differ_much(tmp_path: Path) -> None:
    result = {
        "machine": {"cores": 2, "cpu": "AMD EPYC"},
        "date": "2026-01-02T03:04:05+00:00",
        "settings": {"batch_size": 64, "decode": "none", "epochs": 1, "seconds": None, "rounds": 3},
        "versions": {"penstock": "0.1", "litdata": "0.2", "numpy": "2"},
        "summary": {OURS: {}, "litdata": {}},
    }
    told = caption(result, 200)
    for part in ("2 cores of AMD EPYC", "2026-01-02", "batch size 64", "rounds 3", "litdata 0.2", "points: rounds"):
        assert part in told
    assert "seconds" not in told
    assert is_wide([100.0, 9.0])
    assert not is_wide([100.0, 11.0, 0.0])
    summary = summarize({OURS: runs_of(OURS, [40.0, 50.0, 60.0]), "litdata": runs_of("litdata", [2.0, 3.0, 2.5])})
    whole = result | {"summary": summary, "data": {"url": "x/photos"}, "refused": {"webdataset": "not installed"}}
    plot_ratios([whole], tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert drawn.count("<path") > 10


@pytest.mark.slow
def test_a_plot_shows_a_panel_for_each_result(tmp_path: Path) -> None:
    summary = summarize({OURS: runs_of(OURS, [4.0]), "litdata": runs_of("litdata", [2.0])})
    result = {"data": {"url": "x/photos"}, "summary": summary}
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    plot_ratios([result], one)
    plot_ratios([result, result], two, titles=["first", "second"])
    assert two.stat().st_size > one.stat().st_size > 1000
