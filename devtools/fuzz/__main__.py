"""Feeds damaged and made-up bytes to every parser, and fails where one crashes, hangs, allocates too much or raises
what is no error of ours.

atheris (`pip install 'penstock[fuzz]'`) makes the bytes, led by the lines of the parsers that they reach: with "cover"
it damages valid inputs, with "structured" hypothesis makes JSON, patterns and manifests of its bytes. Cases run in a
child within limits of time and memory; what kills the child is found too.

python -m devtools fuzz --minutes 10 --only parquet arrow-file --keep tests/devtools/fuzz_cases
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.benchmarks.machine import describe_machine, list_versions

from ..arguments import make_parser
from .engines import ENGINES, Outcome, engines_of, fault_of, run_engine, shrink_finding
from .limits import CASE_CPU_S, MEMORY_BYTES, name_of_case
from .targets import TARGETS


def main(arguments: list[str]) -> int:
    parser = make_parser(__doc__)
    names = "\n".join(f"  {name:14}{target.about}" for name, target in TARGETS.items())
    parser.epilog = f"targets:\n{names}"
    parser.add_argument("--minutes", type=float, default=1.0, help="of each target, shared by the engines (1)")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other bytes (0)")
    parser.add_argument("--only", nargs="+", default=list(TARGETS), choices=TARGETS, metavar="TARGET")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--keep", help="a folder for the shortest input of each fault, as TARGET/NAME")
    parser.add_argument("--results", help="a folder for fuzz.json, which rows are added to")
    parser.add_argument("--replay", metavar="FOLDER", help="run the inputs that were kept there instead")
    options = parser.parse_args(arguments)
    if options.replay:
        return replay(Path(options.replay))
    if importlib.util.find_spec("atheris") is None:
        parser.error("fuzzing needs atheris: pip install 'penstock[fuzz]'")
    rows: list[dict[str, Any]] = []
    for name in options.only:
        outcomes = []
        engines = engines_of(name, options.engines)
        for engine in engines:
            with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder:
                seconds = 60 * options.minutes / len(engines)
                outcomes.append(run_engine(engine, name, options.seed, seconds, Path(folder)))
        rows.append(report(name, outcomes, options.keep))
        if options.results:
            write_results(Path(options.results, "fuzz.json"), rows, arguments)
    return 1 if any(row["faults"] for row in rows) else 0


def replay(folder: Path) -> int:
    """Run inputs that were kept, and print the fault of each; return 0 where there is none."""
    faults = 0
    for path in sorted(folder.glob("*/*")):
        fault = fault_of(path.parent.name, path.read_bytes())
        print(f"{path.parent.name}/{path.name}: {fault or 'sound'}", flush=True)
        faults += fault is not None
    return 1 if faults else 0


def report(name: str, outcomes: list[Outcome], keep: str | None) -> dict[str, Any]:
    """Print the faults of one target, keep their inputs, and return its row of the results."""
    counts = ", ".join(f"{o.engine} {o.cases:,} in {o.seconds:.0f} s" for o in outcomes)
    faults: dict[str, list[bytes]] = {}
    for outcome in outcomes:
        for fault, inputs in outcome.found.items():
            faults.setdefault(fault, []).extend(inputs)
    print(f"{name}: {counts}; {len(faults) or 'no'} fault{'' if len(faults) == 1 else 's'}", flush=True)
    for fault, inputs in sorted(faults.items()):
        data = shrink_finding(name, fault, min(inputs, key=len))
        print(f"  {fault}: {len(data)} bytes, {data[:60]!r}{'...' if len(data) > 60 else ''}", flush=True)
        if keep:
            folder = Path(keep, name)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name_of_case(data)).write_bytes(data)
    return {
        "target": name,
        "engines": {o.engine: {"cases": o.cases, "seconds": round(o.seconds, 1)} for o in outcomes},
        "faults": sorted(faults),
    }


def write_results(path: Path, rows: list[dict[str, Any]], arguments: list[str]) -> None:
    """Add a run to the results, in place of what there was of it."""
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": []}
    if len(rows) > 1:
        known["runs"].pop()
    known["about"] = (
        f"Cases run by each engine, and what broke a parser: a crash, more than {CASE_CPU_S:g} s of CPU time, an "
        f"allocation beyond {MEMORY_BYTES >> 20} MiB, or an error that is not one of ours."
    )
    known["runs"].append(
        {
            "command": shlex.join(["python", "-m", "devtools.fuzz", *arguments]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "versions": list_versions(),
            "rows": rows,
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
