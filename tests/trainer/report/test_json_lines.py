"""``metrics.jsonl`` outlives a full disk and a cut line."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from small_trainers import make_trainer

from penstock.trainer import World
from penstock.trainer.report.json_lines import JsonLines


class Notes:
    """Keeps the notes of a run, and fills the disk between two steps of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._write = os.write
        self.notes: list[str] = []

    def record(self, kind: str, step: int, values: Any) -> None:
        if kind == "note":
            self.notes.append(values["note"])
        if kind == "train" and step == 1:
            self._patch.setattr(os, "write", self.write_a_part)
        if kind == "train" and step == 4:
            self._patch.setattr(os, "write", self._write)

    def write_a_part(self, fd: int, data: Any) -> int:
        if not bytes(data).startswith(b'{"kind"'):
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._write(fd, data[:7])

    def close(self) -> None: ...


def test_records_go_on_when_a_full_disk_has_room_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = Notes(monkeypatch)
    with make_trainer(world, str(tmp_path), steps=6) as trainer:
        # The disk is full from step 1's record on, before the file gets it, until step 4's.
        trainer._recorder._observers = [watching, *trainer._recorder._observers]
        trainer.train()
    whole = []
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        try:
            whole.append(json.loads(line))
        except ValueError:
            assert line == '{"kind"'
    assert [one["step"] for one in whole if one["kind"] == "train"] == [4, 5, 6]
    # Steps 1 to 3, and the note of the failure itself.
    assert [one["note"] for one in whole if "records are missing here" in one.get("note", "")] == [
        "4 records are missing here: they could not be written"
    ]
    assert [note for note in watching.notes if "metrics.jsonl cannot be written" in note] == [
        f"{tmp_path}/metrics.jsonl cannot be written (No space left on device); the next record tries again"
    ]


def test_a_line_cut_by_a_kill_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "tra')
    lines = JsonLines(path)
    lines.record("train", 2, {"loss": 1.0})
    lines.close()
    found = path.read_text().splitlines()
    assert found[1] == '{"kind": "tra'
    assert json.loads(found[2])["step"] == 2


def hold(path: Path, ready: Any, may_end: Any) -> None:
    lines = JsonLines(path)
    lines.record("train", 1, {"loss": 1.0})
    ready.set()
    may_end.wait(60)
    lines.close()


@pytest.mark.slow
def test_two_processes_that_write_to_one_file_are_told_and_those_after_another_are_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    context = multiprocessing.get_context("spawn")
    ready, may_end = context.Event(), context.Event()
    other = context.Process(target=hold, args=(path, ready, may_end))
    other.start()
    assert ready.wait(60)
    for turn in range(2):
        lines = JsonLines(path)
        for step in (7, 8):
            lines.record("train", step, {"loss": 1.0})
        lines.close()
        if turn == 0:
            may_end.set()
            other.join()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["kind"], one["step"]) for one in records] == [
        ("train", 1),
        ("note", 7),
        *[("train", step) for step in (7, 8, 7, 8)],
    ]
    assert records[1]["note"].endswith("give each run an output_dir of its own")
