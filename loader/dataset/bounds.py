"""Checks of a manifest's numbers, whoever wrote it: formats make views of memory by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ...storage import ObjectInfo
    from ..columns import IntArray

_MOST = 1 << 60  # samples, or bytes, of a whole data set: sums stay within int64
_SHOWN = 100  # characters of what is wrong


def find_misfit(
    shards: Sequence[ObjectInfo],
    *,
    shard_index: IntArray,
    offsets: IntArray,
    lengths: IntArray,
    samples: IntArray,
    memory: IntArray,
) -> str | None:
    """Describe a contradiction between a manifest's shards and its chunks, (chunks,) int64 each; None if all fits.

    Chunks lie inside their shards, in rising order, and hold samples; every shard has one. A chunk's number of samples
    is checked when it is opened.
    """
    if not len(shards) or not len(samples):
        return "it has no chunk"
    for shard in shards:
        etag_fits = shard.etag is None or isinstance(shard.etag, str)
        if (
            not isinstance(shard.key, str)
            or type(shard.size) is not int
            or not etag_fits
            or not 0 <= shard.size < _MOST
        ):
            return f"shard {shard.key!r} has the size {shard.size!r} and the ETag {shard.etag!r}"
    in_order = np.diff(shard_index)
    if shard_index[0] != 0 or shard_index[-1] != len(shards) - 1 or not ((in_order == 0) | (in_order == 1)).all():
        return f"its chunks are not those of its {len(shards)} shards, in their order"
    for name, values, least in (
        ("offset", offsets, 0),
        ("length", lengths, 1),
        ("samples", samples, 1),
        ("memory", memory, 0),
    ):
        wrong = (values < least) | (values >= _MOST)
        if wrong.any():
            at = int(np.argmax(wrong))
            return f"chunk {at} has {name} {values[at]}"
    sizes = np.array([shard.size for shard in shards], np.int64)
    outside = offsets + lengths > sizes[shard_index]
    if outside.any():
        at = int(np.argmax(outside))
        stop, shard = int(offsets[at] + lengths[at]), shards[int(shard_index[at])]
        return f"chunk {at} ends at byte {stop} of {shard.key}, which has {shard.size}"
    falling = (np.diff(offsets) < 0) & (in_order == 0)
    if falling.any():
        return f"chunk {int(np.argmax(falling)) + 1} lies before the chunk that it follows"
    if float(samples.sum(dtype=np.float64)) >= _MOST or float(memory.sum(dtype=np.float64)) >= _MOST:
        return "its samples or bytes are too many to count"
    return None


def find_strange_schema(schema: Any, config: Any) -> str | None:
    """Describe an error in the form of a manifest's schema or of its format's settings; None if there is none.

    A schema has ``fields``, a list of names, or ``columns``, names with a type, a name or for JSON lines
    an object, and ``nulls``, a bool.
    """
    if not isinstance(schema, dict) or not isinstance(config, dict):
        return "its schema, or its format's settings, are no object"
    fields, columns = schema.get("fields", []), schema.get("columns", {})
    if not isinstance(fields, list) or not all(isinstance(name, str) for name in fields):
        return f"its schema has the fields {str(fields)[:_SHOWN]}"
    if not isinstance(columns, dict):
        return f"its schema has the columns {str(columns)[:_SHOWN]}"
    for name, column in columns.items():
        fits = isinstance(column, dict) and isinstance(column.get("nulls"), bool)
        if not fits or not isinstance(column.get("type"), (str, dict)):
            return f"its schema has the column {name!r} as {str(column)[:_SHOWN]}"
    return None
