"""Choose lossless types for the columns of CSV files, and parse integers exactly."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.types as pt

from .dialect import Dialect

BLOCK_BYTES = 16 << 20  # what settles the types; a row is no longer
HEAD_BYTES = 2 * BLOCK_BYTES  # enough of a file to read its first block as in the whole file

_NULLS = pa.array(pyarrow.csv.ConvertOptions().null_values)
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_WITH_COMMA = r"^[ \t]*[-+]?[0-9]+(,[0-9]+)?[ \t]*$"
_DIGITS = r"^[ \t]*[-+]?[0-9]+[ \t]*$"
_INT64 = range(-(1 << 63), 1 << 63)
_MOST_DIGITS = 20  # of an int64, and its sign


class OddIntegerError(ValueError):
    """A value in a column of integers that is none, or not as integers are written; ``row`` counts from 0."""

    def __init__(self, row: int, text: str) -> None:
        super().__init__(f"{text!r} in row {row}")
        self.row = row
        self.text = text


def open_rows(
    stream: Any, dialect: Dialect, types: dict[str, pa.DataType] | None = None, *, only_these: bool = False
) -> Any:
    """A reader of record batches; Arrow finds the types of columns that ``types`` lacks in the first block."""
    convert = pyarrow.csv.ConvertOptions(
        column_types=types,
        include_columns=list(types or ()) if only_these else None,
        decimal_point=dialect.decimal_point,
    )
    return pyarrow.csv.open_csv(
        stream,
        read_options=pyarrow.csv.ReadOptions(block_size=BLOCK_BYTES, skip_rows=dialect.skip_rows),
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True, delimiter=dialect.delimiter),
        convert_options=convert,
    )


def find_types(head: bytes, dialect: Dialect) -> tuple[dict[str, pa.DataType], dict[str, str]]:
    """Types of a file's columns, by its first ``HEAD_BYTES``; and of those that stay text, a number that says why.

    A column is text where a number would lose what is written: leading zeros, ``0x``, integers beyond int64.

    Raises:
        ValueError: two columns have one name; also what Arrow raises for a file that is no table.
    """
    schema = open_rows(io.BytesIO(head), dialect).schema
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise ValueError(f"two columns are named {twice[0]!r}; rename one in the header")
    types = {field.name: field.type for field in schema}
    kept: dict[str, str] = {}
    numbers = {name: pa.string() for name, kind in types.items() if pt.is_int64(kind) or pt.is_float64(kind)}
    texts = open_rows(io.BytesIO(head), dialect, numbers, only_these=True).read_next_batch() if numbers else None
    for name in numbers:
        assert texts is not None
        odd = _odd_integer(texts.column(name)) if pt.is_int64(types[name]) else _large_integer(texts.column(name))
        if odd is not None:
            types[name], kept[name] = pa.string(), odd
    return types, kept


def find_decimal_commas(head: bytes, dialect: Dialect, types: Mapping[str, pa.DataType]) -> dict[str, str]:
    """The columns of text whose values are all numbers with a comma before the fraction, each with one of them."""
    if dialect.decimal_point == ",":
        return {}
    names: dict[str, pa.DataType] = {name: kind for name, kind in types.items() if pt.is_string(kind)}
    if not names or b"," not in head:
        return {}
    texts = open_rows(io.BytesIO(head), dialect, names, only_these=True).read_next_batch()
    found: dict[str, str] = {}
    for name in names:
        column = texts.column(name)
        values = column.filter(pc.invert(pc.is_in(column, value_set=_NULLS)))
        if len(values) and pc.all(pc.match_substring_regex(values, _WITH_COMMA)).as_py():
            with_comma = values.filter(pc.match_substring(values, ","))
            found |= {name: with_comma[0].as_py()} if len(with_comma) else {}
    return found


def merge_types(one: pa.DataType, two: pa.DataType) -> pa.DataType:
    """The type of a column that has both in several files: text where they are of different kinds."""
    if one == two or pt.is_null(two):
        return one
    if pt.is_null(one):
        return two
    if {one, two} == {pa.int64(), pa.float64()}:
        return pa.float64()
    if pt.is_timestamp(one) and pt.is_timestamp(two) and one.tz == two.tz:
        return one if one.unit == "ns" else two
    return pa.binary() if pt.is_binary(one) or pt.is_binary(two) else pa.string()


def to_integers(texts: pa.Array) -> pa.Array:
    """A column of int64 from its text; what Arrow takes for nulls is null. Raises OddIntegerError."""
    given = pc.if_else(pc.is_in(texts, value_set=_NULLS), None, texts)
    bare = pc.utf8_trim(given, " \t")
    try:
        numbers = bare.cast(pa.int64())
    except pa.ArrowInvalid:
        numbers = None
    if numbers is None or pc.any(pc.not_equal(numbers.cast(pa.string()), bare)).as_py():
        for row, text in enumerate(bare.to_pylist()):
            if text is not None and not (_INTEGER.fullmatch(text) and _fits(text)):
                raise OddIntegerError(row, text)
    assert numbers is not None
    return numbers


def _odd_integer(texts: pa.Array) -> str | None:
    try:
        to_integers(texts)
    except OddIntegerError as exc:
        return exc.text
    return None


def _large_integer(texts: pa.Array) -> str | None:
    """One beyond int64, if all values are integers: numbers with fractions among them make a column of floats."""
    values = texts.filter(pc.invert(pc.is_in(texts, value_set=_NULLS)))
    if not pc.all(pc.match_substring_regex(values, _DIGITS)).as_py():
        return None
    return next((text for text in values.to_pylist() if not _fits(text)), None)


def _fits(text: str) -> bool:
    return len(text) <= _MOST_DIGITS and int(text) in _INT64
