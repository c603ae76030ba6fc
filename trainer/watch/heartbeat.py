"""Heartbeats of ranks, and the judgement from them: which rank is the cause, and since when. No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

ALONE = frozenset(
    {"fetch", "evaluation fetch", "decode", "transform", "log", "compile", "profile"}
    | {"loader length", "loader state", "read checkpoint", "export"}
)
"""Phases without a collective: a rank that stays in one is itself the cause. In any other it may be a victim."""

VERDICT_AT = 0.7
"""Share of the time-out after which the rank that is furthest behind is overdue; the rest is for stopping all."""

SILENT_AT = 0.2
"""Share of the time-out after which silence explains why a collective failed on another rank; but see below."""

_SILENT_S = 5.0  # explains a failed collective whatever the time-out: beats come every 2 s or faster
_SURELY_AT = 0.85  # of the time-out: now a rank must be named, even if the one furthest behind is not overdue
_BROKEN_AT = 0.5  # of the time-out: a failed collective that nothing else explains
_NAMED_OTHERS = 8


class State(StrEnum):
    RUNNING = "running"
    CLOSED = "closed"  # done, without an error
    FAILED = "failed"  # an error of its own
    BROKEN_OFF = "broken off"  # a collective failed on it, so another rank is the likely cause


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Beat of one rank: its phase and the details.

    At the time of writing it had been in the phase for ``since_s``, and ``broken_s`` had passed since a collective
    failed on it.
    """

    phase: str
    details: Mapping[str, Any] = field(default_factory=dict)
    count: int = 0
    state: State = State.RUNNING
    error: str = ""
    since_s: float = 0.0
    broken_s: float = 0.0
    progress: int = 0
    """What a long phase has done so far, in any unit; while it grows, the phase counts as begun anew."""
    timeout_s: float
    sequence: int = 0
    host: str = ""
    """The name of its machine."""
    place: str = ""
    """Its place in a mesh that spreads each replica over several ranks."""
    has_store: bool = True
    """Of rank 0: whether the key-value store is on its machine, and not on that of another torchrun agent."""

    def to_text(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_text(cls, text: str | bytes) -> Beat:
        fields = json.loads(text)
        return cls(**{**fields, "state": State(fields["state"])})


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """The newest beat of a rank and when, by the reader's clock, it last changed; None before the first beat."""

    beat: Beat | None
    changed_at_s: float

    def update(self, beat: Beat, now_s: float) -> Sighting:
        if self.beat is not None and self.beat.sequence == beat.sequence:
            return self
        return replace(self, beat=beat, changed_at_s=now_s)

    def forget(self, before_s: float) -> Sighting:
        """Return this sighting as if the reader had begun to watch at ``before_s``, when it was last suspended."""
        if self.changed_at_s >= before_s:
            return self
        return replace(self, beat=self.beat and replace(self.beat, since_s=0.0), changed_at_s=before_s)

    def silent_s(self, now_s: float) -> float:
        return now_s - self.changed_at_s

    def in_phase_s(self, now_s: float) -> float:
        return self.silent_s(now_s) + (self.beat.since_s if self.beat else 0.0)


def judge(
    sightings: Mapping[int, Sighting], now_s: float, timeout_s: float, *, excused_at_s: float = float("-inf")
) -> str | None:
    """Return which rank must be the cause that training does not continue, as a sentence; None while it may continue.

    ``excused_at_s`` is when a rank was last seen in a phase with a longer time-out of its own: the others have waited
    for that one until then, and only the time since counts.

    In order: a rank that reports its failure; one that fell silent; one on which a collective failed; the one that is
    furthest behind, once it is overdue.
    """
    seen = {rank: one.beat for rank, one in sightings.items() if one.beat is not None}
    failed = [rank for rank, beat in seen.items() if beat.state is State.FAILED]
    if failed:
        return _sentence(failed[:1], sightings, now_s)
    broken = {rank: beat.broken_s for rank, beat in seen.items() if beat.state is State.BROKEN_OFF}
    silent_limit_s = silence_limit_s(timeout_s, broken=bool(broken))
    closed = {rank for rank, beat in seen.items() if beat.state is State.CLOSED}
    silent = [rank for rank, one in sightings.items() if rank not in closed and one.silent_s(now_s) > silent_limit_s]
    if silent:
        return _sentence(silent, sightings, now_s)
    if broken:
        first = max(broken, key=broken.__getitem__)
        return _sentence([first], sightings, now_s) if broken[first] > _BROKEN_AT * timeout_s else None
    running = {rank: sightings[rank] for rank in seen if rank not in closed}
    return _judge_overdue(running, sightings, now_s, timeout_s=timeout_s, unexcused_s=now_s - excused_at_s)


def silence_limit_s(timeout_s: float, *, broken: bool) -> float:
    """Longest silence to allow a rank, in seconds; ``broken``: a collective has failed, which its death may explain."""
    return min(SILENT_AT * timeout_s, _SILENT_S) if broken else VERDICT_AT * timeout_s


def _judge_overdue(
    running: Mapping[int, Sighting],
    sightings: Mapping[int, Sighting],
    now_s: float,
    *,
    timeout_s: float,
    unexcused_s: float,
) -> str | None:
    beats = {rank: one.beat for rank, one in running.items() if one.beat is not None}
    if not beats:
        return None
    # A rank that waits gets the longest time-out that any other rank has for its phase.
    longest_s = max(beat.timeout_s for beat in beats.values())
    share = {}
    for rank, beat in beats.items():
        in_phase_s = running[rank].in_phase_s(now_s)
        if beat.phase in ALONE or beat.timeout_s > timeout_s:
            share[rank] = in_phase_s / beat.timeout_s
        else:
            share[rank] = min(in_phase_s, unexcused_s) / longest_s

    def behind(rank: int) -> tuple[bool, float, int]:
        beat = beats[rank]
        step = beat.details.get("step")
        return beat.phase not in ALONE, step if isinstance(step, int | float) else float("inf"), beat.count

    last = min(beats, key=behind)
    if share[last] > VERDICT_AT:
        level = [rank for rank in beats if behind(rank) == behind(last)]
        silent = [rank for rank in level if _is_silent(running[rank], now_s)]  # cut off: the others wait for these
        return _sentence(silent or level, sightings, now_s)
    surely = [rank for rank in beats if share[rank] > _SURELY_AT]
    return _sentence([min(surely, key=behind)], sightings, now_s) if surely else None


def _is_silent(sighting: Sighting, now_s: float) -> bool:
    """Return whether a rank's silence explains that others wait for it."""
    beat = sighting.beat
    return beat is not None and sighting.silent_s(now_s) > silence_limit_s(beat.timeout_s, broken=True)


def describe(sighting: Sighting, now_s: float) -> str:
    """Describe a rank's phase and how long it lasts: ``in fetch (step=7, shard=train-3.tar) for 4.1 s``."""
    beat = sighting.beat
    if beat is None:
        return "not heard of yet"
    if beat.state is State.CLOSED:
        return "done"
    return f"{_place(beat)} for {sighting.in_phase_s(now_s):.1f} s"


def _place(beat: Beat) -> str:
    """``in fetch (step=7, shard=train-3.tar)``."""
    details = ", ".join(f"{name}={value}" for name, value in beat.details.items())
    return f"in {beat.phase}{f' ({details})' if details else ''}"


def describe_lost_store(first: Sighting, now_s: float, what: str, *, place: str, is_here: bool) -> str:
    """Explain that the key-value store is gone or silent, in the words of ``what``; ``first`` is rank 0's sighting.

    ``place`` is the store's address; ``is_here``: it is this machine, so the rank cannot be cut off from it.
    """
    doing, at = describe(first, now_s), f" at {place}" if place else ""
    cut_off = "" if is_here else " or cut off from this one"
    host = first.beat.host if first.beat is not None else ""
    if first.beat is not None and not first.beat.has_store:
        return (
            f"the key-value store{at} {what}: its host, where another torchrun agent keeps it, is dead or "
            f"stopped{cut_off}; rank 0, on {host}, was last seen {doing}"
        )
    node = f"its node ({host})" if host else "its node"
    return (
        f"the key-value store{at} on rank 0's node {what}: rank 0 or {node} is dead or stopped{cut_off}, "
        f"last seen {doing}"
    )


def _sentence(culprits: Sequence[int], sightings: Mapping[int, Sighting], now_s: float) -> str:
    causes = [_cause(rank, sightings[rank], now_s) for rank in culprits[:_NAMED_OTHERS]]
    if len(culprits) > _NAMED_OTHERS:
        causes.append(f"{len(culprits) - _NAMED_OTHERS} more ranks likewise")
    others = [rank for rank in sightings if rank not in culprits]
    named = [f"{_name(rank, sightings[rank])} {describe(sightings[rank], now_s)}" for rank in others[:_NAMED_OTHERS]]
    if len(others) > _NAMED_OTHERS:
        named.append(f"{len(others) - _NAMED_OTHERS} more")
    return "; ".join(causes) + (f". The others: {'; '.join(named)}" if named else "")


def _cause(rank: int, sighting: Sighting, now_s: float) -> str:
    beat, doing, name = sighting.beat, describe(sighting, now_s), _name(rank, sighting)
    if beat is None:
        return f"{name} has not been heard of for {sighting.silent_s(now_s):.1f} s since the start"
    if beat.state is State.FAILED:
        spent_s = round(sighting.in_phase_s(now_s))
        after = f" after {spent_s} s" if spent_s else ""  # most errors come at once
        return f"{name} failed {_place(beat)}{after}: {beat.error}"
    if beat.state is State.BROKEN_OFF:
        return f"a collective failed on {name} {doing}: {beat.error}"
    if _is_silent(sighting, now_s):
        host = f", {beat.host}," if beat.host else ""
        return (
            f"{name} has sent no heartbeat for {sighting.silent_s(now_s):.1f} s (its process is dead, stopped or "
            f"starved, or its host{host} is down or cut off), last seen {doing}"
        )
    return f"{name} is stalled {doing}"


def _name(rank: int, sighting: Sighting) -> str:
    place = "" if sighting.beat is None else sighting.beat.place
    return f"rank {rank} ({place})" if place else f"rank {rank}"
