"""Resolves a source (a prefix, one shard, a pattern or a list of these) to objects below one root."""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from ...storage import NotFoundError, ObjectInfo, StorageError, Store, open_store
from ...storage.files import in_home
from ...storage.resolve import check_query
from ...storage.urls import decode_path, encode_name, without_password
from ..errors import ConfigError, DatasetError
from ..formats.detect import format_by_name
from ..formats.hive import read_folders, read_root
from ..formats.shard import is_hidden
from .listing import (
    FILE,
    README_NAME,
    Prefix,
    expand_braces,
    find_companions,
    find_keys,
    fixed_prefix,
    is_glob,
    is_path,
    match_glob,
    warn_doubt,
)
from .manifest import MANIFEST_NAME
from .splits import ALL, DICTIONARY_NAME, Split, choose_splits, name_splits, refuse_mixed_splits, split_folder

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
SourceT = TypeVar("SourceT", bound=Source)

_NAMED = 5
_MOST_README_BYTES = 4 << 20
_CHAIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://[^:]*)?::.*://")
# Stands in for the manifest while a data set is being written.
UNFINISHED = b"penstock: this data set is being packed, or its packing was interrupted\n"


def is_unfinished(data: bytes | memoryview) -> bool:
    """Return whether the bytes in the manifest's place mark an incomplete data set; notes of the writer may follow."""
    return bytes(data[: len(UNFINISHED)]) == UNFINISHED


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The objects that a source names.

    ``listing`` also holds companions of the shards (an index.json, an .idx). ``chosen`` are the keys in the order the
    caller gave them, or None if the source is a whole prefix; ``named`` are those that the caller named individually,
    which must therefore be shards; ``spelled`` are these and those below a hidden folder that he named: he wants them
    though their names are hidden. ``saved`` is the manifest beside the data, if there is one, and ``saved_data`` its
    bytes if they are being fetched already. ``folders`` are the prefixes, '' or ending in '/', that the source names
    as a whole and that may not mix splits; ``globs`` are the patterns in it. ``root``: values of columns that the URL's
    own folders tell of all shards, where the caller named shards or a pattern, or a split lies below what he named.
    """

    url: str
    listing: tuple[ObjectInfo, ...]
    chosen: tuple[str, ...] | None
    saved: ObjectInfo | None
    named: frozenset[str] = frozenset()
    spelled: frozenset[str] = frozenset()
    folders: tuple[str, ...] = ()
    globs: tuple[str, ...] = ()
    saved_data: Future[memoryview] | None = None
    root: Mapping[str, str] = field(default_factory=dict)


def select(
    source: Source,
    storage_options: Mapping[str, Any] | None = None,
    *,
    split: Split | None = None,
    progress: bool = False,
) -> tuple[Store, Selection]:
    """Open the store of a source and list what the source names, or a split of that; the caller closes the store.

    Raises:
        DatasetError: nothing there, shards that are missing (up to five are named), several subsets, or no such split.
        StorageError: the store refused or did not answer.
    """
    urls = absolute_urls(source)
    if not urls:
        raise DatasetError("the list of shards is empty; give at least one URL")
    if len(urls) == 1 and not is_glob(urls[0]):
        store, selection = _select_one(urls[0], storage_options, progress, is_split=split is not None)
    else:
        root, keys = _common_root(urls)
        store = open_store(root, storage_options=storage_options)
        try:
            selection = _select_keys(store, root, keys)
        except BaseException:
            store.close()
            raise
    try:
        selection = _select_subset(store, selection)
    except BaseException:
        store.close()
        raise
    return (store, selection) if split is None else _select_split(store, selection, split, storage_options)


def resolve_split(
    source: SourceT, split: Split | None, storage_options: Mapping[str, Any] | None = None
) -> SourceT | str | list[str]:
    """The source that names the shards of a split: its folder, a glob of all, or a list; ``source`` without a split.

    Raises:
        DatasetError, StorageError: as ``select`` does.
    """
    if split is None:
        return source
    store, selection = select(source, storage_options, split=split)
    store.close()
    if selection.chosen is None:
        return selection.url + ("**" if split == ALL else "")
    return [selection.url + encode_name(selection.url, key) for key in selection.chosen]


def absolute_urls(source: Source) -> list[str]:
    """Every URL that a source names, with patterns expanded and local paths made absolute."""
    is_one = isinstance(source, (str, bytes, os.PathLike)) or not isinstance(source, Iterable)
    parts: Iterable[object] = [source] if is_one else cast("Iterable[object]", source)
    return [url for part in parts for url in _absolute(part)]


def _absolute(given: object) -> list[str]:
    if not isinstance(given, (str, os.PathLike)):
        raise ConfigError(
            f"a source is a URL, a path or a list of them, not {type(given).__name__} ({reprlib.repr(given)}); write "
            "samples of another kind as shards first: penstock.pack(samples, 'folder')"
        )
    text = os.fspath(given)
    if not isinstance(text, str) or not text:
        raise ConfigError(f"a source is a URL or a path, not {text!r}")
    if text.startswith("pipe:"):
        raise ConfigError(
            f"{text}: commands are not run; give the URL that the command reads, such as s3://bucket/x.tar"
        )
    if _CHAIN.match(text):
        raise ConfigError(
            f"{without_password(text)}: chains of fsspec's are not read; of an archive give e.g. 'zip://folder/' and "
            "storage_options={'fo': the archive's URL}, and for a cache cache_dir="
        )
    if "://" not in text:
        # An existing path with braces in its name is taken literally.
        if is_path(Path(in_home(text))):
            return [_local(text)]
        return [_local(path) for path in expand_braces(text)]
    check_query(text)
    if text.startswith(FILE) and is_path(Path(text.removeprefix(FILE))):
        return [text]
    return expand_braces(text)


def _local(path: str) -> str:
    slash = "/" if path.endswith("/") else ""
    return str(Path(in_home(path)).absolute()).rstrip("/") + slash


def _split(url: str) -> tuple[str, str]:
    """Scheme and authority ('s3://bucket/', or '/' for local paths), and the name of what lies there."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return "/", url.lstrip("/")
    if scheme == "file":
        return "file:///", rest.lstrip("/")
    authority, _, path = rest.partition("/")
    return f"{scheme}://{authority}/", decode_path(url, path)


