"""``penstock top``, as it is called."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from written_statuses import write

from penstock.cli import run
from penstock.cli.screen import Screen
from penstock.cli.top import Looker


def look(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> tuple[str, list[str]]:
    """(what is printed, in one line; the lines), none of which is wider than 80 columns."""
    assert run(["top", str(folder), "--once", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    return " ".join(" ".join(lines).split()), lines


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    folder = Path("run")
    folder.mkdir()
    line = {"kind": "train", "step": 120, "time": time.time(), "loss": 0.25, "eta_s": 3723.0}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return folder


def test_a_row_a_rank_says_what_it_does_and_a_sentence_what_to_change(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, 0)
    write(folder, 1, seconds={"fetch": 0.1, "forward": 7.0, "backward": 2.0}, phase="forward", phase_s=3.2)
    text, lines = look(capsys, folder)
    assert text.startswith("run step 120 of 500 0 epochs done 2 ranks 1,280 samples/s 100 ms a step loss 0.25 ETA 1:02")
    rows = [" ".join(line.split()) for line in lines]
    assert "waits waits batches" in rows
    assert "rank doing samples/s on data on ranks ready limited by memory" in rows
    assert "0 backward 640 1% 40% 12 training 1.0 GiB" in rows
    assert "1 forward 3.2 s 640 1% 0% 12 training 1.0 GiB" in rows
    assert "Rank 1 on node-a is slowest: 40 ms of 100 ms a step more than the others, in forward." in text


def test_what_the_loader_tunes_of_itself_stands_below(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    why = "fetch_threads 4 to 8: the training loop waited 43% of the time, for chunks"
    recent = {"fetch_threads": 8, "decode_threads": 1, "read_ahead_bytes": 64 << 20, "tuning": why}
    write(folder, 0, recent={**recent, "tuning": "at rest: the training loop is the limit"})
    write(folder, 1, recent=recent, seconds={"fetch": 5.0, "forward": 2.0})
    text, _ = look(capsys, folder)
    assert f"Loader of rank 1: 8 fetch threads, 1 decode thread, up to 64.0 MiB ahead. Tuning: {why}." in text


def test_silent_ranks_failed_ranks_and_those_on_other_disks_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, 0, 8)
    write(folder, 1, 8, time=time.time() - 45, every_s=0.01)
    text, _ = look(capsys, folder)
    assert "Rank 1 has been silent for 45 s, and the others wait: the process is stopped or dead, or its" in text
    assert "Ranks 2 to 7: not seen here." in text
    write(folder, 0, 8, state="failed", error="ValueError: \x1b[2Jbad labels")
    text, _ = look(capsys, folder)
    assert "The run failed. Rank 0 on node-a: ValueError: \\x1b[2Jbad labels" in text


def test_a_rank_whose_clock_is_late_is_not_silent_while_it_writes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    late = {"time": time.time() - 60, "began_s": 1.0}
    write(folder, 0)
    write(folder, 1, every_s=5.0, **late)
    glances: list[float] = []

    def write_another(seconds: float) -> None:
        glances.append(seconds)
        write(folder, 1, every_s=5.0, sequence=len(glances) // 3, **late)

    monkeypatch.setattr("penstock.cli.top.time.sleep", write_another)
    text, _ = look(capsys, folder)
    assert "been silent" not in text
    assert len(glances) == 3  # until there was a new file


@pytest.mark.parametrize("width", [60, 80, 120, 160, 200, 240])
def test_a_wide_terminal_is_used_for_what_the_time_goes_into_and_for_the_rate_over_time(
    folder: Path, width: int
) -> None:
    for rank in range(2):
        traffic = {"network_received_bytes_per_s": 3.0e6, "disk_read_bytes_per_s": 2.0e6}
        write(folder, rank, traffic=traffic, memory={"host_memory_bytes": 1 << 30})
    looker = Looker(folder)
    looker.look()
    view = looker.look()
    screen = Screen(width=width, file=io.StringIO(), force_terminal=False)
    for part in view.render(width):
        screen.print(part)
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    row = next(line for line in lines if line.lstrip().startswith("0  backward"))
    if width >= 160:
        assert len(row.rstrip()) > 0.6 * width
        assert "\u2588\u2588" in row  # its rate, twice the highest
    if width >= 120:
        bar = next(word for word in row.split() if word.startswith(("d", "fff")))
        shares = {letter: bar.count(letter) / len(bar) for letter in "dfb\u00b7"}
        assert shares == pytest.approx({"d": 0.01, "f": 0.3, "b": 0.6, "\u00b7": 0.09}, abs=0.06)
        assert any("f forward" in line and "b backward" in line for line in lines)


def test_many_columns_and_odd_names_fit_eighty_columns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = {"host_memory_bytes": 900e9, "device_memory_reserved_bytes": 79e9}
    for rank in range(3):
        host = f"a-very-long-name-of-a-host-{rank}.internal"
        rates = {"samples_per_s": 123456.7, "phase": "evaluation fetch", "phase_s": 12345.0}
        write(folder, rank, 3, host=host, memory=memory, gpu={"utilisation": 0.98}, **rates)
    text, lines = look(capsys, folder)
    assert "GPU" in text
    assert sum("evaluation fetch 206 min" in line for line in lines) == 3


@pytest.mark.parametrize(("resumes_at", "then"), [(120, "a new start resumes at step 120"), (None, "nothing is saved")])
def test_a_run_that_a_signal_stopped_says_which_and_where_it_goes_on(
    folder: Path, capsys: pytest.CaptureFixture[str], resumes_at: int | None, then: str
) -> None:
    write(folder, 0, state="stopped", stopped_by="a signal that another rank got", resumes_at=resumes_at)
    write(folder, 1, state="stopped", stopped_by="SIGTERM", resumes_at=resumes_at)
    text, _ = look(capsys, folder)
    assert f"Stopped by SIGTERM after step 120 of 500; {then}." in text
    assert text.count(" stopped ") == 2


def test_the_rank_that_failed_of_itself_is_named_and_the_last_save(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, 0, state="failed", error="StallError: rank 1 failed in forward: ValueError: no label", time=1.0)
    write(folder, 1, state="failed", error="ValueError: no label", time=2.0)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "checkpoint", "step": 100, "time": 1.0, "state": "written"}) + "\n")
    text, _ = look(capsys, folder)
    assert "The run failed. Rank 1 on node-a: ValueError: no label. The last save is of step 100." in text


def test_a_run_that_ended_or_was_killed_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, 0, time=time.time() - 100, every_s=0.01)
    write(folder, 1, time=time.time() - 90, every_s=0.01)
    text, _ = look(capsys, folder)
    assert "All ranks have been silent for 90 s: the run was killed, or its nodes or their disk hang." in text
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "end", "step": 500, "time": time.time(), "loss": 0.1}) + "\n")
    for rank in range(2):
        write(folder, rank, state="ended", time=time.time() - 90)
    text, _ = look(capsys, folder)
    assert "Training ended after step 500" in text
    assert run(["top", str(folder), "--timeline", "t.json"]) == 2
    assert "no rank trains now that could record a timeline. Training ended" in capsys.readouterr().err
    assert not Path("t.json").exists()


def test_what_never_was_a_run_is_an_error_and_one_without_statuses_is_told_of(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["top", "nothing"]) == 2
    assert "nothing is no folder or file; give the output_dir of a run" in capsys.readouterr().err
    assert run(["top", str(tmp_path)]) == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err
    text, _ = look(capsys, folder)
    assert "No rank writes its state here: report.status_s is off, they write elsewhere, or" in text
    assert "without --ray. At step 120." in text
    (folder / "metrics.jsonl").write_text("")
    assert "has no records yet" in look(capsys, folder)[0]


def test_json_has_all_that_the_ranks_say_and_the_judgement(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        write(folder, rank)
    assert run(["top", str(folder / "metrics.jsonl"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["running"], found["state"], found["survey"]["bound"]) == (True, "", "devices")
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    assert found["ranks"][0]["recent"]["ready_batches"] == 12
    assert found["train"]["loss"] == 0.25


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_none_are_null_in_json_and_stop_nobody(
    folder: Path, capsys: pytest.CaptureFixture[str], number: float
) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    for rank in range(2):
        write(folder, rank, recent={"packing_efficiency": number})
    line = {"kind": "train", "step": 120, "time": time.time(), "loss": number, "eta_s": number}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert run(["top", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found["train"]["loss"] is found["ranks"][1]["recent"]["packing_efficiency"] is None
    text, _ = look(capsys, folder)
    assert "ETA" not in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--timeline", "t.json", "--seconds", "61"], "--seconds 61 must be above 0 and at most 60"),
        (["--seconds", "3"], "--seconds without --timeline"),
        (["--timeline", "no/t.json"], "no/t.json or run/ranks cannot be written (No such file"),
    ],
)
def test_what_cannot_be_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    write(folder, 0, 1)
    assert run(["top", str(folder), *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_top_needs_no_torch(folder: Path) -> None:
    write(folder, 0, 1)
    code = f"import sys; from penstock.cli import run; run(['top', {str(folder)!r}]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
