"""Ranks that start together agree on a name that no earlier start had, over a store that still holds earlier starts.

torchrun may give restarted processes the key-value store of the previous ones. Keys of the same names would lead new
ranks to the addresses of dead ones, and nothing in the environment tells starts apart on every node.
"""

from __future__ import annotations

import json
import secrets
import time

from torch._C._distributed_c10d import Store

from ..errors import WorldError

_POLL_S = 0.02


def agree_on_start(store: Store, rank: int, world_size: int, *, timeout_s: float) -> str:
    """A name for this start, new and the same on every rank; returns when all ranks are present.

    Rank 0 publishes a new token; the others answer every token that they see with a new one of their own, until one of
    their answers is listed. An answer to rank 0's new token must be new, and so must a list with a rank's own token.

    Raises:
        WorldError: the other ranks did not come in time.
    """
    own = secrets.token_hex(8)
    deadline_s = time.monotonic() + timeout_s
    if rank == 0:
        answers = [f"penstock/answer/{own}/{other}" for other in range(1, world_size)]
        store.set("penstock/call", own)
        while answers and not store.check(answers):
            _wait(deadline_s, rank, world_size, timeout_s)
        store.set(f"penstock/heard/{own}", json.dumps([own, *(store.get(answer).decode() for answer in answers)]))
        return own
    answered = ""
    while True:
        if store.check(["penstock/call"]):
            call = store.get("penstock/call").decode()
            if call != answered:
                store.set(f"penstock/answer/{call}/{rank}", own)
                answered = call
            if store.check([f"penstock/heard/{call}"]) and own in json.loads(store.get(f"penstock/heard/{call}")):
                return call
        _wait(deadline_s, rank, world_size, timeout_s)


def _wait(deadline_s: float, rank: int, world_size: int, timeout_s: float) -> None:
    if time.monotonic() > deadline_s:
        raise WorldError(
            f"rank {rank} of {world_size} waited {timeout_s:.0f} s for the others to start; are all nodes up, and did "
            "each start as many ranks as torchrun expects?"
        )
    time.sleep(_POLL_S)
