"""The page of a run: what it draws, and that it does with what runs leave behind."""

from __future__ import annotations

import json
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_trainers import add_up, make_trainer, rows

from penstock.trainer import Evaluation, World
from penstock.trainer.report.pages.charts import Chart, Line, draw, thin
from penstock.trainer.report.pages.page import render_page
from penstock.trainer.report.pages.run_log import RunLog, read_run
from penstock.trainer.report.pages.summary import describe_state, summarize
from penstock.trainer.report.pages.svg import short, ticks
from penstock.trainer.report.status.rank_status import RankStatus, status_path

NOW_S = 2000.0


def write(folder: Path, records: Iterable[dict[str, Any] | str]) -> RunLog:
    """A run of these records, one second apart; text is a line as it stands."""
    path = folder / "metrics.jsonl"
    lines = [
        one if isinstance(one, str) else json.dumps({"time": 1000.0 + number, **one})
        for number, one in enumerate(records)
    ]
    path.write_text("\n".join(lines))
    return read_run(path)


def steps(first: int, last: int, **values: Any) -> list[dict[str, Any]]:
    return [
        {"kind": "train", "step": step, "steps": 1, "seconds": 1.0, "loss": 1.0 / step, "seconds_fetch": 0.25, **values}
        for step in range(first, last + 1)
    ]


def start(step: int, ranks: int) -> dict[str, Any]:
    return {"kind": "start", "step": step, "world_size": ranks, "device": "cpu", "total_steps": 20}


def restarted(folder: Path) -> RunLog:
    """Killed at step 8, gone on from 6 with two ranks, killed at 9 and gone on from 4 with two."""
    return write(
        folder,
        [
            *(start(0, 4), *steps(1, 8), '{"kind": "train", "st'),
            *({"kind": "resume", "step": 6, "world_size": 2}, start(6, 2), *steps(7, 9)),
            {"kind": "checkpoint", "step": 8, "state": "written", "seconds": 0.5},
            *({"kind": "resume", "step": 4, "world_size": 2}, start(4, 2), *steps(5, 20)),
            {"kind": "end", "step": 20, "loss": 0.05, "seconds": 3.0},
        ],
    )


def page_of(run: RunLog) -> str:
    return render_page(run, title="run <7>", now_s=NOW_S)


def charts_of(page: str) -> dict[str, ET.Element]:
    """Each chart by its title; parsing shows that it is well-formed."""
    figures = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
    found = [ET.fromstring(figure) for figure in figures]
    return {str(figure.findtext("figcaption")): figure for figure in found}


def test_restarts_stand_with_their_ranks_and_the_steps_that_were_made_again(tmp_path: Path) -> None:
    run = restarted(tmp_path)
    assert run.damaged_lines == 1
    assert [(one.first_step, one.last_step, one.world_size) for one in run.attempts] == [
        (0, 8, 4),
        (6, 9, 2),
        (4, 20, 2),
    ]
    assert [one.repeated_from for one in run.attempts] == [4, 4, float("inf")]
    page = page_of(run)
    assert page.count("4→2 ranks") > 1
    assert "1 line was damaged and left out" in page
    loss = charts_of(page)["Loss"]
    assert len(loss.findall(".//path[@class='resume']")) == 2
    assert len(loss.findall(".//path[@class='save']")) == 1
    # Steps 5 to 8 of the first start and 7 to 9 of the second are pale; nothing that lasts is.
    pale = [path.get("d", "").count("L") + 1 for path in loss.findall(".//path[@class='line faint']") if path.get("d")]
    assert pale == [4, 3]
    assert "Training ended after step 20 of 20" in page


