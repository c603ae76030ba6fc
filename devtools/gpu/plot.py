"""The plot of loaders that feed a GPU: samples/s as a share of the same loop's without a loader."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.benchmarks.harness.plot import hide_spines, new_figure, note
from penstock.trainer.report.pages.svg import short

_OURS, _OTHER = "#0b6e8a", "#b8b8b8"


def plot_feeding(results: Mapping[str, Mapping[str, Any]], path: Path, *, limit: str) -> None:
    """Plot one panel for each part's result: medians as bars, rounds as points, and the loop's share of waiting.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    cases = [result[part] for part, result in results.items()]
    figure, (panels,) = new_figure(4.4 * len(cases), 3.6, 1, len(cases))
    for axes, case in zip(panels, cases, strict=True):
        most = statistics.median(run["samples_per_s"] for run in case["runs"][limit])
        loaders = [name for name in case["runs"] if name != limit]
        labels = []
        for place, name in enumerate(loaders):
            rates = [run["samples_per_s"] for run in case["runs"][name]]
            middle = statistics.median(rates)
            waits = statistics.median(run["wait_share"] for run in case["runs"][name])
            axes.barh(place, middle / most, color=_OURS if place == 0 else _OTHER)
            axes.scatter([rate / most for rate in rates], [place] * len(rates), s=10, color="black", zorder=3)
            labels.append(f"{name}\n{short(middle)}/s, waits {waits:.0%}")
        axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(loaders)), labels, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, max(1.05, axes.get_xlim()[1]))
        axes.set_xlabel(f"share of {short(most)}/s without a loader", fontsize=8)
        axes.set_title(f"{case['model']} on {case['title']}", fontsize=9, loc="left")
        hide_spines(axes)
    note(figure, "\n".join(dict.fromkeys(map(_describe_machine, results.values()))))
    figure.savefig(path, dpi=160)


def _describe_machine(result: Mapping[str, Any]) -> str:
    where = result["machine"].get("gpu") or "a CPU, to try the command: the numbers mean nothing"
    return f"{where}; {result['machine']['cores']} cores; {result['date'][:10]}"
