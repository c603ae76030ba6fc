"""Many narrow columns as one array of records: a row is then gathered by one copy, not by one copy per column.

Gathering random rows costs about one cache miss per value if values are stored by column, and one per row if they are
stored by row. So chunks of tables are turned into records when the fetch threads open them, in tiles that stay in the
cache, and a span of batches is turned back into columns when it is gathered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ...storage.memory.buffers import BUFFERS
from ..columns import AnyArray, ArrayColumn, Block, IntArray, Records

_FEWEST = 4  # columns of one item size from which on it pays
_KINDS = "biuf"  # bool, integers, floats; other kinds have sizes that no integer has, or hold references
_TILE_BYTES = 256 << 10  # so that a tile lies in a core's own cache twice, and malloc has room for it


def pack_records(block: Block) -> Block:
    """The block with its scalar columns as records, wherever enough of them have the same item size."""
    by_size: dict[int, list[str]] = defaultdict(list)
    for name, column in block.columns.items():
        if isinstance(column, ArrayColumn) and column.values.ndim == 1 and column.values.dtype.kind in _KINDS:
            by_size[column.values.itemsize].append(name)
    packed = {size: names for size, names in by_size.items() if len(names) >= _FEWEST}
    if not packed:
        return block
    records = [
        Records(
            names=tuple(names),
            dtypes=tuple(_values(block, name).dtype for name in names),
            rows=_interleave([_values(block, name).view(f"u{size}") for name in names]),
        )
        for size, names in packed.items()
    ]
    inside = {name for names in packed.values() for name in names}
    columns = {name: column for name, column in block.columns.items() if name not in inside}
    return replace(block, columns=columns, records=tuple(records))


def unpack_records(records: Records, rows: AnyArray) -> Mapping[str, AnyArray]:
    """The columns of gathered ``rows`` (n,), each (n,) contiguous."""
    width = len(records.names)
    columns = np.empty((width, len(rows)), f"u{rows.itemsize // width}")
    fill_columns(columns, rows, np.arange(len(rows)))
    return {
        name: columns[i].view(dtype) for i, (name, dtype) in enumerate(zip(records.names, records.dtypes, strict=True))
    }


def fill_columns(columns: AnyArray, rows: AnyArray, order: IntArray) -> None:
    """Write records ``rows[order]`` as the columns (width, n) of one unsigned dtype, in tiles that a cache holds.

    ``rows`` may span more memory than may be read: no other rows are.
    """
    width = len(columns)
    tile = max(64, _TILE_BYTES // rows.itemsize)
    for start in range(0, len(order), tile):
        taken = rows[order[start : start + tile]]
        columns[:, start : start + tile] = taken.view(columns.dtype).reshape(-1, width).T


def _values(block: Block, name: str) -> AnyArray:
    column = block.columns[name]
    assert isinstance(column, ArrayColumn)
    return column.values


def _interleave(columns: list[AnyArray]) -> AnyArray:
    """Columns (n,) of one dtype as (n,) records of opaque bytes."""
    count, width, dtype = len(columns[0]), len(columns), columns[0].dtype
    rows: AnyArray = np.frombuffer(BUFFERS.take(count * width * dtype.itemsize), dtype).reshape(count, width)
    tile = max(64, _TILE_BYTES // (width * dtype.itemsize))
    room = np.empty(width * tile, dtype)
    for start in range(0, count, tile):
        stop = min(count, start + tile)
        of_tile = room[: width * (stop - start)]
        np.concatenate([column[start:stop] for column in columns], out=of_tile)
        rows[start:stop] = of_tile.reshape(width, -1).T
    return rows.view(f"V{width * dtype.itemsize}").reshape(count)
