"""``python -m penstock.benchmarks.suite``: the cases against all peers, from the local disk or a real S3 server."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from ..loader.dataset.cache import cache_home
from ..storage import PenstockError, open_store
from .comparison import bench
from .config import BenchConfig
from .contenders import OURS
from .datasets import CASES, Case, make_case
from .plot import plot_ratios, short_number
from .ratios import best_peer
from .report import print_result
from .s3_server import make_bucket, serve_s3

_ROOT = Path(__file__).resolve().parent.parent
_RESUME_TARGET = 1.2

CaseName = Literal["raw", "tokens", "rows", "rows-packed", "images"]
PeerName = Literal["webdataset", "mosaicml-streaming", "litdata"]


@dataclass(frozen=True, kw_only=True)
class SuiteConfig:
    """Compare penstock with its peers on four generated data sets, and print the results beside the targets.

    The S3 server is the one of PENSTOCK_TEST_S3_ENDPOINT (with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), else one
    that is started for each case.
    """

    store: Literal["local", "s3"] = "local"
    """Where the data is stored."""

    cases: tuple[CaseName, ...] = ("raw", "tokens", "rows", "rows-packed", "images")
    """Which comparisons to make."""

    against: tuple[PeerName, ...] = ("webdataset", "mosaicml-streaming", "litdata")
    """Which peers to compare with."""

    scale: float = 1.0
    """Scale of the data sets: 1 is a few gigabytes in total."""

    rounds: int = 3
    """Measurements of each contender in each case."""

    seconds: float = 10.0
    """Length of each run: as many passes as fit from the local disk, at most one pass from S3."""

    workers: int | None = None
    """Threads of penstock, processes of peers; by default one per core for penstock, the fastest number for peers."""

    data: Path = field(default_factory=lambda: cache_home() / "bench-data")
    """Folder for the generated data sets, which are kept."""

    results: Path = _ROOT / "benchmarks" / "results"
    """Folder for results and plots."""


def run_suite(config: SuiteConfig, screen: Console) -> list[dict[str, Any]]:
    """Run the cases one after another; each result is written as soon as it is complete."""
    results = []
    config.results.mkdir(parents=True, exist_ok=True)
    for name in config.cases:
        case = CASES[name]
        screen.print(f"\n[bold]{case.title}[/bold], {config.store}")
        folder = make_case(case, config.data, config.scale)
        with _place(config.store, folder) as (url, options):
            settings = BenchConfig(
                source=url,
                against=config.against,
                batch_size=case.batch_size,
                decode=case.decode,
                peer_layout=case.peer_layout,
                # A second pass would come from the server again for us, but from their local copies for peers.
                epochs=None if config.store == "local" else 1,
                seconds=config.seconds,
                rounds=config.rounds,
                workers=config.workers,
                storage_options=options,
                conversions=None if config.store == "s3" else str(config.data / "conversions"),
            )
            command = ["python", "-m", "penstock.benchmarks.suite", *sys.argv[1:]]
            result = bench(settings, command=command, say=lambda text: screen.print(f"  {text}", style="dim"))
        result["case"] = {"name": name, "title": case.title, "store": config.store, "target": case.target}
        (config.results / f"{config.store}-{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        print_result(result, screen)
        results.append(result)
    titles = [result["case"]["title"] for result in results]
    plot_ratios(results, config.results / f"{config.store}.png", titles=titles)
    return results


@contextlib.contextmanager
def _place(store: Literal["local", "s3"], folder: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The URL and storage options under which contenders find the data set."""
    if store == "local":
        yield str(folder), {}
        return
    with serve_s3() as options:
        bucket = "penstock-bench"
        make_bucket(bucket, options)
        url = f"s3://{bucket}/{folder.name}"
        source, target = open_store(folder), open_store(url, storage_options=options)
        try:
            for info in source.list():
                target.put(info.key, source.get(info.key))
        finally:
            target.close()
        yield url, options


def judge(case: Case, summary: Mapping[str, Any]) -> tuple[str | None, float | None, bool]:
    """(the best peer, the median ratio to it, whether that reaches the case's target)."""
    peer = best_peer(summary)
    if peer is None:
        return None, None, False
    ratio = float(summary[peer]["ratio"])
    return peer, ratio, ratio >= case.target


def print_targets(results: Sequence[Mapping[str, Any]], screen: Console) -> bool:
    """Print a table of all cases and their targets. Returns whether all targets were reached."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name, justify in (("case", "left"), ("penstock", "right"), ("best peer", "left"), ("its", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in ("ratio", "target", "resume", ""):
        table.add_column(name, justify="right")
    all_met = True
    for result in results:
        case, summary = CASES[result["case"]["name"]], result["summary"]
        peer, ratio, met = judge(case, summary)
        resume = summary[OURS].get("resume_ratio", float("nan"))
        met = met and resume <= _RESUME_TARGET
        all_met = all_met and met
        table.add_row(
            case.title,
            f"{short_number(summary[OURS]['samples_per_s'])}/s",
            peer or "none",
            "" if peer is None else f"{short_number(summary[peer]['samples_per_s'])}/s",
            "" if ratio is None else f"{ratio:.2f}x",
            f"{case.target:g}x",
            f"{resume:.2f}x (≤ {_RESUME_TARGET:g})",
            "[green]met[/green]" if met else "[red]missed[/red]",
        )
    screen.print()
    screen.print(table)
    return all_met


def main() -> None:
    config = tyro.cli(SuiteConfig, prog="python -m penstock.benchmarks.suite", config=(tyro.conf.FlagCreatePairsOff,))
    screen = Console(highlight=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the S3 server is stopped then too
    try:
        results = run_suite(config, screen)
    except PenstockError as exc:
        print(f"suite: {exc}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if print_targets(results, screen) else 1)


if __name__ == "__main__":
    main()
