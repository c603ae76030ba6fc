"""Resolves a source (a prefix, one shard, a brace pattern or a list of these) to objects below one root."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...storage import NotFoundError, ObjectInfo, StorageError, Store, open_store
from ..errors import ConfigError, DatasetError
from ..formats.mds import MdsFormat
from ..formats.names import has_suffix
from ..formats.tokens import index_keys
from ..progress import show_progress
from .manifest import MANIFEST_NAME

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

# Stands in for the manifest while a data set is being written.
UNFINISHED = b"penstock: this data set is being packed, or its packing was interrupted\n"

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAX_EXPANDED = 10_000_000
# From this many keys of one folder on, one LIST is cheaper than a HEAD each.
_LIST_FROM = 16
_HEAD_THREADS = 32
_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The objects that a source names.

    ``listing`` also holds companions of the shards (an index.json, an .idx). ``chosen`` are the keys in the order the
    caller gave them, or None if the source is a whole prefix; ``named`` are those that the caller named individually,
    which must therefore be shards. ``saved`` is the manifest beside the data, if there is one.
    """

    url: str
    listing: tuple[ObjectInfo, ...]
    chosen: tuple[str, ...] | None
    saved: ObjectInfo | None
    named: frozenset[str] = frozenset()


def expand_braces(pattern: str) -> list[str]:
    """``a-{00..02}`` is a-00, a-01, a-02; ``{x,y}`` is x, y; several braces multiply, the last one running fastest.

    Raises:
        ConfigError: a range that runs backwards, or braces that are neither range nor list.
    """
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    body, before, after = match[1], pattern[: match.start()], pattern[match.end() :]
    span = _RANGE.fullmatch(body)
    if span:
        first, last = int(span[1]), int(span[2])
        if last < first:
            raise ConfigError(f"{pattern}: the range {{{body}}} runs backwards; write the smaller number first")
        if last - first >= _MAX_EXPANDED:
            raise ConfigError(
                f"{pattern}: the range {{{body}}} names {last - first + 1} shards; give the prefix instead"
            )
        width = len(span[1]) if span[1].startswith("0") else 0
        words = [str(number).zfill(width) for number in range(first, last + 1)]
    elif "," in body:
        words = body.split(",")
    else:
        raise ConfigError(f"{pattern}: {{{body}}} is neither a range like {{000..099}} nor a list like {{a,b}}")
    rests = expand_braces(after)
    return [f"{before}{word}{rest}" for word in words for rest in rests]


def select(
    source: Source, storage_options: Mapping[str, Any] | None = None, *, progress: bool = False
) -> tuple[Store, Selection]:
    """Open the store of a source and list what the source names; the caller closes the store.

    Raises:
        DatasetError: nothing there, or shards that are missing (up to five are named).
        StorageError: the store refused or did not answer.
    """
    urls = absolute_urls(source)
    if not urls:
        raise DatasetError("the list of shards is empty; give at least one URL")
    if len(urls) == 1:
        return _select_one(urls[0], storage_options, progress)
    root, keys = _common_root(urls)
    store = open_store(root, storage_options=storage_options)
    try:
        return store, _select_keys(store, root, keys)
    except BaseException:
        store.close()
        raise


def absolute_urls(source: Source) -> list[str]:
    """Every URL that a source names, with patterns expanded and local paths made absolute."""
    parts: Sequence[object] = [source] if isinstance(source, (str, os.PathLike)) else source
    return [url for part in parts for url in _absolute(part)]


def _absolute(given: object) -> list[str]:
    if not isinstance(given, (str, os.PathLike)):
        raise ConfigError(f"a source is a URL, a path or a list of them, not {type(given).__name__} ({given!r})")
    text = os.fspath(given)
    if not isinstance(text, str) or not text:
        raise ConfigError(f"a source is a URL or a path, not {text!r}")
    if "://" not in text:
        # An existing path with braces in its name is taken literally.
        if Path(text).expanduser().exists():
            return [_local(text)]
        return [_local(path) for path in expand_braces(text)]
    return expand_braces(text)


def _local(path: str) -> str:
    slash = "/" if path.endswith("/") else ""
    return str(Path(path).expanduser().absolute()).rstrip("/") + slash


