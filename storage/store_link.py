"""Connections to a process group's key-value store, which break when the host at the other end is cut off.

Left alone, a request to a host that has gone silent waits until TCP gives up, after a quarter of an hour, and the
answer to a request that arrived is waited for without end. torch sets no limit, but tells which descriptor it uses.
"""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from typing import Any

SILENT_S = 120.0
"""How long the store's host may be silent: as long as requests to an object store are tried again. The connection
breaks when TCP tries again after that, which it does ever more rarely: mostly after two and a half minutes."""

START_KEY = "penstock/start"
"""Of a group's store: the name that the trainer's ranks gave this start, by which loaders' logs tell starts apart."""

_CLIENT = re.compile(r"client=TCPClient\(SocketImpl\(fd=(\d+), ")


def limit_silence(store: Any, seconds: float | None = None) -> None:
    """Have the connection of a TCP store break when for ``seconds``, or ``SILENT_S``, its host acknowledges nothing.

    Whoever then waits for an answer gets the RuntimeError that torch raises for a broken connection. The limit is of
    the host: for a process that is stopped its kernel still acknowledges. Other kinds of stores are left alone.
    """
    found = _CLIENT.search(repr(innermost_store(store)))
    if found is None:
        return
    with suppress(OSError), socket.socket(fileno=os.dup(int(found[1]))) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * (seconds or SILENT_S)))


def clone_store(store: Any) -> Any:
    """A connection of its own to a store, with ``limit_silence``; the store itself where there is one a client.

    Raises:
        RuntimeError: the store's host is cut off.
    """
    limit_silence(store)
    try:
        store.check(["penstock"])  # a new connection to a host that is cut off would be waited for for half an hour
        clone = store.clone()
    except (RuntimeError, AttributeError) as exc:
        if is_cut_off(exc):
            raise
        return store
    limit_silence(clone)
    return clone


def is_cut_off(error: BaseException) -> bool:
    """Return whether a store failed because its host fell silent; if only the process ended, the host answers."""
    return any(words in str(error) for words in ("Connection timed out", "No route to host", "unreachable"))


def place_of(store: Any) -> str:
    """Address of a store as ``host:port``; empty for one that is on no host."""
    inner = innermost_store(store)
    host, port = getattr(inner, "host", None), getattr(inner, "port", None)
    return f"{host}:{port}" if host and port else ""


def is_here(store: Any) -> bool:
    """Return whether a store's host is this machine; true also for one without a host, or with an unresolvable name."""
    host = getattr(innermost_store(store), "host", None)
    if not host:
        return True
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return True
    return any(_is_own(family, address) for family, _, _, _, address in found)


def _is_own(family: int, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)  # only an address of this machine can be bound to
    except OSError:
        return False
    return True


def innermost_store(store: Any) -> Any:
    """The store that the prefixes of others are put around."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
