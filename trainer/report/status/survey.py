"""Survey of all ranks' statuses: who is slowest, who is silent, what bounds the run, what to change. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ....storage.suggestions import list_some
from .rank_status import FINAL, RankStatus

# Phases in which a rank waits for no other. Without sharding that is exact; with it, forward waits for others too.
_OWN = ("fetch", "forward", "optimizer", "shares", "average", "ema")
_TOGETHER = ("backward", "reduce")
_STALE_PERIODS, _STALE_S = 3.0, 5.0
_STUCK_S = 30.0
_SLOW_SHARE = 0.1  # of a step
_WAIT_SHARE = 0.1  # of the time
_ASIDE_SHARE = 0.2
_IDLE_GPU = 0.6
_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class Survey:
    """A judgement of one moment.

    Attributes:
        stale: ranks that have not written for some time, with the seconds.
        missing: ranks of the run that are not known here: they write to another disk, or not yet.
        slowest, skew_s, skew_phase: the rank that computes or waits for data the longest in a step, how much longer
            than the median rank, and in which phase most of it; None where ranks do not differ by a tenth of a step.
        waits: by rank, the share of the time that it waited for others: what it spent where ranks meet (backward and
            reduce) beyond the rank that spent the least there.
        step_s: seconds of a step.
        bound: what bounds the run: "data", "rank", "devices", "host", "other ranks", "checkpoint", "evaluate" or
            "unknown".
        advice: what that means, and what to change.
    """

    world_size: int
    stale: Mapping[int, float]
    missing: Sequence[int]
    slowest: int | None = None
    skew_s: float | None = None
    skew_phase: str | None = None
    waits: Mapping[int, float] = field(default_factory=dict)
    step_s: float | None = None
    bound: str = "unknown"
    advice: str = ""


def survey(ranks: Sequence[RankStatus], now_s: float, *, silent_s: Mapping[int, float] | None = None) -> Survey:
    """Judge the ranks; ``silent_s`` are seconds without a change by the reader's own clock, where it has watched."""
    world_size = max((one.world_size for one in ranks), default=0)
    known = {one.rank for one in ranks}
    missing = [rank for rank in range(world_size) if rank not in known]
    now_s = max([now_s, *(one.time for one in ranks)])
    stale = {}
    for one in ranks:
        age_s = (silent_s or {}).get(one.rank, now_s - one.time)
        if one.state not in FINAL and age_s > max(_STALE_S, _STALE_PERIODS * one.every_s):
            stale[one.rank] = age_s
    training = [one for one in ranks if one.state == "training" and one.rank not in stale]
    moving = [one for one in training if one.steps > 0 and one.steps_per_s > 0]
    step_s = median([1 / one.steps_per_s for one in moving]) if moving else None
    slow = _find_slowest(moving, step_s) if step_s is not None else None
    bound, advice = _judge(training, moving, slow, step_s) if not stale else ("rank", _tell_silent(stale))
    return Survey(
        world_size=world_size,
        stale=stale,
        missing=missing,
        slowest=slow[0].rank if slow else None,
        skew_s=slow[1] if slow else None,
        skew_phase=slow[2] if slow else None,
        waits=_find_waits(moving),
        step_s=step_s,
        bound=bound,
        advice=advice,
    )


def _tell_silent(stale: Mapping[int, float]) -> str:
    named = list_some(sorted(stale), _NAMED)
    ranks = f"Rank {named} has" if len(stale) == 1 else f"Ranks {named} have"
    return (
        f"{ranks} been silent for {max(stale.values()):.0f} s, and the others wait: the process is stopped or dead, or "
        "its node's disk hangs."
    )


def _find_waits(moving: Sequence[RankStatus]) -> dict[int, float]:
    met = {one.rank: one.share(*_TOGETHER) for one in moving}
    return {rank: share - min(met.values()) for rank, share in met.items()} if len(met) > 1 else {}


