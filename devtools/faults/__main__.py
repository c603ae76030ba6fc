"""Inject faults between the loader and a real S3 server, and measure what is lost, repeated or wrong, and for how long.

python -m devtools faults --list          the cases, and each fault
python -m devtools faults                 all of them, some 25 minutes
python -m devtools faults --only drip kill-rank cache
                                        those whose names hold one of these
python -m devtools faults --results benchmarks/results
                                        and keep what was found in faults.json
python -m devtools faults --soak 30m --ranks 3 --seed 7
                                        random faults for as long as you like
python -m devtools faults --page docs/RELIABILITY.md
                                        write the page from benchmarks/results

Each case starts real processes, which read a made-up data set through a proxy
and check the content of every sample against a digest. Batches are compared
with the plan. Where a fault ends a job, it is started again without the fault,
and both parts together must be exact.

The exit code is 1 if a sample was missing, repeated or wrong, or if a limit did
not hold (seconds without a batch, seconds to the error, the error's class and
words, threads and descriptors after close); 2 if it could not run; else 0.

It needs an S3 server: the one that PENSTOCK_TEST_S3_ENDPOINT, AWS_ACCESS_KEY_ID
and AWS_SECRET_ACCESS_KEY name, or Ceph's gateway, which
`tests/servers/s3_server.sh install` installs. Cases that mount a small disk or
limit a cgroup need root, and are skipped with a reason elsewhere; so are those
between hosts (--only host), which are network namespaces, and need no server.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import textwrap
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.benchmarks.machine import describe_machine, list_versions
from penstock.loader.errors import ConfigError
from penstock.loader.progress import show_progress

from .bench import open_bench
from .case import Case, Outcome
from .cases import CASES
from .hosts.scene import HostCase, play_on_hosts
from .page import write_page
from .soak import Soak, parse_seconds

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_HEAD = f"{'case':<22}{'ended':<10}{'miss':>5}{'rep':>4}{'wrong':>6}{'gap s':>7}{'error s':>8}{'speed':>7}"


def format_row(outcome: Outcome) -> str:
    """One line of the table, within 80 columns."""
    if outcome.skipped:
        return f"{outcome.name:<22}skipped: {outcome.skipped}"
    error_s = "" if outcome.error_s is None else f"{outcome.error_s:.1f}"
    speed = "" if outcome.share_of_speed is None else f"{outcome.share_of_speed:.2f}"
    row = (
        f"{outcome.name:<22}{outcome.ended:<10}{outcome.missing:>5}{outcome.repeated:>4}{outcome.wrong:>6}"
        f"{outcome.gap_s:>7.1f}{error_s:>8}{speed:>7}  {'FAILED' if outcome.failures else 'ok'}"
    )
    return "\n".join([row, *(f"    {failure}" for failure in outcome.failures)])


def choose_cases(names: list[str] | None) -> list[Case]:
    """The cases whose names hold one of ``names``, and those without a fault, which set the speed; None for all.

    Raises:
        ConfigError: a name is in no case's.
    """
    if names is None:
        return CASES
    unknown = [name for name in names if not any(name in case.name for case in CASES)]
    if unknown:
        raise ConfigError(f"--only {' '.join(unknown)}: no case has this in its name; --list shows all")
    chosen = [case for case in CASES if any(name in case.name for name in names)]
    usual = {case.usual for case in chosen}
    return [case for case in CASES if case in chosen or case.name in usual]


def run_cases(cases: list[Case], folder: Path, seed: int, *, as_json: bool) -> list[Outcome]:
    outcomes = []
    needs_server = any(not isinstance(case, HostCase) for case in cases)
    with (
        open_bench(folder, seed) if needs_server else nullcontext() as bench,
        show_progress("cases", len(cases), unit="cases") as advance,
    ):
        if not as_json:
            print(_HEAD)
        for case in cases:
            if isinstance(case, HostCase):
                outcomes.append(play_on_hosts(case, folder))
            else:
                assert bench is not None
                outcomes.append(bench.play(case))
            if not as_json:
                print(format_row(outcomes[-1]), flush=True)
            advance(1)
    return outcomes


def name_command(given: argparse.Namespace) -> str:
    """The command as others may repeat it: without folders of this machine."""
    words = ["python -m devtools faults"]
    words += ["--only", *given.only] if given.only and given.soak is None else []
    words += [] if given.soak is None else [f"--soak {given.soak:g}s --ranks {given.ranks}"]
    return " ".join([*words, f"--seed {given.seed}"])


def keep(path: Path, command: str, **found: Any) -> None:
    """Write a result with the command, date and machine; what other commands found stays.

    A run of a few cases takes their rows' place among those of a larger run, and is named in ``also``.
    """
    result = json.loads(path.read_text()) if path.exists() else {}
    about = {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": list_versions(),
    }
    for name, value in found.items():
        result[name] = _merge_rows(result.get("cases"), about, value) if name == "cases" else about | value
    path.write_text(json.dumps(result, indent=1) + "\n")


def _merge_rows(known: dict[str, Any] | None, about: dict[str, Any], fresh: list[dict[str, Any]]) -> dict[str, Any]:
    place = {case.name: number for number, case in enumerate(CASES)}
    names = {row["name"] for row in fresh}
    kept = [row for row in (known or {}).get("rows", []) if row["name"] not in names and row["name"] in place]
    rows = sorted(kept + fresh, key=lambda row: place[row["name"]])
    if known is None or len(kept) < len(fresh):
        return about | {"also": [], "rows": rows}
    run = {name: about[name] for name in ("command", "date", "machine")}
    return known | {"also": [*known.get("also", []), run], "rows": rows}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m devtools faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="list the cases, and do nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="play the cases whose names hold one of these")
    parser.add_argument("--soak", type=parse_seconds, metavar="TIME", help="random faults for so long: 90s, 30m, 2h")
    parser.add_argument("--ranks", type=int, default=3, help="ranks of the soak (default: 3)")
    parser.add_argument("--seed", type=int, default=7, help="of the random choices (default: 7)")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON instead of a table")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="keep what was found in FOLDER/faults.json")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page of results as Markdown, and end")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the logs of all processes in this folder")
    return parser


def main() -> int:
    parser = make_parser()
    given = parser.parse_args()
    try:
        return _run(given)
    except ConfigError as exc:
        parser.exit(2, f"devtools.faults: {exc}\n")


def _run(given: argparse.Namespace) -> int:
    if given.ranks < 1:
        raise ConfigError(f"--ranks {given.ranks}: needs 1 or more")
    cases = choose_cases(given.only)
    if given.list:
        for case in cases:
            print(textwrap.fill(f"{case.name:<23} {case.fault}", 80, subsequent_indent=" " * 24))
        return 0
    results = (given.results or RESULTS) / "faults.json"
    if given.page is not None:
        write_page(results, given.page)
        return 0
    if given.results is not None and not given.results.is_dir():
        raise ConfigError(f"--results {given.results}: there is no such folder")
    folder = given.keep or Path(tempfile.mkdtemp(prefix="penstock-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if given.soak is not None:
            with open_bench(folder, given.seed) as bench:
                report = Soak(bench, ranks=given.ranks, seconds=given.soak, seed=given.seed).run(quiet=given.json)
            found: dict[str, Any] = {"soak": asdict(report)}
            failed = bool(report.failures)
            print(json.dumps(asdict(report), indent=1) if given.json else str(report))
        else:
            outcomes = run_cases(cases, folder, given.seed, as_json=given.json)
            found = {"cases": [asdict(one) for one in outcomes]}
            failed = any(one.failures for one in outcomes)
            if given.json:
                print(json.dumps(found["cases"], indent=1))
            else:
                print(_sum_up(outcomes))
        if given.results is not None:
            keep(results, name_command(given), **found)
    finally:
        if given.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


def _sum_up(outcomes: list[Outcome]) -> str:
    played = [one for one in outcomes if not one.skipped]
    failed = [one.name for one in played if one.failures]
    words = f"{len(played)} cases, {sum(one.delivered for one in played):,} samples"
    return f"{words}: {'all limits held' if not failed else 'FAILED: ' + ', '.join(failed)}"


if __name__ == "__main__":
    sys.exit(main())
