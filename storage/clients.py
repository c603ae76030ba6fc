"""obstore's clients, of which all stores of a bucket with the same options share one, and with it its connections.

Making one takes some 5 ms, most of it for the machine's certificates, and a new connection a round trip or more.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

_READ_BY_OBSTORE = ("AWS_", "AZURE_", "GOOGLE_")

_lock = threading.Lock()
_clients: weakref.WeakValueDictionary[tuple[str, ...], Any] = weakref.WeakValueDictionary()


def share_client(origin: str, options: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """The client for an origin that a store with these options and this environment has open; a new one if none has."""
    environment = {name: value for name, value in os.environ.items() if name.startswith(_READ_BY_OBSTORE)}
    key = (origin, repr(sorted(options.items())), repr(sorted(environment.items())))
    with _lock:
        client = _clients.get(key)
        if client is None:
            client = _clients[key] = make()
        return client


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _clients.clear()


os.register_at_fork(after_in_child=_forget_in_child)
