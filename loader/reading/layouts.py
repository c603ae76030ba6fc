"""Places of values in chunks, kept from one opening to the next: the headers of an archive are walked once.

A layout depends on the chunk's bytes alone. So it is used again for bytes of the same length and checksum, whatever
else is known of the object; for any others the chunk is opened anew. If the bytes of values do not affect the layout,
as in an archive whose headers state sizes, the checksum covers only the bytes between them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import xxhash

from ...storage.hashing import xxh3_64
from ..columns import Block, BytesColumn, Column
from .kept_layouts import IN_CHUNK, KeptLayouts, Layout

_ENTRY_BYTES = 1000  # what a layout takes beside its arrays, about


class Layouts:
    """Keeps layouts of ``budget_bytes`` at most, those that came first. Called by any thread.

    ``kept`` has those that other processes found, and ``close`` adds those that were found here.

    Mutable state: the layouts and the sum of their bytes, under a lock.
    """

    def __init__(self, budget_bytes: int, *, is_framed: bool, kept: KeptLayouts | None = None) -> None:
        self._budget = budget_bytes
        self._kept = kept
        self._sum = _sum_between if is_framed else _sum_all
        self._layouts: dict[int, Layout] = {}
        self._nbytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept, about; resident chunks share them."""
        return self._nbytes + (0 if self._kept is None else self._kept.nbytes)

    def limit(self, budget_bytes: int) -> None:
        """Change the budget; where more is kept, it is dropped."""
        with self._lock:
            self._budget = budget_bytes
            if self._nbytes > budget_bytes:
                self._layouts.clear()
                self._nbytes = 0

    def find(self, chunk: int, data: memoryview, checksum: int | None) -> Block | None:
        """The chunk as it is opened from ``data``; None if its layout is unknown.

        ``checksum`` is the XXH3-64 of ``data`` where that is known, as it was when the layout was kept.
        """
        layout = self._layouts.get(chunk)
        if layout is None and self._kept is not None:
            layout = self._kept.find(chunk, self._budget)
        if layout is None or layout.length != len(data):
            return None
        if layout.checksum != (self._sum(layout.block, IN_CHUNK, data) if checksum is None else checksum):
            return None
        return replace(layout.block, columns=_exchange(layout.block.columns, IN_CHUNK, data))

    def close(self) -> None:
        """Save the layouts that were found for other processes."""
        with self._lock:
            found = dict(self._layouts)
        if self._kept is not None and found:
            self._kept.save(found)

    def keep(
        self,
        chunk: int,
        block: Block,
        data: memoryview,
        checksum: int | None,
        *,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Remember where the values are that ``block`` has in ``data``, if there is room, and nothing of ``data``.

        Blocks with other values than bytes are skipped: what is made of a chunk's bytes may refer to all of them.
        ``check`` raises an error where ``data`` may be other bytes by now: such a layout is not kept.
        """
        columns = [column for column in block.columns.values() if isinstance(column, BytesColumn)]
        if block.records or len(columns) < len(block.columns) or all(c.buffer is not data for c in columns):
            return
        kept = replace(block, columns=_exchange(block.columns, data, IN_CHUNK))
        nbytes = _ENTRY_BYTES + sum(_count_bytes(c) for c in kept.columns.values() if isinstance(c, BytesColumn))
        if self._nbytes + nbytes > self._budget:
            return
        found = self._sum(kept, IN_CHUNK, data) if checksum is None else checksum
        if check is not None:
            check()
        with self._lock:
            if chunk not in self._layouts and self._nbytes + nbytes <= self._budget:
                self._layouts[chunk] = Layout(found, len(data), kept)
                self._nbytes += nbytes


def _sum_all(block: Block, buffer: memoryview, data: memoryview) -> int:
    return xxh3_64(data)


def _sum_between(block: Block, buffer: memoryview, data: memoryview) -> int:
    """The XXH3-64 of what lies between the values that are in ``buffer``, which stands for ``data``."""
    columns = [c for c in block.columns.values() if isinstance(c, BytesColumn) and c.buffer is buffer]
    starts = np.concatenate([column.starts for column in columns])
    stops = np.concatenate([column.stops for column in columns])
    order = np.flatnonzero(starts >= 0)
    order = order[np.argsort(starts[order], kind="stable")]
    # Values may share bytes: what comes after one begins after all that began before.
    begins = [0, *np.maximum.accumulate(stops[order]).tolist()]
    total = xxhash.xxh3_64()
    for begin, end in zip(begins, [*starts[order].tolist(), len(data)], strict=True):
        if begin < end:
            total.update(data[begin:end])
    return total.intdigest()


def _exchange(columns: Mapping[str, Column], old: memoryview, new: memoryview) -> dict[str, Column]:
    return {
        name: replace(column, buffer=new) if isinstance(column, BytesColumn) and column.buffer is old else column
        for name, column in columns.items()
    }


def _count_bytes(column: BytesColumn) -> int:
    return column.starts.nbytes + column.stops.nbytes + len(column.buffer) + len(column.ascii or "")
