"""Charts as SVG text: lines and stacked areas over steps, readable at the width of a phone. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

Point = tuple[int, float | None]

WIDTH, HEIGHT = 360, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 350, 18, 184
_COLUMNS = 300  # points drawn across a chart; more are not seen
_FEWEST_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line, in pieces that are not joined: the attempts of a run. ``color`` is the number of a color."""

    name: str
    pieces: Sequence[Sequence[Point]]
    color: int = 0
    faint: Sequence[Sequence[Point]] = ()
    """Pieces of steps that were made again."""
    dots: bool = False


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Events at steps: resumes with a label, and saves."""

    resumes: Sequence[tuple[int, str]] = ()
    saves: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart to draw: lines, or layers of areas from below, over steps 0 to ``last_step``."""

    title: str
    lines: Sequence[Line]
    last_step: int
    format: Callable[[float], str]
    marks: Marks = field(default_factory=Marks)
    stacked: bool = False
    from_zero: bool = True
    may_be_log: bool = False


def draw(chart: Chart) -> str:
    """Draw the chart as one <svg> element; colors are the CSS variables --c0, --c1, ..., --ink and --rule.

    It is empty where there are values of fewer than two steps, which show no course.
    """
    lines = _stack(chart.lines) if chart.stacked else chart.lines
    points = [point for line in lines for piece in (*line.pieces, *line.faint) for point in piece]
    values = [y for _, y in points if y is not None]
    if len({step for step, y in points if y is not None}) < _FEWEST_STEPS:
        return ""
    axis = _Axis(values, from_zero=chart.from_zero, may_be_log=chart.may_be_log)
    scale = _Scale(max(1, chart.last_step), axis)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_describe(chart))}">',
        *_draw_axes(scale, chart.format),
        *_draw_marks(scale, chart.marks),
    ]
    for line in reversed(lines) if chart.stacked else lines:
        parts += _draw_area(scale, line) if chart.stacked else _draw_line(scale, line, chart.format)
    return "".join((*parts, "</svg>"))