def _find_slowest(moving: Sequence[RankStatus], step_s: float) -> tuple[RankStatus, float, str] | None:
    """(the rank that the others wait for, seconds of a step that it takes more than the median, the phase of most)."""
    if len(moving) < 2:
        return None

    def own(one: RankStatus) -> float:
        return one.share(*_OWN) / one.steps_per_s

    last = max(moving, key=own)
    # Of two ranks the median is their mean, half as far away as the other one.
    excess_s = own(last) - median([own(one) for one in moving if one is not last])
    if excess_s < _SLOW_SHARE * step_s:
        return None

    def excess_in(name: str) -> float:
        return last.share(name) / last.steps_per_s - median([one.share(name) / one.steps_per_s for one in moving])

    return last, excess_s, max(_OWN, key=excess_in)


def _judge(
    training: Sequence[RankStatus],
    moving: Sequence[RankStatus],
    slow: tuple[RankStatus, float, str] | None,
    step_s: float | None,
) -> tuple[str, str]:
    stuck = [one for one in training if one.phase_s > max(_STUCK_S, 10 * (step_s or 0.0))]
    if stuck:
        return _judge_stuck(stuck)
    if not moving or step_s is None:
        return "unknown", ""
    if slow is not None:
        one, excess_s, phase = slow
        more = f"{_ms(excess_s)} of {_ms(step_s)} a step more than the others, in {phase}"
        sentence = f"Rank {one.rank} on {one.host} is slowest: {more}. {_advise_one(one, phase)}"
        return ("data" if phase == "fetch" else "rank"), sentence
    waits = sum(one.data_wait_share or 0.0 for one in moving) / len(moving)
    if waits > _WAIT_SHARE:
        worst = max(moving, key=lambda one: one.data_wait_share or 0.0)
        return "data", f"Training waits for data {waits:.0%} of the time. {worst.advice or _NO_LOADER}"
    for name in ("checkpoint", "evaluate"):
        share = max(one.share(name, *((f"{name[:-1]}ion fetch",) if name == "evaluate" else ())) for one in moving)
        if share > _ASIDE_SHARE:
            return name, f"{share:.0%} of the time goes into {name}: raise {_ASIDE[name]}."
    reduce = min(one.share("reduce") for one in moving)
    if len(moving) > 1 and reduce > _ASIDE_SHARE:
        return "other ranks", (
            f"Every rank waits {reduce:.0%} of the time in reduce, for the network: accumulate more microbatches a "
            "step, compress gradients, or use a faster link."
        )
    used = [one.gpu["utilisation"] for one in moving if "utilisation" in one.gpu]
    if used and sum(used) / len(used) < _IDLE_GPU:
        return "host", (
            f"Devices are busy {sum(used) / len(used):.0%} of the time and do not wait for data: larger batches, "
            "compile, and fewer reads of values from the device in the loss would help."
        )
    return "devices", f"Computing is the limit; waits for data are {waits:.1%} of the time."


_NO_LOADER = "Its loader reports no metrics; penstock's would say which stage is the limit."
_ASIDE = {"checkpoint": "checkpoint.every_steps, or save in the background", "evaluate": "evaluate.every"}


def _judge_stuck(stuck: Sequence[RankStatus]) -> tuple[str, str]:
    """Blame a rank that waits for no other, if there is one."""
    alone = [one for one in stuck if one.phase not in _TOGETHER]
    one = max(alone or stuck, key=lambda each: each.phase_s)
    sentence = f"Rank {one.rank} on {one.host} has been in {one.phase} for {one.phase_s:.0f} s"
    if one.phase == "fetch":
        return "data", f"{sentence}{f', waiting for {one.doing}' if one.doing else ''}. {one.advice}".rstrip()
    if one.phase in _TOGETHER:
        return (
            "other ranks",
            f"{sentence}, where it waits for other ranks; all do, or one of them is missing in this view.",
        )
    return "rank", f"{sentence}."


def _advise_one(one: RankStatus, phase: str) -> str:
    if phase == "fetch":
        return one.advice or _NO_LOADER
    if phase == "forward":
        return "See what else runs on its host, and its device's clock; shares='auto' gives slow ranks fewer samples."
    return "See what else runs on its host."


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
