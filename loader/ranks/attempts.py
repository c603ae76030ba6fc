"""Attempts to make a loader that ranks share: numbered, so that all know its names; failures are posted to all."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

from .detect import is_torch_worker
from .naming import Attempt, group_store, last_posted

P = ParamSpec("P")


def begin_attempt(source: object, world_size: int | None, **taken: object) -> Attempt | None:
    """Number a loader that is about to be made; None where its rank has data of its own."""
    if world_size == 1 or is_torch_worker():
        return None
    last_posted.pop(os.getpid(), None)
    return Attempt.begin(group_store(), source, taken)


def tell_of_failure(init: Callable[P, None]) -> Callable[P, None]:
    """Tell all ranks if a loader that they share cannot be made on this one; see ``PeerWatch.tell``."""

    @wraps(init)
    def telling(*args: P.args, **kwargs: P.kwargs) -> None:
        given: list[Any] = list(args)
        named: dict[str, Any] = dict(kwargs)
        taken = {name: named.get(name) for name in ("split", "subset", "shuffle")}
        source = given[1] if len(given) > 1 else named.get("source")
        attempt = given[0]._attempt = begin_attempt(source, named.get("world_size"), **taken)
        try:
            init(*args, **kwargs)
        except Exception as exc:
            if attempt is not None and group_store() is not None:
                from .peers import tell_at_once

                tell_at_once(exc, attempt.names)
            raise
        finally:
            if attempt is not None and group_store() is not None:
                from .peers import note_made

                note_made(attempt.names)

    return telling
