"""Rows of chunks that a stream asks for: which of them its sieve keeps, and their columns, gathered."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..columns import Block, IntArray
from ..config.keep import BoolArray, Sieve
from ..decoding.byte_views import Lend
from ..decoding.decode import FieldDecoders
from ..decoding.gather import gather
from ..decoding.row_errors import describe_row
from ..decoding.rows import Rows
from ..order.spans import ChunkRows
from ..pipeline.assembler import Equipment
from ..reading.bad.quarantine import ReplacesChunks


class RowReader:
    """Gathers rows of chunks, the ``fields`` of batches, as soon as the chunks are there. The assembler thread's."""

    def __init__(
        self,
        equipment: Equipment,
        quarantine: ReplacesChunks,
        sieve: Sieve | None,
        fields: Collection[str] | None,
        *,
        by_units: bool = False,
        flat: Sequence[str] = (),
        skips: bool = False,
    ) -> None:
        """``by_units``: several rows are always asked for together. ``flat``: see ``gather``.

        ``skips``: rows of bad chunks are not kept.
        """
        self._skips = skips
        self._equipment = equipment
        self._quarantine = quarantine
        self._sieve = sieve
        self._asked = None if sieve is None else sieve.fields(equipment.source.manifest.fields)
        self._fields = fields
        self._by_units = by_units
        self._flat = flat

    def sift(self, groups: Sequence[ChunkRows], count: int, epoch: int | None = None) -> Sifted:
        """Which of ``count`` inputs the sieve keeps."""
        chunks, rows = np.empty((2, count), np.int64)
        for group in groups:
            chunks[group.targets], rows[group.targets] = group.chunk, group.rows
        if self._sieve is None:
            return Sifted(None, np.arange(count, dtype=np.int64), chunks, rows)
        looked = self._gather(groups, count, self._sieve.decoders, self._asked, None, (), epoch)
        kept = np.flatnonzero(self._ask(self._sieve, looked) & self.are_read(looked))
        return Sifted(self.inputs(looked), kept, chunks[kept], rows[kept])

    def inputs(self, rows: Rows) -> IntArray:
        """The ids of gathered inputs."""
        return rows.planned_ids if self._skips else rows.ids

    def are_read(self, rows: Rows) -> BoolArray:
        """(n,) bool: which rows stay; those of a bad chunk, in whose place others were read, are skipped."""
        stays: BoolArray = rows.planned_ids == rows.ids if self._skips else np.ones(len(rows.ids), np.bool_)
        return stays

    def _ask(self, sieve: Sieve, rows: Rows) -> BoolArray:
        try:
            return sieve.holds(rows)
        except Exception as exc:
            if len(rows.ids) == 1:
                exc.add_note(f"in keep= of {describe_row(0, rows, self._equipment.source.manifest)}")
            elif self._by_units:
                for row in range(len(rows.ids)):
                    self._ask(sieve, rows.cut(row, row + 1))
            raise  # else whoever asked about several asks about each

    def gather(self, groups: Sequence[ChunkRows], count: int, epoch: int | None = None) -> Rows:
        """The rows of ``groups`` as batches have them, in the order of their targets. Raises where reading fails.

        With ``epoch``, bad samples are counted.
        """
        leases = self._equipment.leases
        lend = None if leases is None else leases.lend
        return self._gather(groups, count, self._equipment.maker.decoders, self._fields, lend, self._flat, epoch)

    def _gather(
        self,
        groups: Sequence[ChunkRows],
        count: int,
        decoders: FieldDecoders,
        names: Collection[str] | None,
        lend: Lend | None,
        flat: Sequence[str],
        epoch: int | None,
    ) -> Rows:
        by_chunk = {group.chunk: group for group in groups}

        def opened() -> Iterator[tuple[ChunkRows, Block]]:
            for chunk, loaded in self._equipment.reader.take(list(by_chunk)):
                if isinstance(loaded, Block):
                    group, block = by_chunk[chunk], loaded
                else:
                    group, block = self._quarantine.replace(by_chunk[chunk], loaded, epoch)
                yield group, _narrow(block, names)

        rows = gather(opened(), count, self._equipment.source.manifest.first_ids, decoders, lend, flat)
        fields = rows.fields
        if names is not None:
            fields = {name: values for name, values in fields.items() if name in names}
        # What came in the place of a bad chunk's rows is counted for itself, where it is not skipped.
        return replace(rows, fields=fields, planned=rows.planned if self._skips else None)


@dataclass(frozen=True, slots=True)
class Sifted:
    """Inputs that are kept, (kept,) each: their ``places`` among all, ``chunks`` and ``rows``.

    ``ids`` (inputs,) are all inputs' sample ids, None where only gathering tells them.
    """

    ids: IntArray | None
    places: IntArray
    chunks: IntArray
    rows: IntArray


def _narrow(block: Block, names: Collection[str] | None) -> Block:
    """The block without columns that are not asked for."""
    if names is None:
        return block
    wanted = {name: column for name, column in block.columns.items() if name in names}
    records = tuple(packed for packed in block.records if any(name in names for name in packed.names))
    return Block(block.samples, block.nbytes, wanted, records)


def pick_rows(chunks: IntArray, rows: IntArray) -> list[ChunkRows]:
    """Rows of chunks, (n,) each, grouped by chunk: row i goes to target i; in order of first use."""
    by_chunk = np.argsort(chunks, kind="stable")
    sorted_chunks = chunks[by_chunk]
    starts = np.flatnonzero(np.diff(sorted_chunks, prepend=-1)).tolist()
    groups = [
        ChunkRows(int(sorted_chunks[low]), rows[by_chunk[low:high]], by_chunk[low:high])
        for low, high in zip(starts, [*starts[1:], len(chunks)], strict=True)
    ]
    groups.sort(key=lambda group: int(group.targets[0]))
    return groups
