"""A picture of the Grafana dashboard: its panels, with what Prometheus recorded of a real run, as one SVG."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from .faces import ROOT

BOARD = ROOT / "deploy" / "grafana" / "penstock.json"
_RECORDED_S = 90.0
_WIDTH, _ROW, _GAP = 1200, 27, 6  # pixels: the page, a unit of the grid's height, between panels
_SERIES = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#37872d", "#e0b400", "#c4162a")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series of a panel: its name in the legend, and (seconds since 1970, value) in order of time."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Colours:
    """Of a page: behind panels, of panels, of their borders and grids, of text and of lesser text."""

    page: str
    panel: str
    rule: str
    text: str
    dim: str


LIGHT = Colours(page="#f4f5f5", panel="#ffffff", rule="#e2e3e7", text="#24292e", dim="#6b7280")
DARK = Colours(page="#111217", panel="#181b1f", rule="#2c3235", text="#d8d9da", dim="#9095a0")


def draw_board(board: Mapping[str, Any], lines: Mapping[str, Sequence[Line]], colours: Colours) -> str:
    """Draw all panels at their places; ``lines`` has those of each, as ``record_lines`` gives them."""
    panels = board["panels"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) * _ROW + 2 * _GAP
    parts = [_panel(panel, lines.get(_key(panel), ()), colours) for panel in panels]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="system-ui, sans-serif">'
        f'<rect width="{_WIDTH}" height="{height}" fill="{colours.page}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _key(panel: Mapping[str, Any]) -> str:
    return f"{panel['type']} {panel['title']}"


def _panel(panel: Mapping[str, Any], lines: Sequence[Line], colours: Colours) -> str:
    place, unit = panel["gridPos"], _WIDTH / 24
    x, y = place["x"] * unit + _GAP / 2, place["y"] * _ROW + _GAP
    width, height = place["w"] * unit - _GAP, place["h"] * _ROW - _GAP
    room = int(width / 6.6)
    title = escape(panel["title"] if len(panel["title"]) <= room else panel["title"][: room - 1] + "…")
    if panel["type"] == "row":
        return _text(x + 8, y + 16, title, colours.text, 14, "bold")
    box = f'<rect width="{width:.0f}" height="{height:.0f}" rx="2" fill="{colours.panel}" stroke="{colours.rule}"/>'
    head = _text(10, 18, title, colours.text, 12, "500")
    if not any(line.points for line in lines):
        body = _text(width / 2, height / 2 + 4, "No data", colours.dim, 12, anchor="middle")
    elif panel["type"] == "stat":
        body = _stat(panel, lines[0], width, height)
    else:
        body = _plot(panel, [line for line in lines if line.points], width, height, colours)
    return f'<g transform="translate({x:.0f} {y:.0f})">{box}{head}{body}</g>'


def _stat(panel: Mapping[str, Any], line: Line, width: float, height: float) -> str:
    low, high = _bounds([line.points], 0.0)
    scale = _Scale(line.points[0][0], line.points[-1][0], low, high, (0, height / 2, width, height / 2))
    value = write_value(line.points[-1][1], panel["fieldConfig"]["defaults"]["unit"])
    shape = f"{scale.path(line.points)}L{width:.0f} {height:.0f}L0 {height:.0f}Z"
    area = f'<path d="{shape}" fill="{_SERIES[0]}" opacity=".18"/>'
    return area + _text(width / 2, height / 2 + 12, value, _SERIES[0], 28, "600", anchor="middle")


def _plot(panel: Mapping[str, Any], lines: list[Line], width: float, height: float, colours: Colours) -> str:
    defaults = panel["fieldConfig"]["defaults"]
    stacked = "stacking" in defaults["custom"]
    if stacked:
        lines = stack(lines)
    low, high = _bounds([line.points for line in lines], defaults.get("max"))
    ticks = choose_ticks(low, high)
    high = max(high, ticks[-1])
    begin = min(line.points[0][0] for line in lines)
    end = max(line.points[-1][0] for line in lines)
    rows = _legend_rows([line.name for line in lines], width)
    bottom = height - 20 - 14 * len(rows)
    scale = _Scale(begin, end, low, high, (62, 30, width - 72, bottom - 30))
    out = []
    for value in ticks:
        at = scale.y(value)
        out.append(f'<path d="M62 {at:.1f}H{width - 10:.0f}" stroke="{colours.rule}"/>')
        out.append(_text(56, at + 4, write_value(value, defaults["unit"]), colours.dim, 10, anchor="end"))
    for step in range(4):
        moment = begin + (end - begin) * step / 3
        place = ("start", "middle", "middle", "end")[step]
        out.append(_text(scale.x(moment), bottom + 14, f"{moment - begin:.0f} s", colours.dim, 10, anchor=place))
    for number, line in reversed(list(enumerate(lines))):
        colour = _SERIES[number % len(_SERIES)]
        fill = colour if stacked else "none"
        path = scale.path(line.points)
        if stacked:
            ends = (line.points[-1][0], line.points[0][0])
            path += "".join(f"L{scale.x(moment):.1f} {scale.y(low):.1f}" for moment in ends) + "Z"
        out.append(f'<path d="{path}" fill="{fill}" stroke="{colour}" stroke-width="1.4"/>')
    for row, names in enumerate(rows):
        for number, at, name in names:
            y = bottom + 26 + 14 * row
            out.append(
                f'<rect x="{at:.0f}" y="{y - 5:.0f}" width="10" height="4" fill="{_SERIES[number % len(_SERIES)]}"/>'
            )
            out.append(_text(at + 14, y, escape(name), colours.dim, 10))
    return "".join(out)


def _legend_rows(names: Sequence[str], width: float) -> list[list[tuple[int, float, str]]]:
    """Lay names out in rows: (number, x, name) of each."""
    rows: list[list[tuple[int, float, str]]] = [[]]
    at = 10.0
    for number, name in enumerate(names):
        room = 24 + 5.8 * len(name)
        if at + room > width and rows[-1]:
            rows.append([])
            at = 10.0
        rows[-1].append((number, at, name))
        at += room
    return rows


def choose_ticks(low: float, high: float) -> list[float]:
    """Round values from at most ``low`` to at least ``high``, three to six of them."""
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.floor(low / step)
    return [number * step for number in range(first, math.ceil(high / step - 1e-9) + 1)]


@dataclass(frozen=True)
class _Scale:
    begin: float
    end: float
    low: float
    high: float
    box: tuple[float, float, float, float]  # x, y, width, height

    def x(self, moment: float) -> float:
        return self.box[0] + self.box[2] * (moment - self.begin) / max(self.end - self.begin, 1e-9)

    def y(self, value: float) -> float:
        part = (min(max(value, self.low), self.high) - self.low) / max(self.high - self.low, 1e-12)
        return self.box[1] + self.box[3] * (1 - part)

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{self.x(moment):.1f} {self.y(value):.1f}" for moment, value in points)


def stack(lines: Sequence[Line]) -> list[Line]:
    """Lay each line upon those before it; a moment at which a line has no value counts as 0."""
    moments = sorted({moment for line in lines for moment, _ in line.points})
    sums, out = dict.fromkeys(moments, 0.0), []
    for line in lines:
        values = dict(line.points)
        for moment in moments:
            sums[moment] += values.get(moment, 0.0)
        out.append(Line(name=line.name, points=tuple(sums.items())))
    return out


def _bounds(lines: Sequence[Sequence[tuple[float, float]]], most: float | None) -> tuple[float, float]:
    values = [value for points in lines for _, value in points]
    high = most or max(values) * 1.05
    return min(0.0, *values), high if high > 0 else 1.0


def write_value(value: float, unit: str) -> str:
    """Write a number as the dashboard's units say: percentunit, s, bytes, Bps, reqps, ops or none."""
    if unit == "percentunit":
        return f"{value * 100:.3g}%"
    if unit == "s" and 0 < abs(value) < 1:
        return f"{value * 1000:.3g} ms"
    if unit in ("bytes", "Bps"):
        power = min(4, int(math.log(abs(value), 1024))) if abs(value) >= 1 else 0
        return f"{value / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}" + ("/s" if unit == "Bps" else "")
    ending = {"s": " s", "reqps": "/s", "ops": "/s"}.get(unit, "")
    return (f"{value / 1000:.3g}k" if abs(value) >= 10_000 else f"{value:.4g}") + ending


