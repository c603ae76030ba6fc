"""The field's benchmark: its arithmetic, its report from canned results, and peers that fail in every way."""

from __future__ import annotations

import json
import mmap
import os
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from canned_field import entry, script
from measured_runs import measured

from penstock.benchmarks.contenders import LIMIT, OURS, UNCHECKED, VIEWS
from penstock.benchmarks.contenders.records import RecordCodec
from penstock.benchmarks.field.cells import Cell, FieldConfig, cells_of, other_settings, quick
from penstock.benchmarks.field.summary import (
    best_peer,
    figures_of,
    first_pass_rate,
    ours_of,
    quartiles,
    ratio,
    ratio_spread,
    steady_rate,
    summarise,
    too_slow,
)
from penstock.benchmarks.harness.batch_stats import batch_stats, checksum
from penstock.benchmarks.harness.job import Job, Pass
from penstock.benchmarks.harness.prepare import whole_pass_s
from penstock.benchmarks.harness.subprocesses import MeasurementError, combine_ranks, run_job
from penstock.benchmarks.peers.catalogue import PEERS
from penstock.benchmarks.peers.environments import PeerUnavailableError, clean, python_of, reason_of
from penstock.cli import run
from penstock.loader import ByteViews, ConfigError


def test_quartiles_lie_between_the_rounds() -> None:
    assert quartiles([5.0, 1.0, 3.0, 2.0, 4.0]).to_list() == [2.0, 3.0, 4.0]
    assert quartiles([1.0, 2.0, 4.0]).to_list() == [1.5, 2.0, 3.0]
    assert quartiles([7.0]).to_list() == [7.0, 7.0, 7.0]
    with pytest.raises(ValueError, match="nothing"):
        quartiles([])


def test_a_first_pass_counts_its_start_and_steady_state_only_what_follows() -> None:
    run = measured("x", [(100, 0.0, 4.0), (100, 4.0, 5.0), (50, 5.0, 5.5)])
    assert first_pass_rate(run, 100) == 25.0
    assert steady_rate(run) == 100.0
    assert steady_rate(measured("x", [(100, 0.0, 4.0)])) == 70.0  # one pass: what came after its first batch
    assert first_pass_rate(measured("x", []), 100) == 0.0
    figures = figures_of(run, 100)
    assert figures["cpu_us_per_sample"] == pytest.approx(60.0)  # of the first pass alone
    assert figures["run_cpu_us_per_sample"] == pytest.approx(80.0)


def test_a_first_pass_that_was_cut_is_reckoned_whole_so_that_its_start_does_not_weigh_more() -> None:
    # 0.5 s and 1 ms of CPU time to the first batch; then 70 samples a second, at 30 us of CPU time a sample.
    cut = Pass(samples=100, start_s=0.0, stop_s=2.0, complete=False, cpu_s=0.004)
    run = replace(measured("x", []), passes=[cut], samples=100, first_batch_cpu_s=0.001)
    assert first_pass_rate(run, 7000) == pytest.approx(7000 / 100.5)
    assert figures_of(run, 7000)["cpu_us_per_sample"] == pytest.approx(30.0 + 1000 / 7000)


def test_a_pass_that_was_not_read_to_its_end_is_reckoned_from_its_start_and_its_rate() -> None:
    cut = measured("x", [])
    assert whole_pass_s(cut, 700) == 0.5 + 10.0
    assert whole_pass_s(measured("x", [(700, 0.0, 3.0)]), 700) == 3.0


