"""Runs children one after another until the time of a target is over, and collects their findings and crashes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .child import CORPUS, Stage, keep_finding
from .limits import describe_exit
from .structured import strategies

# An engine whose children die this often will find no more.
_MOST_DEATHS = 40
_PATIENCE_S = 180.0
_NEEDED = {"cover": "atheris", "structured": "hypothesis"}
_CHILDREN = {"cover": "covered_child"}


@dataclass(slots=True)
class Outcome:
    """Results of one engine on one target: cases, seconds, and the inputs of each fault, shortest first."""

    engine: str
    cases: int = 0
    seconds: float = 0.0
    found: dict[str, list[bytes]] = field(default_factory=dict)


def engines_of(name: str, wanted: Sequence[str]) -> list[str]:
    """List the engines that can run a target: "cover" needs atheris, "structured" a grammar and hypothesis."""
    found = []
    for engine in wanted:
        module = _NEEDED.get(engine)
        if module is not None and importlib.util.find_spec(module) is None:
            continue
        if engine != "structured" or name in strategies():
            found.append(engine)
    return found


def run_engine(engine: str, name: str, seed: int, seconds: float, folder: Path) -> Outcome:
    """Have one engine make cases for a target. ``folder`` is an empty one."""
    outcome = Outcome(engine)
    (folder / "corpus").mkdir()
    stage = Stage(folder / "stage")
    environment = {
        **os.environ, CORPUS: str(folder / "corpus"), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2",
        "ARROW_DEFAULT_MEMORY_POOL": "system", "PYTHONHASHSEED": "0",
    }  # fmt: skip
    started = time.monotonic()
    for round_ in range(_MOST_DEATHS):
        left = seconds - (time.monotonic() - started)
        if left < 1 and round_:
            break
        module = f"devtools.fuzz.{_CHILDREN.get(engine, 'child')}"
        command = [sys.executable, "-m", module, engine, name, str(seed + round_), str(left), str(folder)]
        with (folder / "output").open("w") as output:
            try:
                code = subprocess.run(
                    command, check=False, env=environment, stdout=output, stderr=output, timeout=left + _PATIENCE_S
                ).returncode
            except subprocess.TimeoutExpired:
                raise RuntimeError(
                    f"{name}: the engine {engine} did not end; {folder / 'output'} may say why"
                ) from None
        number, running = stage.read()
        if code == 0:
            break
        if not running:
            raise RuntimeError(f"{name}: the engine {engine} failed:\n{(folder / 'output').read_text()[-2000:]}")
        keep_finding(folder, describe_exit(code, (folder / "log").read_text()), running)
        stage.end(number)
    outcome.cases, outcome.seconds = stage.read()[0], time.monotonic() - started
    for path in folder.glob("found-*.json"):
        finding = json.loads(path.read_text())
        outcome.found.setdefault(finding["fault"], []).append(bytes.fromhex(finding["input"]))
    for inputs in outcome.found.values():
        inputs.sort(key=len)
    return outcome
