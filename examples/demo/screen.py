"""What the demo shows: a line or two for each event, progress meanwhile, and the audit at the end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

WIDTH = 100
MARGIN = 12  # of the labels, and of what stands beside them

_console = Console(highlight=False)
_console.width = min(_console.width, WIDTH) if _console.is_terminal else WIDTH

Event = dict[str, Any]


def say(label: str, text: str, style: str = "cyan") -> None:
    """Print a label in the left margin and text, with rich's markup, beside it."""
    line = Table.grid()
    line.add_column(width=MARGIN - 2, justify="right", style=f"bold {style}")
    line.add_column(overflow="fold")
    line.add_row(label, Padding(Text.from_markup(text), (0, 0, 0, 2), expand=False))
    _console.print(line)


def show_title(text: str = "a rank is killed, every sample counts once") -> None:
    _console.print()
    _console.print(Rule(f"[bold]penstock[/] · {text}", style="dim"))
    _console.print()


def show_data(url: str, train: Sequence[int], test: Sequence[int]) -> None:
    sizes = ", ".join(map(str, train))
    say("data", f"{sum(train) + sum(test):,} handwritten digits as WebDataset tar shards in [bold]{_shorten(url)}[/]")
    say("", f"{len(train)} training shards of {sizes} images; {sum(test)} held out")
    _console.print()


@contextmanager
def show_waiting(text: str) -> Iterator[None]:
    """Show what the demo waits for; on a terminal, with a spinner."""
    if _console.is_terminal:
        with _console.status(f"{' ' * (MARGIN - 2)}{text}"):
            yield
    else:
        say("wait", text)
        yield


@contextmanager
def show_training(world_size: int, epochs: int) -> Iterator[Callable[[Event], None]]:
    """Yield a function that shows the events that rank 0 reports: as a bar on a terminal, else one line per epoch."""
    say("train", f"torchrun [bold]--nproc-per-node={world_size}[/]")
    columns = (
        TextColumn(" " * (MARGIN - 1)),
        BarColumn(bar_width=28, complete_style="cyan", finished_style="cyan", pulse_style="cyan"),
        TextColumn("{task.description}"),
        TimeRemainingColumn(compact=True),
    )
    tally = _Tally()
    with Progress(*columns, console=_console, transient=True, disable=not _console.is_terminal) as progress:
        task = progress.add_task("starting the ranks", total=None)

        def show(event: Event) -> None:
            match event.get("event"):
                case "start":
                    tally.steps = event["steps"]
                    progress.update(task, total=epochs * tally.steps)
                    if event["epoch"] or event["consumed"]:
                        say("", f"resumed from the checkpoint: epoch {event['epoch']}, position {event['consumed']:,}")
                case "step":
                    tally.add(event)
                    progress.update(task, completed=tally.done, description=tally.describe())
                    if not _console.is_terminal and event["step"] + 1 == tally.steps:
                        say("", tally.describe())

        yield show
    if tally.count:
        say("", f"{tally.count} steps, loss {tally.loss:.3f}, {tally.rate:,.0f} samples/s")
    _console.print()


