"""A prefix that is listed, and its manifest fetched, while it is not yet known whether its URL names an object.

Of a store that is far away each of the three takes a round trip, and so they take one together.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from ...storage import ObjectInfo, open_store
from ...storage.threads.daemon_pool import DaemonPool
from .manifest import MANIFEST_NAME


class Prefix:
    """``listing`` holds its objects, ``manifest`` the bytes of the manifest in it, or the errors of their requests.

    The threads end with these requests. ``store`` belongs to the caller, who closes it.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None, *, with_manifest: bool) -> None:
        store = self.store = open_store(url.rstrip("/") + "/", storage_options=storage_options)
        pool = DaemonPool(f"penstock-open {store.url}")
        try:
            self.listing: Future[list[ObjectInfo]] = pool.submit(lambda: list(store.list()))
            self.manifest: Future[memoryview] | None = pool.submit(store.get, MANIFEST_NAME) if with_manifest else None
        finally:
            pool.close(0)

    def close(self) -> None:
        self.store.close()
