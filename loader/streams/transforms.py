"""Transforms of lanes, from inputs to outputs. Each kind of stream has one kind of transform."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..columns import Block, IntArray
from ..decoding.gather import gather
from ..decoding.rows import copy_sample, describe_row
from ..order.spans import ChunkRows
from ..pipeline.tuning import mean_row_bytes

if TYPE_CHECKING:
    from ..config.keep import BoolArray, Sieve
    from ..counters import Counters
    from ..decoding.batch import UnfinishedBatch
    from ..decoding.byte_views import Lend
    from ..decoding.decode import FieldDecoders
    from ..decoding.row_job import RowJob
    from ..decoding.rows import Rows
    from ..pipeline.assembler import Equipment
    from ..reading.bad.chunks import ReplacesChunks


@dataclass(frozen=True, slots=True)
class TransformResult:
    """The outputs of some inputs, in order: ``places`` (outputs,) says which input each comes from, from 0.

    ``ids`` (inputs,) are all inputs' sample ids. Each output is a row of a chunk, ``chunks`` and ``rows`` (outputs,),
    that is yet to be gathered; or it is in ``samples``, ready to be joined, or it is one of the ``rows`` of something
    there that several outputs share. ``nbytes``: the estimated size of all this.
    ``failed``: the error of the input after the last one here, if work ended there.

    Where outputs are made of several inputs, ``ids`` are in an order in which each output accounts for the inputs since
    the place of the output before it, up to its own; ``kept`` (inputs,) bool says which of them were not dropped. Else
    it is None: an output keeps the input at its place.
    """

    ids: IntArray
    places: IntArray
    chunks: IntArray
    rows: IntArray
    samples: Sequence[Any] | None
    nbytes: int = 0
    failed: Exception | None = None
    kept: BoolArray | None = None

    @property
    def stays(self) -> BoolArray:
        """(inputs,) bool: the inputs that are in an output."""
        if self.kept is not None:
            return self.kept
        stays = np.zeros(len(self.ids), np.bool_)
        stays[self.places] = True
        return stays


class PendingResult(Protocol):
    """Work in progress on other threads. ``ids`` are the samples that it waits for."""

    @property
    def ids(self) -> IntArray:
        """List (n,) int64 sample ids."""

    def result(self) -> TransformResult:
        """Wait for the outputs. An error of a sample is not raised, but in ``failed``."""

    def cancel(self) -> None:
        """Start no more of the work."""


class LaneTransform(Protocol):
    """One kind of work, and all that a new kind of stream adds: lanes, ranks, cursors and batches stay the same.

    It may look at nothing but its inputs, so that every rank and every resume finds the same. It gets runs of whole
    units: of ``unit`` inputs each, counted from a lane's beginning, of which the last of a lane may be shorter. Of a
    unit it may make any number of outputs: sequences packed from documents, say.
    """

    @property
    def unit(self) -> int:
        """The number of inputs that are worked on together."""

    @property
    def is_per_input(self) -> bool:
        """Return whether each input yields at most one output; else outputs may be made of several inputs."""

    @property
    def gives_samples(self) -> bool:
        """Return whether outputs are ready to be joined; else they are rows of chunks."""

    @property
    def output_bytes(self) -> int:
        """The estimated bytes of an output in a batch."""

    @property
    def reader(self) -> RowReader:
        """The reader that gathers rows of chunks."""

    def start(self, groups: Sequence[ChunkRows], bounds: IntArray, epoch: int) -> PendingResult:
        """Start on inputs, the rows of ``groups``, targets from 0. Raises where reading fails.

        ``bounds`` (runs + 1,) are where runs of consecutive inputs of a lane begin; each begins with a unit.
        """

    def join(self, outputs: Collected, steps: Sequence[StepRows]) -> Iterator[UnfinishedBatch]:
        """Make a batch for each step of its rows of the outputs, begun when it is asked for."""


@dataclass(frozen=True, slots=True)
class Collected:
    """n outputs in the order of batches: ``samples`` and ``rows`` as in ``TransformResult``, and their sample ids.

    Those of a mixture have ``sources`` (n,), and ``counts`` are the sources' own counters.
    """

    samples: Sequence[Any]
    rows: IntArray
    ids: IntArray
    sources: IntArray | None = None
    counts: Sequence[Counters] = ()


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step's samples are those from ``low`` to ``high``, at least one; its batch has ``num_rows``, by repeating them,
    of which ``num_valid`` count."""

    low: int
    high: int
    num_rows: int
    num_valid: int

    @property
    def picked(self) -> Sequence[int]:
        """The samples that the batch is made of: all rows or, in a batch without any, one that shows its fields."""
        own = self.high - self.low
        if self.num_rows <= own:
            return range(self.low, self.high)
        return [self.low + i % own for i in range(self.num_rows)]


