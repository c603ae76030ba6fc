"""Python's values as Arrow arrays, or a refusal: Arrow itself drops fractions, keys and times that a type lacks."""

from __future__ import annotations

import datetime
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from ...loader.formats.arrow.columns import describe_type

_ERRORS = (pa.ArrowException, OverflowError, TypeError, ValueError)


class InexactError(ValueError):
    """A value that a column's type cannot hold as it is; ``row`` counts from 0."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(problem)
        self.row = row


def to_array(values: Sequence[Any], kind: pa.DataType | None = None) -> pa.Array:
    """Values as an array of ``kind``, or of the type that Arrow finds for them.

    Raises:
        InexactError: a value would be another one in the array.
        pa.ArrowException, OverflowError, TypeError, ValueError: Arrow cannot convert them.
    """
    _refuse_mixed_times(values)
    try:
        found = pa.array(values)
        if found.type.num_fields:
            found.validate(full=True)  # of bytes among texts in a list Arrow makes text
        elif pt.is_binary(found.type):
            _refuse_text(values)
    except _ERRORS:
        if kind is None:
            raise
    else:
        if kind is None or found.type == kind:
            return found
    array = pa.array(values, kind)
    for row, (given, stored) in enumerate(zip(values, array.to_pylist(), strict=True)):
        if not _is_same(given, stored):
            raise InexactError(row, f"{reprlib.repr(given)} would be {reprlib.repr(stored)} as {kind}")
    return array


def is_kin(found: pa.DataType, kind: pa.DataType) -> bool:
    """Return whether Arrow's cast between two types keeps every value or fails; others turn numbers into text."""
    if describe_type(found) == describe_type(kind) or pt.is_null(found):
        return True
    if pt.is_nested(found) and pt.is_nested(kind):
        if pt.is_struct(found) and pt.is_struct(kind):
            names = {field.name for field in kind}
            return all(field.name in names and is_kin(field.type, kind.field(field.name).type) for field in found)
        are_lists = found.num_fields == kind.num_fields == 1
        return are_lists and is_kin(found.field(0).type, kind.field(0).type)
    if pt.is_timestamp(found) and pt.is_timestamp(kind):
        return (found.tz is None) == (kind.tz is None)
    if pt.is_floating(kind):
        return bool(pt.is_integer(found) or (pt.is_floating(found) and found.bit_width <= kind.bit_width))
    are_numbers = all(pt.is_integer(each) or pt.is_floating(each) or pt.is_decimal(each) for each in (found, kind))
    return are_numbers or any(both(found) and both(kind) for both in (pt.is_time, pt.is_duration))


def _refuse_text(values: Sequence[Any]) -> None:
    """Arrow makes bytes of texts among bytes."""
    for row, value in enumerate(values):
        if isinstance(value, str):
            raise InexactError(row, f"{reprlib.repr(value)} is text, and would be bytes among bytes")


def _refuse_mixed_times(values: Sequence[Any]) -> None:
    """Arrow makes one column of days and moments, and of moments with a zone and without."""
    before: datetime.date | None = None
    for row, value in enumerate(values):
        if value is None:
            continue
        if not isinstance(value, datetime.date):
            return
        if before is not None and _time_kind(value) != _time_kind(before):
            raise InexactError(row, f"{value!r} is of another kind than {before!r} in an earlier sample")
        before = value


def _time_kind(value: datetime.date) -> tuple[bool, bool]:
    return isinstance(value, datetime.datetime), getattr(value, "tzinfo", None) is not None


def _is_same(given: Any, stored: Any) -> bool:
    """Return whether an array holds the value that was given; keys that an object lacks are null there."""
    if given is None or stored is None:
        return given is stored or (isinstance(given, float) and given != given)
    if isinstance(given, Mapping):
        found = dict(stored)
        return given.keys() <= found.keys() and all(_is_same(given.get(name), found[name]) for name in found)
    if isinstance(given, (list, tuple, np.ndarray)):
        return len(given) == len(stored) and all(map(_is_same, given, stored))
    return bool(given == stored) or bool(given != given and stored != stored)
