"""NumPy's arrays of one shape and dtype as an Arrow column of lists of one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

_MOST_AXES = 8


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """Shape and dtype that arrays have in common."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def arrow_type(self) -> pa.DataType:
        """Lists of one length of such lists, down to numbers."""
        kind = pa.from_numpy_dtype(self.dtype)
        for size in reversed(self.shape):
            kind = pa.list_(kind, size)
        return kind


def array_shape(value: Any) -> ArrayShape | None:
    """The shape of an array of numbers or truth values that has some; None for all else."""
    is_plain = isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.isnative
    if not is_plain or not value.size or not 1 <= value.ndim <= _MOST_AXES:
        return None
    return ArrayShape(value.shape, value.dtype)


def stack_arrays(values: Sequence[Any], kind: pa.DataType) -> pa.Array | None:
    """The arrays of n samples, (n, ...) once stacked, as a column of lists of one length; None if they do not fit."""
    sizes, leaf = [], kind
    while pt.is_fixed_size_list(leaf):
        sizes.append(leaf.list_size)
        leaf = leaf.value_type
    if not sizes or any(not isinstance(value, np.ndarray) or value.shape != tuple(sizes) for value in values):
        return None
    stacked = np.stack(values)
    if pa.from_numpy_dtype(stacked.dtype) != leaf:
        return None
    array = pa.array(stacked.reshape(-1))
    for size in reversed(sizes):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array
