"""obstore's clients, of which all stores of a bucket with the same options share one, and with it its connections.

Making one takes some 5 ms, most of it for the machine's certificates, and a new connection a round trip or more.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from obstore.store import HTTPStore, from_url

from ..options import CREDENTIALS_OPTION

_READ_BY_OBSTORE = ("AWS_", "AZURE_", "GOOGLE_")

_lock = threading.Lock()
_clients: weakref.WeakValueDictionary[tuple[str, ...], Any] = weakref.WeakValueDictionary()


def open_shared(origin: str, config: Any, client: Any, *, is_http: bool) -> Any:
    """The client for an origin, with options as `penstock.storage.options` settles them; raises obstore's errors.

    Its own retry is off: RetryStore decides what is retried, and when.
    """
    retry: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=10)}

    def make() -> Any:
        if is_http:
            return HTTPStore.from_url(origin, client_options=client, retry_config=retry)
        url = origin.replace("gcs://", "gs://", 1)  # which is all that obstore knows
        settings: Any = {name: value for name, value in config.items() if name != CREDENTIALS_OPTION}
        provider: Any = {name: value for name, value in config.items() if name == CREDENTIALS_OPTION}
        return from_url(url, config=settings, client_options=client, retry_config=retry, **provider)

    return share_client(origin, {**config, "client": sorted(client.items())}, make)


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
