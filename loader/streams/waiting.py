"""Waiting for what other ranks tell: more seldom the longer it takes, and with a warning once it takes long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..errors import LoaderClosedError

LONG_S = 60.0
_POLL_S = (0.0005, 0.05)
_LOG = logging.getLogger(__name__)


def wait_for_ranks(
    is_enough: Callable[[], bool],
    look: Callable[[], object],
    is_stopped: Callable[[], bool],
    what: str = "other ranks",
) -> None:
    """Wait until what other ranks have told, which ``look`` takes in, is enough. It may say that this came nearer.

    A warning says for ``what`` once that takes long: a rank may be late for a good reason, or never have come.

    Raises:
        LoaderClosedError: the pipeline is stopped.
    """
    pause_s, warn_at = _POLL_S[0], time.monotonic() + LONG_S
    while not is_enough():
        if time.monotonic() > warn_at:
            warn_at = float("inf")
            _LOG.warning(
                "the next batch has waited %.0f s for %s; are all ranks there, and do they read?", LONG_S, what
            )
        if is_stopped():
            raise LoaderClosedError("the loader was closed while it waited for other ranks")
        is_nearer = look()
        if is_enough():
            return
        pause_s = _POLL_S[0] if is_nearer else min(2 * pause_s, _POLL_S[1])
        time.sleep(pause_s)
