"""What tests of the formats share: a store over a folder that records its reads, and shards read as the loader does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.loader.columns import ArrayColumn, Block, BytesColumn
from penstock.loader.formats.shard import ChunkRef, ShardFormat, ShardIndex, ShardTask
from penstock.storage import ByteRange, NotFoundError, ObjectInfo


class FolderStore:
    """Reads files below ``root``; ``reads`` lists (key, start, stop) of every range that was read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reads: list[tuple[str, int, int]] = []

    @property
    def url(self) -> str:
        return self.root.as_uri()

    def get(self, key: str, byte_range: ByteRange | None = None, *, etag: str | None = None) -> memoryview:
        path = self.root / key
        if not path.is_file():
            raise NotFoundError(key)
        byte_range = byte_range or ByteRange(0, path.stat().st_size)
        self.reads.append((key, byte_range.start, byte_range.stop))
        with path.open("rb") as file:
            file.seek(byte_range.start)
            data = file.read(len(byte_range))
        assert len(data) == len(byte_range), f"{byte_range} is past the end of {key}"
        return memoryview(data)

    def get_ranges(self, key: str, ranges: Sequence[ByteRange], *, etag: str | None = None) -> list[memoryview]:
        return [self.get(key, byte_range, etag=etag) for byte_range in ranges]

    def head(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, (self.root / key).stat().st_size)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        keys = sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file())
        return (self.head(key) for key in keys if key.startswith(prefix))

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        (self.root / key).parent.mkdir(parents=True, exist_ok=True)
        (self.root / key).write_bytes(data)
        return self.head(key)

    def put_if(self, key: str, data: bytes | bytearray | memoryview, *, etag: str | None) -> ObjectInfo:
        raise NotImplementedError("formats write no locks")

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            (self.root / key).unlink(missing_ok=True)

    def close(self) -> None:
        pass


def index_all(store: FolderStore, fmt: ShardFormat) -> tuple[Mapping[str, Any], list[tuple[ShardTask, ShardIndex]]]:
    """The merged schema and every shard's index."""
    tasks = fmt.shards(store, list(store.list()))
    found = [(task, fmt.index_shard(store, task)) for task in tasks]
    schema = found[0][1].schema
    for task, index in found[1:]:
        schema = fmt.merge_schema(schema, index.schema, task.info.key)
    return schema, found


def open_all(store: FolderStore, fmt: ShardFormat, columns: Sequence[str] | None = None) -> list[Block]:
    """Every chunk of every shard, opened as the loader does it."""
    schema, found = index_all(store, fmt)
    blocks = []
    for task, index in found:
        header = fmt.open_shard(store, task.info)
        first_row = 0
        for span in index.chunks:
            chunk = ChunkRef(task.info, span.offset, span.length, span.samples, first_row)
            first_row += span.samples
            parts = store.get_ranges(task.info.key, fmt.chunk_ranges(chunk, header, columns))
            blocks.append(fmt.open_chunk(chunk, header, parts, columns, schema))
            assert blocks[-1].samples == span.samples
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
