"""Whether other ranks end an epoch as early as this one: told over the store; a collective would meet a step's."""

from __future__ import annotations

import time

from torch.distributed.distributed_c10d import PrefixStore

from .heartbeat import Beat

_STEPPING = frozenset({"microbatches", "forward", "backward", "reduce", "optimizer"})
_POLL_S = 0.02


def find_stepping(store: PrefixStore, others: list[int], key: str, *, rank: int, step: int) -> int | None:
    """Tell the others that this rank has no batch for ``step``; wait until all have said so, or one is in that step.

    ``store`` is a watchdog's, whose beats it reads, and ``key`` names this end of an epoch. Returns the rank that is in
    the step, or None where there is none, or a verdict was spoken meanwhile. Not a collective.
    """
    store.set(f"{key}/{rank}", "")
    seen: dict[int, int] = {}
    while not store.check(["verdict"]):
        missing = [one for one in others if not store.check([f"{key}/{one}"])]
        if not missing:
            return None
        for other in missing:
            if not store.check([f"beat/{other}"]):
                continue
            beat = Beat.from_text(store.get(f"beat/{other}"))
            # An older beat may be of a step of this number from before a rewind.
            is_fresh = beat.sequence > seen.setdefault(other, beat.sequence)
            if is_fresh and beat.details.get("step") == step and beat.phase in _STEPPING:
                return other
        time.sleep(_POLL_S)
    return None
