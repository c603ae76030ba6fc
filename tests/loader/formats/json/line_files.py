"""Files of JSON lines, and what the format reads of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from folder_store import FolderStore, open_all, rows_of

from penstock.loader.formats.json.jsonl import JsonlFormat
from penstock.loader.formats.shard import ShardIndex, ShardTask


def write(folder: Path, rows: list[Any], name: str = "s.jsonl") -> bytes:
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    (folder / name).write_bytes(data)
    return data


def read(folder: Path, chunk_bytes: int = 1 << 20, columns: list[str] | None = None) -> list[dict[str, Any]]:
    return [row for block in open_all(FolderStore(folder), JsonlFormat(chunk_bytes), columns) for row in rows_of(block)]


def index(folder: Path, data: bytes, name: str = "s.jsonl", chunk_bytes: int = 1 << 20) -> ShardIndex:
    (folder / name).write_bytes(data)
    store = FolderStore(folder)
    return JsonlFormat(chunk_bytes).index_shard(store, ShardTask(store.head(name)))


GOOD = b'{"a": 1}\n'


def same(ours: Any, theirs: Any) -> bool:
    """Equal but for what columns do on purpose: NaN for null among floats, all keys in structs, ints as floats."""
    if theirs is None:
        return ours is None or (isinstance(ours, float) and math.isnan(ours))
    if isinstance(theirs, dict):
        return isinstance(ours, dict) and all(same(ours.get(k), theirs.get(k)) for k in {*ours, *theirs})
    if isinstance(theirs, list):
        return isinstance(ours, list) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, int) and isinstance(ours, float):
        return ours == float(theirs)
    return type(ours) is type(theirs) and ours == theirs