def _split(url: str) -> tuple[str, str]:
    """Scheme and authority ('s3://bucket/', or '/' for local paths), and the rest."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return "/", url.lstrip("/")
    if scheme == "file":
        return "file:///", rest.lstrip("/")
    authority, _, path = rest.partition("/")
    return f"{scheme}://{authority}/", path


def _select_one(url: str, storage_options: Mapping[str, Any] | None, progress: bool) -> tuple[Store, Selection]:
    base, path = _split(url)
    folder, _, name = path.rpartition("/")
    # A web server answers for a folder's name with the page of its index, as if that were an object.
    if name and not (base.startswith("http") and "." not in name):
        root = f"{base}{folder}/" if folder else base
        store = open_store(root, storage_options=storage_options)
        try:
            info = store.head(name)
            return store, _select_objects(store, root, [info], named=frozenset((name,)))
        except NotFoundError:
            store.close()
        except BaseException:
            store.close()
            raise
    url = url.rstrip("/") + "/"
    store = open_store(url, storage_options=storage_options)
    try:
        objects = []
        with show_progress("listing", None, unit="objects", enabled=progress) as advance:
            for info in store.list():
                objects.append(info)
                advance(1)
        saved = next((info for info in objects if info.key == MANIFEST_NAME), None)
        listing = tuple(info for info in objects if not info.key.endswith(MANIFEST_NAME))
        if not listing:
            raise DatasetError(f"{store.url}: nothing there; check the URL (is it a prefix that ends where you think?)")
    except BaseException:
        store.close()
        raise
    return store, Selection(url=url, listing=listing, chosen=None, saved=saved)


def _common_root(urls: Sequence[str]) -> tuple[str, list[str]]:
    bases = {_split(url)[0] for url in urls}
    if len(bases) > 1:
        first, second = sorted(bases)[:2]
        raise DatasetError(f"the shards lie in several stores ({first} and {second}); a data set lies in one")
    (base,) = bases
    paths = [_split(url)[1] for url in urls]
    folders = [path.rpartition("/")[0].split("/") for path in paths]
    shared = os.path.commonprefix(folders)  # noqa: RUF071 - of lists, so part by part
    folder = "/".join(shared)
    start = len(folder) + 1 if folder else 0
    return (f"{base}{folder}/" if folder else base), [path[start:] for path in paths]


def _select_keys(store: Store, root: str, keys: Sequence[str]) -> Selection:
    found = find_keys(store, [key for key in keys if key and not key.endswith("/")])
    order: list[ObjectInfo] = []
    missing: list[str] = []
    for key in keys:
        if key in found:
            order.append(found[key])
            continue
        prefix = key if key.endswith("/") or not key else f"{key}/"
        inside = [info for info in store.list(prefix) if not info.key.endswith(MANIFEST_NAME)]
        order += inside
        if not inside:
            missing.append(key or "/")
            if len(missing) > _NAMED:
                break  # enough for the message; each further one would cost a LIST
    if missing:
        named = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
        raise DatasetError(f"{store.url}: missing {named}, which the source names; check the pattern or the list")
    return _select_objects(store, root, order, named=frozenset(found))


def _select_objects(store: Store, root: str, order: Sequence[ObjectInfo], *, named: frozenset[str]) -> Selection:
    listing = {info.key: info for info in order}
    if len(listing) < len(order):
        seen: set[str] = set()
        twice = next(info.key for info in order if info.key in seen or seen.add(info.key))  # type: ignore[func-returns-value]
        raise ConfigError(f"{store.url}: {twice} is given twice; name each shard once")
    listing.update((info.key, info) for info in _find_companions(store, named) if info.key not in listing)
    try:
        saved = store.head(MANIFEST_NAME)
    except StorageError:
        saved = None  # missing, or not readable: the shards themselves will tell
    return Selection(
        url=root, listing=tuple(listing.values()), chosen=tuple(info.key for info in order), named=named, saved=saved
    )


def _find_companions(store: Store, keys: Iterable[str]) -> Iterator[ObjectInfo]:
    """What belongs to shards: for MDS their folder, whose index.json names every shard; for Megatron the .idx files."""
    folders = {key.rpartition("/")[0] for key in keys if has_suffix(key, MdsFormat.suffixes)}
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
        except StorageError:
            single += together  # plain web servers do not list
    if single:
        with ThreadPoolExecutor(min(_HEAD_THREADS, len(single)), "penstock-head") as pool:
            found.update((info.key, info) for info in pool.map(lambda key: _head(store, key), single) if info)
    return found


def _head(store: Store, key: str) -> ObjectInfo | None:
    try:
        return store.head(key)
    except NotFoundError:
        return None
