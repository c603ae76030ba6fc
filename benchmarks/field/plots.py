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
from .summary import best_peer, is_ours, median, ratio, ratio_spread
from .table import by_speed, lines_of, name_of_line

WIDTH = 360
_NAME, _RIGHT = 126, 304  # bars begin, and end at most
_ROW = 24
_LOG_FROM = 8.0  # a linear axis would make bars this far apart invisible


@dataclass(frozen=True)
class Axis:
    """From values to x, linear from 0 or logarithmic."""

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
            first, last = math.floor(math.log10(self.low) + 1e-9), math.ceil(math.log10(self.high) - 1e-9)
            step = max(1, -(-(last - first) // 4))
            powers = [10.0**power for power in range(first, last + 1, step)]
            return [power for power in powers if self.low * 0.999 <= power <= self.high * 1.001]
        power = 10.0 ** math.floor(math.log10(self.high / 3))
        step_size = next(power * digit for digit in (1, 2, 5, 10) if self.high / (power * digit) <= 4)
        return [step_size * k for k in range(1 + int(self.high / step_size + 1e-9))]


def rate_axis(values: Sequence[float], left: float = _NAME, right: float = _RIGHT) -> Axis:
    """The axis for rates that are all above 0."""
    high, low = max(values), min(values)
    if high / low > _LOG_FROM:
        return Axis(10.0 ** math.floor(math.log10(low / 1.5)), high, left, right, True)
    return Axis(0.0, high, left, right, False)


def draw_rates(cell: Mapping[str, Any]) -> str:
    """First passes as bars with quartiles as whiskers, and what is steady as a dot; "" where nothing was measured."""
    names = [name for name in by_speed(cell["contenders"]) if _median(cell, name, "first_pass_per_s")]
    if not names:
        return ""
    values = [
        value for name in names for kind in ("first_pass_per_s", "steady_per_s") if (value := _median(cell, name, kind))
    ]
    axis = rate_axis(values)
    bottom = _ROW * len(names) + 6
    told = ", ".join(f"{words.name_of(name)} {words.rate(_median(cell, name, 'first_pass_per_s'))}" for name in names)
    label = escape(f"Samples per second in the first pass: {told}")
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
    parts.append(f'<text class="end value {kind}" x="{WIDTH - 4}" y="{y + 4}">{words.rate(middle)}</text>')
    return parts


def _median(cell: Mapping[str, Any], name: str, kind: str) -> float:
    return median(cell["contenders"][name]["summary"], kind) or 0.0


def draw_ratios(cells: Sequence[Mapping[str, Any]]) -> str:
    """Our first pass over that of the best peer, a line a cell, on a logarithmic axis; "" without peers."""
    rows = []
    for cell, ours in lines_of(cells):
        each = cell["contenders"]
        peer = best_peer(each, ours=ours)
        value, spread = ratio(each, peer, ours=ours), ratio_spread(each, peer, ours=ours)
        if peer is not None and value is not None and spread is not None:
            rows.append((f"{name_of_line(cell, ours)}, {words.place_of(cell)}", words.name_of(peer), value, spread))
    if not rows:
        return ""
    ends = [end for _, _, value, spread in rows for end in (value, spread.low, spread.high)]
    low, high = min(0.5, min(ends) / 1.1), max(2.0, max(ends) * 1.1)
    axis = Axis(low, high, 10, WIDTH - 58, True)
    bottom = 34 * len(rows) + 6
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {bottom + 20}" role="img" aria-label="'
        + escape(
            "Speed as a multiple of the best peer: " + ", ".join(f"{row[0]} {words.times(row[2])}" for row in rows)
        )
        + '">'
    ]
    for tick in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0):
        if low <= tick <= high:
            x = axis.x(tick)
            mark = "even" if tick == 1.0 else "rule"
            parts.append(f'<line class="{mark}" x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{bottom}"/>')
            parts.append(f'<text class="mid" x="{x:.1f}" y="{bottom + 15}">{tick:g}x</text>')
    for row, (label, peer, value, spread) in enumerate(rows):
        y, kind = row * 34 + 25, "good" if value >= 1 else "bad"
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
