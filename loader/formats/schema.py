"""Schemas: their form, how they are merged, how columns are chosen by name, and a block of the columns.

A schema is ``{"columns": {name: {"type": str, "nulls": bool, ...}}, "seen_in": shard key}``. ``nulls`` says that a
value of the column may be missing anywhere in the data set, so that every chunk yields the same columns and dtypes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...storage.suggestions import did_you_mean
from ..columns import KEY_COLUMN, ArrayColumn, Block, BytesColumn, Column
from ..errors import ConfigError, FormatError

# The bool column beside ``x`` that marks its nulls is named ``x__null``.
NULL_SUFFIX = "__null"
# In a schema a column that not all shards have has this key, with a shard that lacks it.
MISSING = "missing"
# The types, as schemas describe them, whose values cannot say themselves that they are missing, and arrays of these.
_MARKED_TYPE = re.compile(
    r"(u?int\d*|bool|(timestamp|date|time|duration)\w*(\[[^\]]+\])?)(?P<sizes>(\[\d+(, \d+)*\])*)"
)


def choose_columns(known: Sequence[str] | Mapping[str, Any], wanted: Sequence[str] | None) -> list[str]:
    """The names to read, each once: ``wanted`` in its order, or all that are ``known``.

    Raises:
        ConfigError: a wanted column is not known; lists those that are.
    """
    if wanted is None:
        return list(known)
    missing = [name for name in wanted if name not in known]
    if missing:
        raise ConfigError(
            f"columns={list(wanted)}: the data set has no {missing}; it has {list(known)}{did_you_mean(missing, known)}"
        )
    return list(dict.fromkeys(wanted))


def null_marks(columns: Iterable[str], known: Collection[str]) -> list[str]:
    """The names that the marks of the nulls of ``columns`` have, where there are any. ``known``: all of the data set's.

    One that has such a name itself is no mark: formats refuse it beside a column that needs it.
    """
    return [name + NULL_SUFFIX for name in columns if name + NULL_SUFFIX not in known]


def names_read(columns: Collection[str], known: Collection[str]) -> frozenset[str]:
    """Names to read in chunks for some of the ``known`` columns: these, the marks of their nulls, and keys."""
    if not columns:
        return frozenset()  # nothing is read
    keys = [] if KEY_COLUMN in known else [KEY_COLUMN]
    return frozenset([*columns, *null_marks(columns, known), *keys])


def merge_columns(
    known: Mapping[str, Any], new: Mapping[str, Any], shard: str, *, may_lack: bool = False
) -> dict[str, Any]:
    """The schema of both: same names and types; ``nulls`` where either has them.

    A type "null", also in lists and structs, is of shards that have no value there, and becomes that of the others.
    With ``may_lack`` a column may be in one of them alone: it has the shard that lacks it as ``missing``, and nobody
    can read it (``refuse_missing``).

    Raises:
        FormatError: the two differ in a name or in anything else; names both shards and what differs.
    """
    first = known.get("seen_in", "the shards before it")
    ours, theirs = known["columns"], new["columns"]
    if ours.keys() != theirs.keys() and not (may_lack and ours.keys() & theirs.keys()):
        raise FormatError(
            shard,
            f"has the columns {list(theirs)}, but {first} has {list(ours)}; write the shards with the same columns, or "
            "read them as two data sets",
        )
    merged = {name: {**column, MISSING: first} for name, column in theirs.items() if name not in ours}
    seen_in = first
    for name, column in ours.items():
        if name not in theirs:
            merged[name] = {MISSING: shard, **column}
            continue
        lacking = {MISSING: column[MISSING]} if MISSING in column else {}
        column, other = {key: value for key, value in column.items() if key != MISSING}, theirs[name]
        kind = _common_type(str(column["type"]), str(other["type"]))
        if kind is None or {**column, "type": kind, "nulls": False} != {**other, "type": kind, "nulls": False}:
            raise FormatError(
                shard,
                f"column {name!r} is {_describe(other)}, but {_describe(column)} in {first}; write the shards with one "
                "schema, or read them as two data sets",
            )
        if kind != column["type"]:
            seen_in = shard
        merged[name] = {**column, "type": kind, "nulls": bool(column.get("nulls") or other.get("nulls")), **lacking}
    merged = {name: merged[name] for name in {**ours, **theirs}}
    return {**known, "columns": merged, "seen_in": seen_in} if "seen_in" in known else {**known, "columns": merged}


def find_missing(schema: Mapping[str, Any]) -> list[FormatError]:
    """An error for each column that not all shards have; it names the column and a shard."""
    return [
        FormatError(
            column[MISSING],
            f"has no column {name!r}, and other shards have one; leave it out with columns=, write the shards with the "
            "same columns (also those that stand in paths, as in year=2024/), or read them as two data sets",
        )
        for name, column in schema.get("columns", {}).items()
        if MISSING in column
    ]


def refuse_missing(schema: Mapping[str, Any], names: Collection[str] | None = None) -> None:
    """Raise FormatError where one of these columns (None: of all) is not in all shards."""
    columns = schema.get("columns", {})
    known = columns if names is None else {name: columns[name] for name in names if name in columns}
    for error in find_missing({"columns": known}):
        raise error


def columns_here(known: Mapping[str, Any], wanted: Sequence[str] | None, here: Collection[str]) -> list[str]:
    """As ``choose_columns``; of all columns those that this shard has, where some are missing in others."""
    names = choose_columns(known, wanted)
    if wanted is not None:
        return names
    return [name for name in names if MISSING not in known[name] or name in here]


def _common_type(ours: str, theirs: str) -> str | None:
    """The type of both, where they are one or one of them has no values; else None."""
    if ours == theirs or theirs == "null":
        return ours
    if ours == "null":
        return theirs
    if all(kind.startswith("list<") and kind.endswith(">") for kind in (ours, theirs)):
        inner = _common_type(ours[5:-1], theirs[5:-1])
        return None if inner is None else f"list<{inner}>"
    if all(kind.startswith("struct<") and kind.endswith(">") for kind in (ours, theirs)):
        return _common_struct(struct_fields(ours), struct_fields(theirs))
    return None


def _common_struct(ours: Sequence[str], theirs: Sequence[str]) -> str | None:
    if len(ours) != len(theirs):
        return None
    common = []
    for own, other in zip(ours, theirs, strict=True):
        (name, _, kind), (other_name, _, other_kind) = own.partition(": "), other.partition(": ")
        joined = _common_type(kind, other_kind) if name == other_name else None
        if joined is None:
            return None
        common.append(f"{name}: {joined}")
    return f"struct<{', '.join(common)}>"


def struct_fields(struct: str) -> list[str]:
    """The fields of a described struct, each as "name: type"; nested ones are in brackets."""
    fields, depth = [""], 0
    for sign in struct[7:-1]:
        depth += (sign in "<[(") - (sign in ">])")
        if sign == "," and depth == 0:
            fields.append("")
        else:
            fields[-1] += sign
    return [fields[0], *(field.removeprefix(" ") for field in fields[1:])]


def expect_nulls(schema: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """The schema with ``nulls`` for those of its columns that have one of the names."""
    columns = schema.get("columns", {})
    changed = {name: {**column, "nulls": True} for name, column in columns.items() if name in names}
    return {**schema, "columns": {**columns, **changed}} if changed else schema


def marked_shape(column: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape of one value of a column that comes with marks of its nulls; None for a column that does not."""
    found = _MARKED_TYPE.fullmatch(str(column["type"])) if column.get("nulls") else None
    if found is None:
        return None
    sizes = re.findall(r"\[([^\]]+)\]", found["sizes"])  # of arrays of arrays, the inner ones first
    return tuple(int(size) for of_array in reversed(sizes) for size in of_array.split(", "))


