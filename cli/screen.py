"""Output of commands: facts, tables that fit, numbers; names from data sets cannot send commands to the terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

# C0, DEL and C1 control characters, and what changes the direction of text.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_GAP = 2


def shown(text: str) -> str:
    """A text with control characters written out, so that a name cannot move the cursor or colour what follows."""
    return _UNSAFE.sub(lambda found: repr(found[0])[1:-1], text)


class Screen(Console):
    """A console for data: brackets are no markup, long words are neither cut nor broken, control characters show."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        options.setdefault("crop", False)
        super().print(*(shown(each) if isinstance(each, str) else each for each in objects), **options)

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704 - rich calls it with the error at hand, and would exit with 1, which says "bad data found"

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # What came here another way than ``shown``; nothing takes its place, as the lines are laid out already.
            yield segment if segment.control else segment._replace(text=_UNSAFE.sub("", segment.text))


def console() -> Screen:
    return Screen()


class FactTable:
    """Two columns, label and value. Values are wrapped between words only; a long word, a URL say, stays whole."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, Text]] = []

    def add_row(self, label: str, value: str | Text) -> None:
        text = value if isinstance(value, Text) else Text(value)
        self._rows.append((label, Text(shown(text.plain), style=text.style)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        start = max((len(label) for label, _ in self._rows), default=0) + _GAP
        for label, value in self._rows:
            lines = wrapped(value.plain, options.max_width - start)
            for number, line in enumerate(lines):
                head = Text((label if number == 0 else "").ljust(start), style="cyan")
                yield Text.assemble(head, (line, value.style), no_wrap=True, overflow="ignore")


def wrapped(text: str, width: int) -> list[str]:
    """The lines of a text, broken between words only; at least one."""
    return textwrap.wrap(text, max(20, width), break_long_words=False, break_on_hyphens=False) or [""]


def fact_table() -> FactTable:
    return FactTable()


def print_grid(
    screen: Console, header: Sequence[str], rows: Sequence[Sequence[str]], *, styles: Sequence[str] = ()
) -> None:
    """A table of numbers, one row a line; where a line would not fit, its rows as columns, as many as fit at a time."""
    widths = [max(map(cell_len, map(shown, column))) for column in zip(header, *rows, strict=True)]
    if sum(widths) + _GAP * (len(widths) - 1) > screen.width:
        print_columns(screen, header, list(rows), styles=styles)
        return
    table = _table(sum(widths) + _GAP * (len(widths) - 1))
    for name in header:
        table.add_column(Text(shown(name)), justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        table.add_row(*(shown(cell) for cell in row), style=styles[number] if styles else None)
    screen.print(table)


def print_columns(
    screen: Console, labels: Sequence[str], columns: Sequence[Sequence[str]], *, styles: Sequence[str] = ()
) -> None:
    """Columns of cells beside their labels, the first of which head them; columns that do not fit follow below."""
    start = max(map(cell_len, labels)) + _GAP
    widths = [max(map(cell_len, map(shown, column))) + _GAP for column in columns]
    first = 0
    while first < len(columns):
        stop, used = first + 1, start + widths[first]
        while stop < len(columns) and used + widths[stop] - _GAP <= screen.width:
            used += widths[stop]
            stop += 1
        if first:
            screen.print()
        table = _table(start + sum(widths[first:stop]) - _GAP)
        table.add_column(Text(labels[0], style="cyan"), style="cyan", no_wrap=True)
        for column in columns[first:stop]:
            table.add_column(Text(shown(column[0])), justify="right", no_wrap=True)
        for row, label in enumerate(labels[1:], start=1):
            cells = [
                Text(shown(column[row]), style=styles[place] if styles else "")
                for place, column in enumerate(columns[first:stop], start=first)
            ]
            table.add_row(label, *cells)
        screen.print(table)
        first = stop


def _table(width: int) -> Table:
    """A table of that width, even where the terminal is narrower: else rich would cut what is in its cells."""
    return Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold", width=width)


def heading(text: str) -> Text:
    return Text(text, style="bold")


def format_count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def name_classes(classes: Sequence[str]) -> str:
    """The names of classes with their numbers; of many the first ten, and how many there are."""
    shown_ones = ", ".join(f"{number} = {name}" for number, name in enumerate(classes[:10]))
    return shown_ones + (f", ... ({len(classes):,})" if len(classes) > 10 else "")


def format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s"