def test_a_rewind_is_marked_and_is_no_start_of_the_ranks(tmp_path: Path) -> None:
    """Back from step 9 to 6, then killed at 10 and gone on from 8 with two ranks of four."""
    back = {"kind": "rewind", "step": 9, "to_step": 6, "skipped_batches": 2, "why": "step 8: the loss <9> is above 4"}
    run = write(
        tmp_path,
        [
            *(start(0, 4), *steps(1, 9), {"kind": "note", "step": 9, "note": "gone"}, back, *steps(7, 10)),
            *({"kind": "resume", "step": 8, "world_size": 2}, start(8, 2), *steps(9, 20)),
        ],
    )
    spans = [(one.first_step, one.last_step, one.world_size, one.repeated_from) for one in run.attempts]
    assert spans == [(0, 9, 4, 6), (6, 10, 4, 8), (8, 20, 2, float("inf"))]
    assert [len(one.of("note")) for one in run.attempts] == [1, 0, 0]
    assert summarize(run, NOW_S)["attempts"][1]["rewound_from"] == 9
    page = page_of(run)
    marks = charts_of(page)["Loss"].findall(".//path[@class='resume']")
    assert len(marks) == 2
    assert page.count(">rewound<") > 1
    assert "4→2 ranks" in page
    assert "step 9: back to step 6, skipping 2 more batches; step 8: the loss &lt;9&gt; is above 4" in page
    assert "<dt>starts</dt><dd>2</dd>" in page
    assert "<dt>rewinds</dt><dd>1</dd>" in page


def test_what_a_start_notes_first_is_its_own_and_lengthens_no_start_before(tmp_path: Path) -> None:
    run = write(
        tmp_path,
        [
            *(start(0, 1), *steps(1, 2), {"kind": "note", "step": 2, "note": "old", "time": 1003.5}),
            *({"kind": "note", "step": 0, "note": text, "time": 5000.0} for text in ("new", "newer")),
            *({"kind": "resume", "step": 2, "world_size": 1, "time": 5001.0}, {**start(2, 1), "time": 5002.0}),
        ],
    )
    assert [[note["note"] for note in one.of("note")] for one in run.attempts] == [["old"], ["new", "newer"]]
    assert [one.ended_s for one in run.attempts] == [1003.5, 5002.0]


def test_the_save_that_training_waits_for_as_it_ends_counts_and_none_counts_twice(tmp_path: Path) -> None:
    def save(step: int, seconds: float) -> dict[str, Any]:
        return {"kind": "checkpoint", "step": step, "seconds": seconds}

    end = {"kind": "end", "step": 4, "seconds": 9.0}
    begun = [start(0, 1), save(0, 0.25), *steps(1, 4, seconds_checkpoint=0.25), save(4, 7.0)]
    assert write(tmp_path, [*begun, end]).phase_seconds()["checkpoint"] == 1.0 + 7.0
    rewind = {"kind": "rewind", "step": 4, "to_step": 2}
    assert write(tmp_path, [*begun, rewind, *steps(3, 4)]).phase_seconds()["checkpoint"] == 1.0


def test_a_failed_run_is_named_with_its_cause_first_and_has_no_charts_of_one_point(tmp_path: Path) -> None:
    saved = {"kind": "checkpoint", "step": 5, "seconds": 0.5}
    failure = {"kind": "failure", "step": 7, "error": "ValueError: label <11>\nof 10"}
    page = page_of(write(tmp_path, [start(0, 1), saved, *steps(5, 5), failure]))
    first = "The run failed after step 7 of 20: ValueError: label &lt;11&gt; of 10. The last save is of step 5."
    assert f"<header><h1>run &lt;7&gt;</h1><p>{first}</p></header>" in page
    assert "<h2>What failed</h2><pre>ValueError: label &lt;11&gt;\nof 10</pre>" in page
    assert not charts_of(page)
    assert "Charts are drawn from the second record on" in page
    assert ">failed</td>" in page