class FilterTransform:
    """Drops the rows that ``sieve`` rejects, then, with ``may_drop``, those that the transform returns None for.

    With ``skips``, which needs ``may_drop``, bad samples too: of bad chunks, and what cannot be decoded or transformed.
    """

    unit = 1
    is_per_input = True

    def __init__(
        self,
        equipment: Equipment,
        *,
        quarantine: ReplacesChunks,
        sieve: Sieve | None,
        fields: Collection[str] | None,
        may_drop: bool,
        skips: bool = False,
    ) -> None:
        self._equipment = equipment
        self.reader = RowReader(equipment, quarantine, sieve, fields, skips=skips)
        self.gives_samples = may_drop
        self.output_bytes = mean_row_bytes(equipment.source.manifest)

    def start(self, groups: Sequence[ChunkRows], bounds: IntArray, epoch: int) -> PendingResult:
        sifted = self.reader.sift(groups, int(bounds[-1]), epoch)
        ids, kept, chunks, rows = sifted.ids, sifted.places, sifted.chunks, sifted.rows
        if not self.gives_samples:
            if ids is None:  # nothing is dropped: all is known without reading
                ids = self._equipment.source.manifest.first_ids[chunks] + rows
            return Ready(TransformResult(ids, kept, chunks, rows, None, ids.nbytes + 3 * kept.nbytes))
        if not len(kept):
            assert ids is not None
            return Ready(TransformResult(ids, kept, chunks, rows, []))
        gathered = self.reader.gather(pick_rows(chunks, rows), len(kept), epoch)
        ids = self.reader.inputs(gathered) if ids is None else ids
        are_read = self.reader.are_read(gathered)
        if not are_read.all():
            kept, gathered = kept[are_read], gathered.pick(np.flatnonzero(are_read).tolist())
            if not len(kept):
                return Ready(TransformResult(ids, kept, chunks[are_read], rows[are_read], []))
        return _Transforming(ids, kept, self._equipment.maker.work(gathered, epoch), gathered)

    def join(self, outputs: Collected, steps: Sequence[StepRows]) -> Iterator[UnfinishedBatch]:
        samples = outputs.samples
        for step in steps:
            picked = step.picked
            own = [samples[i] for i in picked[: step.high - step.low]]
            repeats = [copy_sample(samples[i]) for i in picked[len(own) :]]  # collate= may change them
            yield self._equipment.maker.join(own + repeats, outputs.ids[picked], step.num_rows, step.num_valid)


@dataclass(frozen=True, slots=True)
class Ready:
    """Finished work."""

    done: TransformResult

    @property
    def ids(self) -> IntArray:
        return self.done.ids

    def result(self) -> TransformResult:
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

    def result(self) -> TransformResult:
        samples, failed = self.job.samples()
        stays = np.fromiter((sample is not None for sample in samples), np.bool_, len(samples))
        places = self.kept[: len(samples)][stays]
        ids = self.inputs if failed is None else self.inputs[: int(self.kept[len(samples)])]
        none = np.empty(0, np.int64)
        return TransformResult(ids, places, none, none, [s for s in samples if s is not None], self.job.nbytes, failed)

    def cancel(self) -> None:
        self.job.cancel()


class RowReader:
    """Gathers rows of chunks, the ``fields`` of batches, as the chunks arrive. Used by the assembler thread."""

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
        """Take ``by_units``: several rows are always asked for together. ``flat``: see ``gather``.

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
        """Select those of ``count`` inputs that the sieve keeps."""
        chunks, rows = np.empty((2, count), np.int64)
        for group in groups:
            chunks[group.targets], rows[group.targets] = group.chunk, group.rows
        if self._sieve is None:
            return Sifted(None, np.arange(count, dtype=np.int64), chunks, rows)
        looked = self._gather(groups, count, self._sieve.decoders, self._asked, None, (), epoch)
        kept = np.flatnonzero(self._ask(self._sieve, looked) & self.are_read(looked))
        return Sifted(self.inputs(looked), kept, chunks[kept], rows[kept])

    def inputs(self, rows: Rows) -> IntArray:
        """Get the ids of gathered inputs."""
        return rows.planned_ids if self._skips else rows.ids

    def are_read(self, rows: Rows) -> BoolArray:
        """Select (n,) bool the rows that stay; those of a bad chunk, in whose place others were read, are skipped."""
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
            raise  # else the caller that asked about several asks about each

    def gather(self, groups: Sequence[ChunkRows], count: int, epoch: int | None = None) -> Rows:
        """Gather the rows of ``groups`` as batches have them, in the order of targets. Raises where reading fails.

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
    """Leave out a block's columns that are not asked for."""
    if names is None:
        return block
    wanted = {name: column for name, column in block.columns.items() if name in names}
    records = tuple(packed for packed in block.records if any(name in names for name in packed.names))
    return Block(block.samples, block.nbytes, wanted, records)


def pick_rows(chunks: IntArray, rows: IntArray) -> list[ChunkRows]:
    """Group rows of chunks, (n,) each, by chunk: row i goes to target i; in order of first use."""
    by_chunk = np.argsort(chunks, kind="stable")
    sorted_chunks = chunks[by_chunk]
    starts = np.flatnonzero(np.diff(sorted_chunks, prepend=-1)).tolist()
    groups = [
        ChunkRows(int(sorted_chunks[low]), rows[by_chunk[low:high]], by_chunk[low:high])
        for low, high in zip(starts, [*starts[1:], len(chunks)], strict=True)
    ]
    groups.sort(key=lambda group: int(group.targets[0]))
    return groups
