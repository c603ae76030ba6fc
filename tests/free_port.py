"""Ports for servers that cannot be told to choose one themselves."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

_RANDOM = random.SystemRandom()  # pytest's workers may share a seed
_given: set[int] = set()


def free_port() -> int:
    """A port below those that the kernel gives away: no connection or server gets it before the test uses it."""
    for _ in range(1000):
        port = _RANDOM.randrange(20_000, 30_000)
        if port in _given:
            continue
        with suppress(OSError), socket.create_server(("", port)):
            _given.add(port)
            return port
    raise AssertionError("no port is free")
