"""Python's values as Arrow arrays, or a refusal: Arrow itself drops fractions, keys and times that a type lacks."""

from __future__ import annotations

import datetime
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

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
    """Whether an array's value is the one that was given; keys that an object lacks are null there."""
    if given is None or stored is None:
        return given is stored or (isinstance(given, float) and given != given)
    if isinstance(given, Mapping):
        found = dict(stored)
        return given.keys() <= found.keys() and all(_is_same(given.get(name), found[name]) for name in found)
    if isinstance(given, (list, tuple, np.ndarray)):
        return len(given) == len(stored) and all(map(_is_same, given, stored))
    return bool(given == stored) or bool(given != given and stored != stored)
