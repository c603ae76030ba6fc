"""Ranks that start together agree on a name that no earlier start had, over a store that still holds earlier starts.

torchrun may give restarted processes the key-value store of the previous ones. Keys of the same names would lead new
ranks to the addresses of dead ones, and nothing in the environment tells starts apart on every node.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence

from torch._C._distributed_c10d import Store

from ...storage.suggestions import list_some
from ..errors import WorldError

_POLL_S = (0.02, 0.2)
_NAMED = 8


def agree_on_start(
    store: Store,
    rank: int,
    world_size: int,
    *,
    timeout_s: float,
    doing: str = "start",
    heard: Callable[[], None] = lambda: None,
) -> str:
    """A name for this start, new and the same on every rank; returns when all ranks are present.

    ``heard`` is called whenever the store has answered.

    Rank 0 publishes a new token; the others answer every token that they see with a new one of their own, until one of
    their answers is listed. An answer to rank 0's new token must be new, and so must a list with a rank's own token.

    Raises:
        WorldError: the other ranks did not come in time.
    """
    own = secrets.token_hex(8)
    deadline_s, pause_s = time.monotonic() + timeout_s, _POLL_S[0]
    if rank == 0:
        answers = [f"penstock/answer/{own}/{other}" for other in range(1, world_size)]
        store.set("penstock/call", own)
        while answers and not store.check(answers):
            heard()
            if time.monotonic() > deadline_s:
                missing = [other for other, answer in enumerate(answers, 1) if not store.check([answer])]
                raise _too_late(rank, world_size, timeout_s, doing, missing)
            pause_s = _sleep(pause_s)
        store.set(f"penstock/heard/{own}", json.dumps([own, *(store.get(answer).decode() for answer in answers)]))
        return own
    answered = ""
    while True:
        heard()
        if store.check(["penstock/call"]):
            call = store.get("penstock/call").decode()
            if call != answered:
                store.set(f"penstock/answer/{call}/{rank}", own)
                answered = call
            if store.check([f"penstock/heard/{call}"]) and own in json.loads(store.get(f"penstock/heard/{call}")):
                return call
        if time.monotonic() > deadline_s:
            raise _too_late(rank, world_size, timeout_s, doing, [])
        pause_s = _sleep(pause_s)


def _sleep(pause_s: float) -> float:
    """Sleep, and return for how long to sleep next: many ranks may wait for a late one for minutes."""
    time.sleep(pause_s)
    return min(1.5 * pause_s, _POLL_S[1])


def _too_late(rank: int, world_size: int, timeout_s: float, doing: str, missing: Sequence[int]) -> WorldError:
    absent = f" (not there: rank {list_some(missing, _NAMED)})" if missing else ""
    return WorldError(
        f"rank {rank} of {world_size} waited {timeout_s:.0f} s for the others to {doing}{absent}; are all nodes up and "
        "connected, and did each start as many ranks as torchrun expects?"
    )
