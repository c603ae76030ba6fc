"""Report torch's current compilations, so that the watchdog can tell a long one from a hang."""

from __future__ import annotations

import time
from typing import Any

PHASES = ("forward", "backward", "evaluate", "optimizer")
"""Where something is compiled: what runs for the first time, or on other shapes."""


class Compiling:
    """Listens to torch.compile in this process; one is enough for it, and any thread may read it.

    All mutable state: the seconds of compilations that are over, and since when one is under way. One thread compiles
    at a time, and what it compiles on the way counts as part of it.
    """

    def __init__(self) -> None:
        self._state: tuple[float, float | None] = (0.0, None)

    def listen(self) -> None:
        """Begin to listen, unless that was done; ``torch._dynamo.reset`` ends it."""
        from torch._dynamo.callback import callback_handler

        if self._begin not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._begin)
            callback_handler.register_end_callback(self._end)

    def advance(self, limit_s: float) -> int:
        """A number that grows while something is compiled, for ``limit_s`` seconds of one compilation at most."""
        over_s, since_s = self._state
        running_s = 0.0 if since_s is None else min(time.monotonic() - since_s, limit_s)
        return int(1000 * (over_s + running_s))

    def activity(self) -> dict[str, Any]:
        """For how long something has been compiled now, if it is."""
        since_s = self._state[1]
        return {} if since_s is None else {"compiling_s": round(time.monotonic() - since_s, 1)}

    def _begin(self, arguments: object) -> None:
        self._state = (self._state[0], time.monotonic())

    def _end(self, arguments: object) -> None:
        over_s, since_s = self._state
        self._state = (over_s + (0.0 if since_s is None else time.monotonic() - since_s), None)


COMPILING = Compiling()
"""All that this process compiles."""
