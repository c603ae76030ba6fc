"""Arithmetic of the report: quartiles over rounds, ratios of medians, and the best peer. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..contenders import LIMIT, OURS, VARIANTS, VIEWS, WITHOUT_OBJECTS, base_of
from ..harness.job import Measurement
from ..harness.prepare import whole_pass_s


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


def first_pass_rate(run: Measurement, num_samples: int) -> float:
    """Samples per second of the first pass, from asking for the loader until the pass ended.

    Of a pass that was cut, what a whole one would take is reckoned from its start and its rate: else a loader would
    seem the slower the longer it takes to start.
    """
    if not run.passes or not run.passes[0].stop_s:
        return 0.0
    first = run.passes[0]
    return first.samples / first.stop_s if first.complete else num_samples / whole_pass_s(run, num_samples)


def first_pass_cpu_us(run: Measurement, num_samples: int) -> float:
    """CPU microseconds a sample of the first pass, of all processes; reckoned in the same way where it was cut."""
    if not run.passes:
        return 0.0
    first = run.passes[0]
    if first.complete:
        return 1e6 * first.cpu_s / first.samples
    share_read = first.samples / num_samples
    return 1e6 * (run.first_batch_cpu_s + (first.cpu_s - run.first_batch_cpu_s) / share_read) / num_samples


def steady_rate(run: Measurement) -> float:
    """Samples per second of the passes after the first; where there is only one, of that after its first batch."""
    later = run.passes[1:]
    if not later:
        return run.samples_per_s
    seconds = later[-1].stop_s - run.passes[0].stop_s
    return sum(each.samples for each in later) / seconds if seconds > 0 else 0.0


def figures_of(run: Measurement, num_samples: int) -> dict[str, float]:
    """Figures to keep of a run over a data set of ``num_samples``."""
    return {
        "first_pass_per_s": first_pass_rate(run, num_samples),
        "steady_per_s": steady_rate(run),
        "first_batch_s": run.first_batch_s,
        "cpu_us_per_sample": first_pass_cpu_us(run, num_samples),
        "run_cpu_us_per_sample": 1e6 * run.cpu_s / max(1, run.samples),
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


def is_ours(contender: str) -> bool:
    return base_of(contender) == OURS


def ours_of(contenders: Mapping[str, Any]) -> list[str]:
    """Our own contenders that were measured, list[bytes] first; at least the plain one, which may not have been."""
    return [OURS, *(name for name in VARIANTS if is_ours(name) and name in contenders)]


def peers_of(contenders: Mapping[str, Any], ours: str = OURS) -> list[str]:
    """The peers to compare one of ours with: bytes objects with bytes objects, views with whatever is fastest."""
    return [
        name
        for name in contenders
        if not is_ours(name) and name != LIMIT and (ours in WITHOUT_OBJECTS or name not in WITHOUT_OBJECTS)
    ]


def best_peer(
    contenders: Mapping[str, Mapping[str, Any]], name: str = "first_pass_per_s", ours: str = OURS
) -> str | None:
    """The peer with the highest median of a rate; None if none was measured."""
    peers = [peer for peer in peers_of(contenders, ours) if median(contenders[peer]["summary"], name)]
    return max(peers, key=lambda peer: contenders[peer]["summary"][name][1], default=None)


def too_slow(rounds: Mapping[str, Sequence[Mapping[str, float]]], times: float) -> dict[str, float]:
    """Peers whose medians, in the first pass and after it, are ``times`` below the best peer's, and by how much.

    The best one of those that hand out bytes objects counts for them, though views may be faster.
    """
    measured = {name: each for name, each in rounds.items() if each}
    behind: dict[str, float] = {}
    for peer in peers_of(measured, VIEWS):
        rivals = peers_of(measured, VIEWS if peer in WITHOUT_OBJECTS else OURS)
        behind[peer] = min(_times_behind(measured, peer, rivals, rate) for rate in ("first_pass_per_s", "steady_per_s"))
    return {peer: value for peer, value in behind.items() if value > times}


def _times_behind(
    rounds: Mapping[str, Sequence[Mapping[str, float]]], peer: str, rivals: Sequence[str], rate: str
) -> float:
    medians = {name: statistics.median(each[rate] for each in rounds[name]) for name in rivals}
    return max(medians.values()) / medians[peer] if medians[peer] else float("inf")


def ratio(
    contenders: Mapping[str, Mapping[str, Any]],
    other: str | None,
    name: str = "first_pass_per_s",
    ours: str = OURS,
) -> float | None:
    """Our median over another's; None where one of them was not measured, or was 0."""
    if other is None or ours not in contenders or other not in contenders:
        return None
    own, theirs = median(contenders[ours]["summary"], name), median(contenders[other]["summary"], name)
    return own / theirs if own is not None and theirs else None


def ratio_spread(
    contenders: Mapping[str, Mapping[str, Any]],
    other: str | None,
    name: str = "first_pass_per_s",
    ours: str = OURS,
) -> Spread | None:
    """Quartiles of the ratio within a round, which other load on the machine changes least."""
    if other is None or ours not in contenders or other not in contenders:
        return None
    pairs = zip(contenders[ours]["rounds"], contenders[other]["rounds"], strict=False)
    ratios = [own[name] / theirs[name] for own, theirs in pairs if theirs.get(name)]
    return quartiles(ratios) if ratios else None


def is_reckoned(entry: Mapping[str, Any], name: str = "first_pass_per_s") -> bool:
    """Return whether the median first pass is estimated from the starts of passes that were cut."""
    in_order = sorted(entry["rounds"], key=lambda each: each.get(name, 0.0))
    middle = in_order[(len(in_order) - 1) // 2 : len(in_order) // 2 + 1]
    return any(not each.get("whole_passes", 1) for each in middle)


def load_note(loads: Sequence[float], cores: int) -> str:
    """Describe how busy other work kept the machine: one-minute loads before each round."""
    if not loads:
        return "load unknown"
    spread = quartiles(loads)
    note = f"load {spread.median:.1f} (median before a round; {spread.low:.1f} to {spread.high:.1f}) on {cores} cores"
    return note + ("; the machine was busy: read ratios, not rates" if spread.low > 1.5 * cores else "")


def describe(run: Measurement) -> dict[str, Any]:
    """Describe a contender's settings and bottleneck; the same in each round."""
    return {"settings": run.settings, "version": run.version, "bottleneck": run.bottleneck}
