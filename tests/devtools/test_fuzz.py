"""The fuzzing bench: what it found is kept and mended, and it sees each kind of fault."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from devtools.fuzz import limits
from devtools.fuzz.child import make_entry
from devtools.fuzz.engines import fault_of, shrink
from devtools.fuzz.targets import TARGETS, Target
from penstock.storage import PenstockError

KEPT = Path(__file__).parent / "fuzz_cases"


@pytest.mark.slow
def test_inputs_that_once_broke_a_parser_are_read_or_refused() -> None:
    command = [sys.executable, "-m", "devtools.fuzz", "--replay", str(KEPT)]
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    found = done.stdout.splitlines()
    assert len(found) == sum(path.is_file() for path in KEPT.rglob("*"))
    assert [line for line in found if not line.endswith(": sound")] == []
    assert done.returncode == 0


@pytest.mark.full
def test_a_short_run_ends_and_counts_its_cases(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="no atheris here: pip install 'penstock[fuzz]'")
    command = [sys.executable, "-m", "devtools.fuzz", "--minutes", "0.05", "--only", "audit"]
    done = subprocess.run([*command, "--results", str(tmp_path)], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("audit: structured ")
    assert ", cover " in done.stdout
    assert "; no faults" in done.stdout
    assert (tmp_path / "fuzz.json").exists()


def crash(data: bytes) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(data: bytes) -> None:
    while True:
        pass


def take_memory(data: bytes) -> None:
    try:
        bytearray(limits.MEMORY_BYTES + (64 << 20))
    except MemoryError as exc:
        raise PenstockError("no memory") from exc


def index_wrongly(data: bytes) -> None:
    [][len(data)]


def refuse(data: bytes) -> None:
    raise PenstockError("refused")


@pytest.mark.parametrize(
    ("run", "fault"),
    [
        (crash, "crash (SIGSEGV)"),
        (hang, "hang"),
        (take_memory, "allocation beyond"),
        (index_wrongly, "IndexError"),
        (refuse, None),
    ],
)
def test_each_kind_of_fault_is_seen(monkeypatch: pytest.MonkeyPatch, run: Any, fault: str | None) -> None:
    monkeypatch.setattr(limits, "CASE_CPU_S", 0.2)
    monkeypatch.setitem(TARGETS, "made", Target(about="", run=run, seeds=list))
    found = fault_of("made", b"data")
    assert found is None if fault is None else str(found).startswith(fault)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jsonl", "manifest", "pattern"])
def test_the_fuzzers_bytes_make_inputs_by_the_grammar_and_the_same_ones_again(name: str) -> None:
    made: list[bytes] = []
    entry = make_entry("structured", name, made.append)
    for seed in (0, 0):
        draw = random.Random(seed)
        for _ in range(64):
            entry(draw.randbytes(1024))
    half = len(made) // 2
    assert made[:half] == made[half:]
    assert len(set(made)) > 5


def test_an_input_shrinks_to_what_matters() -> None:
    assert shrink(bytes(300) + b"needle" + bytes(200), lambda data: b"needle" in data, 20) == b"needle"
