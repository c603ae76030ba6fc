"""Tar archives that are put together header by header."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from folder_store import FolderStore, open_all, rows_of

from penstock.loader.formats.shard import ShardIndex, ShardTask
from penstock.loader.formats.tar.blocks import BLOCK
from penstock.loader.formats.tar.format import TarFormat


def header(name: str, size: int | bytes, *, kind: bytes = b"0", magic: bytes = b"ustar\x0000") -> bytes:
    """A tar header, as plain as the format allows."""
    field = size if isinstance(size, bytes) else b"%011o\0" % size
    block = bytearray(BLOCK)
    block[: len(name)] = name.encode()
    block[100:124] = b"0000644\x000000000\x000000000\x00"
    block[124:136] = field
    block[136:148] = b"00000000001\0"
    block[148:156] = b" " * 8
    block[156:157] = kind
    block[257 : 257 + len(magic)] = magic
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member(name: str, data: bytes, **changes: Any) -> bytes:
    return header(name, len(data), **changes) + data + bytes(-len(data) % BLOCK)


END = bytes(2 * BLOCK)


def index(folder: Path, data: bytes, name: str = "s.tar", form: TarFormat | None = None) -> ShardIndex:
    (folder / name).write_bytes(data)
    store = FolderStore(folder)
    return (form or TarFormat()).index_shard(store, ShardTask(store.head(name)))


def read(folder: Path, data: bytes, name: str = "s.tar", chunk_bytes: int = 4096) -> list[dict[str, Any]]:
    (folder / name).write_bytes(data)
    return [row for block in open_all(FolderStore(folder), TarFormat(chunk_bytes)) for row in rows_of(block)]


GOOD = member("a.x", b"1" * 600) + member("a.y", b"2") + member("b.x", b"3" * 600)
