"""What the demo shows: a line for each thing that happens, progress while it lasts, two tables at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.loader.audit import AuditReport
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

WIDTH = 100
_LABEL_WIDTH = 10

_console = Console()
_console.width = min(_console.width, WIDTH) if _console.is_terminal else WIDTH

Event = dict[str, Any]


def say(label: str, text: str | Text, style: str = "cyan") -> None:
    """A label in the left margin, and what there is to say beside it."""
    line = Table.grid(padding=(0, 2))
    line.add_column(width=_LABEL_WIDTH, justify="right", style=f"bold {style}")
    line.add_column(overflow="fold")
    line.add_row(label, text if isinstance(text, Text) else Text.from_markup(text))
    _console.print(line)


def show_title() -> None:
    _console.print()
    _console.print(Rule(Text.from_markup("[bold]penstock[/]  a rank is killed, the run goes on, every sample counts once")))
    _console.print()


def show_data(url: str, train: Sequence[int], test: Sequence[int]) -> None:
    say("data", f"{sum(train) + sum(test):,} handwritten digits as WebDataset tar shards in [bold]{_shorten(url)}[/]")
    say("", f"{len(train)} training shards of {', '.join(map(str, train))} images; {sum(test)} held out")
    _console.print()


@contextmanager
def show_waiting(text: str) -> Iterator[None]:
    if not _console.is_terminal:
        say("wait", text)
        yield
        return
    with _console.status(text):
        yield


@contextmanager
def show_training(world_size: int, epochs: int) -> Iterator[Callable[[Event], None]]:
    """Give a function that takes what rank 0 reports, and shows it: as a bar on a terminal, else by lines."""
    say("train", f"torchrun --nproc-per-node={world_size}")
    columns = (
        TextColumn(" " * _LABEL_WIDTH),
        SpinnerColumn(),
        BarColumn(bar_width=30),
        TextColumn("{task.description}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=_console, transient=True, disable=not _console.is_terminal) as progress:
        task = progress.add_task("the ranks start", total=None)
        tally = _Tally(epochs)

        def show(event: Event) -> None:
            if event.get("event") == "start":
                if event["epoch"] or event["consumed"]:
                    where = f"epoch {event['epoch']}, position {event['consumed']:,} of {event['samples']:,}"
                    say("", f"resumed from the checkpoint on {world_size} ranks: {where}")
                tally.steps = event["steps"]
                progress.update(task, total=epochs * event["steps"])
            elif event.get("event") == "step":
                description = tally.add(event)
                progress.update(task, completed=tally.done, description=description)
                if not _console.is_terminal and event["step"] + 1 == tally.steps:
                    say("", description)

        yield show
    if tally.count:
        say("", tally.summarize())
        _console.print()


class _Tally:
    """Steps of one attempt: where it is, its loss, its speed."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self.steps = 1
        self.done = self.count = self.samples = 0
        self._started_s = 0.0
        self._loss = 0.0

    def add(self, event: Event) -> str:
        """Count a step; gives the line that describes it."""
        now_s = time.monotonic()
        if not self.count:
            self._started_s = now_s
        else:
            self.samples += event["samples"]
        self._loss = event["loss"] if not self.count else 0.9 * self._loss + 0.1 * event["loss"]
        self.count += 1
        self.done = event["epoch"] * self.steps + event["step"] + 1
        self._rate = self.samples / max(now_s - self._started_s, 1e-9)
        return (
            f"epoch {event['epoch'] + 1:>2}/{self.epochs}  step {event['step'] + 1:>2}/{self.steps}"
            f"  loss {self._loss:.3f}  {self._rate:>6,.0f} samples/s"
        )

    def summarize(self) -> str:
        return f"{self.count} steps, loss {self._loss:.3f}, {self._rate:,.0f} samples/s"


def show_kill(kill: Event, checkpoint: Event, seconds: float) -> None:
    say(
        "SIGKILL",
        f"kill -9 of rank {kill['rank']} (pid {kill['pid']}) in epoch {kill['epoch']}, step {kill['step']}; "
        f"torchrun ended the others in {seconds:.1f} s",
        style="red",
    )
    say("", f"the last checkpoint has epoch {checkpoint['epoch']}, position {checkpoint['consumed']:,}; what was delivered after it counts for nothing")
    _console.print()


def show_result(end: Event, is_enough: bool, least: float) -> None:
    accuracy = end["right"] / end["count"]
    verdict = "" if is_enough else f", below {least}"
    say(
        "result",
        f"held-out loss {end['loss']:.3f}, accuracy [bold]{accuracy:.4f}[/] ({end['right']} of {end['count']}){verdict}",
        style="green" if is_enough else "red",
    )
    _console.print()


def show_audit(report: AuditReport, is_exact: bool, folder: Path) -> None:
    attempts = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("attempt", "ranks", "from epoch", "from position"):
        attempts.add_column(name, justify="right")
    for number, (world_size, epoch, start) in enumerate(report.attempts, start=1):
        attempts.add_row(str(number), str(world_size), str(epoch), f"{start:,}")
    accounts = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("epoch", "samples", "delivered", "missing", "duplicated", "replayed"):
        accounts.add_column(name, justify="right")
    for account in report.epochs:
        accounts.add_row(
            str(account.epoch),
            f"{account.samples:,}",
            f"{account.delivered:,}",
            _flag(account.missing),
            _flag(account.duplicated),
            f"[yellow]{account.replayed:,}[/]" if account.replayed else "0",
        )
    say("audit", f"of the delivery logs in {_shorten(str(folder))}")
    _console.print(_indent(attempts))
    _console.print()
    _console.print(_indent(accounts))
    _console.print()
    if is_exact:
        say("exact", "[bold green]every sample of every epoch was delivered exactly once[/]", style="green")
    else:
        say("NOT exact", "[bold red]samples are missing or came twice[/]", style="red")
    _console.print()


def _flag(count: int) -> str:
    return f"[bold red]{count:,}[/]" if count else "[green]0[/]"


def _indent(table: Table) -> Table:
    line = Table.grid()
    line.add_column(width=_LABEL_WIDTH)
    line.add_column()
    line.add_row("", table)
    return line


def _shorten(path: str) -> str:
    here = f"{Path.cwd()}/"
    return path.removeprefix(here)
