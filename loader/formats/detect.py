"""Detect the format of a data set: by the names of its objects, else by the first bytes of files without a suffix."""

from __future__ import annotations

import importlib
import shlex
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import zstandard

from ...storage import ByteRange, ObjectInfo, Store
from ...storage.suggestions import did_you_mean
from ..errors import ConfigError, DatasetError
from .shard import SUFFIXES, has_suffix, is_hidden

if TYPE_CHECKING:
    from .shard import ShardFormat

# Imported on first use, so that a named format does not load the libraries of the others.
_CLASSES = {
    "tar": ("tar.format", "TarFormat"),
    "parquet": ("arrow.parquet", "ParquetFormat"),
    "arrow": ("arrow.ipc", "ArrowFormat"),
    "tokens": ("tokens", "TokensFormat"),
    "mds": ("mds", "MdsFormat"),
    "jsonl": ("json.jsonl", "JsonlFormat"),
    "token_documents": ("token_documents", "TokenDocumentsFormat"),  # behind "tokens", which has the same suffixes
}
FORMAT_NAMES = tuple(_CLASSES)

_SNIFFED_BYTES = 1024
_SNIFFED_FILES = 4

_TOKENS_NEED_LENGTH = (
    "token files do not store a sequence length: give it with format=TokensFormat(seq_len=2048), "
    "or --seq-len 2048 on the command line; or read their documents with format=TokenDocumentsFormat() "
    "(--format token_documents)"
)


def make_format(name: str, config: Mapping[str, Any] | None = None) -> ShardFormat:
    """The format of that name, with the settings in ``config``, as its ``config()`` returns them.

    Raises:
        ConfigError: no such format, or a setting that it does not have.
    """
    if name not in _CLASSES:
        raise ConfigError(f"format={name!r} is none of {', '.join(FORMAT_NAMES)}{did_you_mean(name, FORMAT_NAMES)}")
    config = dict(config or {})
    if name == "tokens" and config.get("seq_len") is None:
        raise ConfigError(_TOKENS_NEED_LENGTH)
    try:
        return _format_class(name)(**config)
    except TypeError as exc:
        raise ConfigError(f"format {name!r} cannot be configured with {config}: {exc}") from exc


@cache
def _format_class(name: str) -> type[ShardFormat]:
    module, kind = _CLASSES[name]
    found: type[ShardFormat] = getattr(importlib.import_module(f".{module}", __package__), kind)
    return found


def detect_format(store: Store, listing: Sequence[ObjectInfo], named: Collection[str] = ()) -> ShardFormat:
    """The one format that the objects of a data set have.

    Suffixes decide. Where no object has a known one, the first bytes of a few files without a suffix do. Hidden objects
    count where the caller ``named`` them.

    Raises:
        DatasetError: there are shards of two formats, or of none.
        ConfigError: the shards are token files, which need a sequence length.
    """
    found: dict[str, list[str]] = {}
    for info in listing:
        name = format_by_name(info.key, named)
        if name is not None:
            found.setdefault(name, []).append(info.key)
    if not found:
        found = _by_magic(store, [info for info in listing if info.key in named or not is_hidden(info.key)])
    if not found:
        raise DatasetError(_nothing_found(store, listing))
    if len(found) > 1:
        examples = "; ".join(f"{name}: {', '.join(keys[:2])}" for name, keys in sorted(found.items()))
        raise DatasetError(
            f"{store.url}: shards of {len(found)} formats ({examples}); "
            f"choose one with format={sorted(found)[0]!r} (--format), or give a folder that holds only one of them"
        )
    (name,) = found
    if name == "tokens":
        raise ConfigError(f"{store.url}: {found[name][0]} is a token file; {_TOKENS_NEED_LENGTH}")
    return make_format(name)


def format_by_name(key: str, named: Collection[str] = ()) -> str | None:
    """The format that a key's suffix means, None for other suffixes and for hidden objects not ``named``."""
    if key not in named and is_hidden(key):
        return None
    return next((name for name, suffixes in SUFFIXES.items() if has_suffix(key, suffixes)), None)


def _by_magic(store: Store, listing: Sequence[ObjectInfo]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    # A suffix that no format has (.jpg, .json) says what the file is; only files without one are opened.
    bare = [info for info in listing if info.size and "." not in _base(info.key)]
    for info in bare[:_SNIFFED_FILES]:
        head = bytes(store.get(info.key, ByteRange(0, min(_SNIFFED_BYTES, info.size)), etag=info.etag))
        name = sniff_format(head)
        if name is not None:
            found.setdefault(name, []).append(info.key)
    return found


def sniff_format(head: bytes) -> str | None:
    """The format of a file that starts with ``head``; None where that does not tell."""
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "arrow"
    if head.startswith(b"MMIDIDX"):
        return "tokens"
    if head.startswith(b"\x1f\x8b"):
        try:
            head = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head)
        except zlib.error:
            return None
    elif head.startswith(b"\x28\xb5\x2f\xfd"):
        try:
            head = zstandard.ZstdDecompressor().decompressobj().decompress(head)
        except zstandard.ZstdError:
            return None
    if head[257:262] == b"ustar":
        return "tar"
    if head.lstrip().startswith(b"{"):
        return "jsonl"
    return None


def encrypted_hint(keys: Iterable[str]) -> str:
    """Explain that the objects are encrypted, and how to read them; "" if none is."""
    from ...storage import ENCRYPTED_SUFFIX  # with what encrypts

    encrypted = [key for key in keys if key.endswith(ENCRYPTED_SUFFIX)]
    if not encrypted:
        return ""
    return (
        f"is encrypted ({encrypted[0]}{', ...' if len(encrypted) > 1 else ''}); give "
        "storage_options={'encryption_key': 'env'} (--storage-option encryption_key=env), with the key in "
        "PENSTOCK_ENCRYPTION_KEY"
    )


def _base(key: str) -> str:
    return key.rpartition("/")[2]


def _nothing_found(store: Store, listing: Sequence[ObjectInfo]) -> str:
    keys = [info.key for info in listing]
    if hint := encrypted_hint(keys):
        return f"{store.url}: {hint}"
    known = ", ".join(suffixes[0] for suffixes in SUFFIXES.values() if suffixes)
    if any(_base(key) == "index.json" for key in keys):
        return (
            f"{store.url}: has an index.json but no .mds files, so it is not an MDS data set; "
            f"repack it with `penstock pack`, or use shards named {known}"
        )
    examples = ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
    if all(has_suffix(key, (".csv", ".csv.gz", ".tsv", ".tsv.gz")) for key in keys):
        what, more = "a table of text" if len(keys) == 1 else "tables of text", " --format parquet"
    else:
        what, more = "a loose file" if len(keys) == 1 else f"{len(keys):,} loose files", ""
    place = store.url.removeprefix("file://").rstrip("/")
    if len(keys) == 1:
        place = f"{place}/{keys[0]}"
    target = (place.partition(".")[0] if "://" not in place else place) + "-shards"
    command = shlex.join(["penstock", "pack", place, target]) + more
    if all(has_suffix(key, _format_class("jsonl").other_suffixes) for key in keys):
        return (
            f"{store.url}: holds no shards by their names, but {what} ({examples}). If each line is a JSON object, "
            f"give format='jsonl' (--format jsonl); else pack first: `{command}`"
        )
    return (
        f"{store.url}: holds no shards, but {what} ({examples}); pack first: `{command}`. Shards are named {known}; "
        "give format= (--format) to read shards with other names"
    )