def thin(points: Sequence[Point], columns: int = _COLUMNS) -> list[Point]:
    """Thin the points to about two a column, its lowest and its highest, so that no spike is lost; gaps stay gaps."""
    if len(points) <= 2 * columns:
        return list(points)
    kept: list[Point] = []
    for column in range(columns):
        part = points[column * len(points) // columns : (column + 1) * len(points) // columns]
        known = [point for point in part if point[1] is not None]
        ends = {min(known, key=lambda p: p[1] or 0.0), max(known, key=lambda p: p[1] or 0.0)} if known else set()
        gaps = [point for point in part if point[1] is None][:1]
        kept += sorted((*ends, *gaps), key=lambda point: point[0])
    return kept


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Choose round numbers from ``low`` to ``high``, at most ``most``."""
    rough = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(power * digit for digit in (1, 2, 2.5, 5, 10, 20) if power * digit >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


class _Axis:
    """The range of values and its ticks; logarithmic where values are positive and far apart."""

    def __init__(self, values: Sequence[float], *, from_zero: bool, may_be_log: bool) -> None:
        low, high = min(values), max(values)
        self.is_log = may_be_log and low > 0 and high / low > 30
        if self.is_log:
            self.low, self.high = math.log10(low), math.log10(high)
            powers = range(math.floor(self.low), math.ceil(self.high) + 1)
            digits = (1,) if self.high - self.low > 3 else (1, 2, 5)
            marks = [digit * 10.0**power for power in powers for digit in digits]
            self.ticks = [mark for mark in marks if low <= mark <= high][:: 1 + len(marks) // 12]
            return
        if from_zero:
            low, high = min(0.0, low), max(0.0, high)
        if high - low < 1e-12 * max(abs(low), abs(high), 1e-300):
            spread = abs(high) / 2 or 1.0
            low, high = low - spread * (not from_zero), high + spread
        self.ticks = ticks(low, high)
        self.low, self.high = low, high + (0.04 * (high - low))

    def place(self, value: float) -> float:
        """Map a value to 0 at the bottom, 1 at the top."""
        at = math.log10(value) if self.is_log else value
        return (at - self.low) / max(self.high - self.low, 1e-300)


@dataclass(frozen=True)
class _Scale:
    last_step: int
    axis: _Axis

    def x(self, step: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * step / self.last_step

    def y(self, value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * self.axis.place(value)


def _draw_axes(scale: _Scale, format_value: Callable[[float], str]) -> Iterable[str]:
    for value in scale.axis.ticks:
        y = scale.y(value)
        yield f'<path class="rule" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>'
        yield f'<text class="end" x="{_LEFT - 5}" y="{y + 4:.1f}">{escape(format_value(value))}</text>'
    yield f'<text class="end" x="{_LEFT - 10}" y="{HEIGHT - 4}">step</text>'
    for step in ticks(0, scale.last_step, 6):
        if step == int(step):
            at = "end" if scale.x(step) > _RIGHT - 12 else "mid"
            yield f'<text class="{at}" x="{scale.x(step):.1f}" y="{HEIGHT - 4}">{escape(short(step))}</text>'


def _draw_marks(scale: _Scale, marks: Marks) -> Iterable[str]:
    seen_at = -100.0
    for step, label in marks.resumes:
        x = scale.x(step)
        yield f'<path class="resume" d="M{x:.1f} {_TOP - 4}V{_BOTTOM}"><title>{escape(label)}</title></path>'
        if x - seen_at > 48:
            at = "end" if x > (_LEFT + _RIGHT) / 2 else ""
            yield f'<text class="mark {at}" x="{x:.1f}" y="11">{escape(label)}</text>'
            seen_at = x
    columns = sorted({round(scale.x(step)) for step in marks.saves})
    yield "".join(f'<path class="save" d="M{x - 3} {_BOTTOM + 7}h6l-3 -6z"/>' for x in columns)


def _draw_line(scale: _Scale, line: Line, format_value: Callable[[float], str]) -> Iterable[str]:
    for pieces, kind in ((line.faint, " faint"), (line.pieces, "")):
        for piece in pieces:
            drawn = [(scale.x(step), y) for step, y in thin(piece)]
            path = _path([(x, None if y is None else scale.y(y)) for x, y in drawn])
            yield f'<path class="line{kind}" style="stroke:var(--c{line.color})" d="{path}"/>'
            if line.dots or len(piece) == 1:
                for step, value in piece[:_COLUMNS]:
                    if value is not None:
                        title = escape(f"step {step}: {format_value(value)}")
                        at = f'cx="{scale.x(step):.1f}" cy="{scale.y(value):.1f}"'
                        style = f'class="dot{kind}" style="fill:var(--c{line.color})"'
                        yield f'<circle {style} r="2.5" {at}><title>{title}</title></circle>'


def _draw_area(scale: _Scale, line: Line) -> Iterable[str]:
    for piece in line.pieces:
        points = [(scale.x(step), scale.y(y)) for step, y in thin(piece) if y is not None]
        if len(points) == 1:
            points = [(points[0][0] - 2, points[0][1]), (points[0][0] + 2, points[0][1])]
        if points:
            floor = scale.y(0.0)
            body = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            edges = f"M{points[0][0]:.1f} {floor:.1f}L{body}L{points[-1][0]:.1f} {floor:.1f}Z"
            yield f'<path class="area" style="fill:var(--c{line.color})" d="{edges}"/>'


def _stack(lines: Sequence[Line]) -> list[Line]:
    """Stack each line on those before it; steps that one lacks count as 0 there."""
    found: list[Line] = []
    sums: list[dict[int, float]] = [{} for _ in lines[0].pieces] if lines else []
    for line in lines:
        pieces = []
        for total, piece in zip(sums, line.pieces, strict=True):
            for step, y in piece:
                total[step] = total.get(step, 0.0) + (y or 0.0)
            pieces.append(sorted(total.items()))
        found.append(Line(name=line.name, pieces=pieces, color=line.color))
    return found


def _path(points: Sequence[tuple[float, float | None]]) -> str:
    parts, pen_is_up = [], True
    for x, y in points:
        if y is None:
            pen_is_up = True
            continue
        parts.append(f"{'M' if pen_is_up else 'L'}{x:.1f} {y:.1f}")
        pen_is_up = False
    return "".join(parts)


def _describe(chart: Chart) -> str:
    """Describe the chart in words, for those who do not see it."""
    courses = []
    for line in chart.lines:
        known = [(step, y) for piece in line.pieces for step, y in piece if y is not None]
        if known:
            (first, y0), (last, y1) = known[0], known[-1]
            courses.append(f"{line.name} {chart.format(y0)} at step {first}, {chart.format(y1)} at step {last}")
    return f"{chart.title}: {'; '.join(courses)}"


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