def test_the_best_peer_is_the_fastest_one_and_never_the_bare_loop() -> None:
    each = {
        OURS: entry(900.0, 1000.0, 1100.0),
        LIMIT: entry(2000.0),
        "a": entry(300.0, 500.0, 550.0),
        "b": entry(9.0),
    }
    assert best_peer(each) == "a"
    assert ratio(each, "a") == pytest.approx(2.0)
    assert ratio(each, LIMIT) == pytest.approx(0.5)
    spread = ratio_spread(each, "a")  # of the rounds' ratios 3, 2 and 2
    assert spread is not None
    assert spread.to_list() == pytest.approx([2.0, 2.0, 2.5])
    alone = {OURS: each[OURS], LIMIT: each[LIMIT]}
    assert (best_peer(alone), ratio(alone, None), ratio_spread(alone, None)) == (None, None, None)
    assert ratio({"a": each["a"]}, "a") is None


def test_bytes_are_compared_with_bytes_and_views_with_whatever_is_fastest() -> None:
    each = {
        OURS: entry(1000.0), VIEWS: entry(4000.0), LIMIT: entry(5000.0), "litdata": entry(500.0), "spdl": entry(400.0),
        "spdl-view": entry(2000.0), UNCHECKED: entry(1500.0),
    }  # fmt: skip
    assert ours_of(each) == [OURS, VIEWS, UNCHECKED]
    assert (best_peer(each), best_peer(each, ours=VIEWS)) == ("litdata", "spdl-view")
    assert best_peer(each, ours=UNCHECKED) == "litdata"  # it makes bytes objects
    assert ratio(each, "litdata") == pytest.approx(2.0)
    assert ratio(each, "spdl-view", ours=VIEWS) == pytest.approx(2.0)
    spread = ratio_spread(each, LIMIT, ours=VIEWS)
    assert spread is not None
    assert spread.median == pytest.approx(0.8)
    assert ours_of({"litdata": entry(1.0)}) == [OURS]  # a line that says that it was not measured


def test_peers_far_behind_the_fastest_peer_are_left_out_unless_they_are_near_it_once_running() -> None:
    figures = {
        OURS: [{"first_pass_per_s": 1.0, "steady_per_s": 1.0}],
        LIMIT: [{"first_pass_per_s": 900.0, "steady_per_s": 900.0}],
        "litdata": [{"first_pass_per_s": 100.0, "steady_per_s": 100.0}],
        "grain": [{"first_pass_per_s": 10.0, "steady_per_s": 90.0}],
        "torch": [{"first_pass_per_s": 10.0, "steady_per_s": 12.5}],
        "spdl": [{"first_pass_per_s": 0.0, "steady_per_s": 0.0}],
        "datasets": [],
    }
    assert too_slow(figures, 5.0) == {"torch": pytest.approx(8.0), "spdl": float("inf")}
    assert too_slow({OURS: figures[OURS]}, 5.0) == {}
    # Views are another matter: bytes objects need not be as fast.
    views = {"spdl-view": [{"first_pass_per_s": 1e4, "steady_per_s": 1e4}], "litdata": figures["litdata"]}
    assert too_slow(views, 5.0) == {}
    views["spdl-view"][0].update(first_pass_per_s=9.0, steady_per_s=9.0)
    assert list(too_slow(views, 5.0)) == ["spdl-view"]


def test_the_consumer_reads_of_every_page_of_bytes_views_and_gathered_bytes() -> None:
    values = [b"x" * size for size in (0, 1, 4096, 10_000)]
    views = ByteViews(values)
    batches: list[dict[str, Any]] = [{"bin": values}, {"bin": views}, {"bin": views.gather()}]
    assert [batch_stats(batch) for batch in batches] == [(4, 14_097)] * 3
    assert len({checksum(batch) for batch in batches}) == 1
    assert batch_stats({"text": ["ab", "c"], "n": [1, None]}) == (2, 3 + 8)
    with tempfile.TemporaryFile() as file:
        file.truncate(64 << 12)
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        batch_stats({"bin": [memoryview(mapped)]})
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt > before  # it was mapped, and nothing more


