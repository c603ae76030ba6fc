"""Values in mapped files that become objects when their batch is due; until then only their places are known.

So memory holds only the values that the training loop needs, and the next batch reuses the last one's:
memory that is new to a process costs several times the copy into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from ...columns import IntArray
    from ...order.spans import ChunkRows
    from ...reading.mapped.chunks import MappedColumn
    from ...reading.mapped.files import MappedFile


@dataclass(frozen=True, slots=True)
class LateBytes:
    """A field of n rows: value i is ``columns[origins[i]].buffer[starts[i]:stops[i]]``, missing where starts[i] < 0.

    ``origins``, ``starts``, ``stops``: (n,) int64. Of those that lie elsewhere, and are made already, origins[i] is -1,
    and value i is ``made[starts[i]]``. The files stay mapped as long as this refers to them.
    """

    is_mapped: ClassVar[bool] = True
    at: ClassVar[None] = None

    name: str
    columns: Sequence[MappedColumn]
    origins: IntArray
    starts: IntArray
    stops: IntArray
    made: Sequence[Any] = ()

    @property
    def names(self) -> Sequence[str]:
        return (self.name,)

    @property
    def nbytes(self) -> int:
        """Bytes of the values once made, without those of their objects."""
        return int((self.stops - self.starts)[self.starts >= 0].sum())

    def cut(self, start: int, stop: int) -> LateBytes:
        return self.pick(slice(start, stop))

    def pick(self, rows: IntArray | slice) -> LateBytes:
        return replace(self, origins=self.origins[rows], starts=self.starts[rows], stops=self.stops[rows])

    def make(self, memory: object = None) -> dict[str, list[Any]]:
        """Make the field, as a list; objects lie in the interpreter's memory."""
        made, buffers = self.made, [column.buffer for column in self.columns]
        places = zip(self.origins.tolist(), self.starts.tolist(), self.stops.tolist(), strict=True)
        values = [(buffers[i][a:b].tobytes() if i >= 0 else made[a]) if a >= 0 else None for i, a, b in places]
        return {self.name: values}

    def mapped(self) -> list[MappedFile]:
        """List the files that values are copied from."""
        return [self.columns[i].file for i in set(self.origins.tolist()) if i >= 0]


class LateBytesOfSpan:
    """Collects where a field's values lie, chunk by chunk."""

    def __init__(self) -> None:
        self._parts: list[tuple[MappedColumn, ChunkRows]] = []

    def add(self, column: MappedColumn, group: ChunkRows) -> None:
        """Add the rows of ``group``."""
        self._parts.append((column, group))

    def finish(self, name: str, order: IntArray, made: Sequence[Any]) -> LateBytes:
        """Collect all rows: value i is ``made[order[i]]``, except where an added one takes its place.

        ``made`` may be shorter; values that are in neither are missing.
        """
        origins, stops = np.full((2, len(order)), -1, np.int64)
        starts = np.where(order < len(made), order, -1)
        for number, (column, group) in enumerate(self._parts):
            origins[group.targets] = number
            starts[group.targets], stops[group.targets] = column.starts[group.rows], column.stops[group.rows]
        others = np.flatnonzero((origins < 0) & (starts >= 0))
        sizes = [len(v) if isinstance(v := made[i], bytes | memoryview | str) else 0 for i in starts[others].tolist()]
        stops[others] = starts[others] + sizes
        return LateBytes(name, [column for column, _ in self._parts], origins, starts, stops, made)
