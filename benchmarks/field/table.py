"""The report in the terminal: a line a cell, and a table of contenders where there are few cells."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..contenders import LIMIT, OURS
from . import words
from .summary import best_peer, is_ours, load_note, median, ours_of, ratio, ratio_spread

_FEW = 4
_WIDE = 110


def print_report(report: Mapping[str, Any], screen: Console) -> None:
    """Print all cells, those in detail that are few, and what was not measured, with the reasons."""
    cells = report["cells"]
    machine, settings = report["machine"], report["settings"]
    loads = [load for cell in cells for load in cell["loads"]]
    rounds = settings["rounds"]
    turns = "one round" if rounds == 1 else f"medians of {rounds} rounds, contenders in turns"
    _wrapped(screen, f"{machine['cores']} cores of {machine['cpu']}; {turns}; {load_note(loads, machine['cores'])}")
    if len(cells) <= _FEW:
        for cell in cells:
            screen.print()
            print_cell(cell, screen)
    screen.print()
    _print_overview(cells, screen)
    _print_refused(cells, screen)


def _print_overview(cells: Sequence[Mapping[str, Any]], screen: Console) -> None:
    """A line a cell and kind of ours; in a wide terminal with the ratio's quartiles, and the ratio in steady state."""
    is_wide = screen.width >= _WIDE
    more = (("quartiles", "right"), ("steady", "right")) if is_wide else ()
    heads = (
        ("first pass", "left"),
        ("from", "left"),
        ("penstock", "right"),
        ("best peer", "left"),
        ("peer's", "right"),
    )
    table = _table((*heads, ("ratio", "right"), ("of loop", "right"), *more))
    for cell, ours in lines_of(cells):
        each = cell["contenders"]
        peer = best_peer(each, ours=ours)
        faster, limit = ratio(each, peer, ours=ours), ratio(each, LIMIT, ours=ours)
        row: list[str | Text] = [
            name_of_line(cell, ours),
            words.short_place_of(cell),
            words.rate(figure_of(each, ours, "first_pass_per_s")),
            words.name_of(peer) if peer else "none",
            words.rate(figure_of(each, peer, "first_pass_per_s")),
            Text(words.times(faster), style="" if faster is None else "green" if faster >= 1 else "red"),
            "–" if limit is None else f"{limit:.2f}",
        ]
        if is_wide:
            spread, steady = ratio_spread(each, peer, ours=ours), best_peer(each, "steady_per_s", ours)
            row.append("–" if spread is None else f"{words.times(spread.low)[:-1]} to {words.times(spread.high)}")
            row.append(words.times(ratio(each, steady, "steady_per_s", ours)))
        table.add_row(*row)
    screen.print(table, crop=False)
    screen.print()
    _print_costs(cells, screen)


def _print_costs(cells: Sequence[Mapping[str, Any]], screen: Console) -> None:
    """Print a sample's CPU time and the time to the first batch: ours, the best peer's, the bare loop's."""
    heads = (("CPU a sample", "left"), ("from", "left"), ("penstock", "right"), ("peer's", "right"))
    table = _table((*heads, ("loop's", "right"), ("1st batch", "right"), ("peer's 1st", "right")))
    for cell, ours in lines_of(cells):
        each = cell["contenders"]
        peer = best_peer(each, ours=ours)
        table.add_row(
            name_of_line(cell, ours),
            words.short_place_of(cell),
            *(words.microseconds(figure_of(each, name, "cpu_us_per_sample")) for name in (ours, peer, LIMIT)),
            *(words.seconds(figure_of(each, name, "first_batch_s")) for name in (ours, peer)),
        )
    screen.print(table, crop=False)


def _table(heads: Iterable[tuple[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for head, justify in heads:
        table.add_column(head, justify=justify, no_wrap=True)
    return table


def lines_of(cells: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Each cell with each of our contenders that was measured in it."""
    for cell in cells:
        for ours in ours_of(cell["contenders"]):
            yield cell, ours


def name_of_line(cell: Mapping[str, Any], ours: str) -> str:
    """The workload, and what sets the contender apart: "bytes-40k views"."""
    return f"{cell['workload']} {words.kind_of(ours)}".strip()


def figure_of(contenders: Mapping[str, Any], name: str | None, figure: str) -> float | None:
    return None if name is None or name not in contenders else median(contenders[name]["summary"], figure)


def print_cell(cell: Mapping[str, Any], screen: Console) -> None:
    """Every contender of a cell; the fastest first pass on top."""
    screen.print(Text(f"{words.title_of(cell)}, {words.place_of(cell)}", style="bold"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for head in ("samples/s", "first pass", "steady", "first batch", "resume", "CPU", "memory"):
        table.add_column(head, justify="left" if head == "samples/s" else "right", no_wrap=True)
    for name in by_speed(cell["contenders"]):
        summary = cell["contenders"][name]["summary"]
        style = "bold cyan" if is_ours(name) else "dim" if name == LIMIT else ""
        table.add_row(
            words.name_of(name),
            words.rate(median(summary, "first_pass_per_s")),
            words.rate(median(summary, "steady_per_s")),
            words.seconds(median(summary, "first_batch_s")),
            words.times(median(summary, "resume_ratio")),
            words.microseconds(median(summary, "cpu_us_per_sample")),
            words.size(median(summary, "peak_rss_bytes")),
            style=style,
        )
    screen.print(table, crop=False)


def by_speed(contenders: Mapping[str, Any]) -> list[str]:
    """Contenders by their first pass, the limit first of all."""
    return sorted(
        contenders,
        key=lambda name: (name != LIMIT, -(median(contenders[name]["summary"], "first_pass_per_s") or 0.0)),
    )


def line_of(cell: Mapping[str, Any]) -> str:
    """Line to print for a finished cell."""
    each = cell["contenders"]
    ours = median(each.get(OURS, {}).get("summary", {}), "first_pass_per_s")
    peer = best_peer(each)
    if ours is None:
        return f"{cell['workload']}, {words.place_of(cell)}: penstock was not measured"
    line = f"{cell['workload']}, {words.place_of(cell)}: {words.rate(ours)} samples/s"
    return line if peer is None else f"{line}, {words.times(ratio(each, peer))} {words.name_of(peer)}"


def refusals(cells: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[str]]:
    """(contender, reason) -> the cells in which it was not measured for that reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        for name, reason in cell["refused"].items():
            found.setdefault((name, reason), []).append(f"{cell['workload']}, {words.place_of(cell)}")
    return found


def _print_refused(cells: Sequence[Mapping[str, Any]], screen: Console) -> None:
    for (name, reason), where in refusals(cells).items():
        screen.print()
        places = f"{len(where)} comparisons" if len(where) > 2 else " and ".join(where)
        _wrapped(screen, f"{words.name_of(name)} was not measured ({places}): {reason}")


def _wrapped(screen: Console, text: str) -> None:
    for part in textwrap.wrap(text, max(40, screen.width), break_long_words=False, break_on_hyphens=False):
        screen.print(Text(part), soft_wrap=True)
