"""Agree over the store on whether other ranks end an epoch as early; a collective would meet a step's."""

from __future__ import annotations

import time

from torch.distributed.distributed_c10d import PrefixStore

from .heartbeat import Beat

_STEPPING = frozenset({"microbatches", "forward", "backward", "reduce", "optimizer"})
_POLL_S = 0.02
_LOOK_S = 0.25  # beats, a request or two for each rank, come less often than that


def find_stepping(store: PrefixStore, others: list[int], key: str, *, rank: int, step: int) -> int | None:
    """Tell the others that this rank has no batch for ``step``; wait until all have said so, or one is in that step.

    ``store`` is a watchdog's, whose beats it reads, and ``key`` names this end of an epoch. Returns the rank that is in
    the step, or None where there is none, or a verdict was spoken meanwhile. Not a collective.
    """
    store.set(f"{key}/{rank}", "")
    ends = {other: f"{key}/{other}" for other in others}
    seen: dict[int, int] = {}
    looked_at_s = time.monotonic()
    while not store.check(["verdict"]):
        if store.check(list(ends.values())):  # whether all are there, in one request
            return None
        if time.monotonic() - looked_at_s >= _LOOK_S:
            looked_at_s = time.monotonic()
            for other, end in ends.items():
                if not store.check([end]) and _is_stepping(store, other, step, seen):
                    return other
        time.sleep(_POLL_S)
    return None


def _is_stepping(store: PrefixStore, other: int, step: int, seen: dict[int, int]) -> bool:
    """Return whether the rank's beat shows the step; ``seen`` has its first beat, which may precede a rewind."""
    if not store.check([f"beat/{other}"]):
        return False
    beat = Beat.from_text(store.get(f"beat/{other}"))
    is_fresh = beat.sequence > seen.setdefault(other, beat.sequence)
    return is_fresh and beat.details.get("step") == step and beat.phase in _STEPPING