def _select_one(
    url: str, storage_options: Mapping[str, Any] | None, progress: bool, *, is_split: bool
) -> tuple[Store, Selection]:
    base, path = _split(url)
    folder, _, name = path.rpartition("/")
    # A web server answers for a folder's name with the page of its index, as if that were an object.
    may_be_object = bool(name) and not (base.startswith("http") and "." not in name)
    is_prefix = base not in {"/", "file:///"} and "." not in name  # probably; local ones are asked at once
    ahead = Prefix(url, storage_options, with_manifest=not is_split) if is_prefix else None
    if may_be_object:
        root = f"{base}{encode_name(base, folder)}/" if folder else base
        store = open_store(root, storage_options=storage_options)
        try:
            info = store.head(name)
            selection = _select_objects(store, root, [info], named=frozenset((name,)))
        except NotFoundError:
            store.close()
        except BaseException:
            for opened in (store, ahead):
                if opened is not None:
                    opened.close()
            raise
        else:
            if ahead is not None:
                ahead.close()
            return store, selection
    url = url.rstrip("/") + "/"
    store = open_store(url, storage_options=storage_options) if ahead is None else ahead.store
    try:
        objects = []
        from ..progress import show_progress

        with show_progress("listing", None, unit="objects", enabled=progress) as advance:
            for info in store.list() if ahead is None else ahead.listing.result():
                objects.append(info)
                advance(1)
        saved = next((info for info in objects if info.key == MANIFEST_NAME), None)
        listing = tuple(info for info in objects if not info.key.endswith(MANIFEST_NAME))
        if not listing:
            raise DatasetError(
                f"{store.url}: nothing there; check the URL (is it a prefix that ends where you think? The name of an "
                "object has its ending, such as .bin)"
            )
    except BaseException:
        store.close()
        raise
    data = None if ahead is None else ahead.manifest
    return store, Selection(url=url, listing=listing, chosen=None, saved=saved, folders=("",), saved_data=data)


