"""Charts as SVG text: axes with round ticks, and elements, for every page that draws. Pure.

Charts are WIDTH wide, so that they are readable at the width of a phone. Colours are CSS variables of the page, whose
light and dark scheme they follow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 360
_FAR_APART = 30.0  # from the least to the most, from where values need a logarithm
_MANY_TIMES = 1000.0  # where an axis has room for powers of ten alone
_HEADROOM = 1.04  # above the highest value


@dataclass(frozen=True)
class Axis:
    """A map from values, ``low`` to ``high``, to places, ``start`` to ``stop``: linear, or logarithmic."""

    low: float
    high: float
    start: float
    stop: float
    is_log: bool = False

    def place(self, value: float) -> float:
        if self.is_log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + (self.stop - self.start) * min(1.0, share)

    def ticks(self, most: int = 5) -> list[float]:
        """Choose round numbers of the axis: at most ``most``, or 1, 2 and 5 of each power of ten."""
        if not self.is_log:
            return ticks(self.low, self.high, most)
        digits = (1, 2, 5) if self.high / self.low <= _MANY_TIMES else (1,)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        marks = [digit * 10.0**power for power in powers for digit in digits]
        shown = [mark for mark in marks if self.low * 0.999 <= mark <= self.high * 1.001]
        return shown[:: 1 + len(shown) // 12]


def fit_axis(
    values: Sequence[float], start: float, stop: float, *, from_zero: bool = True, may_be_log: bool = False
) -> Axis:
    """Make the axis that shows all values; logarithmic where it may be, and they are positive and far apart."""
    low, high = min(values), max(values)
    if may_be_log and low > 0 and high / low > _FAR_APART:
        return Axis(low, high, start, stop, is_log=True)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    if high - low < 1e-12 * max(abs(low), abs(high), 1e-300):
        spread = abs(high) / 2 or 1.0
        low, high = low - spread * (not from_zero), high + spread
    return Axis(low, high, start, start + (stop - start) / _HEADROOM)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Choose round numbers from ``low`` to ``high``, at most ``most``."""
    rough = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(power * digit for digit in (1, 2, 2.5, 5, 10, 20) if power * digit >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def draw_svg(height: float, label: str, parts: Iterable[str]) -> str:
    """Join elements to one <svg>; ``label`` says in words what it shows."""
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def text(kind: str, x: float, y: float, words: str, more: str = "") -> str:
    """Make a text of the CSS class ``kind``; ``more`` is markup behind it."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}{more}</text>'


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="{kind}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def dot(kind: str, x: float, y: float, radius: float, *, style: str = "", title: str = "") -> str:
    """Make a dot; ``title`` is shown where a pointer rests on it."""
    styled, titled = f' style="{style}"' if style else "", f"<title>{escape(title)}</title>" if title else ""
    return f'<circle class="{kind}"{styled} cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}">{titled}</circle>'


def bar(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"/>'


_UNITS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SMALLEST = 1e-3


def short(value: float) -> str:
    """Format three digits and a unit: 12.3k, 0.25, 3e-4."""
    size = abs(value)
    for bound, unit in _UNITS:
        if size >= 0.9995 * bound:
            return f"{value / bound:.3g}{unit}"
    if size and size < _SMALLEST:
        digits, power = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.3g}"


def percent(value: float) -> str:
    return f"{100 * value:.3g}%"
