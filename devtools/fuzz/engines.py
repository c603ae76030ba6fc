"""Runs atheris on a target until its time is over, judges what it found, and makes that smaller."""

from __future__ import annotations

import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .child import make_entry
from .limits import describe_exit, judge, limit_process, time_limit
from .structured import strategies
from .targets import TARGETS

ENGINES = ("structured", "cover")
# An engine whose children die this often will find no more.
_MOST_DEATHS = 40
_PATIENCE_S = 180.0
_FIRST_BYTES = 1024  # of inputs that hypothesis makes bytes of


@dataclass(slots=True)
class Outcome:
    """Results of one engine on one target: cases, seconds, and the inputs of each fault, shortest first."""

    engine: str
    cases: int = 0
    seconds: float = 0.0
    found: dict[str, list[bytes]] = field(default_factory=dict)


def engines_of(name: str, wanted: Sequence[str]) -> list[str]:
    """List the engines that can run a target: "structured" needs a grammar."""
    return [engine for engine in wanted if engine != "structured" or name in strategies()]


def run_engine(engine: str, name: str, seed: int, seconds: float, folder: Path) -> Outcome:
    """Have one engine make cases for a target. ``folder`` is an empty one."""
    outcome = Outcome(engine)
    _write_corpus(engine, name, seed, folder)
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "ARROW_DEFAULT_MEMORY_POOL": "system",
        "PYTHONHASHSEED": "0",
    }  # fmt: skip
    started, deaths = time.monotonic(), 0
    while deaths < _MOST_DEATHS and (left := seconds - (time.monotonic() - started)) > (deaths > 0):
        given = (engine, name, str(seed + deaths), str(left), str(folder))
        command = [sys.executable, "-m", "devtools.fuzz.child", *given]
        done = subprocess.run(
            command, check=False, env=environment, capture_output=True, text=True, errors="replace",
            timeout=left + _PATIENCE_S,
        )  # fmt: skip
        outcome.cases += sum(map(int, re.findall(r"stat::number_of_executed_units: +(\d+)", done.stderr)))
        if done.returncode == 0:
            break
        deaths += 1
        if len(_lethal(folder)) < deaths:
            raise RuntimeError(f"{name}: the engine {engine} failed:\n{done.stderr[-2000:]}")
    outcome.seconds = time.monotonic() - started
    inputs = [path.read_bytes() for path in folder.glob("found-*")]
    entry = make_entry(engine, name, inputs.append)
    for path in _lethal(folder):
        entry(path.read_bytes())
    for data in sorted(inputs, key=len):
        fault = fault_of(name, data)
        if fault is not None:
            outcome.found.setdefault(fault, []).append(data)
    return outcome


def _lethal(folder: Path) -> list[Path]:
    """List the inputs that ended a child, or took long."""
    return [path for path in folder.glob("*-*") if path.name.startswith(("crash-", "timeout-", "oom-"))]


def _write_corpus(engine: str, name: str, seed: int, folder: Path) -> None:
    draw, target = random.Random(seed), TARGETS[name]
    inputs = target.seeds() if engine == "cover" else [draw.randbytes(_FIRST_BYTES) for _ in range(16)]
    (folder / "corpus").mkdir()
    for number, data in enumerate(inputs):
        (folder / "corpus" / f"seed-{number}").write_bytes(data)
    words = (*target.words, b"0") if engine == "cover" else (b"0",)  # libFuzzer takes no empty list
    lines = ['"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in words if len(word) < 64]
    (folder / "words").write_text("".join(lines))


def fault_of(name: str, data: bytes) -> str | None:
    """Find a target's fault on an input, tried in a forked process; None for nothing."""
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder, "answer"), Path(folder, "log")
        child = os.fork()
        if child == 0:  # the first case imports modules, which is no allocation of its own
            try:
                for seed in TARGETS[name].seeds():
                    judge(TARGETS[name].run, seed)
                with log.open("w") as file:
                    limit_process(file)
                    with time_limit():
                        answer.write_text(judge(TARGETS[name].run, data) or "")
            finally:
                sys.stdout = sys.stderr = None
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            return describe_exit(-os.WTERMSIG(status), log.read_text())
        return (answer.read_text() if answer.exists() else "the case ended its process") or None


def shrink(data: bytes, fails: Callable[[bytes], bool], seconds: float) -> bytes:
    """Shrink an input within about ``seconds``, as long as it ``fails``: leave parts out, ever smaller ones."""
    until, size = time.monotonic() + seconds, max(1, len(data) // 2)
    while size and time.monotonic() < until:
        at = 0
        while at < len(data) and time.monotonic() < until:
            shorter = data[:at] + data[at + size :]
            if shorter != data and fails(shorter):
                data = shorter
            else:
                at += size
        size //= 2
    return data


def shrink_finding(name: str, fault: str, data: bytes, seconds: float = 20.0) -> bytes:
    """Shrink the input of a target's fault."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return shrink(data, lambda smaller: fault_of(name, smaller) == fault, seconds)