def test_the_cost_of_a_resume_is_that_of_its_own_round() -> None:
    rounds = [
        {"fresh_s": 1.0, "resumed_s": 2.0},
        {"fresh_s": 4.0, "resumed_s": 4.0},
        {"fresh_s": 2.0, "resumed_s": 3.0},
    ]
    assert summarise(rounds)["resume_ratio"][1] == 1.5
    assert "resume_ratio" not in summarise([{"fresh_s": 1.0, "resumed_s": 2.0}, {}])


def test_ranks_are_as_fast_as_the_last_and_as_large_as_all() -> None:
    slow = measured("x", [(100, 0.1, 4.0)], seconds=4.0, samples_per_s=25.0, first_batch_s=1.0)
    fast = measured("x", [(100, 0.0, 2.0)], seconds=2.0, samples_per_s=50.0)
    both = combine_ranks([fast, slow])
    assert (both.samples, both.seconds, both.samples_per_s, both.first_batch_s) == (200, 4.0, 50.0, 1.0)
    assert both.passes == [Pass(samples=200, start_s=0.0, stop_s=4.0, complete=True, cpu_s=0.012)]
    assert (both.cpu_s, both.peak_rss_bytes) == (0.04, 4 << 20)
    assert combine_ranks([fast]) is fast


def test_the_matrix_has_ranks_and_delays_for_two_workloads_alone() -> None:
    cells = cells_of(FieldConfig())
    assert len(cells) == len(set(cells)) == 28
    assert Cell(workload="images", store="s3", ranks=1) in cells
    assert Cell(workload="images", store="local", ranks=2) not in cells
    assert Cell(workload="tokens", store="s3", ranks=4) in cells
    assert {one.workload for one in cells if one.store == "s3-tls"} == {"bytes-40k", "tokens"}
    small = quick(FieldConfig(against=("torch",)))
    assert [each.name for each in cells_of(small)] == ["bytes-40k · local · 1 rank", "tokens · local · 1 rank"]
    assert small.against == ("torch",)


def test_cells_of_other_settings_do_not_stand_beside_these() -> None:
    before = json.loads(json.dumps(FieldConfig(workloads=("tokens",)).to_dict()))
    assert other_settings(before, FieldConfig()) == []
    assert other_settings(before, FieldConfig(rounds=3)) == ["rounds 5 and now 3"]
    assert other_settings({}, FieldConfig())


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"workloads": ("video",)}, "--workloads video: unknown; the workloads are bytes-6k"),
        ({"against": ("dali",)}, "--against dali: unknown; the peers are webdataset"),
        ({"stores": ("gs",)}, "--stores gs"),
        ({"ranks": (0,)}, "--ranks 0"),
        ({"ranks": ()}, "at least one"),
        ({"rounds": 0}, "--rounds 0"),
        ({"scale": 0.0}, "--scale"),
        ({"delay_ms": -1.0}, "--delay-ms"),
        ({"drop_slower": 1.0}, "--drop-slower 1: must be above 1"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        FieldConfig(**wrong)


def test_the_command_refuses_what_contradicts_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["bench", "--quick", "--full"]) == 2
    assert run(["bench", "--quick", "--ranks", "2"]) == 2
    assert run(["bench", "--full", "--ranks", "two"]) == 2
    assert run(["bench", "--redraw", str(tmp_path / "none.json")]) == 2
    (tmp_path / "other.json").write_text("[]")
    assert run(["bench", "--redraw", str(tmp_path / "other.json")]) == 2
    told = capsys.readouterr().err
    for part in ("choose one", "take --full with --ranks", "such as 1,2,4", "cannot be read", "is no report"):
        assert part in told


