"""Which format a data set has: by its names, then by the first bytes of a file whose name says nothing."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import zstandard

from ...storage import ByteRange, ObjectInfo, Store
from ..errors import ConfigError, DatasetError
from .shard import ShardFormat

# Imported when needed: a format's libraries are no cost to those who read another.
_CLASSES = {
    "tar": ("tar.format", "TarFormat"),
    "parquet": ("arrow.parquet", "ParquetFormat"),
    "arrow": ("arrow.ipc", "ArrowFormat"),
    "tokens": ("tokens", "TokensFormat"),
    "mds": ("mds", "MdsFormat"),
    "jsonl": ("json.jsonl", "JsonlFormat"),
}
FORMAT_NAMES = tuple(_CLASSES)

_SUFFIXES = {
    "tar": (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.zstd", ".tzst"),
    "parquet": (".parquet", ".parq", ".pq"),
    "arrow": (".arrow", ".arrows", ".feather", ".ipc"),
    "tokens": (".bin", ".tokens", ".u16", ".u32"),
    "mds": (".mds", ".mds.zstd", ".mds.zst", ".mds.gz", ".mds.bz2"),
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".ndjson.gz", ".ndjson.zst"),
}
_SNIFFED_BYTES = 1024
_SNIFFED_FILES = 4

_TOKENS_NEED_LENGTH = (
    "token files hold no sequence length: give it with format=TokensFormat(seq_len=2048), "
    "or --seq-len 2048 on the command line"
)


def make_format(name: str, config: Mapping[str, Any] | None = None) -> ShardFormat:
    """The format of that name, configured as its ``config()`` says.

    Raises:
        ConfigError: no such format, or a setting that it does not have.
    """
    if name not in _CLASSES:
        raise ConfigError(f"format={name!r} is none of {', '.join(FORMAT_NAMES)}")
    config = dict(config or {})
    if name == "tokens" and config.get("seq_len") is None:
        raise ConfigError(_TOKENS_NEED_LENGTH)
    module, kind = _CLASSES[name]
    format_class = getattr(importlib.import_module(f".{module}", __package__), kind)
    try:
        made: ShardFormat = format_class(**config)
    except TypeError as exc:
        raise ConfigError(f"format {name!r} cannot be configured with {config}: {exc}") from exc
    return made


def detect_format(store: Store, listing: Sequence[ObjectInfo]) -> ShardFormat:
    """The one format that the objects of a data set have.

    Names decide; only where no name is known are the first bytes of a few files read.

    Raises:
        DatasetError: there are shards of two formats, or none.
        ConfigError: token files, which need a sequence length.
    """
    found: dict[str, list[str]] = {}
    for info in listing:
        name = _by_name(info.key)
        if name is not None:
            found.setdefault(name, []).append(info.key)
    if not found:
        found = _by_magic(store, listing)
    if not found:
        raise DatasetError(_nothing_found(store, listing))
    if len(found) > 1:
        examples = "; ".join(f"{name}: {', '.join(keys[:2])}" for name, keys in sorted(found.items()))
        raise DatasetError(
            f"{store.url}: shards of {len(found)} formats ({examples}); "
            f"say which to read with format={sorted(found)[0]!r} (--format), or point to a folder with one of them"
        )
    (name,) = found
    if name == "tokens":
        raise ConfigError(f"{store.url}: {found[name][0]} and the like are token files; {_TOKENS_NEED_LENGTH}")
    return make_format(name)


def _is_hidden(key: str) -> bool:
    """Job markers and the like (_SUCCESS, .crc files, _temporary/...) are no data, by old custom."""
    return any(part.startswith((".", "_")) for part in key.split("/"))


def _by_name(key: str) -> str | None:
    if _is_hidden(key):
        return None
    lowered = key.lower()
    for name, suffixes in _SUFFIXES.items():
        if lowered.endswith(suffixes):
            return name
    return None


def _by_magic(store: Store, listing: Sequence[ObjectInfo]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    # A name with an ending that is not ours (.jpg, .json) has said what it is: only bare names are opened.
    nameless = [info for info in listing if info.size and not _is_hidden(info.key) and "." not in _base(info.key)]
    for info in nameless[:_SNIFFED_FILES]:
        head = bytes(store.get(info.key, ByteRange(0, min(_SNIFFED_BYTES, info.size)), etag=info.etag))
        name = sniff_format(head)
        if name is not None:
            found.setdefault(name, []).append(info.key)
    return found


def sniff_format(head: bytes) -> str | None:
    """The format that a file with these first bytes has; None where they tell nothing."""
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


def _base(key: str) -> str:
    return key.rpartition("/")[2]


def _nothing_found(store: Store, listing: Sequence[ObjectInfo]) -> str:
    keys = [info.key for info in listing]
    known = ", ".join(suffixes[0] for suffixes in _SUFFIXES.values())
    if any(_base(key) == "index.json" for key in keys):
        return (
            f"{store.url}: has an index.json but no .mds files, so it is no MDS data set; "
            f"repack it with `penstock pack`, or use shards named {known}"
        )
    examples = ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
    return (
        f"{store.url}: none of its {len(keys)} objects is a shard ({examples}); known are {known}. "
        "Loose files become shards with `penstock pack FOLDER TARGET`; shards of other names need format="
    )
