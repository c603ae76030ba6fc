"""Results for people: a table of contenders, and a plot of ratios."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..loader.errors import ConfigError
from .contenders import OURS
from .ratios import best_peer

_COLOURS = {OURS: "#0b6e8a", "webdataset": "#e0a458", "mosaicml-streaming": "#b56576", "litdata": "#6d6875"}


def format_duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _resume(summary: Mapping[str, Any]) -> str:
    if "resume_ratio" not in summary:
        return "–"
    return f"{format_duration(summary['resumed_first_batch_s'])} ({summary['resume_ratio']:.2f}x)"


_ROWS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("samples/s", lambda s: f"{s['samples_per_s']:,.0f}"),
    ("MB/s", lambda s: f"{s['mb_per_s']:,.1f}"),
    ("first batch", lambda s: format_duration(s["first_batch_s"])),
    ("first batch after a resume", _resume),
    ("wait per batch, p50", lambda s: format_duration(s["wait_p50_ms"] / 1000)),
    ("wait per batch, p99", lambda s: format_duration(s["wait_p99_ms"] / 1000)),
    ("time spent waiting", lambda s: f"{s['wait_share']:.0%}"),
    ("CPU per sample", lambda s: f"{s['cpu_us_per_sample']:,.1f} us"),
    ("peak memory", lambda s: f"{s['peak_bytes'] / 2**20:,.0f} MiB"),
    ("bounded by", lambda s: s.get("bottleneck", "–")),
)


def print_result(result: Mapping[str, Any], screen: Console) -> None:
    """Print the data, the machine and a column for each contender; then which contenders were not measured, and why."""
    data, machine, summary = result["data"], result["machine"], result["summary"]
    fields = ", ".join(data["fields"])
    screen.print(Text(data["url"], style="bold"))
    size = f"{data['bytes'] / 1e6:,.1f} MB in {data['shards']:,} {data['format']} shards"
    screen.print(f"{data['samples']:,} samples, {size}; {fields}", markup=False)
    settings = result["settings"]
    screen.print(
        f"batches of {settings['batch_size']}, decode {settings['decode']}; "
        f"{machine['cores']} cores of {machine['cpu']}; median of {settings['rounds']} rounds",
        markup=False,
    )
    screen.print()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", style="cyan", no_wrap=True)
    for name in summary:
        table.add_column(name, justify="right")
    for label, show in _ROWS:
        table.add_row(label, *(show(each) for each in summary.values()))
    if len(summary) > 1:
        table.add_row(Text("penstock is faster by", style="bold"), *(_ratio(each) for each in summary.values()))
    screen.print(table)
    for name, reason in result["refused"].items():
        screen.print(f"\n{name} was not measured: {reason}", markup=False)


def _ratio(summary: Mapping[str, Any]) -> str:
    if "ratio" not in summary:
        return ""
    low, high = min(summary["ratios"]), max(summary["ratios"])
    return f"{summary['ratio']:.2f}x ({low:.2f} to {high:.2f})"


def plot_ratios(results: Sequence[Mapping[str, Any]], path: Path, *, titles: Sequence[str] = ()) -> None:
    """Plot samples/s of every contender as bars, one panel per result, titled with the ratio of ours to the best peer.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ConfigError("a plot needs matplotlib; pip install 'penstock[bench]'") from exc
    figure = Figure(figsize=(3.1 * len(results) + 0.6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (axes, result) in enumerate(zip(_panels(figure, len(results)), results, strict=True)):
        title = titles[number] if number < len(titles) else Path(result["data"]["url"]).name
        _draw(axes, result["summary"], title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def _panels(figure: Any, count: int) -> Sequence[Any]:
    panels = figure.subplots(1, count, squeeze=False)
    return list(panels[0])


def _draw(axes: Any, summary: Mapping[str, Any], title: str) -> None:
    names = list(summary)
    rates = [summary[name]["samples_per_s"] for name in names]
    bars = axes.bar(range(len(names)), rates, width=0.68, color=[_COLOURS.get(name, "#999999") for name in names])
    axes.bar_label(bars, [short_number(rate) for rate in rates], padding=2, fontsize=8)
    axes.set_xticks(range(len(names)), [name.replace("mosaicml-", "mosaicml\n") for name in names], fontsize=8)
    axes.set_yticks([])
    axes.margins(y=0.18)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    peer = best_peer(summary)
    faster = "" if peer is None else f"\n{summary[peer]['ratio']:.1f}x the best peer"
    axes.set_title(f"{title}{faster}", fontsize=10, loc="left")
    axes.set_xlabel("samples/s", fontsize=8, color="#555555")


def short_number(value: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}" if value < 100 * size else f"{value / size:.0f}{unit}"
    return f"{value:.0f}"