def test_no_option_of_the_command_is_without_effect(capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--rounds", "9"], ["--seconds", "30"], ["--scale", "2"], ["--delay-ms", "5"], ["--no-resume"]):
        capsys.readouterr()
        assert run(["bench", "--quick", *option]) == 2
        assert f"take --full with {option[0]}" in capsys.readouterr().err
    assert run(["bench", "--full", "--stores", "s3-delay", "--ranks", "2", "--against", "none"]) == 2
    assert "nothing to measure" in capsys.readouterr().err


def test_a_record_gives_back_its_sample() -> None:
    fields: dict[str, Any] = {
        "jpg": {"kind": "bytes"},
        "text": {"kind": "text"},
        "ids": {"kind": "array", "dtype": "uint16", "shape": [3]},
        "label": {"kind": "array", "dtype": "int32", "shape": []},
        "v": {"kind": "vector", "dtype": "float64"},
    }
    codec = RecordCodec(fields)
    sample = {
        "jpg": b"\0\1", "text": "höhe", "ids": np.array([1, 2, 65535], np.uint16), "label": np.int32(-7),
        "v": np.array([0.5, 2.0]),
    }  # fmt: skip
    found = codec.decode(codec.encode(sample))
    assert (found["jpg"], found["text"], found["label"]) == (b"\0\1", "höhe", -7)
    assert found["ids"].tolist() == [1, 2, 65535]
    assert found["v"].tolist() == [0.5, 2.0]
    assert codec.decode(codec.encode(sample | {"jpg": None}))["jpg"] == b""
    with pytest.raises(ConfigError, match="extra"):
        RecordCodec({"extra": {"kind": "object"}})


def test_reasons_name_no_host_and_no_folder_of_this_machine() -> None:
    peer = PEERS["litdata"]
    offline = (
        "WARNING: Retrying after NewConnectionError: host='index.example', port=443\nERROR: No matching distribution"
    )
    assert reason_of(offline, peer).startswith("the package index cannot be reached")
    assert "example" not in reason_of(offline, peer)
    broken = (
        'Traceback\n  File "/home/x/y.py"\nImportError: /home/me/lib/x.so: undefined symbol, see https://h.example/a'
    )
    assert reason_of(broken, peer) == "ImportError: (a file): undefined symbol, see (a URL)"
    assert clean("took 3/4 of it, and/or ended") == "took 3/4 of it, and/or ended"


@pytest.mark.slow
def test_a_peer_that_cannot_be_installed_is_told_in_words_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in [name for name in os.environ if name.startswith("PIP_FIND_LINKS")]:
        monkeypatch.delenv(name)
    with pytest.raises(PeerUnavailableError, match="the package index cannot be reached, or lacks a package"):
        python_of(PEERS["spdl"], root=tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_a_peer_that_hangs_is_ended_and_one_that_crashes_says_why(tmp_path: Path) -> None:
    job = Job(contender="litdata", url="x", num_samples=1, scratch="")
    with pytest.raises(MeasurementError, match="litdata: took longer than 0 s"):
        run_job(replace(job, python=script(tmp_path / "hang", "exec sleep 600")), timeout_s=0.3)
    with pytest.raises(MeasurementError, match="exit code 3:\nboom"):
        run_job(replace(job, python=script(tmp_path / "crash", "echo boom; exit 3")))
    with pytest.raises(MeasurementError, match="was killed, as the kernel does where memory is short"):
        run_job(replace(job, python=script(tmp_path / "killed", "kill -9 $$")))


def test_a_rank_that_crashes_ends_those_that_wait_for_it(tmp_path: Path) -> None:
    body = 'if grep -q \'"rank": 1\'; then echo boom; exit 3; fi; echo $$ > "$0.pid"; exec sleep 600'
    job = Job(contender="litdata", url="x", num_samples=1, scratch="", world_size=2)
    started = time.monotonic()
    with pytest.raises(MeasurementError, match="exit code 3:\nboom"):
        run_job(replace(job, python=script(tmp_path / "rank", body)), timeout_s=300.0)
    assert time.monotonic() - started < 200
    waiting = tmp_path / "rank.pid"
    if waiting.exists() and waiting.read_text().strip():
        with pytest.raises(ProcessLookupError):
            os.kill(int(waiting.read_text()), 0)
