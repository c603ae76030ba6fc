"""The types of JSON columns: what a value's type is, what the type of two is, and what Arrow calls it.

A type is JSON itself, so that it fits into a manifest: 'null', 'bool', 'int' (int64), 'uint' (uint64), 'float', 'str',
``{"list": type}``, ``{"struct": {name: type}}``, or 'any' for a column whose values contradict each other.

Integers that float64 does not give back are never made floats. What is known of integers decides which type they have
together with others, so that types are finer while they are found: see ``_FACTS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ...columns import EXACT_INTEGERS, float_holds

JsonType = str | dict[str, Any]

# Objects with more keys than this are no records but maps, which have no columns.
STRUCT_FIELDS = 256
# Python and Arrow walk values recursively, and Arrow crashes on deep ones.
MAX_DEPTH = 100

# Arrow 26 builds broken lists of pa.null(); a column that is always null may as well hold strings.
_ARROW = {"null": pa.string(), "bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "str": pa.string()}

# What is known of the numbers of each type, as far as it matters: some are negative, "big" (beyond int64, not beyond
# uint64), "odd" (integers that float64 does not give back), or have a fraction, as those beyond uint64 are read.
_FACTS = {
    "int": frozenset[str](),
    "int-": frozenset({"negative"}),
    "int~": frozenset({"odd"}),
    "int-~": frozenset({"negative", "odd"}),
    "big": frozenset({"big"}),
    "uint": frozenset({"big", "odd"}),
    "float": frozenset({"fraction"}),
}
_NAMES = {facts: name for name, facts in _FACTS.items()}
_ARROW |= {"int-": pa.int64(), "int~": pa.int64(), "int-~": pa.int64(), "big": pa.float64(), "uint": pa.uint64()}
_PLAIN = {"int-": "int", "int~": "int", "int-~": "int", "big": "float"}


def merge_types(one: JsonType, two: JsonType) -> JsonType:
    """The type that holds the values of both; 'any' where there is none, also deep inside."""
    if one == two or two == "null":
        return one
    if one == "null":
        return two
    if isinstance(one, str) or isinstance(two, str):
        known = [_FACTS[kind] for kind in (one, two) if isinstance(kind, str) and kind in _FACTS]
        return _name_numbers(known[0] | known[1]) if len(known) == 2 else "any"
    if "list" in one and "list" in two:
        return list_of(merge_types(one["list"], two["list"]))
    if "struct" in one and "struct" in two:
        names = [*one["struct"], *(name for name in two["struct"] if name not in one["struct"])]
        return struct_of(
            {name: merge_types(one["struct"].get(name, "null"), two["struct"].get(name, "null")) for name in names}
        )
    return "any"


def _name_numbers(facts: frozenset[str]) -> str:
    """The type of numbers of which these facts are known; 'any' where float64 would have to hold odd integers."""
    if "fraction" in facts or facts >= {"big", "negative"}:
        return "any" if "odd" in facts else "float"
    return _NAMES[facts]


def name_integers(low: int, high: int, *, are_held: bool) -> str:
    """The type of integers from ``low`` to ``high``; 'any' where no type holds them."""
    facts = {"negative"} if low < 0 else set()
    if not are_held:
        facts.add("odd")
    if low < -(1 << 63) or high >= 1 << 64:
        return "float" if are_held else "any"
    if high >= 1 << 63:
        facts.add("big")
    return _name_numbers(frozenset(facts))


def plain_type(kind: JsonType) -> JsonType:
    """The type as which columns are read, without what is known of their numbers."""
    if isinstance(kind, str):
        return _PLAIN.get(kind, kind)
    if "list" in kind:
        return {"list": plain_type(kind["list"])}
    return {"struct": {name: plain_type(item) for name, item in kind["struct"].items()}}


def make_column(kind: JsonType, *, nulls: bool) -> dict[str, Any]:
    """A column of a schema; ``numbers`` has what is known of its numbers, where its type does not tell."""
    plain = plain_type(kind)
    column = {"type": plain, "nulls": nulls}
    return column if plain == kind else {**column, "numbers": kind}


def union_columns(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of two schemas; one that a side lacks has nulls, and one of two types the type that holds both."""
    absent = {"type": "null", "nulls": True}
    return {
        name: make_column(
            merge_types(a.get("numbers", a["type"]), b.get("numbers", b["type"])), nulls=a["nulls"] or b["nulls"]
        )
        for name in {**one, **two}
        for a, b in [(one.get(name, absent), two.get(name, absent))]
    }


def list_of(item: JsonType) -> JsonType:
    return "any" if item == "any" else {"list": item}


def struct_of(fields: dict[str, JsonType]) -> JsonType:
    """A struct without fields cannot be told from a map, and stays JSON; so does one with very many."""
    return "any" if not 0 < len(fields) <= STRUCT_FIELDS or "any" in fields.values() else {"struct": fields}


def infer_type(value: Any) -> JsonType:
    """The type of one value as ``json.loads`` returns it; an integer that no type holds is 'any'."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return name_integers(value, value, are_held=float_holds(value))
    if isinstance(value, float):
        return "float"
    if isinstance(value, str):
        return "str"
    if isinstance(value, list):
        item_type: JsonType = "null"
        for item in value:
            item_type = merge_types(item_type, infer_type(item))
        return list_of(item_type)
    return struct_of({name: infer_type(item) for name, item in value.items()})


def from_arrow(array: pa.Array) -> JsonType | None:
    """The type of a column as Arrow's JSON reader inferred it; strings that look like times stay strings.

    None where floats may have been integers that float64 does not hold.
    """
    kind = array.type
    if pa.types.is_list(kind):
        item = from_arrow(array.flatten())
        return None if item is None else list_of(item)
    if pa.types.is_struct(kind):
        fields = {kind.field(i).name: from_arrow(child) for i, child in enumerate(array.flatten())}
        found = {name: item for name, item in fields.items() if item is not None}
        return struct_of(found) if len(found) == len(fields) else None
    if pa.types.is_int64(kind):
        return _type_of_integers(array)
    if pa.types.is_floating(kind):
        bounds = pc.min_max(array)
        low, high = bounds["min"].as_py(), bounds["max"].as_py()
        return "float" if low is None or -EXACT_INTEGERS < low <= high < EXACT_INTEGERS else None
    return "null" if pa.types.is_null(kind) else "bool" if pa.types.is_boolean(kind) else "str"


def _type_of_integers(array: pa.Array) -> str:
    bounds = pc.min_max(array)
    low, high = bounds["min"].as_py(), bounds["max"].as_py()
    if low is None:
        return "int"
    are_held = -EXACT_INTEGERS <= low <= high <= EXACT_INTEGERS or all(map(float_holds, array.drop_null().to_pylist()))
    return name_integers(low, high, are_held=are_held)


def to_arrow(kind: JsonType) -> pa.DataType:
    if isinstance(kind, str):
        return _ARROW[kind]
    if "list" in kind:
        return pa.list_(to_arrow(kind["list"]))
    return pa.struct([(name, to_arrow(item)) for name, item in kind["struct"].items()])