@pytest.mark.parametrize("known_by", ["the rank's own status", "the record", "the watchdog"])
def test_the_cause_of_a_failure_on_another_rank_is_told_by_whoever_knows_it(tmp_path: Path, known_by: str) -> None:
    cause = "rank 1 failed in forward (step=3): ValueError: no label"
    records: list[dict[str, Any]] = [start(0, 2), *steps(1, 3)]
    if known_by != "the watchdog":
        records.append({"kind": "failure", "step": 3, "error": f"StallError: {cause}"})
    if known_by == "the rank's own status":
        errors = [f"StallError: {cause}", "ValueError: no label"]
        for rank, error in enumerate(errors):
            write_status(tmp_path, rank=rank, world_size=2, state="failed", error=error, time=1010.0 + rank)
    (tmp_path / "stalls").mkdir()
    report = tmp_path / "stalls" / "stall-rank-0.txt"
    report.write_text(f"penstock watchdog on rank 0: training stops: {cause}\nThis rank: in reduce\n")
    told = "rank 1 on node-a: ValueError: no label" if known_by == "the rank's own status" else cause
    assert f"after step 3 of 20: {told}. Nothing was saved." in describe_state(write(tmp_path, records), NOW_S)
    os.utime(report, (900.0, 900.0))  # of an earlier start
    is_unknown = known_by == "the watchdog"
    assert ("No end is recorded" in describe_state(read_run(tmp_path / "metrics.jsonl"), NOW_S)) == is_unknown


def write_status(folder: Path, **values: Any) -> None:
    more: dict[str, Any] = {"host": "node-a", "pid": 7, "device": "cpu", "every_s": 1.0, "began_s": 1000.0}
    status = RankStatus(**{**more, **values})
    status_path(folder, status.rank).parent.mkdir(exist_ok=True)
    status_path(folder, status.rank).write_text(status.to_text())


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (
            {"stopped_by": "SIGTERM", "resumes_at": 12},
            "Stopped by SIGTERM after step 12 of 20; resumes at step 12.",
        ),
        (
            {"stopped_by": "SIGINT", "resumes_at": None},
            "Stopped by SIGINT after step 12 of 20; nothing is saved.",
        ),
        ({}, "Training ended after step 12 of 20."),
    ],
)
def test_a_run_that_a_signal_stopped_is_told_apart_from_one_that_ended(
    tmp_path: Path, end: dict[str, Any], told: str
) -> None:
    run = write(tmp_path, [start(0, 1), *steps(1, 12), {"kind": "end", "step": 12, **end}])
    assert re.sub(r", at \d{4}-[^;.]*UTC", "", describe_state(run, NOW_S)) == told
    assert (f">stopped by {end['stopped_by']}</td>" if end else ">ended</td>") in page_of(run)


def test_epochs_are_those_that_are_done_in_every_view(tmp_path: Path) -> None:
    trained = [start(0, 1), *steps(1, 20, epoch=19)]
    assert "<dt>epochs done</dt><dd>19</dd>" in page_of(write(tmp_path, trained))
    ended = [*trained, {"kind": "end", "step": 20, "epoch": 20}]
    assert "<dt>epochs done</dt><dd>20</dd>" in page_of(write(tmp_path, ended))
    of_older_release = [*trained, {"kind": "end", "step": 20}]
    assert "epochs done" not in page_of(write(tmp_path, of_older_release))  # 19 or 20: nothing tells


def test_the_axis_of_steps_is_named(tmp_path: Path) -> None:
    charts = charts_of(page_of(restarted(tmp_path)))
    assert charts
    assert all("step" in [text.text for text in chart.findall(".//text")] for chart in charts.values())


def test_times_add_up_and_what_no_phase_covers_is_told(tmp_path: Path) -> None:
    spent = write(tmp_path, [start(0, 1), *steps(1, 4, seconds_forward=0.5)]).phase_seconds()
    assert spent == {"forward": 2.0, "fetch": 1.0, "other": 1.0}


def test_a_run_in_progress_says_how_old_it_is(tmp_path: Path) -> None:
    run = write(tmp_path, [start(0, 1), *steps(1, 3), '{"kind": "tra'])
    told = describe_state(run, NOW_S)
    assert "At step 3 of 20. No end is recorded" in told
    assert "16 min 37 s before this page" in told
    assert "Loss" in charts_of(page_of(run))