def _common_root(urls: Sequence[str]) -> tuple[str, list[str]]:
    bases = {_split(url)[0] for url in urls}
    if len(bases) > 1:
        first, second = sorted(bases)[:2]
        raise DatasetError(f"the shards lie in several stores ({first} and {second}); a data set lies in one")
    (base,) = bases
    paths = [_split(url)[1] for url in urls]
    fixed = [fixed_prefix(path) if is_glob(url) else path for url, path in zip(urls, paths, strict=True)]
    folder = _shared_folder(fixed)
    return base + encode_name(base, folder), [path[len(folder) :] for path in paths]


def _shared_folder(paths: Sequence[str]) -> str:
    """The innermost folder that holds all paths: '' or 'a/b/'."""
    folders = [path.rpartition("/")[0].split("/") for path in paths]
    shared = "/".join(os.path.commonprefix(folders))  # noqa: RUF071 - of lists, so part by part
    return f"{shared}/" if shared else ""


def _select_keys(store: Store, root: str, keys: Sequence[str]) -> Selection:
    globs = {key for key in keys if is_glob(root + key)}
    # One with brackets alone may be an object's name.
    surely = {key for key in globs if "*" in key or "?" in key}
    found = find_keys(store, [key for key in keys if key and not key.endswith("/") and key not in surely])
    order: list[ObjectInfo] = []
    matched: set[str] = set()
    missing: list[str] = []
    folders: list[str] = []
    spelled = set(found)
    for key in keys:
        if key in found:
            order.append(found[key])
            continue
        if key in globs:
            given = fixed_prefix(key)
            inside = match_glob(key, _list_data(store, given))
            matched.update(info.key for info in inside)
        else:
            given = key if key.endswith("/") or not key else f"{key}/"
            inside = _list_data(store, given)
            folders.append(given)
        order += inside
        spelled.update(info.key for info in inside if is_hidden(info.key) and not is_hidden(info.key, given))
        if not inside:
            missing.append(key or "/")
            if len(missing) > _NAMED:
                break  # enough for the message; each further one would cost a LIST
    if missing:
        named = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
        raise DatasetError(f"{store.url}: missing {named}, which the source names; check the pattern or the list")
    selection = _select_objects(store, root, order, named=frozenset(found), matched=matched)
    return replace(
        selection,
        folders=tuple(folders),
        globs=tuple(key for key in keys if key in globs and key not in found),
        spelled=frozenset(spelled),
    )


def _list_data(store: Store, prefix: str) -> list[ObjectInfo]:
    return [info for info in store.list(prefix) if not info.key.endswith(MANIFEST_NAME)]


def _select_objects(
    store: Store, root: str, order: Sequence[ObjectInfo], *, named: frozenset[str], matched: Set[str] = frozenset()
) -> Selection:
    listing = {info.key: info for info in order}
    if len(listing) < len(order):
        seen: set[str] = set()
        twice = next(info.key for info in order if info.key in seen or seen.add(info.key))  # type: ignore[func-returns-value]
        raise ConfigError(f"{store.url}: {twice} is given twice; name each shard once")
    listing.update((info.key, info) for info in find_companions(store, named | matched) if info.key not in listing)
    chosen = tuple(info.key for info in order)
    every, saved, in_root = tuple(listing.values()), _find_saved(store), read_root(_split(root)[1])
    return Selection(url=root, listing=every, chosen=chosen, named=named, spelled=named, saved=saved, root=in_root)


def _find_saved(store: Store) -> ObjectInfo | None:
    try:
        return store.head(MANIFEST_NAME)
    except StorageError:
        return None  # missing, or not readable: the shards themselves will tell


