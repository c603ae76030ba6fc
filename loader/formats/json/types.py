"""The types of JSON columns: what a value's type is, what the type of two is, and what Arrow calls it.

A type is JSON itself, so that it fits into a manifest: 'null', 'bool', 'int' (int64), 'float', 'str',
``{"list": type}``, ``{"struct": {name: type}}``, or 'any' for a column whose values contradict each other.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

JsonType = str | dict[str, Any]

# Objects with more keys than this are no records but maps, which have no columns.
STRUCT_FIELDS = 256
# Python and Arrow walk values recursively, and Arrow crashes on deep ones.
MAX_DEPTH = 100

# Arrow 26 builds broken lists of pa.null(); a column that is always null may as well hold strings.
_ARROW = {"null": pa.string(), "bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "str": pa.string()}
_INT64 = range(-(1 << 63), 1 << 63)
_FLOAT64 = int(sys.float_info.max)


def merge_types(one: JsonType, two: JsonType) -> JsonType:
    """The type that holds the values of both; 'any' where there is none, also deep inside."""
    if one == two or two == "null":
        return one
    if one == "null":
        return two
    if isinstance(one, str) or isinstance(two, str):
        return "float" if {str(one), str(two)} == {"int", "float"} else "any"
    if "list" in one and "list" in two:
        return list_of(merge_types(one["list"], two["list"]))
    if "struct" in one and "struct" in two:
        names = [*one["struct"], *(name for name in two["struct"] if name not in one["struct"])]
        return struct_of(
            {name: merge_types(one["struct"].get(name, "null"), two["struct"].get(name, "null")) for name in names}
        )
    return "any"


def union_columns(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of two schemas; one that a side lacks has nulls, and one of two types the type that holds both."""
    absent = {"type": "null", "nulls": True}
    return {
        name: {"type": merge_types(a["type"], b["type"]), "nulls": a["nulls"] or b["nulls"]}
        for name in {**one, **two}
        for a, b in [(one.get(name, absent), two.get(name, absent))]
    }


def list_of(item: JsonType) -> JsonType:
    return "any" if item == "any" else {"list": item}


def struct_of(fields: dict[str, JsonType]) -> JsonType:
    """A struct without fields cannot be told from a map, and stays JSON; so does one with very many."""
    return "any" if not 0 < len(fields) <= STRUCT_FIELDS or "any" in fields.values() else {"struct": fields}


def infer_type(value: Any) -> JsonType:
    """The type of one value as ``json.loads`` returns it; an integer beyond int64 is a float, beyond float64 'any'."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if value in _INT64 else "float" if abs(value) <= _FLOAT64 else "any"
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


def from_arrow(kind: pa.DataType) -> JsonType:
    """The type of a column that Arrow's JSON reader inferred; strings that look like times stay strings."""
    if pa.types.is_list(kind):
        return list_of(from_arrow(kind.value_type))
    if pa.types.is_struct(kind):
        return struct_of({kind.field(i).name: from_arrow(kind.field(i).type) for i in range(kind.num_fields)})
    if pa.types.is_null(kind):
        return "null"
    return next((name for name, known in _ARROW.items() if known == kind and name != "null"), "str")


def to_arrow(kind: JsonType) -> pa.DataType:
    if isinstance(kind, str):
        return _ARROW[kind]
    if "list" in kind:
        return pa.list_(to_arrow(kind["list"]))
    return pa.struct([(name, to_arrow(item)) for name, item in kind["struct"].items()])
