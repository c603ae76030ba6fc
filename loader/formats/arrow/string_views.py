"""Views of text and binaries in null slots: Arrow's validation leaves them out, and its casts follow them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

# Arrow's columnar format, "Variable-size Binary View Layout": longer values lie in a buffer of their own.
_INLINE_BYTES = 12
_VIEW = np.dtype([("length", "<i4"), ("prefix", "<i4"), ("buffer", "<i4"), ("offset", "<i4")])


def views_are_inside(array: pa.Array) -> bool:
    """Return whether all views of an array, also those of nulls and of arrays inside it, stay inside their buffers."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return views_are_inside(array.storage)
    if pt.is_string_view(kind) or pt.is_binary_view(kind):
        return _are_inside(array)
    if pt.is_struct(kind):
        return all(views_are_inside(array.field(i)) for i in range(kind.num_fields))
    if pt.is_map(kind):
        return views_are_inside(array.keys) and views_are_inside(array.items)
    if pt.is_dictionary(kind):
        return views_are_inside(array.dictionary)
    return views_are_inside(array.values) if kind.num_fields == 1 and not pt.is_union(kind) else True


def _are_inside(array: pa.Array) -> bool:
    _, data, *buffers = array.buffers()
    if data is None or not len(array):
        return True
    views = np.frombuffer(data, _VIEW, count=len(array), offset=array.offset * _VIEW.itemsize)
    lengths = views["length"].astype(np.int64)
    if (lengths < 0).any():
        return False
    long = lengths > _INLINE_BYTES
    places, offsets, lengths = views["buffer"][long], views["offset"][long].astype(np.int64), lengths[long]
    if not len(places):
        return True
    if int(places.min()) < 0 or int(places.max()) >= len(buffers) or int(offsets.min()) < 0:
        return False
    sizes = np.array([buffer.size for buffer in buffers], np.int64)
    return bool((offsets + lengths <= sizes[places]).all())