def _select_subset(store: Store, selection: Selection) -> Selection:
    """Drop all subsets but the default one from a selection, in folders whose README.md lists subsets."""
    dropped: set[str] = set()
    for folder in selection.folders:
        readme = next((info for info in selection.listing if info.key == folder + README_NAME), None)
        if readme is None or not 0 < readme.size < _MOST_README_BYTES:
            continue
        from .subsets import choose_subset, read_subsets

        text = str(store.get(readme.key, etag=readme.etag), "utf-8", "replace")
        try:
            subsets = read_subsets(text)
        except ValueError as exc:
            warn_doubt(
                f"{selection.url}{readme.key}: its list of subsets (configs) cannot be read ({exc}), so subsets may be "
                "mixed; name the shards of one by a pattern, or correct the list"
            )
            continue
        if len(subsets) < 2:
            continue
        inside = [
            replace(info, key=info.key[len(folder) :])
            for info in selection.listing
            if info.key.startswith(folder) and format_by_name(info.key, selection.spelled) is not None
        ]
        kept = choose_subset(selection.url + folder, subsets, inside)
        if kept is not None:
            dropped.update(folder + info.key for info in inside if info.key not in kept)
    if not dropped:
        return selection
    chosen = None if selection.chosen is None else tuple(key for key in selection.chosen if key not in dropped)
    return replace(
        selection, listing=tuple(info for info in selection.listing if info.key not in dropped), chosen=chosen
    )


def _select_split(
    store: Store, selection: Selection, split: Split, storage_options: Mapping[str, Any] | None
) -> tuple[Store, Selection]:
    """Select the shards of a split: its own folder, if it has one, as if that were the source; else some shards."""
    try:
        candidates = selection.chosen or tuple(info.key for info in selection.listing)
        shards = [key for key in candidates if format_by_name(key, selection.spelled) is not None]
        if not shards:  # loose files, or without an ending
            shards = [key for key in candidates if key in selection.spelled or not is_hidden(key)]
        names = name_splits(shards, _read_dictionaries(store, selection.listing))
        if split == ALL and ALL not in names.values():
            return store, replace(selection, folders=())
        wanted = choose_splits(store.url, split, names, len(shards))
        keys = [key for name in wanted for key in shards if names.get(key) == name]
    except BaseException:
        store.close()
        raise
    others = set(shards) - set(keys)
    listing = [info for info in selection.listing if info.key not in others]
    if selection.chosen is not None:
        return store, replace(selection, listing=tuple(listing), chosen=tuple(keys), folders=())
    parents = {split_folder(key, names[key]) for key in keys}
    folder = parents.pop() if len(parents) == 1 and parents != {""} else _shared_folder(keys)
    store.close()
    url = selection.url + encode_name(selection.url, folder)
    store = open_store(url, storage_options=storage_options)
    inside = tuple(replace(info, key=info.key[len(folder) :]) for info in listing if info.key.startswith(folder))
    is_whole = len(wanted) == 1 and not any(key.startswith(folder) for key in others)
    chosen = None if is_whole else tuple(key[len(folder) :] for key in keys)
    root = {**selection.root, **read_folders(folder.split("/"))}
    return store, Selection(url=url, listing=inside, chosen=chosen, saved=_find_saved(store), root=root)


def refuse_mixed(store: Store, selection: Selection, keys: Sequence[str]) -> None:
    """Raise DatasetError if a folder that the source names as a whole holds shards ``keys`` of several splits."""
    if not selection.folders:
        return
    dictionaries = _read_dictionaries(store, selection.listing)
    for folder in selection.folders:
        inside = [key[len(folder) :] for key in keys if key.startswith(folder)]
        listed = {key[len(folder) :]: splits for key, splits in dictionaries.items() if key.startswith(folder)}
        refuse_mixed_splits(selection.url + folder, inside, listed)


def _read_dictionaries(store: Store, listing: Sequence[ObjectInfo]) -> dict[str, list[str]]:
    """The splits that each dataset_dict.json of ``save_to_disk`` lists, by its folder ('' or 'a/')."""
    found = {}
    for info in listing:
        folder, slash, name = info.key.rpartition("/")
        if name == DICTIONARY_NAME:
            try:
                splits = json.loads(bytes(store.get(info.key, etag=info.etag)))["splits"]
                found[folder + slash] = [str(split) for split in splits]
            except (ValueError, KeyError, TypeError) as exc:
                raise DatasetError(
                    f"{store.url}/{info.key}: lists no splits ({exc!r}); write or copy it again"
                ) from exc
    return found
