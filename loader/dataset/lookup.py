"""Look up which objects exist, in few requests, and find the companions of shards."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

from ...storage import NotFoundError, ObjectInfo, StorageError, Store, StoreUnreachableError
from ...storage.threads.daemon_pool import DaemonPool
from ..formats.names import SUFFIXES, has_suffix
from ..formats.tokens import index_keys

# From this many keys of one folder on, one LIST is cheaper than a HEAD each.
_LIST_FROM = 16
_HEAD_THREADS = 32


def find_companions(store: Store, keys: Iterable[str]) -> Iterator[ObjectInfo]:
    """Find companions of shards: for MDS their folder, whose index.json names the shards; for Megatron .idx files."""
    folders = {key.rpartition("/")[0] for key in keys if has_suffix(key, SUFFIXES["mds"])}
    for folder in sorted(folders):
        yield from store.list(f"{folder}/" if folder else "")
    yield from find_keys(store, [index for key in sorted(keys) for index in index_keys(key)]).values()


def find_keys(store: Store, keys: Sequence[str]) -> dict[str, ObjectInfo]:
    """Those of ``keys`` that exist: by one LIST if many share a folder, else by a HEAD each, in threads."""
    folders: dict[str, list[str]] = {}
    for key in keys:
        folders.setdefault(key.rpartition("/")[0], []).append(key)
    found: dict[str, ObjectInfo] = {}
    single: list[str] = []
    for together in folders.values():
        if len(together) < _LIST_FROM:
            single += together
            continue
        wanted = set(together)
        try:
            prefix = os.path.commonprefix(together)  # noqa: RUF071 - character by character is meant
            found.update((info.key, info) for info in store.list(prefix) if info.key in wanted)
        except NotFoundError:
            continue
        except StoreUnreachableError:
            raise
        except StorageError:
            single += together  # plain web servers do not list
    if single:
        with DaemonPool("penstock-head", _HEAD_THREADS) as pool:
            found.update((info.key, info) for info in pool.map(lambda key: _head(store, key), single) if info)
    return found


def _head(store: Store, key: str) -> ObjectInfo | None:
    try:
        return store.head(key)
    except NotFoundError:
        return None
