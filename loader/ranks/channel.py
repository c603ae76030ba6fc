"""Channel by which ranks share what their lanes yield: an append-only log of messages in the process group's store.

There are no collectives, and no rank waits in here: callers poll for messages.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

import xxhash

from ...storage.store_link import clone_store, innermost_store
from ..dataset.exchange import translated
from ..errors import ConfigError, DatasetError, LoaderClosedError

LONG_S = 60.0
_POLL_S = (0.0005, 0.05)
_LOG = logging.getLogger(__name__)

_made: Counter[str] = Counter()


class Channel(Protocol):
    """A log a topic. Every rank may append, and reads all messages of a topic, its own too, in one order."""

    def post(self, topic: str, message: bytes) -> None:
        """Append a message."""

    def read(self, topic: str, after: int) -> list[bytes]:
        """The messages of a topic from number ``after`` on, as far as they have arrived; does not wait for more."""


class MemoryChannel:
    """The channel of ranks that are threads of one process, and of a single rank. One lock."""

    def __init__(self) -> None:
        self._topics: dict[str, list[bytes]] = {}
        self._lock = threading.Lock()

    def post(self, topic: str, message: bytes) -> None:
        with self._lock:
            self._topics.setdefault(topic, []).append(message)

    def read(self, topic: str, after: int) -> list[bytes]:
        with self._lock:
            return self._topics.get(topic, [])[after:]


class StoreChannel:
    """The channel of the ranks of a process group, through its key-value store.

    Message i of a topic is one key; a counter hands out the numbers. What was posted stays until the store ends: some
    bytes for each few hundred samples of an epoch.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        # Another connection, where there is one a client: a barrier of the training's must not hold up ours.
        with translated(store):
            self._store = clone_store(store)
        self._prefix = prefix
        self._lock = threading.Lock()

    def post(self, topic: str, message: bytes) -> None:
        number = int(self._call("add", self._key(topic, "count"), 1)) - 1
        self._call("set", self._key(topic, str(number)), message)

    def read(self, topic: str, after: int) -> list[bytes]:
        count = int(self._call("add", self._key(topic, "count"), 0))
        keys = [self._key(topic, str(number)) for number in range(after, count)]
        while keys and not self._call("check", keys):
            keys = keys[: len(keys) // 2]  # a sender has taken a number, and is about to send: what is before it
        if not keys:
            return []
        if self._store.has_extended_api():  # few calls, however many messages
            return [bytes(message) for message in self._call("multi_get", keys)]
        return [bytes(self._call("get", key)) for key in keys]

    def _key(self, topic: str, name: str) -> str:
        return f"{self._prefix}/{topic}/{name}"

    def _call(self, verb: str, *values: Any) -> Any:
        with translated(self._store), self._lock:
            return getattr(self._store, verb)(*values)


def number_loader(identity: str, world_size: int) -> str:
    """The name of a new loader's channel: the n-th that a rank makes of ``identity`` meets the n-th of the others."""
    name = f"{xxhash.xxh3_64_hexdigest(identity.encode())}/{world_size}"
    _made[name] += 1
    return f"{name}/{_made[name]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelAddress:
    """Address of a channel for another process of the same rank: that of a TCP store, and the prefix of its keys."""

    host: str
    port: int
    prefix: str

    def open(self) -> Channel:
        """Connect. Raises DatasetError where the store is gone."""
        from torch._C._distributed_c10d import TCPStore

        try:
            store = TCPStore(self.host, self.port, is_master=False, wait_for_workers=False)
        except RuntimeError as exc:
            raise DatasetError(
                f"the process group's store at {self.host}:{self.port} cannot be reached: {exc}"
            ) from exc
        return StoreChannel(store, self.prefix)


def open_channel(name: str, world_size: int) -> Channel:
    """The channel of this name, which ``number_loader`` gave.

    Raises:
        ConfigError: there are several ranks and no process group.
    """
    if world_size == 1:
        return MemoryChannel()
    store = _find_store(world_size)
    inner = innermost_store(store)
    if not _is_tcp(inner):
        return StoreChannel(store, f"penstock/stream/{name}")
    return StoreChannel(inner, f"{_agree_on_root(store)}/{name}")


def locate_channel(name: str, world_size: int) -> ChannelAddress | None:
    """The address of the channel that ``open_channel`` opens; None for a single rank, which needs none.

    Raises:
        ConfigError: there is no process group, or no other process can connect to its store.
    """
    if world_size == 1:
        return None
    store = _find_store(world_size)
    inner = innermost_store(store)
    if not _is_tcp(inner):
        raise ConfigError(
            f"a loader that drops samples with a process of its own: the process group's {type(inner).__name__} cannot "
            "be reached from there; give init_process_group() a TCPStore, as env:// does, or use place='threads'"
        )
    return ChannelAddress(host=inner.host, port=inner.port, prefix=f"{_agree_on_root(store)}/{name}")


def _is_tcp(store: Any) -> bool:
    return type(store).__name__ == "TCPStore"


def _agree_on_root(store: Any) -> str:
    """Agree with all ranks on a prefix for keys in the innermost store: torch does not tell those of its wrappers."""
    with translated(store):
        return bytes(store.compare_set("penstock/stream", "", f"penstock/stream/{uuid4().hex}")).decode()


def _find_store(world_size: int) -> Any:
    """Find the process group's store. Raises ConfigError where there is none."""
    distributed = sys.modules.get("torch.distributed")  # imported by whoever initialised it
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        raise ConfigError(
            f"a loader that drops samples, with world_size={world_size} and no process group: what is left of each "
            "lane is known only to the rank that reads it, so ranks must tell each other. Call "
            "torch.distributed.init_process_group() before the first batch, on any backend"
        )
    return distributed.distributed_c10d._get_default_store()


def wait_for_ranks(
    is_enough: Callable[[], bool],
    look: Callable[[], object],
    is_stopped: Callable[[], bool],
    what: str = "other ranks",
) -> None:
    """Poll other ranks' messages with ``look`` until they are enough; a true result means that they came nearer.

    Warns once, naming ``what``, if that takes long: a rank may be late for a good reason, or never have come.

    Raises:
        LoaderClosedError: the pipeline is stopped.
    """
    pause_s, warn_at = _POLL_S[0], time.monotonic() + LONG_S
    while not is_enough():
        if time.monotonic() > warn_at:
            warn_at = float("inf")
            _LOG.warning(
                "the next batch has waited %.0f s for %s; check that all ranks run and take batches", LONG_S, what
            )
        if is_stopped():
            raise LoaderClosedError("the loader was closed while it waited for other ranks")
        is_nearer = look()
        if is_enough():
            return
        pause_s = _POLL_S[0] if is_nearer else min(2 * pause_s, _POLL_S[1])
        time.sleep(pause_s)
