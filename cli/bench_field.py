"""``penstock bench --quick`` and ``--full``: the field's benchmark, on generated data sets."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..benchmarks.datasets import CASES
from ..benchmarks.field.cells import STORES, FieldConfig, cells_of, quick
from ..benchmarks.field.page import draw_picture, render
from ..benchmarks.field.runner import run_field
from ..benchmarks.field.table import line_of, print_report
from ..benchmarks.peers.catalogue import PEERS
from ..loader.dataset.cache import cache_home
from ..loader.errors import ConfigError
from ..storage.files import write_whole
from .common import Flag, console, parse, print_json

WORDS = ("--quick", "--full", "--redraw")
_Some = Annotated[str | None, tyro.conf.arg(metavar="NAME,...", help_behavior_hint="")]
_Ratio = Annotated[float | None, tyro.conf.arg(metavar="RATIO", help_behavior_hint="")]
_File = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
_Folder = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")]


_OF_FULL = ("workloads", "stores", "ranks", "rounds", "seconds", "scale", "delay_ms")


@dataclass(frozen=True, kw_only=True)
class FieldArguments:
    """Compare penstock with its peers on generated data: first passes, steady state, first batch, resume, CPU, memory.

    Peers are installed once, each into an environment of its own with pinned packages, in the cache folder; torch is
    shared. Each is set up as its documentation advises, which the report quotes, with its best number of workers, and
    checked to deliver every sample once. One that cannot be measured is reported with the reason. A bare loop over the
    same libraries shows the limit of the machine.

    --quick is a small set, some minutes long. --full is all workloads, from the local disk, from an S3 server (that
    of PENSTOCK_TEST_S3_ENDPOINT, or Ceph's gateway) and with a delay on each request, on 1, 2 and 4 ranks: some
    hours. Each comparison is kept as soon as it is done; the same command goes on where it was ended.

    example:  penstock bench --quick

    example:  penstock bench --full --workloads tokens,images --stores local,s3 --results results/
    """

    quick: Flag = False
    """Measure two workloads from the local disk on one rank."""

    full: Flag = False
    """Measure the whole matrix, or what --workloads, --stores and --ranks select of it."""

    redraw: _File = None
    """Print this JSON report, and draw its page again, without measuring."""

    workloads: _Some = None
    """Of bytes-6k, bytes-40k, bytes-1m, images, tokens, rows, rows-packed, jsonl; all if not given."""

    stores: _Some = None
    """Of local, s3, s3-delay, s3-tls; all if not given."""

    ranks: _Some = None
    """Numbers of ranks; 1,2,4 if not given."""

    against: _Some = None
    """Of webdataset, mosaicml-streaming, litdata, datasets, grain, spdl, torch, or none; all if not given."""

    rounds: int = 5
    """Measurements of each contender, in turns."""

    seconds: float = 8.0
    """Length of a run after its first batch."""

    scale: float = 1.0
    """Size of the data sets; 1 is about 300 MB each."""

    delay_ms: float = 20.0
    """Delay of each request of s3-delay, in milliseconds."""

    environments: Annotated[str, tyro.conf.arg(metavar="{own,here}")] = "own"
    """own: peers in pinned environments that are made; here: those that are installed beside penstock."""

    resume: Flag = True
    """Skip the runs that measure a resume in mid-epoch beside a fresh start, which are half of all."""

    drop_slower: _Ratio = None
    """Leave out of further rounds the peers that a round shows to be so many times slower than the fastest of them."""

    calibrate: Flag = False
    """Find each peer's best number of workers again, which is otherwise kept beside the data."""

    data: _Folder = None
    """Folder for the generated data sets and the peers' copies, which are kept; in the cache if not given."""

    results: _Folder = None
    """Folder for field.json, field.html and field.svg (field-quick with --quick); the current folder if not given."""

    again: Flag = False
    """Measure everything again, also what the results hold already."""

    json: Flag = False
    """Print the report as JSON."""


def run(arguments: Sequence[str]) -> int:
    given = parse(FieldArguments, "bench", arguments)
    if given.redraw is not None:
        return _redraw(given.redraw, given)
    if given.quick and given.full:
        raise ConfigError("--quick and --full: choose one")
    config = configure(given)
    folder = given.results or Path()
    report = folder / ("field-quick.json" if given.quick else "field.json")
    if given.again:
        report.unlink(missing_ok=True)
    data = given.data or cache_home() / "bench-data"
    with _ending_in_order(), _progress(len(cells_of(config))) as progress:
        found = run_field(
            config, data=data, report=report, command=_command(given), progress=progress, calibrate=given.calibrate
        )
    return _show(found, report, given)


def configure(given: FieldArguments) -> FieldConfig:
    """The configuration that arguments ask for.

    Raises:
        ConfigError: a name is unknown, or a number out of range.
    """
    config = FieldConfig(
        workloads=_names(given.workloads, tuple(CASES)),
        stores=_names(given.stores, STORES),  # type: ignore[arg-type]
        ranks=_numbers(given.ranks),
        against=() if given.against == "none" else _names(given.against, tuple(PEERS)),
        rounds=given.rounds,
        seconds=given.seconds,
        scale=given.scale,
        delay_ms=given.delay_ms,
        environments=given.environments,  # type: ignore[arg-type]
        resume=given.resume,
        drop_slower=given.drop_slower,
    )
    if not given.quick:
        if not cells_of(config):
            raise ConfigError(
                "nothing to measure: on several ranks, and with the delay, one at a time, only "
                f"{', '.join(name for name, case in CASES.items() if case.everywhere)} are; choose other --workloads, "
                "--stores or --ranks"
            )
        return config
    default = FieldArguments()
    chosen = [name.replace("_", "-") for name in _OF_FULL if getattr(given, name) != getattr(default, name)]
    chosen += [] if given.resume else ["no-resume"]
    if chosen:
        raise ConfigError(f"--quick measures a set of its own; take --full with --{' and --'.join(chosen)}")
    return quick(config)


def _names(text: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    return default if text is None else tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _numbers(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(name) for name in _names(text, ("1", "2", "4")))
    except ValueError as exc:
        raise ConfigError(f"--ranks {text}: numbers with commas between them, such as 1,2,4") from exc


def _command(given: FieldArguments) -> str:
    """The command as it may stand in a report: without folders of this machine."""
    default = FieldArguments()
    names = [
        "workloads",
        "stores",
        "ranks",
        "against",
        "rounds",
        "seconds",
        "scale",
        "delay_ms",
        "environments",
        "drop_slower",
    ]
    changed = [name for name in names if getattr(given, name) != getattr(default, name)]
    words = [f"--{name.replace('_', '-')} {getattr(given, name)}" for name in changed]
    flags = [] if given.resume else ["--no-resume"]
    return " ".join(("penstock bench", "--quick" if given.quick else "--full", *words, *flags))


def _redraw(path: Path, given: FieldArguments) -> int:
    other = [each.name for each in fields(given) if getattr(given, each.name) != each.default]
    if unused := sorted(set(other) - {"redraw", "json"}):
        words = (f"--{'no-resume' if name == 'resume' else name.replace('_', '-')}" for name in unused)
        raise ConfigError(f"--redraw measures nothing, and draws beside its file; leave out {', '.join(words)}")
    try:
        found = json.loads(path.read_text())
        found["cells"], found["machine"], found["settings"], found["peers"]
    except OSError as exc:
        raise ConfigError(f"--redraw {path}: cannot be read ({exc.strerror})") from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"--redraw {path}: is no report of penstock bench --quick or --full") from exc
    return _show(found, path, given)


def _show(found: Mapping[str, Any], report: Path, given: FieldArguments) -> int:
    page = report.with_suffix(".html")
    picture = draw_picture(found)
    write_whole(page, render(found).encode())
    if picture:
        write_whole(report.with_suffix(".svg"), picture.encode())
    if given.json:
        print_json(dict(found))
    else:
        screen = console()
        print_report(found, screen)
        screen.print()
        screen.print(f"page    {page}")
        screen.print(f"report  {report}")
    return 0 if found["cells"] and all("penstock" in cell["contenders"] for cell in found["cells"]) else 1


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Let SIGTERM end the bench as Ctrl-C does, so that servers and processes are ended with it."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Lines:
    """Progress without a terminal: a line for each comparison."""

    def say(self, text: str) -> None:
        pass

    def done(self, cell: Any, result: Mapping[str, Any]) -> None:
        print(line_of(result), file=sys.stderr, flush=True)


class _Bar:
    """Progress on a terminal: a bar over the comparisons, and what is done now."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task

    def say(self, text: str) -> None:
        self._bar.update(self._task, description=text)

    def done(self, cell: Any, result: Mapping[str, Any]) -> None:
        self._bar.console.print(line_of(result), markup=False, highlight=False)
        self._bar.advance(self._task)


@contextmanager
def _progress(cells: int) -> Iterator[_Lines | _Bar]:
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Bar(bar, bar.add_task("", total=cells))