def _text(x: float, y: float, text: str, colour: str, size: int, weight: str = "400", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{text}</text>'
    )


def record_lines(board: Mapping[str, Any], ask: str, begin: float, end: float) -> dict[str, list[Line]]:
    """Ask Prometheus at the URL ``ask`` for every panel's expressions, as Grafana would, from ``begin`` to ``end``."""
    found: dict[str, list[Line]] = {}
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$job", ".*").replace("$rank", ".*").replace("$__rate_interval", "15s")
            step = max(1, round((end - begin) / 45))
            values = {"query": query, "start": f"{begin:.0f}", "end": f"{end:.0f}", "step": str(step)}
            with urllib.request.urlopen(
                f"{ask}/api/v1/query_range?{urllib.parse.urlencode(values)}", timeout=30
            ) as got:
                answer = json.load(got)
            for series in answer["data"]["result"]:
                name = _legend(target.get("legendFormat", ""), series["metric"])
                points = tuple((float(moment), float(value)) for moment, value in series["values"] if value != "NaN")
                found.setdefault(_key(panel), []).append(Line(name=name, points=points))
    return found


def _legend(form: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), form)


def draw_dashboard(folder: Path, *, seconds: float = _RECORDED_S) -> None:
    """Train the shipped recipe on two ranks, let Prometheus record it, and draw the dashboard, light and dark.

    Raises:
        RuntimeError: Prometheus is not installed, or the run ended before it was recorded.
    """
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        raise RuntimeError("there is no Prometheus: tests/servers/prometheus.sh fetches its program")
    board = json.loads(BOARD.read_text())
    port, served = _free_port(), _free_port()
    with tempfile.TemporaryDirectory() as place:
        config = Path(place, "prometheus.yml")
        config.write_text(
            "global: {scrape_interval: 2s}\nscrape_configs:\n"
            f'  - job_name: penstock\n    static_configs: [{{targets: ["127.0.0.1:{served}"]}}]\n'
        )
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        options = [
            f"--trainer.output_dir={place}/run",
            "--trainer.epochs=1000",
            f"--trainer.report.prometheus_port={served}",
        ]
        commands = [
            [*launcher, "-m", "penstock.trainer", "digits", "--trainer.report.every=5", *options],
            [prometheus, f"--config.file={config}", f"--storage.tsdb.path={place}/recorded",
             f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"],
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        begun = [subprocess.Popen(command, cwd=place, env=environment) for command in commands]
        try:
            while not Path(place, "run", "metrics.jsonl").exists():
                _check_running(begun)
                time.sleep(0.5)
            time.sleep(5)
            began = time.time()
            while time.time() < began + seconds:
                _check_running(begun)
                time.sleep(1)
            lines = record_lines(board, f"http://127.0.0.1:{port}", began, time.time())
        finally:
            for process in begun:
                process.terminate()
            for process in begun:
                process.wait()
    folder.mkdir(exist_ok=True)
    for name, colours in (("dashboard", LIGHT), ("dashboard-dark", DARK)):
        path = folder / f"{name}.svg"
        path.write_text(draw_board(board, lines, colours))
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


def _check_running(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode} before it was recorded")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