def add_marks(block: Block, shapes: Mapping[str, tuple[int, ...]]) -> Block:
    """The block with marks for those of the named columns that lack them: only members that no tar has are missing.

    ``shapes``: those of single values, where the columns themselves do not tell.
    """
    added = {
        name + NULL_SUFFIX: _marks_of(block.columns.get(name), (block.samples, *shapes[name]))
        for name in sorted(shapes)
        if name + NULL_SUFFIX not in block.columns
    }
    if not added:
        return block
    nbytes = block.nbytes + sum(column.nbytes for column in added.values())
    return replace(block, nbytes=nbytes, columns={**block.columns, **added})


def _marks_of(column: Column | None, shape: tuple[int, ...]) -> ArrayColumn:
    if isinstance(column, ArrayColumn):
        shape = column.values.shape
    elif isinstance(column, BytesColumn) and len(shape) == 1:
        return ArrayColumn(column.starts < 0)
    return ArrayColumn(np.full(shape, column is None))


def refuse_null_clash(columns: Collection[str], marked: Iterable[str], shard: str) -> None:
    """Raise FormatError where a column has the name that the nulls of one of the ``marked`` columns need."""
    for name in marked:
        if name + NULL_SUFFIX in columns:
            raise FormatError(
                shard, f"column {name + NULL_SUFFIX!r} has the name reserved for the nulls of {name!r}; rename it"
            )


def _describe(column: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in column.items() if key not in ("type", "nulls")}
    return f"{column['type']} {rest}" if rest else str(column["type"])


def make_block(columns: Mapping[str, Column], samples: int, held_bytes: int = 0) -> Block:
    """A block of ``columns``, counting a shared buffer once; they keep at least ``held_bytes`` alive."""
    total = 0
    buffers: dict[int, int] = {}
    for column in columns.values():
        if isinstance(column, BytesColumn):
            buffers[id(column.buffer)] = column.buffer.nbytes
            total += column.starts.nbytes + column.stops.nbytes
        else:
            total += column.nbytes
    return Block(samples, max(total + sum(buffers.values()), held_bytes), columns)
