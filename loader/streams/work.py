"""What is done to the rows of lanes: from inputs to outputs. Each kind of stream has one kind of work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..columns import Block, IntArray
from ..decoding.batch import RowJob
from ..decoding.byte_views import Lend
from ..decoding.decode import FieldDecoders
from ..decoding.gather import Rows, gather
from ..decoding.row_errors import describe_row
from ..order.spans import ChunkRows
from ..pipeline.assembler import Equipment
from ..reading.quarantine import Quarantine
from .keep import BoolArray, Sieve


@dataclass(frozen=True, slots=True)
class Yield:
    """The outputs of some inputs, in order: ``places`` (outputs,) says which input each comes from, from 0.

    ``ids`` (inputs,) are all inputs' sample ids. Each output is a row of a chunk, ``chunks`` and ``rows`` (outputs,),
    that is yet to be gathered; or it is in ``samples``, ready for collation. ``nbytes``: what all this takes, about.
    ``failed``: what the input after the last one here raised, if work ended there.
    """

    ids: IntArray
    places: IntArray
    chunks: IntArray
    rows: IntArray
    samples: Sequence[Any] | None
    nbytes: int = 0
    failed: Exception | None = None


class PendingYield(Protocol):
    """Work that goes on on other threads. ``ids`` are the samples that it waits for."""

    @property
    def ids(self) -> IntArray:
        """(n,) int64 sample ids."""

    def result(self) -> Yield:
        """Wait for the outputs. Does not raise what a sample raised: that is in ``failed``."""

    def cancel(self) -> None:
        """Begin no more of it."""


class WindowWork(Protocol):
    """One kind of work, and what a new kind of stream brings: all else (lanes, ranks, cursors, batches) is the same.

    It may look at nothing but its inputs, so that every rank and every resume finds the same. Without
    ``whole_windows`` it gets runs of rows of several lanes at once, and each row yields one output or none. With it, a
    call gets one whole window of one lane, of which it may make any number of outputs: sequences packed from
    documents, say. Then ``places`` do not decrease, and several outputs may have the same.

    ``gives_samples``: outputs are samples, ready for collation; else rows of chunks, for ``gather``.
    """

    whole_windows: bool
    gives_samples: bool

    def start(self, groups: Sequence[ChunkRows], count: int, epoch: int) -> PendingYield:
        """Begin with ``count`` inputs, which ``groups`` are the rows of, targets from 0. Raises where reading fails."""

    def gather(self, groups: Sequence[ChunkRows], count: int) -> Rows:
        """The rows of outputs as batches have them, in the order of their targets. Raises where reading fails."""


class FilterWork:
    """Drops what ``sieve`` does not keep, then, with ``may_drop``, what the transform returns None for."""

    whole_windows = False

    def __init__(
        self,
        equipment: Equipment,
        *,
        quarantine: Quarantine,
        sieve: Sieve | None,
        columns: Sequence[str] | None,
        may_drop: bool,
    ) -> None:
        self._equipment = equipment
        self._columns = columns
        self._quarantine = quarantine
        self._sieve = sieve
        self._may_drop = self.gives_samples = may_drop

    def start(self, groups: Sequence[ChunkRows], count: int, epoch: int) -> PendingYield:
        ids, chunks, rows = np.empty((3, count), np.int64)
        for group in groups:
            chunks[group.targets], rows[group.targets] = group.chunk, group.rows
        if self._sieve is None:
            kept: IntArray = np.arange(count, dtype=np.int64)
        else:
            looked = self._gather(groups, count, self._sieve.decoders, self._sieve.columns, None)
            ids = looked.ids
            kept = np.flatnonzero(self._ask(self._sieve, looked))
        if not self._may_drop:
            return _Ready(Yield(ids, kept, chunks[kept], rows[kept], None, ids.nbytes + 3 * kept.nbytes))
        if not len(kept):
            return _Ready(Yield(ids, kept, chunks[kept], rows[kept], []))
        gathered = self.gather(pick_rows(chunks[kept], rows[kept]), len(kept))
        if self._sieve is None:
            ids = gathered.ids
        return _Transforming(ids, kept, self._equipment.maker.work(gathered, epoch), gathered)

    def _ask(self, sieve: Sieve, rows: Rows) -> BoolArray:
        try:
            return sieve.holds(rows)
        except Exception as exc:
            if len(rows.ids) == 1:  # whoever asked about several asks about each
                exc.add_note(f"in keep= of {describe_row(0, rows, self._equipment.source.manifest)}")
            raise

    def gather(self, groups: Sequence[ChunkRows], count: int) -> Rows:
        leases = self._equipment.leases
        lend = None if leases is None else leases.lend
        return self._gather(groups, count, self._equipment.maker.decoders, self._columns, lend)

    def _gather(
        self,
        groups: Sequence[ChunkRows],
        count: int,
        decoders: FieldDecoders,
        columns: Sequence[str] | None,
        lend: Lend | None,
    ) -> Rows:
        by_chunk = {group.chunk: group for group in groups}

        def opened() -> Iterator[tuple[ChunkRows, Block]]:
            for chunk, loaded in self._equipment.reader.take(list(by_chunk)):
                if isinstance(loaded, Block):
                    group, block = by_chunk[chunk], loaded
                else:
                    group, block = self._quarantine.replace(by_chunk[chunk], loaded)
                yield group, _narrow(block, columns)

        rows = gather(opened(), count, self._equipment.source.manifest.first_ids, decoders, lend)
        if columns is None:
            return rows
        return Rows(rows.ids, {name: values for name, values in rows.fields.items() if name in columns})


def _narrow(block: Block, columns: Sequence[str] | None) -> Block:
    """The block without columns that are not asked for."""
    if columns is None:
        return block
    wanted = {name: column for name, column in block.columns.items() if name in columns}
    records = tuple(packed for packed in block.records if any(name in columns for name in packed.names))
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


@dataclass(frozen=True, slots=True)
class _Ready:
    done: Yield

    @property
    def ids(self) -> IntArray:
        return self.done.ids

    def result(self) -> Yield:
        return self.done

    def cancel(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Transforming:
    inputs: IntArray
    kept: IntArray
    job: RowJob
    rows: Rows

    @property
    def ids(self) -> IntArray:
        return self.rows.ids

    def result(self) -> Yield:
        samples, failed = self.job.samples()
        stays = np.fromiter((sample is not None for sample in samples), np.bool_, len(samples))
        places = self.kept[: len(samples)][stays]
        ids = self.inputs if failed is None else self.inputs[: int(self.kept[len(samples)])]
        none = np.empty(0, np.int64)
        return Yield(ids, places, none, none, [s for s in samples if s is not None], self.job.nbytes, failed)

    def cancel(self) -> None:
        self.job.cancel()
