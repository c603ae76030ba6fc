"""Objects that a source names: patterns in it, and which objects exist, looked up in few requests."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ...storage import NotFoundError, ObjectInfo, StorageError, Store, StoreUnreachableError, open_store
from ...storage.threads.daemon_pool import DaemonPool
from ..errors import ConfigError
from ..formats.shard import SUFFIXES, has_suffix
from ..formats.tokens import index_keys
from .manifest import MANIFEST_NAME

FILE = "file://"
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAX_EXPANDED = 2_000_000  # of all braces of a pattern together
_MOST_DIGITS = 18
_MAGIC = re.compile(r"[*?\[]")
# In a translated glob: a star, and what lies between it and the part's next star, without a set, which may fit a slash.
_STAR_BEFORE_STAR = re.compile(r"\[\^/\]\*((?:\\.|\[\^/\](?!\*)|[^\\\[\](){}*+?|/])+)(?=\[\^/\]\*)")


def expand_braces(pattern: str) -> list[str]:
    """``a-{00..02}`` is a-00, a-01, a-02; ``{x,y}`` is x, y; several braces multiply, the last one running fastest.

    Raises:
        ConfigError: a range that runs backwards, braces that are neither range nor list, or too many names.
    """
    parts: list[Sequence[str]] = []
    at, count = 0, 1
    for match in _BRACES.finditer(pattern):
        words = _words(match[1], pattern, _MAX_EXPANDED // count)
        parts += [(pattern[at : match.start()],), words]
        at, count = match.end(), count * len(words)
    return ["".join(chosen) for chosen in itertools.product(*parts, (pattern[at:],))]


def _words(body: str, pattern: str, most: int) -> list[str]:
    """Expand the inside of braces into its words. Raises ConfigError if there are more than ``most``."""
    span = _RANGE.fullmatch(body)
    if span is None and "," not in body:
        raise ConfigError(f"{pattern}: {{{body}}} is neither a range like {{000..099}} nor a list like {{a,b}}")
    if span is None:
        words = body.split(",")
        count = len(words)
    elif max(map(len, span.groups())) > _MOST_DIGITS:
        count = most + 1
    else:
        first, last = int(span[1]), int(span[2])
        count = last - first + 1
    if count > most:
        raise ConfigError(
            f"{pattern}: names more than {_MAX_EXPANDED:,} shards with {{{body}}}; give the prefix instead"
        )
    if span is None:
        return words
    if count < 1:
        raise ConfigError(f"{pattern}: the range {{{body}}} runs backwards; write the smaller number first")
    width = len(span[1]) if span[1].startswith("0") else 0
    return [str(number).zfill(width) for number in range(first, last + 1)]


def is_glob(url: str) -> bool:
    """Return whether a URL or path is a glob; an existing local one is taken literally; a web URL may have a query."""
    if url.startswith(("http://", "https://")) and "?" in url:
        return False
    local = url.removeprefix(FILE)
    return _MAGIC.search(url) is not None and ("://" in local or not is_path(Path(local)))


def is_path(path: Path) -> bool:
    """Return whether a file or folder exists."""
    try:
        return path.exists()
    except OSError:  # a name longer than a file's may be
        return False


def fixed_prefix(glob: str) -> str:
    """Return the literal beginning of a glob, up to its first wildcard; every match begins with it."""
    found = _MAGIC.search(glob)
    return glob if found is None else glob[: found.start()]


def match_glob(glob: str, objects: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """The objects whose whole key fits ``glob``, in their order.

    ``*`` and ``?`` stand for characters of one part of a key, ``[...]`` for one of a set, ``**`` for any number of
    parts. A glob that fits no object but folders (``train-*`` or ``train-*/``) stands for all that these hold.

    Raises:
        ConfigError: ``**`` is not a part of its own.
    """
    from fsspec.utils import glob_translate  # which takes 0.1 seconds

    try:
        fits = re.compile(_without_backtracking(glob_translate(glob.rstrip("/")))).match
    except (ValueError, re.error) as exc:
        raise ConfigError(f"{glob}: not a glob ({exc}); write ** between slashes, as in data/**/*.parquet") from exc
    matches = [] if glob.endswith("/") else [info for info in objects if fits(info.key)]
    return matches or [info for info in objects if any(fits(folder) for folder in _folders(info.key))]


def _without_backtracking(regex: str) -> str:
    """The same language: what follows a star may be taken where it first fits, since the next star takes the rest.

    Else a name of many repeats takes a time that grows with the power of the number of stars.
    """
    return _STAR_BEFORE_STAR.sub(r"(?>[^/]*?\1)", regex)


def _folders(key: str) -> list[str]:
    """'a/b/c' lies in the folders 'a' and 'a/b'."""
    parts = key.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


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
