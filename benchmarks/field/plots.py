"""Plots as SVG text: bars of contenders, and the ratios of all cells. Readable at the width of a phone. Pure.

Colours are CSS variables of the page, so that plots follow its light and dark scheme.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ..contenders import LIMIT
from . import words
from .summary import best_peer, is_ours, is_reckoned, median, ratio, ratio_spread
from .table import by_speed, lines_of

WIDTH = 360
_NAME, _RIGHT = 126, 296  # bars begin, and end at most
_ROW = 24
_HEAD, _FOOT = 66, 38  # of the ratios: what they are, and the axis
_MANY_TIMES = 50.0  # from the least to the most, where an axis has room for powers of ten alone


@dataclass(frozen=True)
class Axis:
    """A linear map from values to x, from 0, or a logarithmic one."""

    low: float
    high: float
    left: float
    right: float
    is_log: bool

    def x(self, value: float) -> float:
        if self.is_log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = value / self.high
        return self.left + (self.right - self.left) * min(1.0, share)

    def ticks(self) -> list[float]:
        if self.is_log:
            digits = (1, 2, 5) if self.high / self.low < _MANY_TIMES else (1,)
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            marks = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
            return [mark for mark in marks if self.low * 0.999 <= mark <= self.high * 1.001]
        power = 10.0 ** math.floor(math.log10(self.high / 3))
        step_size = next(power * digit for digit in (1, 2, 5, 10) if self.high / (power * digit) <= 4)
        return [step_size * k for k in range(1 + int(self.high / step_size + 1e-9))]


def rate_axis(values: Sequence[float], left: float = _NAME, right: float = _RIGHT) -> Axis:
    """Make the axis for rates: from 0, so that a bar that is half as long is half as fast."""
    return Axis(0.0, max(values), left, right, False)


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
    label = escape(f"Samples per second in the first pass: {rates}")
    parts = [f'<svg viewBox="0 0 {WIDTH} {bottom + 22}" role="img" aria-label="{label}">']
    for tick in axis.ticks():
        x = axis.x(tick)
        parts.append(f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{bottom}"/>')
        parts.append(f'<text class="mid" x="{x:.1f}" y="{bottom + 15}">{words.tick(tick)}</text>')
    for row, name in enumerate(names):
        parts += _draw_row(cell, name, axis, row * _ROW + 4)
    return "".join((*parts, "</svg>"))


def _draw_row(cell: Mapping[str, Any], name: str, axis: Axis, top: float) -> list[str]:
    summary = cell["contenders"][name]["summary"]
    low, middle, high = summary["first_pass_per_s"]
    y, kind = top + 9, "ours" if is_ours(name) else "limit" if name == LIMIT else "peer"
    start, stop = axis.x(axis.low), axis.x(middle)
    width = max(1.0, stop - start)
    parts = [
        f'<text class="end name {kind}" x="{_NAME - 6}" y="{y + 4}">{escape(words.name_of(name))}</text>',
        f'<rect class="bar {kind}" x="{start:.1f}" y="{top + 1}" width="{width:.1f}" height="16" rx="2"/>',
    ]
    if high > low:
        parts.append(f'<line class="whisker" x1="{axis.x(low):.1f}" x2="{axis.x(high):.1f}" y1="{y}" y2="{y}"/>')
    steady = median(summary, "steady_per_s")
    if steady:
        parts.append(f'<circle class="steady" cx="{axis.x(steady):.1f}" cy="{y}" r="3.6"/>')
    shown = words.reckoned(words.rate(middle), is_reckoned(cell["contenders"][name]))
    parts.append(f'<text class="end value {kind}" x="{WIDTH - 4}" y="{y + 4}">{shown}</text>')
    return parts


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
    axis = Axis(low, high, 10, WIDTH - 58, True)
    top = _HEAD if heading else 26
    bottom = top + 34 * len(rows) + 6
    ratios = ", ".join(f"{row[0]} {words.times(row[2])}" for row in rows)
    label = escape(f"Speed as a multiple of the best other loader: {ratios}")
    parts = [f'<svg viewBox="0 0 {WIDTH} {bottom + _FOOT}" role="img" aria-label="{label}">']
    for line, (kind, text) in enumerate(zip(("title", "dim"), heading, strict=False)):
        parts.append(f'<text class="{kind}" x="10" y="{16 + 17 * line}">{escape(text)}</text>')
    parts += _draw_legend(top - 12)
    for tick in axis.ticks():
        x = axis.x(tick)
        mark = "even" if tick == 1.0 else "rule"
        parts.append(f'<line class="{mark}" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        at = "" if x < axis.left + 14 else "mid"  # else the first label would be cut
        parts.append(f'<text class="{at}" x="{x:.1f}" y="{bottom + 15}">{tick:g}x</text>')
    axis_name = "times as fast as the best other loader (logarithmic)"
    parts.append(f'<text class="mid" x="{(axis.left + axis.right) / 2:.1f}" y="{bottom + 32}">{axis_name}</text>')
    for row, (label, peer, value, spread) in enumerate(rows):
        y, kind = top + row * 34 + 25, "good" if value >= 1 else "bad"
        against = f'<tspan class="dim">/ {escape(peer)}</tspan>'
        low_x, high_x = axis.x(spread.low), axis.x(spread.high)
        parts += [
            f'<text class="label" x="10" y="{y - 10}">{escape(label)} {against}</text>',
            f'<line class="track" x1="10" x2="{WIDTH - 58}" y1="{y}" y2="{y}"/>',
            f'<line class="spread {kind}" x1="{low_x:.1f}" x2="{high_x:.1f}" y1="{y}" y2="{y}"/>',
            f'<circle class="dot {kind}" cx="{axis.x(value):.1f}" cy="{y}" r="4.5"/>',
            f'<text class="value {kind}" x="{WIDTH - 50}" y="{y + 4}">{words.times(value)}</text>',
        ]
    return "".join((*parts, "</svg>"))


def _draw_legend(y: float) -> list[str]:
    """Draw the legend of dots and bands, with their colours."""
    return [
        f'<circle class="dot good" cx="15" cy="{y - 4}" r="4.5"/><text x="24" y="{y}">faster</text>',
        f'<circle class="dot bad" cx="73" cy="{y - 4}" r="4.5"/><text x="82" y="{y}">slower (medians)</text>',
        f'<line class="spread good" x1="190" x2="204" y1="{y - 4}" y2="{y - 4}"/>',
        f'<text x="212" y="{y}">quartiles of the rounds</text>',
    ]
