"""Decide by names alone which objects of a data set are shards."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...storage import ObjectInfo

# Of the formats, all in lower case; in one place, so that a name is known without the libraries of every format.
CODEC_SUFFIXES = (".gz", ".bz2", ".zst", ".zstd")
SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "tar": (*(".tar" + codec for codec in ("", *CODEC_SUFFIXES)), ".tgz", ".tbz2", ".tzst"),
    "parquet": (".parquet", ".pq", ".parq"),
    "arrow": (".arrow", ".arrows", ".feather", ".ipc"),
    "tokens": (".bin", ".tokens", ".u16", ".u32"),
    "mds": (".mds", *(f".mds.{codec}" for codec in ("zstd", "zst", "gz", "bz2", "br", "snappy"))),
    "jsonl": tuple(plain + codec for plain in (".jsonl", ".ndjson", ".json-lines") for codec in ("", *CODEC_SUFFIXES)),
    "token_documents": (),  # those of tokens, which are detected as such
}

_SYSTEM_FILES = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini", ".ds_store", "icon\r"})
_SYSTEM_FOLDERS = frozenset({"__macosx", "@eadir", "$recycle.bin", "system volume information"})


def is_hidden(key: str, given: str = "") -> bool:
    """Return whether a folder or file in ``key`` starts with '.' or '_', as job markers and partial output do.

    Such objects (``_SUCCESS``, ``.crc`` files, ``_temporary/...``) are not data, by a convention as old as Hadoop.
    ``given`` is what the caller wrote of the key, its beginning: a name that starts in it is no accident.
    """
    parts = key.removeprefix(given).split("/")
    if given and not given.endswith("/"):
        del parts[0]
    return any(part.startswith((".", "_")) for part in parts)


def is_system(key: str) -> bool:
    """Return whether a file is one that Windows, macOS or a NAS keeps in folders, and none of the user's."""
    *folders, name = key.lower().split("/")
    return name in _SYSTEM_FILES or any(folder in _SYSTEM_FOLDERS for folder in folders)


def is_text(key: str) -> bool:
    """Return whether a name is Unicode: that of a local file may be any bytes, which Python keeps as surrogates."""
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def has_suffix(key: str, suffixes: tuple[str, ...]) -> bool:
    """Return whether ``key`` ends in one of ``suffixes``, in any case; the suffixes are lower-case."""
    return key.lower().endswith(suffixes)


def find_shards(
    listing: Sequence[ObjectInfo], suffixes: tuple[str, ...], named: Collection[str] = ()
) -> list[ObjectInfo]:
    """The objects with one of ``suffixes`` that are not hidden, or that the caller ``named`` one by one."""
    return [
        info for info in listing if has_suffix(info.key, suffixes) and (info.key in named or not is_hidden(info.key))
    ]
