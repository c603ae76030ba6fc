"""Charts of the bench: bars of contenders, and the ratios of all cells. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ...trainer.report.pages.svg import WIDTH, Axis, bar, dot, draw_svg, line, text
from ..contenders import LIMIT
from . import words
from .summary import best_peer, is_ours, is_reckoned, median, ratio, ratio_spread
from .table import by_speed, lines_of

_NAME, _RIGHT = 126, 296  # bars begin, and end at most
_ROW = 24
_HEAD, _FOOT = 66, 38  # of the ratios: what they are, and the axis
_HEADS = ("title", "dim")


def rate_axis(values: Sequence[float], left: float = _NAME, right: float = _RIGHT) -> Axis:
    """Make the axis for rates: from 0, so that a bar that is half as long is half as fast."""
    return Axis(0.0, max(values), left, right)


def draw_rates(cell: Mapping[str, Any]) -> str:
    """Draw first passes as bars with quartiles as whiskers, and steady rates as dots; "" where nothing was measured."""
    names = [name for name in by_speed(cell["contenders"]) if _median(cell, name, "first_pass_per_s")]
    if not names:
        return ""
    values = [
        value for name in names for kind in ("first_pass_per_s", "steady_per_s") if (value := _median(cell, name, kind))
    ]
    axis = rate_axis(values)
    bottom = _ROW * len(names) + 6
    rates = ", ".join(f"{words.name_of(name)} {words.rate(_median(cell, name, 'first_pass_per_s'))}" for name in names)
    label = f"Samples per second in the first pass: {rates}"
    parts = []
    for tick in axis.ticks():
        x = axis.place(tick)
        parts += [line("rule", x, 2, x, bottom), text("mid", x, bottom + 15, words.tick(tick))]
    for row, name in enumerate(names):
        parts += _draw_row(cell, name, axis, row * _ROW + 4)
    return draw_svg(bottom + 22, label, parts)


def _draw_row(cell: Mapping[str, Any], name: str, axis: Axis, top: float) -> list[str]:
    summary = cell["contenders"][name]["summary"]
    low, middle, high = summary["first_pass_per_s"]
    y, kind = top + 9, "ours" if is_ours(name) else "limit" if name == LIMIT else "peer"
    parts = [
        text(f"end name {kind}", _NAME - 6, y + 4, words.name_of(name)),
        bar(f"bar {kind}", axis.start, top + 1, max(1.0, axis.place(middle) - axis.start), 16),
    ]
    if high > low:
        parts.append(line("whisker", axis.place(low), y, axis.place(high), y))
    steady = median(summary, "steady_per_s")
    if steady:
        parts.append(dot("steady", axis.place(steady), y, 3.6))
    shown = words.reckoned(words.rate(middle), is_reckoned(cell["contenders"][name]))
    return [*parts, text(f"end value {kind}", WIDTH - 4, y + 4, shown)]


def _median(cell: Mapping[str, Any], name: str, kind: str) -> float:
    return median(cell["contenders"][name]["summary"], kind) or 0.0


def draw_ratios(cells: Sequence[Mapping[str, Any]], heading: Sequence[str] = ()) -> str:
    """Draw our first pass over that of the best other loader, a line a cell, on a logarithmic axis; "" without others.

    ``heading``: a title and a line of text above the legend.
    """
    rows = []
    for cell, ours in lines_of(cells):
        each = cell["contenders"]
        peer = best_peer(each, ours=ours)
        value, spread = ratio(each, peer, ours=ours), ratio_spread(each, peer, ours=ours)
        if peer is not None and value is not None and spread is not None:
            rows.append((words.line_of(cell, ours), words.name_of(peer), value, spread))
    if not rows:
        return ""
    ends = [end for _, _, value, spread in rows for end in (value, spread.low, spread.high)]
    low, high = min(0.5, min(ends) / 1.1), max(2.0, max(ends) * 1.1)
    axis = Axis(low, high, 10, WIDTH - 58, is_log=True)
    top = _HEAD if heading else 26
    bottom = top + 34 * len(rows) + 6
    parts = [text(kind, 10, 16 + 17 * row, said) for row, (kind, said) in enumerate(zip(_HEADS, heading, strict=False))]
    parts += _draw_legend(top - 12)
    for tick in axis.ticks():
        x = axis.place(tick)
        parts.append(line("even" if tick == 1.0 else "rule", x, top, x, bottom))
        parts.append(text("" if x < axis.start + 14 else "mid", x, bottom + 15, f"{tick:g}x"))  # else it would be cut
    axis_name = "times as fast as the best other loader (logarithmic)"
    parts.append(text("mid", (axis.start + axis.stop) / 2, bottom + 32, axis_name))
    for row, (name, peer, value, spread) in enumerate(rows):
        y, kind = top + row * 34 + 25, "good" if value >= 1 else "bad"
        parts += [
            text("label", 10, y - 10, f"{name} ", f'<tspan class="dim">/ {escape(peer)}</tspan>'),
            line("track", 10, y, WIDTH - 58, y),
            line(f"spread {kind}", axis.place(spread.low), y, axis.place(spread.high), y),
            dot(f"dot {kind}", axis.place(value), y, 4.5),
            text(f"value {kind}", WIDTH - 50, y + 4, words.times(value)),
        ]
    ratios = ", ".join(f"{row[0]} {words.times(row[2])}" for row in rows)
    return draw_svg(bottom + _FOOT, f"Speed as a multiple of the best other loader: {ratios}", parts)


def _draw_legend(y: float) -> list[str]:
    """Draw the legend of dots and bands, with their colours."""
    return [
        dot("dot good", 15, y - 4, 4.5), text("", 24, y, "faster"),
        dot("dot bad", 73, y - 4, 4.5), text("", 82, y, "slower (medians)"),
        line("spread good", 190, y - 4, 204, y - 4), text("", 212, y, "quartiles of the rounds"),
    ]  # fmt: skip
