"""The bench of faults finds what is lost, repeated or wrong, and a few of its cases hold their limits."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devtools.faults.__main__ import choose_cases, main
from devtools.faults.account import Account, Attempt, account
from devtools.faults.bench import Bench, _list_failures
from devtools.faults.case import Case, Outcome
from devtools.faults.cases import CASES
from devtools.faults.faults import Corrupt, Delay
from devtools.faults.network_cases import nothing
from devtools.faults.page import write_page
from devtools.faults.proxy import Request
from devtools.faults.soak import Soak, parse_seconds
from devtools.faults.stage import Stage
from penstock.loader import ConfigError

PLAN = {0: [[4, 1], [0, 3], [2]], 1: [[2, 0], [1, 4], [3]]}
STRONG = ["wrong-bytes", "kill-rank", "cache-swapped"]


def batch(epoch: int, stop: int, *ids: int, wrong: tuple[int, ...] = (), t: float = 0.0) -> dict[str, Any]:
    return {"t": t, "kind": "batch", "epoch": epoch, "stop": stop, "ids": list(ids), "wrong": list(wrong)}


def account_for(*attempts: Attempt) -> Account:
    return account(attempts, lambda epoch: PLAN[epoch])


TWO_RANKS = Attempt(
    start=(0, 0),
    ranks=[[batch(0, 2, 4), batch(0, 4, 0), batch(0, 5, 2)], [batch(0, 2, 1), batch(0, 4, 3), batch(0, 5)]],
)


def test_what_is_as_planned_is_exact_on_any_number_of_ranks() -> None:
    found = account_for(TWO_RANKS)
    assert found == Account(delivered=5, missing=0, repeated=0, wrong=0, misplaced=0, replayed=0)
    assert found.is_exact


@pytest.mark.parametrize(
    ("place", "line", "expected"),
    [
        ((0, 0), batch(0, 2), {"missing": 1, "misplaced": 1}),
        ((0, 0), batch(0, 2, 4, 4), {"repeated": 1, "misplaced": 1}),
        ((0, 0), batch(0, 2, 3), {"missing": 1, "repeated": 1, "misplaced": 1}),
        ((0, 0), batch(0, 2, 4, wrong=(4,)), {"wrong": 1}),
        ((0, 0), batch(0, 3, 4), {"missing": 1, "misplaced": 2}),
    ],
)
def test_whatever_is_not_as_planned_is_counted(
    place: tuple[int, int], line: dict[str, Any], expected: dict[str, int]
) -> None:
    ranks = [list(lines) for lines in TWO_RANKS.ranks]
    ranks[place[0]][place[1]] = line
    found = asdict(account_for(replace(TWO_RANKS, ranks=ranks)))
    assert {name: found[name] for name in ("missing", "repeated", "wrong", "misplaced") if found[name]} == expected


def test_batches_that_a_later_start_gives_again_are_replayed_not_repeated() -> None:
    ahead = replace(TWO_RANKS, ranks=[TWO_RANKS.ranks[0][:2], TWO_RANKS.ranks[1][:1]])
    assert ahead.reached == (0, 2)
    later = Attempt(start=(0, 2), ranks=[[batch(0, 4, 3, 0), batch(0, 5, 2), batch(1, 2, 0, 2)]])
    assert account_for(ahead, later) == Account(delivered=7, missing=0, repeated=0, wrong=0, misplaced=0, replayed=1)


def test_limits_that_do_not_hold_fail_a_case() -> None:
    case = Case(name="x", group="network", fault="", sees="", inject=nothing, errors=("ChecksumError",), names="a.tar")
    good = Outcome(
        name="x", group="network", fault="", sees="", delivered=1, ended="error", error="ChecksumError",
        message="a.tar: wrong", error_s=1.0,
    )  # fmt: skip
    assert list(_list_failures(case, good)) == []
    for worse in (
        {"missing": 1}, {"repeated": 1}, {"wrong": 1}, {"misplaced": 1}, {"delivered": 0}, {"ended": "finished"},
        {"error": "KeyError"}, {"message": "wrong"}, {"error_s": 31.0}, {"gap_s": 31.0}, {"threads_left": 1},
        {"descriptors_left": 1},
    ):  # fmt: skip
        assert len(list(_list_failures(case, replace(good, **worse)))) == 1, worse


def test_cases_are_chosen_by_a_part_of_their_names(capsys, monkeypatch) -> None:
    assert {case.name for case in choose_cases(["drip"])} == {"none", "drip", "drip-at-first", "drip-unhedged"}
    assert len({case.name for case in CASES}) == len(CASES)
    with pytest.raises(ConfigError, match="--only drops: no case has this in its name; --list"):
        choose_cases(["drops"])
    monkeypatch.setattr(sys, "argv", ["faults", "--list", "--only", "outage"])
    assert main() == 0
    assert "connections reset and refused for 20 s" in capsys.readouterr().out


def test_lengths_of_time_are_read() -> None:
    assert [parse_seconds(text) for text in ("90", "90s", "30m", "2h")] == [90, 90, 1800, 7200]


def test_the_page_holds_every_case_and_what_failed(tmp_path: Path) -> None:
    rows = [asdict(Outcome(name=case.name, group=case.group, fault=case.fault, sees=case.sees)) for case in CASES]
    rows[1]["failures"] = ["7 samples missing"]
    about = {"command": "c", "date": "2026-01-01", "machine": {"cpu": "x", "cores": 1, "load_1m": 0.0}}
    (tmp_path / "faults.json").write_text(json.dumps({"cases": {**about, "rows": rows}}))
    write_page(tmp_path / "faults.json", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert all(f"| {case.fault} |" in text for case in CASES if case.group != "none")
    assert "**7 samples missing**" in text
    with pytest.raises(ConfigError, match="no results; make them with --results"):
        write_page(tmp_path / "none.json", tmp_path / "page.md")


def test_the_page_is_what_the_kept_results_make(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    write_page(root / "benchmarks" / "results" / "faults.json", tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == (root / "docs" / "RELIABILITY.md").read_text()


@pytest.fixture(scope="module")
def bench(s3_endpoint: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(s3_endpoint, tmp_path_factory.mktemp("stages"), seed=5)


@pytest.mark.s3
@pytest.mark.parametrize("name", [*STRONG, pytest.param("drip-unhedged", marks=pytest.mark.full)])
def test_a_job_under_faults_gives_each_sample_once_and_as_it_was(bench: Bench, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    outcome = bench.play(case)
    assert outcome.failures == []
    assert outcome.delivered >= 3000


@pytest.mark.full
@pytest.mark.s3
def test_a_short_soak_of_random_faults_and_kills_is_exact(bench: Bench) -> None:
    report = Soak(bench, ranks=2, seconds=12, seed=3, deadly_every_s=(3.0, 5.0)).run(quiet=True)
    assert report.failures == []
    assert report.delivered > 0
    assert report.faults


def test_a_soak_gives_no_shard_wrong_bytes_twice_in_a_row() -> None:
    soak = Soak(None, ranks=1, seconds=1, seed=1)  # type: ignore[arg-type]
    wrong = Corrupt(after_bytes=1)
    asked = [("/b/x.tar?sign=1", 0.0), ("/b/x.tar?sign=2", 59.0), ("/b/y.tar", 59.0), ("/b/x.tar", 60.0)]
    given = [soak._survivable(wrong, Request("GET", path, {}), at) for path, at in asked]
    assert given == [wrong, None, wrong, wrong]
    late = Delay(seconds=1)
    assert [soak._survivable(late, Request("GET", "/b/x.tar", {}), at) for at in (60.0, 61.0)] == [late, late]


@pytest.mark.s3
def test_a_soak_whose_job_never_begins_reports_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Stage.start
    monkeypatch.setattr(Stage, "start", lambda stage, ranks, **how: start(stage, ranks, prefix=("false",), **how))
    report = Soak(bench, ranks=2, seconds=0.5, seed=3, deadly_every_s=(0.1, 0.1)).run(quiet=True)
    assert any("ended before it began" in failure or "ended by itself" in failure for failure in report.failures)
    assert report.delivered == 0


@pytest.mark.s3
def test_planned_epochs_hold_every_sample_once(bench: Bench) -> None:
    for epoch in (0, 5):
        assert np.sort(np.concatenate(bench.plan(bench.url)(epoch))).tolist() == list(range(3000))
