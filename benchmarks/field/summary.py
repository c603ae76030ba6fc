"""The arithmetic of the report: quartiles over rounds, ratios of medians, and who is the best peer. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..contenders import LIMIT, OURS
from ..job import Measurement


@dataclass(frozen=True)
class Spread:
    """The quartiles of some rounds; all alike where there was one."""

    low: float
    median: float
    high: float

    def to_list(self) -> list[float]:
        return [self.low, self.median, self.high]


def quartiles(values: Sequence[float]) -> Spread:
    """First quartile, median and third quartile, by linear interpolation between the values, the ends included.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("quartiles of nothing")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low, median, high)


def first_pass_rate(run: Measurement) -> float:
    """Samples per second of the first pass, from asking for the loader until the pass, or the run, ended."""
    if not run.passes or not run.passes[0].stop_s:
        return 0.0
    return run.passes[0].samples / run.passes[0].stop_s


def steady_rate(run: Measurement) -> float:
    """Samples per second of the passes after the first; where there is only one, of that after its first batch."""
    later = run.passes[1:]
    if not later:
        return run.samples_per_s
    seconds = later[-1].stop_s - run.passes[0].stop_s
    return sum(each.samples for each in later) / seconds if seconds > 0 else 0.0


def figures_of(run: Measurement) -> dict[str, float]:
    """What is kept of a run."""
    return {
        "first_pass_per_s": first_pass_rate(run),
        "steady_per_s": steady_rate(run),
        "first_batch_s": run.first_batch_s,
        "cpu_us_per_sample": 1e6 * run.cpu_s / max(1, run.samples),
        "peak_rss_bytes": run.peak_rss_bytes,
        "peak_bytes": run.peak_bytes,
        "wait_share": run.wait_share,
        "samples": run.samples,
        "whole_passes": sum(each.complete for each in run.passes),
    }


def summarise(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Quartiles of every figure over a contender's rounds; the cost of a resume is a ratio of each round's own pair."""
    names = [name for name in rounds[0] if all(name in each for each in rounds)]
    summary: dict[str, Any] = {name: quartiles([each[name] for each in rounds]).to_list() for name in names}
    if "resumed_s" in summary:
        summary["resume_ratio"] = quartiles([each["resumed_s"] / each["fresh_s"] for each in rounds]).to_list()
    return summary


def median(summary: Mapping[str, Any], name: str) -> float | None:
    """A figure's median, None where it was not measured."""
    found = summary.get(name)
    return None if found is None else float(found[1])


def peers_of(contenders: Mapping[str, Any]) -> list[str]:
    return [name for name in contenders if name not in (OURS, LIMIT)]


def best_peer(contenders: Mapping[str, Mapping[str, Any]], name: str = "first_pass_per_s") -> str | None:
    """The peer with the highest median of a rate; None if none was measured."""
    peers = [peer for peer in peers_of(contenders) if median(contenders[peer]["summary"], name)]
    return max(peers, key=lambda peer: contenders[peer]["summary"][name][1], default=None)


def ratio(
    contenders: Mapping[str, Mapping[str, Any]], other: str | None, name: str = "first_pass_per_s"
) -> float | None:
    """Our median over another's; None where one of them was not measured, or was 0."""
    if other is None or OURS not in contenders or other not in contenders:
        return None
    ours, theirs = median(contenders[OURS]["summary"], name), median(contenders[other]["summary"], name)
    return ours / theirs if ours is not None and theirs else None


def ratio_spread(
    contenders: Mapping[str, Mapping[str, Any]], other: str | None, name: str = "first_pass_per_s"
) -> Spread | None:
    """Quartiles of the ratio within a round, which other load on the machine changes least."""
    if other is None or OURS not in contenders or other not in contenders:
        return None
    pairs = zip(contenders[OURS]["rounds"], contenders[other]["rounds"], strict=False)
    ratios = [ours[name] / theirs[name] for ours, theirs in pairs if theirs.get(name)]
    return quartiles(ratios) if ratios else None


def load_note(loads: Sequence[float], cores: int) -> str:
    """How busy the machine was by other work, in words: one-minute loads before each round."""
    if not loads:
        return "load unknown"
    spread = quartiles(loads)
    told = f"load {spread.median:.1f} (median before a round; {spread.low:.1f} to {spread.high:.1f}) on {cores} cores"
    return told + ("; the machine was busy: read ratios, not rates" if spread.low > 1.5 * cores else "")


def describe(run: Measurement) -> dict[str, Any]:
    """How a contender was set up, and what it was bounded by; the same in each round."""
    return {"settings": run.settings, "version": run.version, "bottleneck": run.bottleneck}


def passes_of(run: Measurement) -> list[dict[str, Any]]:
    return [asdict(each) for each in run.passes]
