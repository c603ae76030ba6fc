"""``penstock report``, as it is called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import run

RECORDS = [
    {"kind": "start", "step": 0, "time": 1.0, "world_size": 2, "total_steps": 2},
    {"kind": "train", "step": 1, "time": 2.0, "loss": 0.5},
    {"kind": "train", "step": 2, "time": 3.0, "loss": None},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run 7"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in RECORDS) + '{"ki')
    (folder / "stalls").mkdir()
    (folder / "stalls" / "stall-rank-1.txt").write_text("penstock watchdog on rank 1: training stops\nThis rank: ...\n")
    return folder


def test_a_run_becomes_a_page_beside_its_records(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "<title>run 7 " in page
    assert "penstock watchdog on rank 1: training stops" in page
    out = capsys.readouterr().out
    assert "At step 2 of 2. No end is recorded" in " ".join(out.split())
    assert "1 damaged line" in out


@pytest.mark.slow
def test_a_folder_whose_name_is_not_unicode_is_shown_with_its_bytes_written_out(folder: Path) -> None:
    odd = folder.rename(folder.with_name("\udcff"))
    command = [sys.executable, "-m", "penstock.cli", "report", str(odd)]
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}  # as in most locales
    done = subprocess.run(command, env=strict, capture_output=True, text=True, check=True)
    assert "\\udcff/report.html" in done.stdout
    assert "<title>\\udcff " in (odd / "report.html").read_text()


def test_json_prints_what_the_page_tells_and_output_writes_it_elsewhere(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(folder / "metrics.jsonl"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["ended"], found["attempts"][0]["world_size"]) == (2, False, 2)
    assert not (folder / "report.html").exists()
    assert run(["report", str(folder), "--output", str(tmp_path / "a.html")]) == 0
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")


def test_what_is_no_run_and_what_cannot_be_written_are_errors_in_words(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(tmp_path / "nothing")]) == 2
    assert "is no folder or file; give the output_dir of a run" in capsys.readouterr().err
    assert run(["report", str(tmp_path)]) == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err
    (tmp_path / "notes.txt").write_text("no run\n{}\n")
    for command in ("report", "top"):
        assert run([command, str(tmp_path / "notes.txt")]) == 2
        assert "notes.txt holds no records of a run; give the output_dir" in capsys.readouterr().err
    (folder / "metrics.jsonl").rename(folder / "copy.jsonl")
    assert run(["top", str(folder / "copy.jsonl")]) == 2
    assert "copy.jsonl is a file; give the output_dir" in capsys.readouterr().err
    assert run(["report", str(folder / "copy.jsonl"), "--json"]) == 0
    (folder / "copy.jsonl").rename(folder / "metrics.jsonl")
    capsys.readouterr()
    assert not (tmp_path / "report.html").exists()
    assert run(["report", str(folder), "--output", str(tmp_path / "no" / "such.html")]) == 2
    assert "give --output FILE" in capsys.readouterr().err


@pytest.mark.slow
def test_a_report_needs_no_torch(folder: Path) -> None:
    code = f"import sys; from penstock.cli import run; run(['report', {str(folder)!r}]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
