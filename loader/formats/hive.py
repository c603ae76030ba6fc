"""Columns that stand in the paths of shards, as in ``year=2024/part.parquet``: the partitions of Hive, Spark and Arrow.

They are a function of the shards' keys, so that a manifest need not store them: ``find_columns`` tells those of a data
set, and ``Partitions`` gives each chunk its values. Columns that shards hold themselves are the shards', whatever their
paths say. Nothing is read here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from ..columns import ArrayColumn, Block, BytesColumn, Column
from .schema import NULL_SUFFIX, make_block, refuse_null_clash
from .shard import is_text

if TYPE_CHECKING:
    from .shard import ChunkRef

# Formats of tables: samples of others have fields of their own, named by files.
TABLES = frozenset({"parquet", "arrow", "jsonl"})
# In a manifest's schema a column that stands in paths has this key, with the value that the root's own folders give it.
_IN_PATH = "path"
_NULL = "__HIVE_DEFAULT_PARTITION__"
_WHOLE = re.compile(r"-?[0-9]{1,30}")
_INT64 = range(-(1 << 63), 1 << 63)


def read_folders(folders: Iterable[str]) -> dict[str, str]:
    """The value of each folder that is called ``key=value``, as it is written; of a key that comes twice, the inner."""
    parts = (folder.partition("=") for folder in folders if is_text(folder))
    return {_decode(key): _decode(value) for key, mark, value in parts if key and mark}


def read_root(path: str) -> dict[str, str]:
    """The values of the folders ``key=value`` that a root's path ends in."""
    folders = path.strip("/").split("/")
    first = next((place for place in range(len(folders), 0, -1) if not folders[place - 1].partition("=")[1]), 0)
    return read_folders(folders[first:])


def _decode(text: str) -> str:
    """Text as it was before it was made fit for a path; as it is, where that is no Unicode."""
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        return text


def stored_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema without the columns that stand in paths: what the shards' own bytes hold, and a manifest stores."""
    columns = schema.get("columns")
    if not isinstance(columns, Mapping):
        return schema
    stored = {name: column for name, column in columns.items() if not _is_in_path(column)}
    return schema if len(stored) == len(columns) else {**schema, "columns": stored}


def _is_in_path(column: Any) -> bool:
    return isinstance(column, Mapping) and _IN_PATH in column


def with_path_columns(
    schema: Mapping[str, Any], shard_format: str, keys: Sequence[str], root: Mapping[str, str]
) -> Mapping[str, Any]:
    """The schema of shards with these ``keys``, with the columns that stand in their paths.

    ``root`` has values that the root's own folders give to all of them.

    Raises:
        FormatError: a column has the name that the nulls of another one need.
    """
    stored = stored_schema(schema)
    if shard_format not in TABLES or not stored.get("columns") or not (root or any("=" in key for key in keys)):
        return stored
    known = stored["columns"]
    found = {name: column for name, column in find_columns(keys, root).items() if name not in known}
    marked = [name for name, column in found.items() if column["nulls"] and column["type"] == "int64"]
    refuse_null_clash({**known, **found}, marked, keys[0])
    refuse_null_clash(found, [name for name, column in known.items() if column["nulls"]], keys[0])
    return {**stored, "columns": {**known, **found}} if found else stored


def find_columns(keys: Sequence[str], root: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The columns that stand in paths: int64 where all values are such numbers, else string.

    One that some shard's path lacks has that shard as ``missing``.
    """
    by_folder = {key.rpartition("/")[0]: key for key in keys}
    values = {folder: {**root, **read_folders(folder.split("/"))} for folder in by_folder}
    columns: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for of_folder in values.values() for name in of_folder):
        found = {of_folder[name] for of_folder in values.values() if name in of_folder}
        texts = found - {_NULL}
        whole = bool(texts) and all(_WHOLE.fullmatch(text) and int(text) in _INT64 for text in texts)
        columns[name] = {"type": "int64" if whole else "string", "nulls": _NULL in found, _IN_PATH: root.get(name)}
        lacking = next((by_folder[folder] for folder, of_folder in values.items() if name not in of_folder), None)
        if lacking is not None:
            columns[name]["missing"] = lacking
    return columns


@dataclass(frozen=True, slots=True)
class Partitions:
    """Columns to read from chunks whose shards' paths hold columns, too.

    ``schema`` and ``stored`` are the shards' own: the schema, and those of the wanted columns (None: all of them).
    ``in_path`` are the wanted columns that stand in paths, as in the schema.
    """

    schema: Mapping[str, Any]
    stored: Sequence[str] | None
    in_path: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, schema: Mapping[str, Any], columns: Sequence[str] | None) -> Partitions:
        known: Mapping[str, Mapping[str, Any]] = schema.get("columns", {})
        in_path = {name: column for name, column in known.items() if _IN_PATH in column}
        if columns is None or not in_path:
            return cls(stored_schema(schema), columns, in_path)
        return cls(
            stored_schema(schema),
            [name for name in columns if name not in in_path],
            {name: column for name, column in in_path.items() if name in columns},
        )

    def add_to(self, block: Block, chunk: ChunkRef) -> Block:
        """The block of a chunk, or of some of its rows, with the columns that stand in its shard's path."""
        found: dict[str, Column] = {}
        for name, column, value in self._values(chunk):
            found[name] = _repeat(value, column["type"], block.samples)
            if column["nulls"] and column["type"] == "int64":
                found[name + NULL_SUFFIX] = ArrayColumn(np.full(block.samples, value is None))
        if not found:
            return block
        added = make_block(found, block.samples)
        return replace(block, nbytes=block.nbytes + added.nbytes, columns={**block.columns, **found})

    def add_to_table(self, table: pa.Table, chunk: ChunkRef) -> pa.Table:
        """The table of a chunk with the columns that stand in its shard's path."""
        for name, column, value in self._values(chunk):
            kind = pa.int64() if column["type"] == "int64" else pa.string()
            table = table.append_column(name, pa.repeat(pa.scalar(value, kind), len(table)))
        return table

    def values(self, chunk: ChunkRef) -> dict[str, int | str | None]:
        """The values of the columns that stand in a chunk's path."""
        return {name: value for name, _, value in self._values(chunk)}

    def _values(self, chunk: ChunkRef) -> Iterable[tuple[str, Mapping[str, Any], int | str | None]]:
        own = read_folders(chunk.shard.key.split("/")[:-1]) if self.in_path else {}
        for name, column in self.in_path.items():
            text = own.get(name, column[_IN_PATH])
            if text is not None:  # else it is missing, and nobody reads it
                value = None if text == _NULL else int(text) if column["type"] == "int64" else text
                yield name, column, value


def _repeat(value: int | str | None, kind: str, count: int) -> Column:
    """A value ``count`` times; for an integer that is missing, 0."""
    if kind == "int64":
        return ArrayColumn(np.full(count, 0 if value is None else int(value), np.int64))
    data = str(value or "").encode()
    starts = np.full(count, -1 if value is None else 0, np.int64)
    return BytesColumn(memoryview(data), starts, np.full(count, len(data), np.int64), text=True)
