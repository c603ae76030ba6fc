"""The plot of a comparison: every round as a point, and beside it what was measured, where, when, and what was not."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...loader.errors import ConfigError
from ...trainer.report.pages.svg import short
from ..contenders import OURS
from .ratios import best_peer, ratio_to

_COLOURS = {OURS: "#0b6e8a", "webdataset": "#e0a458", "mosaicml-streaming": "#b56576", "litdata": "#6d6875"}
_LOG_FROM = 10.0  # ratios above this show a linear bar as a line


def require_plotting(path: Path | None = None) -> None:
    """Raise ConfigError where matplotlib is not installed, or writes no files that are named as ``path``."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as exc:
        raise ConfigError("a plot needs matplotlib; pip install 'penstock[bench]'") from exc
    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path is not None and path.suffix and path.suffix[1:].lower() not in kinds:
        raise ConfigError(f"{path}: plots are written as .png, .svg or .pdf, and not as {path.suffix}")


def new_figure(width: float, height: float, rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    """Make a figure, in inches, and its panels, rows by columns; ``options`` are those of matplotlib's ``subplots``.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_plotting()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def note(figure: Any, text: str, size: float = 7) -> None:
    """Write where and how a figure was measured below it."""
    figure.supxlabel(text, fontsize=size, color="#555555")


def hide_spines(axes: Any, *sides: str) -> None:
    axes.spines[list(sides or ("top", "right"))].set_visible(False)


def plot_ratios(results: Sequence[Mapping[str, Any]], path: Path, *, titles: Sequence[str] = ()) -> None:
    """Plot samples/s of every contender, one panel per result: medians as bars, each round as a point.

    A panel is titled with the ratio of ours to the best peer, has a logarithmic axis where contenders differ by more
    than ten, and names the contenders that were not measured with the reason. Machine, date and settings stand below.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure, (panels,) = new_figure(max(4.6, 3.1 * len(results) + 0.6), 4.4, 1, len(results))
    for number, (axes, result) in enumerate(zip(panels, results, strict=True)):
        title = titles[number] if number < len(titles) else Path(result["data"]["url"]).name
        _draw(axes, result, title)
    note(figure, caption(results[0], int(22 * figure.get_figwidth())), 6.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def caption(result: Mapping[str, Any], width: int) -> str:
    """Machine, date and settings of a result, in lines of ``width`` characters."""
    machine, settings, versions = result.get("machine", {}), result.get("settings", {}), result.get("versions", {})
    named = [f"{name} {versions[name]}" for name in (OURS, "torch", *result["summary"]) if name in versions]
    facts = {
        name: settings[name] for name in ("batch_size", "decode", "epochs", "seconds", "rounds") if name in settings
    }
    parts = [
        f"{machine['cores']} cores of {machine['cpu']}" if machine else "",
        str(result.get("date", "")),
        ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items() if value is not None),
        ", ".join(dict.fromkeys(named)),
    ]
    text = "; ".join(part for part in parts if part)
    return "\n".join(textwrap.wrap(f"{text}. Bars: medians; points: rounds.", width))


def is_wide(rates: Sequence[float]) -> bool:
    """Return whether contenders differ by so much that a linear axis would hide the slower ones."""
    some = [rate for rate in rates if rate > 0]
    return bool(some) and max(some) / min(some) > _LOG_FROM


def _draw(axes: Any, result: Mapping[str, Any], title: str) -> None:
    summary = result["summary"]
    names = list(summary)
    rates = [summary[name]["samples_per_s"] for name in names]
    axes.bar(range(len(names)), rates, width=0.68, color=[_COLOURS.get(name, "#999999") for name in names])
    for place, name in enumerate(names):
        rounds = [run["samples_per_s"] for run in result.get("contenders", {}).get(name, {}).get("epoch", ())]
        over = max([summary[name]["samples_per_s"], *rounds])
        label = short(summary[name]["samples_per_s"])
        axes.annotate(label, (place, over), (0, 4), textcoords="offset points", ha="center", fontsize=8)
        axes.scatter([place] * len(rounds), rounds, s=9, color="black", zorder=3, linewidths=0)
    axes.set_xticks(range(len(names)), [name.replace("mosaicml-", "mosaicml\n") for name in names], fontsize=8)
    if is_wide(rates):
        axes.set_yscale("log")
        axes.set_ylim(bottom=min(rate for rate in rates if rate > 0) / 3)
        axes.tick_params(axis="y", labelsize=7)
    else:
        axes.set_yticks([])
    axes.margins(y=0.18)
    hide_spines(axes, "top", "right", *(() if is_wide(rates) else ("left",)))
    peer = best_peer(summary)
    faster = "" if peer is None else f"\n{ratio_to(summary, peer):.1f}x the best peer"
    axes.set_title(f"{title}{faster}", fontsize=10, loc="left")
    scale = "samples/s, logarithmic" if is_wide(rates) else "samples/s"
    refused = [f"{name} not measured: {reason.splitlines()[0]}" for name, reason in result.get("refused", {}).items()]
    lines = [line for text in refused for line in textwrap.wrap(text, 52)[:3]]
    axes.set_xlabel("\n".join([scale, *lines]), fontsize=7, color="#555555")
