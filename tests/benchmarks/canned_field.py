"""Canned results of the field."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

from measured_runs import measured

from penstock.benchmarks.field.summary import (
    figures_of,
    summarise,
)


def entry(*rates: float, version: str | None = None) -> dict[str, Any]:
    """A contender of a report whose rounds had these rates."""
    runs = (measured("x", [(100, 0.0, 100 / each), (100, 100 / each, 150 / each)]) for each in rates)
    rounds = [figures_of(run, 100) | {"fresh_s": 0.1, "resumed_s": 0.11} for run in runs]
    settings = {"workers": 2}
    return {
        "summary": summarise(rounds),
        "rounds": rounds,
        "settings": settings,
        "version": version,
        "bottleneck": None,
    }


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)