@pytest.mark.parametrize("records", [[], ["{}"], ["\0\0\0", "[1, 2]", '{"kind": "train", "step": -1, "time": 3}']])
def test_a_run_without_records_is_told_in_words(tmp_path: Path, records: list[Any]) -> None:
    run = write(tmp_path, records)
    page = page_of(run)
    assert "The run has no records yet" in page
    assert run.damaged_lines == len(records)
    assert not charts_of(page)


def test_a_page_needs_nothing_else_and_what_was_recorded_is_no_markup(tmp_path: Path) -> None:
    note = "<script>alert(1)</script>"
    run = write(tmp_path, [start(0, 1), {"kind": "note", "step": 0, "note": note}, *steps(1, 3)])
    page = page_of(run)
    assert "&lt;script&gt;alert(1)" in page
    assert "run &lt;7&gt;" in page
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\(|https?://", page)


@pytest.mark.slow
def test_a_real_run_and_its_resume_are_drawn(world: World, tmp_path: Path) -> None:
    report = {"every": 1, "quiet": True, "flops_per_sample": 24.0, "peak_flops": 1e9}
    for last in (4, 8):
        evaluation = Evaluation(batches=rows(world, "pad"), metrics=add_up)
        options = {"evaluation": evaluation, "evaluate": {"every": 2}, "checkpoint": {"every_steps": 2}}
        with make_trainer(world, str(tmp_path), steps=last, report=report, **options) as trainer:
            trainer.train()
    run = read_run(tmp_path / "metrics.jsonl")
    assert run.damaged_lines == 0
    assert set(charts_of(page_of(run))) == {
        *("Loss", "Learning rate", "Samples/s", "MFU", "Milliseconds of a step, by phase"),
        *("Share of time waiting for data", "Memory of rank 0, GiB", "Norm of the gradients"),
        *("Evaluation: number", "Evaluation: square"),
    }
    told = summarize(run, NOW_S)
    assert json.loads(json.dumps(told)) == told
    assert [one["first_step"] for one in told["attempts"]] == [0, 4]
    assert told["ended"]


NUMBERS = st.floats(-1e30, 1e30) | st.none()


@given(st.lists(st.tuples(st.integers(0, 10**7), NUMBERS), max_size=50), st.booleans(), st.booleans())
def test_any_numbers_give_a_chart_inside_its_frame(points: list[Any], from_zero: bool, may_be_log: bool) -> None:
    line = Line(name="x", pieces=[sorted(points, key=lambda point: point[0])])
    last = max((step for step, _ in points), default=0)
    chart = Chart(title="x", lines=[line], last_step=last, format=short, from_zero=from_zero, may_be_log=may_be_log)
    picture = draw(chart)
    assert bool(picture) == (len({step for step, y in points if y is not None}) > 1)
    if picture:
        for path in ET.fromstring(picture).findall(".//path[@class='line']"):
            numbers = [float(one) for one in re.findall(r"[-\d.]+", path.get("d", ""))]
            assert all(0 <= x <= 360 for x in numbers[0::2])
            assert all(0 <= y <= 210 for y in numbers[1::2])


def test_thinning_keeps_spikes_and_gaps_and_bounds_the_page(tmp_path: Path) -> None:
    points: list[tuple[int, float | None]] = [(step, 1.0) for step in range(100_000)]
    points[50_001] = (50_001, 99.0)
    points[70_001] = (70_001, None)
    kept = thin(points)
    assert len(kept) < 1000
    assert (50_001, 99.0) in kept
    assert (70_001, None) in kept
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999.6, "1k"), (12345.0, "12.3k"), (3e-4, "3e-4"), (0.25, "0.25"), (989e12, "989T"), (-2000, "-2k")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e9))
def test_ticks_are_few_and_inside(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert len(found) <= 6
    slack = 1e-6 * (width + abs(low))
    assert all(low - slack <= tick <= low + width + slack for tick in found)
