"""Recordings of what loaders refuse, log and deliver, in JSON beside this file: what a redesign must leave as it is.

``refusals.json``: the error of each pair of arguments' values (``pairs.py``, ``choices.py``); ``audits.json``: what the
audit's logs hold (``audits.py``); ``mixture_of_one.json``: a mixture of one source against its data set alone
(``of_one.py``). ``test_recordings.py`` compares them. After a change that is meant, record again, all or some, and read
the difference; the arguments are the names of these files::

    cd tests/loader/recordings && PYTHONPATH=.. python record.py [NAME ...]
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import audits
import of_one
import pairs
from data import make_data

from penstock.loader import BadSampleWarning

HERE = Path(__file__).parent


def record_refusals(data: Path, scratch: Path) -> dict[str, Any]:
    bench = pairs.Bench(data, scratch)
    return {name: pairs.record(bench, family) for name, family in pairs.FAMILIES.items() if family.under is None}


def record_audits(data: Path, scratch: Path) -> dict[str, Any]:
    return {
        kind: {
            f"{world_size} ranks": audits.record(data, scratch / f"{kind} {world_size}", kind, world_size)
            for world_size in audits.WORLDS
        }
        for kind in audits.KINDS
    }


def record_mixture_of_one(data: Path, scratch: Path) -> dict[str, Any]:
    return {kind: of_one.record(data, kind) for kind in of_one.KINDS}


RECORDERS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "refusals": record_refusals,
    "audits": record_audits,
    "mixture_of_one": record_mixture_of_one,
}


def read_refusals(family: str) -> dict[str, Any]:
    found: dict[str, Any] = read("refusals")[pairs.FAMILIES[family].under or family]
    return found


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text())
    return found


def format_json(value: Any, depth: int = 0) -> str:
    """JSON with a line for each value that fits into one, as a difference of two is read."""
    line = json.dumps(value)
    if len(line) <= 120 or not isinstance(value, dict | list):
        return line
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {format_json(inner, depth + 1)}" for name, inner in value.items()]
    else:
        parts = [format_json(inner, depth + 1) for inner in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{' ' * (depth + 1)}" + f",\n{' ' * (depth + 1)}".join(parts) + f"\n{' ' * depth}{closing}"


def main() -> None:
    warnings.simplefilter("ignore", BadSampleWarning)
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder) / "data")
        for name in sys.argv[1:] or RECORDERS:
            scratch = Path(folder) / name
            scratch.mkdir()
            (HERE / f"{name}.json").write_text(format_json(RECORDERS[name](data, scratch)) + "\n")


if __name__ == "__main__":
    main()
