"""The types of JSON columns: what a value's type is, what the type of two is, and what Arrow calls it.

A type is JSON itself, so that it fits into a manifest: 'null', 'bool', 'int' (int64), 'float', 'str',
``{"list": type}``, ``{"struct": {name: type}}``, or 'any' for a column whose values contradict each other.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

JsonType = str | dict[str, Any]

# Objects with more keys than this are no records but maps, which have no columns.
STRUCT_FIELDS = 256
# Types are walked recursively, by Python and by Arrow, which dies of deep ones.
MAX_DEPTH = 100

# Arrow 26 builds broken lists of pa.null(); what is always null may as well be strings.
_ARROW = {"null": pa.string(), "bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "str": pa.string()}
_INT64 = range(-(1 << 63), 1 << 63)


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


def list_of(item: JsonType) -> JsonType:
    return "any" if item == "any" else {"list": item}


def struct_of(fields: dict[str, JsonType]) -> JsonType:
    """A struct without fields cannot be told from a map, and stays JSON; so does one with very many."""
    return "any" if not 0 < len(fields) <= STRUCT_FIELDS or "any" in fields.values() else {"struct": fields}


def infer_type(value: Any, depth: int = 0) -> JsonType:
    """The type of one value as ``json.loads`` gives it; an integer beyond int64 is a float, a very deep value 'any'."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if value in _INT64 else "float"
    if isinstance(value, float):
        return "float"
    if isinstance(value, str):
        return "str"
    if depth >= MAX_DEPTH:
        return "any"
    if isinstance(value, list):
        item_type: JsonType = "null"
        for item in value:
            item_type = merge_types(item_type, infer_type(item, depth + 1))
        return list_of(item_type)
    return struct_of({name: infer_type(item, depth + 1) for name, item in value.items()})


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


def conform(value: Any, kind: JsonType) -> Any:
    """``value`` as Arrow takes it for ``kind``: integers among floats as floats, unpaired surrogates as '?'.

    Raises:
        TypeError: the value is of another type.
    """
    if value is None:
        return None
    if merge_types(infer_shallow(value), _shallow(kind)) != _shallow(kind):
        raise TypeError(f"a value of type {infer_shallow(value)}, not {_shallow(kind)}")
    if kind == "float":
        return _to_float(value)
    if kind == "str":
        return value.encode("utf-8", "replace").decode()
    if isinstance(kind, dict) and "list" in kind:
        return [conform(item, kind["list"]) for item in value]
    if isinstance(kind, dict):
        return {name: conform(value.get(name), item) for name, item in kind["struct"].items()}
    return value


def infer_shallow(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return "list" if isinstance(value, list) else "struct"
    return str(infer_type(value))


def _shallow(kind: JsonType) -> str:
    return kind if isinstance(kind, str) else next(iter(kind))


def _to_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
