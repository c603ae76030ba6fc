"""A store over a folder, small enough to be read at a glance, and what the tests of formats share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.loader.columns import ArrayColumn, Block, BytesColumn
from penstock.loader.formats.shard import ChunkRef, ShardFormat
from penstock.storage import ByteRange, NotFoundError, ObjectInfo


class FolderStore:
    """Reads files below a folder, and keeps a record of the ranges that were asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ranges: list[tuple[str, int, int]] = []

    @property
    def url(self) -> str:
        return self.root.as_uri()

    def get(self, key: str, byte_range: ByteRange | None = None, *, etag: str | None = None) -> memoryview:
        path = self.root / key
        if not path.is_file():
            raise NotFoundError(key)
        byte_range = byte_range or ByteRange(0, path.stat().st_size)
        self.ranges.append((key, byte_range.start, byte_range.stop))
        with path.open("rb") as file:
            file.seek(byte_range.start)
            data = file.read(len(byte_range))
        assert len(data) == len(byte_range), f"{byte_range} is past the end of {key}"
        return memoryview(data)

    def get_ranges(self, key: str, ranges: Sequence[ByteRange], *, etag: str | None = None) -> list[memoryview]:
        return [self.get(key, one) for one in ranges]

    def head(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, (self.root / key).stat().st_size)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        keys = (path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if path.is_file())
        return iter([self.head(key) for key in sorted(keys) if key.startswith(prefix)])

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return self.head(key)

    def close(self) -> None:
        pass


def open_blocks(form: ShardFormat, store: FolderStore, columns: Sequence[str] | None = None) -> list[Block]:
    """Index every shard and open every chunk, as the loader would."""
    blocks = []
    indexes = []
    schema: Any = None
    for task in form.shards(store, list(store.list())):
        index = form.index_shard(store, task)
        schema = index.schema if schema is None else form.merge_schema(schema, index.schema, task.info.key)
        indexes.append((task, index))
    for task, index in indexes:
        header = form.open_shard(store, task.info)
        first_row = 0
        for span in index.chunks:
            chunk = ChunkRef(task.info, span.offset, span.length, span.samples, first_row)
            parts = store.get_ranges(task.info.key, form.chunk_ranges(chunk, header, columns))
            block = form.open_chunk(chunk, header, parts, columns, schema)
            assert block.samples == span.samples
            blocks.append(block)
            first_row += span.samples
    return blocks


def rows_of(block: Block) -> list[dict[str, Any]]:
    """The samples of a block as dicts of Python values, without the fields that are missing."""
    every = np.arange(block.samples)
    values: dict[str, list[Any]] = {}
    for name, column in block.columns.items():
        values[name] = column.values.tolist() if isinstance(column, ArrayColumn) else column.take(every)
    missing = {name for name, column in block.columns.items() if isinstance(column, BytesColumn)}
    return [
        {name: column[i] for name, column in values.items() if column[i] is not None or name not in missing}
        for i in range(block.samples)
    ]
