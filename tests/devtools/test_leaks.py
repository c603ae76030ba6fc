"""The leak hunt: short epochs and loaders that come and go leave nothing, and what is left is seen."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from devtools.leaks import Count, find_leaks

HELD = Count(memory_bytes=300 << 20, threads=9, descriptors=6, processes=0, shared_memory=0, temporary_files=0)


@pytest.mark.full
def test_short_epochs_and_loaders_that_come_and_go_leave_nothing(tmp_path: Path) -> None:
    cases = ["epochs-views", "cycles"]
    command = [sys.executable, "-m", "devtools.leaks", "--epochs", "200", "--cycles", "50"]
    done = subprocess.run(
        [*command, "--only", *cases, "--results", str(tmp_path)], stdout=subprocess.PIPE, text=True, check=False
    )
    assert [line.partition("; leaks: ")[2] for line in done.stdout.splitlines()] == ["none"] * len(cases)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("grown", "words"),
    [
        ({}, []),
        ({"memory_bytes": (300 << 20) + 4096}, []),
        ({"memory_bytes": 320 << 20}, ["memory_bytes 314,572,800 -> 335,544,320"]),
        ({"threads": 10, "descriptors": 7}, ["threads 9 -> 10", "descriptors 6 -> 7"]),
        ({"temporary_files": 1}, ["temporary_files 0 -> 1"]),
    ],
)
def test_what_grows_after_the_first_rounds_is_a_leak(grown: dict[str, int], words: list[str]) -> None:
    assert find_leaks([HELD] * 9 + [replace(HELD, **grown)]) == words
