"""Sizes of the values of Arrow arrays in bytes, of which a sample's size is the sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from .columns import bits, flat_values, is_binary, is_list, is_text, slices

if TYPE_CHECKING:
    from ...columns import IntArray


def value_sizes(array: pa.Array) -> IntArray:
    """(len(array),) int64: the bytes of each value, of strings and lists what they hold; 0 for nulls."""
    kind, length = array.type, len(array)
    if isinstance(array, pa.ExtensionArray):
        return value_sizes(array.storage)
    if pt.is_dictionary(kind):
        return value_sizes(array.dictionary_decode())
    if pt.is_map(kind):
        ends = np.asarray(array.offsets.to_numpy(zero_copy_only=False), dtype=np.int64)
        sums = np.concatenate([[0], np.cumsum(value_sizes(array.keys) + value_sizes(array.items))])
        sizes = sums[ends[1:]] - sums[ends[:-1]]
    elif is_list(kind):
        parents = np.asarray(pc.list_parent_indices(array), dtype=np.int64)
        sizes = np.bincount(parents, weights=value_sizes(pc.list_flatten(array)), minlength=length)
    elif pt.is_fixed_size_list(kind):
        sizes = value_sizes(flat_values(array)).reshape(length, kind.list_size).sum(axis=1)
    elif pt.is_struct(kind):
        sizes = sum((value_sizes(part) for part in array.flatten()), np.zeros(length, np.int64))
    elif is_text(kind) or is_binary(kind):
        found = slices(array, text=is_text(kind))
        return np.where(found.starts >= 0, found.stops - found.starts, 0)
    else:
        width = 0 if pt.is_null(kind) else 1 if pt.is_boolean(kind) else kind.bit_width // 8
        sizes = np.full(length, width, np.int64)
    if array.null_count:
        sizes = np.where(bits(array.buffers()[0], array.offset, length), sizes, 0)
    return np.asarray(sizes, dtype=np.int64)