@contextmanager
def show_batches() -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that shows how a run over a parameter server goes: a bar on a terminal, else a line an epoch."""
    columns = (
        TextColumn(" " * (MARGIN - 1)),
        BarColumn(bar_width=28, complete_style="cyan", finished_style="cyan", pulse_style="cyan"),
        TextColumn("{task.description}"),
        TimeRemainingColumn(compact=True),
    )
    told = 0
    with Progress(*columns, console=_console, transient=True, disable=not _console.is_terminal) as progress:
        task = progress.add_task("starting Ray", total=None)

        def show(standing: dict[str, Any]) -> None:
            nonlocal told
            behind = "  ".join(f"{one['name']} -{one['behind']}" for one in standing["workers"])
            text = f"epoch {standing['epoch']:>2}  {standing['batches']:,} of {standing['total_batches']:,} batches"
            progress.update(
                task, total=standing["total_batches"], completed=standing["batches"], description=f"{text}  {behind}"
            )
            if not _console.is_terminal and standing["epoch"] > told:
                told = standing["epoch"]
                say("", text)

        yield show


class _Tally:
    """The steps of one attempt: its position, smoothed loss, and samples per second since the first step."""

    def __init__(self) -> None:
        self.steps = 1
        self.done = self.count = 0
        self.loss = self.rate = 0.0
        self._at = (0, 0)
        self._first_samples = 0
        self._started_s = 0.0

    def add(self, step: Event) -> None:
        now_s = time.monotonic()
        if self.count:
            self.rate = (step["samples"] - self._first_samples) / max(now_s - self._started_s, 1e-9)
            self.loss += 0.1 * (step["loss"] - self.loss)
        else:
            self._started_s, self._first_samples, self.loss = now_s, step["samples"], step["loss"]
        self.count += 1
        self._at = (step["epoch"], step["step"])
        self.done = step["epoch"] * self.steps + step["step"] + 1

    def describe(self) -> str:
        epoch, step = self._at
        where = f"epoch {epoch:>2}  step {step + 1:>2} of {self.steps}"
        return f"{where}  loss {self.loss:.3f}  {self.rate:>5,.0f} samples/s"


def show_kill(kill: Event, checkpoint: Event, ending_s: float) -> None:
    say("SIGKILL", f"[bold]kill -9[/] of rank {kill['rank']} (pid {kill['pid']}) {_place(kill)}", style="red")
    _show_end("the other ranks", checkpoint, ending_s)


def show_lost_process(kill: Event, checkpoint: Event, error: str, ending_s: float) -> None:
    of = f"rank {kill['rank']}'s loader process (pid {kill['pid']})"
    say("SIGKILL", f"[bold]kill -9[/] of {of} {_place(kill)}", style="red")
    say("", f"rank {kill['rank']}: {error.partition(';')[0]}")
    _show_end("both ranks", checkpoint, ending_s)


def _place(kill: Event) -> str:
    return f"in epoch {kill['epoch']}, at position {kill['consumed']:,} of {kill['samples']:,}"


def _show_end(ranks: str, checkpoint: Event, ending_s: float) -> None:
    where = f"the last checkpoint is at position {checkpoint['consumed']:,}"
    say("", f"torchrun ended {ranks} in {ending_s:.1f} s; {where}")
    _console.print()


def show_result(end: Event, held_out: int, least_accuracy: float) -> None:
    accuracy, right = end["accuracy"], round(end["accuracy"] * held_out)
    is_enough = accuracy >= least_accuracy
    short = "" if is_enough else f"; [red]below {least_accuracy}[/]"
    share = f"accuracy [bold]{accuracy:.4f}[/] ({right} of {held_out} held-out digits)"
    say("result", f"loss {end['loss']:.3f}, {share}{short}", style="green" if is_enough else "red")
    _console.print()


def show_audit(folder: Path) -> int:
    """Run ``penstock audit`` and show its report. Returns its exit code."""
    say("audit", f"[bold]penstock audit {_shorten(str(folder))}[/]")
    environment = {**os.environ, "COLUMNS": str(_console.width - MARGIN)}
    if _console.is_terminal and not _console.no_color:
        environment["FORCE_COLOR"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "audit", str(folder)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    _console.print(Padding(Text.from_ansi(done.stdout.rstrip()), (1, 0, 1, MARGIN)))
    return done.returncode


def show_verdict(is_exact: bool, epochs: int, samples: int) -> None:
    if is_exact:
        say("exact", f"all {samples:,} samples delivered once in each of {epochs} epochs", style="green")
    else:
        say("not exact", f"some epoch did not deliver all {samples:,} samples exactly once", style="red")
    _console.print()


def _shorten(path: str) -> str:
    return path.removeprefix(f"{Path.cwd()}/")
