"""The arithmetic of a comparison: medians over rounds, their ratios, and the ratios of the rounds as their spread."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..contenders import OURS
from .job import Measurement

Runs = Mapping[str, Mapping[str, Sequence[Measurement]]]

_MEDIANS = (
    "samples_per_s",
    "mb_per_s",
    "wait_p50_ms",
    "wait_p99_ms",
    "wait_share",
    "cpu_s",
    "peak_bytes",
    "peak_rss_bytes",
    "samples",
    "seconds",
)


def summarize(runs: Runs) -> dict[str, Any]:
    """Each contender's medians, its most frequent bottleneck, and the ratio of ours to it: of medians, and by round.

    ``runs`` maps a contender to its "epoch", "fresh" and "resumed" measurements, one a round.
    """
    return {name: _summarize_one(name, runs) for name in runs}


def _summarize_one(name: str, runs: Runs) -> dict[str, Any]:
    own = runs[name]
    summary: dict[str, Any] = {key: statistics.median(getattr(run, key) for run in own["epoch"]) for key in _MEDIANS}
    summary["cpu_us_per_sample"] = statistics.median(run.cpu_s / max(run.samples, 1) * 1e6 for run in own["epoch"])
    summary["first_batch_s"] = statistics.median(run.first_batch_s for run in own["fresh"] or own["epoch"])
    resumed = [run.first_batch_s for run in own["resumed"]]
    if resumed:
        summary["resumed_first_batch_s"] = statistics.median(resumed)
        # A slow contender does not come to the middle of its epoch in every round, and is not resumed there then.
        if len(resumed) == len(own["fresh"]):
            summary["resume_ratio"] = median_ratio(resumed, [run.first_batch_s for run in own["fresh"]])
    named = [run.bottleneck for run in own["epoch"] if run.bottleneck is not None]
    if named:
        summary["bottleneck"] = statistics.mode(named)
    if name != OURS and OURS in runs:
        ours = [run.samples_per_s for run in runs[OURS]["epoch"]]
        theirs = [run.samples_per_s for run in own["epoch"]]
        summary["ratios"] = round_ratios(ours, theirs)
        summary["ratio"] = median_ratio(ours, theirs)
    return summary


def round_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The ratio of ours to theirs, round by round; infinity where a peer delivered nothing."""
    return [own / other if other else float("inf") for own, other in zip(ours, theirs, strict=True)]


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of ours over the median of theirs: the ratio of the figures that are shown."""
    other = statistics.median(theirs)
    return statistics.median(ours) / other if other else float("inf")


def ratio_to(summary: Mapping[str, Any], peer: str) -> float:
    """Our speed over a peer's, by the medians of a summary."""
    other = summary[peer]["samples_per_s"]
    return float(summary[OURS]["samples_per_s"] / other) if other else float("inf")


def best_peer(summary: Mapping[str, Any]) -> str | None:
    """The peer that comes closest to ours, or beats it most; None if there is no peer."""
    peers = [name for name in summary if name != OURS and OURS in summary]
    return min(peers, key=lambda name: ratio_to(summary, name), default=None)
