"""What all formats with a schema share: the schema's form, choosing columns by name, and counting a block's bytes.

A schema is ``{"columns": {name: {"type": str, "nulls": bool, ...}}, "seen_in": shard key}``. ``nulls`` says that a
value of the column may be missing anywhere in the data set, so that every chunk yields the same columns and dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..columns import Block, BytesColumn, Column
from ..errors import ConfigError, FormatError


def choose_columns(known: Sequence[str] | Mapping[str, Any], wanted: Sequence[str] | None) -> list[str]:
    """The names to read: ``wanted`` in its order, or all that are ``known``.

    Raises:
        ConfigError: a wanted column is not known; lists those that are.
    """
    if wanted is None:
        return list(known)
    missing = [name for name in wanted if name not in known]
    if missing:
        raise ConfigError(f"columns={list(wanted)}: there is no {missing}; the data set has {list(known)}")
    return list(dict.fromkeys(wanted))


def merge_columns(known: Mapping[str, Any], new: Mapping[str, Any], shard: str) -> dict[str, Any]:
    """The schema of both: same names and types; ``nulls`` where either has them.

    Raises:
        FormatError: the two differ in a name or in anything but ``nulls``; names both shards and what differs.
    """
    first = known.get("seen_in", "the shards before it")
    ours, theirs = known["columns"], new["columns"]
    if ours.keys() != theirs.keys():
        raise FormatError(
            shard,
            f"has the columns {list(theirs)}, but {first} has {list(ours)}; make the shards alike, or read them as two "
            "data sets",
        )
    merged = {}
    for name, column in ours.items():
        other = theirs[name]
        if {**column, "nulls": False} != {**other, "nulls": False}:
            raise FormatError(
                shard,
                f"column {name!r} is {_describe(other)}, but {_describe(column)} in {first}; write the shards with one "
                "schema, or read them as two data sets",
            )
        merged[name] = {**column, "nulls": bool(column.get("nulls") or other.get("nulls"))}
    return {**known, "columns": merged}


def _describe(column: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in column.items() if key not in ("type", "nulls")}
    return f"{column['type']} {rest}" if rest else str(column["type"])


def make_block(columns: Mapping[str, Column], samples: int, held_bytes: int = 0) -> Block:
    """A block of ``columns``, counting a shared buffer once; ``held_bytes`` are kept alive by them at the least."""
    total = 0
    buffers: dict[int, int] = {}
    for column in columns.values():
        if isinstance(column, BytesColumn):
            buffers[id(column.buffer)] = column.buffer.nbytes
            total += column.starts.nbytes + column.stops.nbytes
        else:
            total += column.nbytes
    return Block(samples, max(total + sum(buffers.values()), held_bytes), columns)
