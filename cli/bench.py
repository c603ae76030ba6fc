"""``penstock bench``: how fast a data set is read, by which stage that is bounded, and how peers do on it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ..benchmarks.comparison import bench
from ..benchmarks.config import BenchConfig
from ..benchmarks.report import plot_ratios, print_result
from ..loader.errors import ConfigError
from .common import SourceArguments, console, parse, print_json


@dataclass(frozen=True, kw_only=True)
class BenchArguments(SourceArguments):
    """Measure how fast a data set is read: samples/s, MB/s, time to the first batch, waits, memory, CPU, bottleneck.

    Every run has a process of its own, imports are not timed, and contenders alternate, so that a busy machine is
    equally bad for all. --against converts the data set for the peers once, sets each up as its manual recommends for
    speed, and checks that it delivers every sample exactly once before it is timed.

    example:  penstock bench s3://bucket/train/ --batch-size 256 --decode 224

    example:  penstock bench train/ --against webdataset,mosaicml-streaming,litdata --plot ratios.png
    """

    batch_size: int = 64
    """Samples per batch."""

    epochs: int | None = None
    """Passes over the data in each run; 1 if neither this nor --seconds is given."""

    seconds: float | None = None
    """End a run after so long, pass after pass unless --epochs is given too."""

    decode: Literal["none", "auto", "224"] = "auto"
    """Raw bytes; by extension and type; or images to 224 x 224, randomly cropped and flipped."""

    workers: int | None = None
    """Threads of penstock, worker processes of peers; as many as there are cores if not given."""

    cache_dir: str | None = None
    """Let penstock keep fetched chunks in this folder. Peers always keep theirs on the local disk."""

    against: Annotated[str, tyro.conf.arg(metavar="PEER,...")] = ""
    """Peers to compare with: webdataset, mosaicml-streaming, litdata."""

    peer_decode: Literal["auto", "pil", "opencv", "penstock"] = "auto"
    """What peers decode images with; auto tries PIL and OpenCV, and takes the faster."""

    conversions: str | None = None
    """Folder or URL for the copies in peers' formats; a cache folder, or a sibling of the data in S3, if not given."""

    peer_layout: Literal["plain", "packed"] = "plain"
    """Give peers a field a column and a record a sample, or what an expert would: columns and rows packed in arrays."""

    rounds: int = 3
    """How often each contender is measured."""

    startup: bool = True
    """Measure the time to the first batch in runs of its own too, from fresh and after a resume in mid-epoch."""

    step_ms: float = 0.0
    """Let the consumer take so long over each batch, as training would."""

    out: Path | None = None
    """Write the result, with all rounds, as JSON to this file too."""

    plot: Path | None = None
    """Draw the comparison into this file (.png, .svg or .pdf)."""


def run(arguments: Sequence[str]) -> int:
    given = parse(BenchArguments, "bench", arguments)
    against = tuple(name.strip() for name in given.against.split(",") if name.strip())
    if given.plot is not None and not against:
        raise ConfigError("--plot draws a comparison: name peers with --against")
    config = BenchConfig(
        source=given.chosen_source(),
        against=against,
        batch_size=given.batch_size,
        decode=given.decode,
        peer_decode=given.peer_decode,
        peer_layout=given.peer_layout,
        workers=given.workers,
        epochs=given.epochs if given.epochs or given.seconds else 1,
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
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=2) + "\n")
    if given.plot is not None:
        plot_ratios([result], given.plot)
    if given.json:
        print_json(result)
    else:
        print_result(result, screen)
    return 0


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Say on stderr what is being done, in a line that goes away; nothing where nobody watches."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("looking at the data") as status:
        yield status.update


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    """The command line as it was given, but for the values of storage options."""
    words = ["penstock", "bench"]
    hide = False
    for word in arguments:
        name, mark, _ = word.partition("=")
        if hide:
            word = f"{name}=..." if mark else "..."
        elif word.startswith(("--storage-option=", "--storage_option=")):
            word = f"{'='.join(word.split('=')[:2])}=..."
        hide = word in ("--storage-option", "--storage_option")
        words.append(shlex.quote(word))
    return words
