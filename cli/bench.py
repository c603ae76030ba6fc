"""``penstock bench``: how fast a data set is read, which stage limits it, and how other loaders compare."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ..benchmarks.harness.comparison import bench
from ..benchmarks.harness.config import BenchConfig
from ..benchmarks.harness.plot import plot_ratios, require_plotting
from ..benchmarks.harness.report import print_result
from ..loader.dataset.source import resolve_split
from ..loader.errors import ConfigError
from ..storage.files import write_output
from ..storage.urls import without_password
from . import bench_field
from .common import Flag, OptionalNumber, SourceArguments, console, local_path, parse, print_json, to_json


@dataclass(frozen=True, kw_only=True)
class BenchArguments(SourceArguments):
    """Measure how fast a data set is read: samples/s, MiB/s, time to the first batch, waits, memory, CPU, bottleneck.

    Without a data set, --quick (minutes) and --full (hours) compare penstock with seven other loaders on generated
    ones; penstock bench --quick --help tells more.

    Each run is a separate process, imports are not timed, and contenders alternate, so that other load on the machine
    affects all of them alike. --against converts the data set once for each peer, configures each peer as its manual
    recommends for speed, in an environment of its own, and checks that it delivers every sample exactly once.

    example:  penstock bench s3://bucket/train/ --batch-size 256 --decode 224

    example:  penstock bench train/ --against webdataset,mosaicml-streaming,litdata --plot ratios.png
    """

    batch_size: int = 64
    """Samples per batch."""

    epochs: OptionalNumber = None
    """Passes over the data in each run; 1 if neither this nor --seconds is given."""

    seconds: Annotated[float | None, tyro.conf.arg(metavar="S", help_behavior_hint="")] = None
    """Read for this long, in as many passes as fit; with --epochs, whichever ends first."""

    decode: Literal["none", "auto", "224"] = "auto"
    """none: raw bytes; auto: by extension and type; 224: images to 224 x 224, randomly cropped and flipped."""

    workers: OptionalNumber = None
    """Threads of penstock, worker processes of peers; one per core if not given."""

    cache_dir: Annotated[str | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Cache penstock's chunks in this folder. Peers always cache on the local disk."""

    against: Annotated[str, tyro.conf.arg(metavar="PEER,...", help_behavior_hint="")] = ""
    """Peers to compare with: webdataset, mosaicml-streaming, litdata, datasets, grain, spdl, torch."""

    environments: Literal["own", "here"] = "own"
    """own: peers in pinned environments that are made; here: those that are installed beside penstock."""

    peer_decode: Literal["auto", "pil", "opencv", "penstock"] = "auto"
    """Image decoder of the peers; auto takes the faster of PIL and OpenCV."""

    conversions: Annotated[str | None, tyro.conf.arg(metavar="PLACE", help_behavior_hint="")] = None
    """Folder or URL for the copies in the peers' formats; a cache folder, or beside the data in S3, if not given."""

    peer_layout: Literal["plain", "packed"] = "plain"
    """plain: one column per field, one record per sample; packed: columns and rows packed into arrays by hand."""

    rounds: int = 3
    """Measurements of each contender."""

    startup: Flag = True
    """Skip the runs that measure the time to the first batch, from a fresh start and after a mid-epoch resume."""

    step_ms: float = 0.0
    """Simulated training step: milliseconds that the consumer spends on each batch."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Write the result, with all rounds, to this JSON file."""

    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Plot the comparison to this file (.png, .svg or .pdf)."""


def run(arguments: Sequence[str]) -> int:
    if any(word.partition("=")[0] in bench_field.WORDS for word in arguments):
        return bench_field.run(arguments)
    given = parse(BenchArguments, "bench", arguments)
    against = tuple(dict.fromkeys(name.strip() for name in given.against.split(",") if name.strip()))
    if given.plot is not None and not against:
        raise ConfigError("--plot needs peers to compare with; name them with --against")
    if given.plot is not None:
        require_plotting(given.plot)  # before anything is measured
        _refuse_unwritable("--plot", given.plot)
    if given.out is not None:
        _refuse_unwritable("--out", given.out)
    source = resolve_split(given.chosen_source(), given.chosen_split(), given.options())
    config = BenchConfig(
        source=source,
        against=against,
        batch_size=given.batch_size,
        decode=given.decode,
        peer_decode=given.peer_decode,
        peer_layout=given.peer_layout,
        environments=given.environments,
        workers=given.workers,
        epochs=1 if given.epochs is None and given.seconds is None else given.epochs,
        seconds=given.seconds,
        rounds=given.rounds,
        step_ms=given.step_ms,
        startup=given.startup,
        cache_dir=given.cache_dir,
        storage_options=given.options() or {},
        format=given.chosen_format(),
        conversions=given.conversions,
    )
    screen = console()
    with _status() as say:
        result = bench(config, command=_without_secrets(arguments), say=say)
    if given.json:
        print_json(result)
    else:
        print_result(result, screen)
    if given.out is not None:  # last: what was measured is seen where it cannot be written
        write_output(given.out, f"{to_json(result)}\n".encode())
    if given.plot is not None:
        plot_ratios([result], given.plot)
    return 0


def _refuse_unwritable(option: str, out: Path) -> None:
    """Make the folder of a file. Raises ConfigError where it cannot be written, before anything is measured for it."""
    local_path(out, option)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"{option} {out}: its folder cannot be made ({exc.strerror})") from exc
    if out.is_dir():
        raise ConfigError(f"{option} {out}: is a folder; give the file to write")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise ConfigError(f"{option} {out}: may not be written")


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Show progress in a transient line on stderr, if it is a terminal."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("reading the data set") as status:
        yield status.update


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    """The command line as given, without the values of storage options and the passwords of URLs."""
    words = ["penstock", "bench"]
    hide = False
    for word in arguments:
        name, mark, _ = word.partition("=")
        if hide:
            word = f"{name}=..." if mark else "..."
        elif word.startswith(("--storage-option=", "--storage_option=")):
            word = f"{'='.join(word.split('=')[:2])}=..."
        hide = word in ("--storage-option", "--storage_option")
        words.append(shlex.quote(without_password(word)))
    return words
