"""What is kept of each shard to open its chunks with (a parquet footer, say): read once, by one thread."""

from __future__ import annotations

import threading
from typing import Any

from ...storage import ObjectInfo, Store
from ..formats.shard import ShardFormat


class _Entry:
    """One shard's header, opened under ``lock``. None is a header too, hence ``is_open``."""

    __slots__ = ("header", "is_open", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_open = False
        self.header: Any = None


class HeaderCache:
    """Opens each shard when it is first asked for, and keeps its header. Called by any thread.

    Threads that ask for a shard while another one opens it wait for that one. Mutable state: the entries, under a lock,
    and each entry under its own.
    """

    def __init__(self, shard_format: ShardFormat, store: Store) -> None:
        self._format = shard_format
        self._store = store
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()

    def get(self, shard: ObjectInfo) -> Any:
        """The shard's header, as the format's ``open_shard`` returned it.

        Raises what ``open_shard`` raises. A failure is not kept: each thread that waited, and each later call, opens
        the shard again.
        """
        with self._lock:
            entry = self._entries.setdefault(shard.key, _Entry())
        with entry.lock:
            if not entry.is_open:
                entry.header = self._format.open_shard(self._store, shard)
                entry.is_open = True
            return entry.header

    def forget(self, shard: ObjectInfo) -> None:
        """Have the shard opened again when it is next asked for; a thread that is opening it keeps that for itself."""
        with self._lock:
            self._entries.pop(shard.key, None)
