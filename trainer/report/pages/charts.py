"""Charts of a run: lines and stacked areas over steps. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from .svg import Axis, dot, draw_svg, fit_axis, line, short, text

Point = tuple[int, float | None]

_HEIGHT = 210
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
    points = [point for each in lines for piece in (*each.pieces, *each.faint) for point in piece]
    values = [y for _, y in points if y is not None]
    if len({step for step, y in points if y is not None}) < _FEWEST_STEPS:
        return ""
    y_axis = fit_axis(values, _BOTTOM, _TOP, from_zero=chart.from_zero, may_be_log=chart.may_be_log)
    scale = _Scale(Axis(0, max(1, chart.last_step), _LEFT, _RIGHT), y_axis)
    parts = [*_draw_axes(scale, chart.format), *_draw_marks(scale, chart.marks)]
    for each in reversed(lines) if chart.stacked else lines:
        parts += _draw_area(scale, each) if chart.stacked else _draw_line(scale, each, chart.format)
    return draw_svg(_HEIGHT, _describe(chart), parts)


def thin(points: Sequence[Point]) -> list[Point]:
    """Thin the points to about two a column, its lowest and its highest, so that no spike is lost; gaps stay gaps."""
    if len(points) <= 2 * _COLUMNS:
        return list(points)
    kept: list[Point] = []
    for column in range(_COLUMNS):
        part = points[column * len(points) // _COLUMNS : (column + 1) * len(points) // _COLUMNS]
        known = [point for point in part if point[1] is not None]
        ends = {min(known, key=lambda p: p[1] or 0.0), max(known, key=lambda p: p[1] or 0.0)} if known else set()
        gaps = [point for point in part if point[1] is None][:1]
        kept += sorted((*ends, *gaps), key=lambda point: point[0])
    return kept


@dataclass(frozen=True)
class _Scale:
    steps: Axis
    values: Axis

    def x(self, step: float) -> float:
        return self.steps.place(step)

    def y(self, value: float) -> float:
        return self.values.place(value)


def _draw_axes(scale: _Scale, format_value: Callable[[float], str]) -> Iterable[str]:
    for value in scale.values.ticks():
        y = scale.y(value)
        yield line("rule", _LEFT, y, _RIGHT, y)
        yield text("end", _LEFT - 5, y + 4, format_value(value))
    yield text("end", _LEFT - 10, _HEIGHT - 4, "step")
    for step in scale.steps.ticks(6):
        if step == int(step):
            yield text("end" if scale.x(step) > _RIGHT - 12 else "mid", scale.x(step), _HEIGHT - 4, short(step))


def _draw_marks(scale: _Scale, marks: Marks) -> Iterable[str]:
    seen_at = -100.0
    for step, label in marks.resumes:
        x = scale.x(step)
        yield f'<path class="resume" d="M{x:.1f} {_TOP - 4}V{_BOTTOM}"><title>{escape(label)}</title></path>'
        if x - seen_at > 48:
            at = "end" if x > (_LEFT + _RIGHT) / 2 else ""
            yield text(f"mark {at}", x, 11, label)
            seen_at = x
    columns = sorted({round(scale.x(step)) for step in marks.saves})
    yield "".join(f'<path class="save" d="M{x - 3} {_BOTTOM + 7}h6l-3 -6z"/>' for x in columns)


def _draw_line(scale: _Scale, drawn: Line, format_value: Callable[[float], str]) -> Iterable[str]:
    for pieces, kind in ((drawn.faint, " faint"), (drawn.pieces, "")):
        for piece in pieces:
            path = _path([(scale.x(step), None if y is None else scale.y(y)) for step, y in thin(piece)])
            yield f'<path class="line{kind}" style="stroke:var(--c{drawn.color})" d="{path}"/>'
            if drawn.dots or len(piece) == 1:
                for step, value in piece[:_COLUMNS]:
                    if value is not None:
                        style, title = f"fill:var(--c{drawn.color})", f"step {step}: {format_value(value)}"
                        yield dot(f"dot{kind}", scale.x(step), scale.y(value), 2.5, style=style, title=title)


def _draw_area(scale: _Scale, layer: Line) -> Iterable[str]:
    for piece in layer.pieces:
        points = [(scale.x(step), scale.y(y)) for step, y in thin(piece) if y is not None]
        if len(points) == 1:
            points = [(points[0][0] - 2, points[0][1]), (points[0][0] + 2, points[0][1])]
        if points:
            floor = scale.y(0.0)
            body = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            edges = f"M{points[0][0]:.1f} {floor:.1f}L{body}L{points[-1][0]:.1f} {floor:.1f}Z"
            yield f'<path class="area" style="fill:var(--c{layer.color})" d="{edges}"/>'


def _stack(lines: Sequence[Line]) -> list[Line]:
    """Stack each line on those before it; steps that one lacks count as 0 there."""
    found: list[Line] = []
    sums: list[dict[int, float]] = [{} for _ in lines[0].pieces] if lines else []
    for layer in lines:
        pieces = []
        for total, piece in zip(sums, layer.pieces, strict=True):
            for step, y in piece:
                total[step] = total.get(step, 0.0) + (y or 0.0)
            pieces.append(sorted(total.items()))
        found.append(Line(name=layer.name, pieces=pieces, color=layer.color))
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
    for each in chart.lines:
        known = [(step, y) for piece in each.pieces for step, y in piece if y is not None]
        if known:
            (first, y0), (last, y1) = known[0], known[-1]
            courses.append(f"{each.name} {chart.format(y0)} at step {first}, {chart.format(y1)} at step {last}")
    return f"{chart.title}: {'; '.join(courses)}"
