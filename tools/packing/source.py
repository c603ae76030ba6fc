"""Open the source that ``pack`` reads: its kind is chosen by the files at a URL; it yields batches of samples."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...loader.dataset.index import open_manifest
from ...loader.dataset.listing import FILE
from ...loader.dataset.manifest import Manifest
from ...loader.dataset.source import Selection, select
from ...loader.dataset.splits import Split, refuse_mixed_splits, refuse_split_folders
from ...loader.errors import ConfigError, DatasetError
from ...loader.formats.detect import FORMAT_NAMES, encrypted_hint, format_by_name, make_format
from ...loader.formats.shard import CODEC_SUFFIXES, ShardFormat, has_suffix, is_hidden, is_system
from ...loader.formats.tokens import index_keys
from ...storage import NotFoundError, ObjectInfo, Store
from ...storage.errors import PenstockError
from ...storage.files import in_home
from ...storage.suggestions import unknown_choice
from .dialect import TAB_SUFFIXES, TABLE_SUFFIXES
from .samples import IterableSource, SampleSource, SourceOptions
from .target import OWN_NAME

_URL = re.compile(r"[a-z0-9+.-]+://\S+")
# A loader's arguments, and the command line's, that are called otherwise here, as what is written has its own.
_ARGUMENT = re.compile(r"(?<![\w.(])(format|storage_options)(?==)")
_OPTION = re.compile(r"(?<![\w-])--(format|seq-len|dtype|eos|storage-option)(?![\w-])")
_COMMAND = re.compile(r"(`[^`]*`)")
COMPRESSED_JSON = tuple(".json" + codec for codec in CODEC_SUFFIXES)
# What other tools leave beside shards; no samples.
_BESIDE = ("index.json", "dataset_info.json", "state.json", "dataset_dict.json", "license", "readme.md")


def open_source(
    source: Any,
    *,
    storage_options: Mapping[str, Any] | None,
    format: ShardFormat | str | None,  # noqa: A002 - the word that users know
    split: Split | None,
    options: SourceOptions,
    progress: bool,
    group: int,
    replaced: str | None = None,
) -> SampleSource:
    """The source of a URL, a path, a list of them, or an iterable; the caller closes it.

    ``format`` "files" takes every file as a field of a sample, "csv" tables, and a format's name shards of it. An
    iterable is read ``group`` items at a time. ``replaced``: a folder whose shards will be overwritten.

    Raises:
        ConfigError: no such format, or shards of the source would be overwritten before they are read.
        DatasetError: there is nothing, or shards lie among other files.
    """
    if not _is_url(source):
        file_options = format, split, options.follow_links or None, options.extensions, storage_options or None
        if options.is_for_tables or any(each is not None for each in file_options):
            raise ConfigError(
                "source_format=, split=, follow_links=, extensions=, delimiter=, decimal_point= and "
                "source_storage_options= apply to URLs and paths, not to an iterable of samples"
            )
        return IterableSource(source, group, options.classes)
    from .dataset import DatasetSource
    from .delimited import CsvSource
    from .folder import FolderSource

    given = make_format(format) if isinstance(format, str) and format in FORMAT_NAMES else format
    if options.is_for_tables and given not in (None, "csv"):
        raise ConfigError(f"delimiter= and decimal_point= apply to CSV files, not with source_format={format!r}")
    if options.extensions and given not in (None, "files"):
        raise ConfigError(f"extensions= chooses among loose files; with source_format={format!r} leave it out")
    if isinstance(given, str) and given not in ("files", "csv"):
        raise ConfigError(unknown_choice("source_format", given, ("files", "csv", *FORMAT_NAMES)))
    if given is None or isinstance(given, str):
        try:
            store, selection = select(source, storage_options, split=split, progress=progress)
        except NotFoundError as exc:
            raise NotFoundError(f"{source}: no such file or folder; there is nothing to pack") from exc
        kind = given or ("files" if options.extensions else None)
        kind = kind or choose_kind(store, selection.listing, selection.saved is not None)
        if split is None:
            _refuse_splits(store, kind, selection)
        if options.is_for_tables and kind != "csv":
            store.close()
            raise ConfigError(f"delimiter= and decimal_point= apply to CSV files, and {source} holds {kind}")
        if kind == "files":
            return FolderSource(
                store,
                selection.listing,
                follow_links=options.follow_links,
                classes=options.classes,
                extensions=options.extensions,
            )
        if kind == "csv":
            tables = [info for info in selection.listing if is_table(info.key)]
            seen = [info for info in tables if not is_hidden(info.key)]
            return CsvSource(store, seen or tables, options)
        store.close()
    manifest = open_manifest(
        source, split=split, storage_options=storage_options, format=given or None, progress=progress
    )
    if replaced is not None:
        _refuse_own_shards(manifest, replaced)
    return DatasetSource(manifest, storage_options, options)


def _refuse_own_shards(manifest: Manifest, target: str) -> None:
    root = _place(target)
    for shard in manifest.shards:
        place = _place(manifest.url) + shard.key
        if place.startswith(root) and OWN_NAME.fullmatch(place, len(root)):
            raise ConfigError(
                f"{target}: overwrite=True (--overwrite) would replace {shard.key} of the source before all of it is "
                "read, and lose samples; choose another target"
            )


def _place(folder: str) -> str:
    """A folder as one text, however it is written: of a path the absolute one, without links."""
    if "://" in folder and not folder.startswith(FILE):
        return folder.rstrip("/") + "/"
    return f"{Path(in_home(folder.removeprefix(FILE))).resolve()}/"


def _refuse_splits(store: Store, kind: str, selection: Selection) -> None:
    """Refuse several splits in a folder that the source names as a whole, as loaders do of shards."""
    keys = [info.key for info in selection.listing if not is_hidden(info.key)]
    try:
        for folder in selection.folders:
            inside = [key[len(folder) :] for key in keys if key.startswith(folder)]
            if kind == "files":
                refuse_split_folders(selection.url + folder, inside)
            elif kind == "csv":
                tables = [key for key in inside if is_table(key)]
                refuse_mixed_splits(selection.url + folder, tables, {}, unit="file")
    except DatasetError:
        store.close()
        raise


def _is_url(source: Any) -> bool:
    if isinstance(source, (str, Path)):
        return True
    # A list of texts is samples for tokens, unless they all look like places.
    return (
        isinstance(source, (list, tuple))
        and bool(source)
        and all(isinstance(each, Path) or (isinstance(each, str) and _is_place(each)) for each in source)
    )


def _is_place(text: str) -> bool:
    if _URL.fullmatch(text):
        return True
    try:
        return "/" in text and Path(text).exists()
    except (OSError, ValueError):  # no path at all
        return False


def choose_kind(store: Store, listing: Sequence[ObjectInfo], has_manifest: bool) -> str:
    """'shards', 'csv' or 'files': what the objects of a source are.

    Raises:
        DatasetError: shards lie among other files, so the choice is ambiguous.
    """
    keys = [info.key for info in listing if not is_hidden(info.key) and not is_system(info.key)]
    if has_manifest:
        return "shards"
    if hint := encrypted_hint(keys):  # encrypted objects would be packed as unreadable files
        raise DatasetError(f"{store.url}: {hint}")
    companions = {index for key in keys for index in index_keys(key)}
    shards: dict[str, list[str]] = {}
    others: list[str] = []
    for key in keys:
        name = format_by_name(key)
        # A file of tokens is told from a field named "bin" only by the index that Megatron keeps beside it.
        if name == "tokens" and not companions.intersection(keys):
            name = None
        if name is not None:
            shards.setdefault(name, []).append(key)
        elif key not in companions and key.rpartition("/")[2].lower() not in _BESIDE:
            others.append(key)
    if not shards:
        tables = [key for key in others if is_table(key)]
        if len(tables) < len(others) and all(has_suffix(key, TAB_SUFFIXES) for key in tables):
            tables = []  # a field of samples, beside others
        if tables and len(tables) < len(others):
            raise DatasetError(_mixed(store, "csv", tables[0], next(key for key in others if key not in tables)))
        if others and all(format_by_name(key) == "tokens" for key in others):
            raise DatasetError(
                f"{store.url}: holds nothing but {others[0]} and the like; give "
                "source_format=TokensFormat(seq_len=2048) (--source-seq-len 2048) if these are tokens, or "
                "source_format='files' (--source-format files) for each file as a field of a sample"
            )
        if others and all(has_suffix(key, COMPRESSED_JSON) for key in others):
            raise DatasetError(
                f"{store.url}: holds nothing but {others[0]} and the like; give source_format='jsonl' "
                "(--source-format jsonl) if each line is a JSON object, or source_format='files' "
                "(--source-format files) for each file, compressed as it is, as a field of a sample"
            )
        return "csv" if tables else "files"
    if others:
        name = sorted(shards)[0]
        raise DatasetError(_mixed(store, name, shards[name][0], others[0]))
    return "shards"


def is_table(key: str) -> bool:
    """Return whether an object's name is that of a CSV file, of any delimiter."""
    return has_suffix(key, TABLE_SUFFIXES)


def _mixed(store: Store, name: str, shard: str, other: str) -> str:
    return (
        f"{store.url}: holds {name} files ({shard}) and others ({other}); say what to pack with "
        f"source_format={name!r} (--source-format {name}) for the {name} files, or source_format='files' "
        "(--source-format files) for every file as a field of a sample"
    )


@contextmanager
def named_source() -> Iterator[None]:
    """Errors from inside name the arguments of the source."""
    try:
        yield
    except PenstockError as exc:
        exc.args = tuple(_name_source(each) if isinstance(each, str) else each for each in exc.args)
        raise


def _name_source(message: str) -> str:
    parts = _COMMAND.split(message)  # what is another command, which has options of its own, stays as it is
    parts[::2] = [_OPTION.sub(r"--source-\1", _ARGUMENT.sub(r"source_\1", part)) for part in parts[::2]]
    return "".join(parts)
