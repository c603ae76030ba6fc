"""Packing as a transform of lanes: a unit of documents in, sequences out, with nothing carried over between units.

Sequences are laid out when a unit's turn comes. Their rows are filled when their batch is wanted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..columns import IntArray, Ragged
from ..counters import Counters
from ..decoding.batch import BatchMaker, UnfinishedBatch
from ..decoding.row_work import IDS, VALID, RowError
from ..decoding.values import BatchValues
from ..errors import LoaderClosedError
from ..packing.packed import Packed, add_counts, cumulative_lengths, fill, join_segments
from ..sources.sources import SOURCE
from .transforms import Collected, PendingResult, Ready, RowReader, StepRows, TransformResult, pick_rows

if TYPE_CHECKING:
    from ..config.keep import BoolArray, Sieve
    from ..decoding.row_job import RowJob
    from ..decoding.rows import Values
    from ..order.spans import ChunkRows
    from ..packing.packer import Packer
    from ..pipeline.assembler import Equipment
    from ..reading.bad.chunks import ReplacesChunks

_NONE: IntArray = np.empty(0, np.int64)


class PackTransform:
    """Packs what ``sieve`` keeps of units of ``unit`` samples, decoded and transformed. Threads of the pool pack."""

    gives_samples = True
    is_per_input = False

    def __init__(
        self,
        equipment: Equipment,
        *,
        quarantine: ReplacesChunks,
        sieve: Sieve | None,
        fields: Collection[str] | None,
        packer: Packer,
        unit: int,
    ) -> None:
        self._equipment = equipment
        is_read = equipment.maker.options.transform is None  # else the transform gets values as usual
        flat = packer.needed if is_read else ()
        self.reader = RowReader(equipment, quarantine, sieve, fields, by_units=True, flat=flat)
        self._packer = packer
        self.unit = unit
        self.output_bytes = packer.sequence_bytes

    def start(self, groups: Sequence[ChunkRows], bounds: IntArray, epoch: int) -> PendingResult:
        sifted = self.reader.sift(groups, int(bounds[-1]))
        cuts = cut_units(bounds, self.unit)
        if not len(sifted.places):
            assert sifted.ids is not None
            return Ready(TransformResult(sifted.ids, _NONE, _NONE, _NONE, [], kept=np.zeros(len(sifted.ids), np.bool_)))
        rows = self.reader.gather(pick_rows(sifted.chunks, sifted.rows), len(sifted.places))
        ids = rows.ids if sifted.ids is None else sifted.ids
        job = self._equipment.maker.work(rows, epoch)
        # The job's rows are in the pool's queue before these, which wait for them: so no thread waits for itself.
        units = [
            self._equipment.maker.pool.submit(self._pack, job, ids[start:stop], sifted.places[low:high] - start, low)
            for start, stop, low, high in _unit_rows(sifted.places, cuts)
        ]
        return _Packing(self._equipment, ids, cuts, job, units)

    def _pack(self, job: RowJob, ids: IntArray, places: IntArray, low: int) -> _Unit | Exception:
        """Pack a unit into sequences; return them, or the error of one of its rows. On a thread of the pool.

        ``ids`` (inputs,) are those of all its inputs, of which ``places`` (n,) are kept: rows ``low`` on of the job.
        """
        high = low + len(places)
        failed = job.wait()
        if failed is not None and failed.row < high:
            return job.explain(failed) if failed.row >= low else LoaderClosedError("a unit before it failed")
        values, present = self._documents(job, low, high)
        try:
            packed = self._packer.pack(values) if len(present) else None
        except RowError as error:
            return job.explain(RowError(low + int(present[error.row]), error.step, error.cause))
        return _account(packed, ids, places[present], self._packer.packing.batch_fields)

    def _documents(self, job: RowJob, low: int, high: int) -> tuple[dict[str, Any], IntArray]:
        """Collect the values that are packed, and their rows from ``low`` on, without the dropped ones."""
        if not self._equipment.maker.options.transform:
            every = np.arange(high - low)
            given = ((name, values) for name, values in job.results.values.items() if name in self._packer.needed)
            return {n: _cut(of, low, high) for n, of in given if not isinstance(of, BatchValues)}, every
        samples = job.results.samples[low:high]
        present = np.flatnonzero(np.fromiter((sample is not None for sample in samples), np.bool_, len(samples)))
        left = [sample for sample in samples if sample is not None]
        return {name: [sample.get(name) for sample in left] for name in self._packer.needed}, present

    def join(self, outputs: Collected, steps: Sequence[StepRows]) -> Iterator[UnfinishedBatch]:
        return start_batches(self._equipment.maker, outputs, steps)


@dataclass(frozen=True, slots=True)
class _Unit:
    """A unit of n inputs that became m sequences, with the sequence that accounts for each input.

    ``ids`` (n,) are in that order, with ``stays`` (n,); ``places`` (m,). An input is accounted for by the first
    sequence that has a piece of it; those left out, by the last. ``packed`` is None where no input was kept.
    """

    packed: Packed | None
    ids: IntArray
    stays: BoolArray
    places: IntArray
    sequences: PackedUnit | None


def _account(packed: Packed | None, ids: IntArray, inputs: IntArray, fields: Collection[str]) -> _Unit:
    """Account for the inputs with these ``ids`` (n,), of which ``inputs`` were packed."""
    stays = np.zeros(len(ids), np.bool_)
    if packed is None or not len(packed):
        return _Unit(packed, ids, stays, _NONE, None)
    held = np.add.reduceat(packed.is_first.astype(np.int64), packed.layout.bounds[:-1])
    first = inputs[packed.rows[packed.is_first]]
    stays[first] = True
    order = np.concatenate([first, np.flatnonzero(~stays)])
    places = np.cumsum(held) - 1
    places[-1] = len(ids) - 1
    pieces = ids[inputs[packed.rows]]
    return _Unit(packed, ids[order], stays[order], places, PackedUnit(packed, pieces, fields))


@dataclass(frozen=True, slots=True)
class _Packing:
    """Units that are being packed: those of inputs ``cuts[i]`` to ``cuts[i + 1]``."""

    equipment: Equipment
    ids: IntArray
    cuts: IntArray
    job: RowJob
    units: Sequence[Future[_Unit | Exception]]

    def result(self) -> TransformResult:
        ids, stays, ends, rows = [_NONE], [np.empty(0, np.bool_)], [_NONE], [_NONE]
        samples: list[PackedUnit] = []
        nbytes = 0
        failed: Exception | None = None
        for future, start in zip(self.units, self.cuts[:-1].tolist(), strict=True):
            try:
                unit = future.result()
            except (CancelledError, LoaderClosedError) as exc:
                raise LoaderClosedError("the loader was closed while a unit was being packed") from exc
            except Exception as exc:  # noqa: BLE001 - raised where the unit's first sequence is waited for
                failed = exc
                break
            if isinstance(unit, Exception):
                failed = unit
                break
            ids.append(unit.ids)
            stays.append(unit.stays)
            ends.append(unit.places + start)
            if unit.sequences is not None:
                samples += [unit.sequences] * len(unit.places)
                rows.append(np.arange(len(unit.places)))
            if unit.packed is not None:
                nbytes += unit.packed.nbytes
                if not len(unit.packed):
                    count_packed(self.equipment.counters, unit.packed, np.zeros(1, np.int64))
        of_inputs, places, of_outputs = (np.concatenate(each) for each in (ids, ends, rows))
        return TransformResult(
            of_inputs, places, _NONE, of_outputs, samples, nbytes, failed, kept=np.concatenate(stays)
        )

    def cancel(self) -> None:
        self.job.cancel()
        for unit in self.units:
            unit.cancel()


def cut_units(bounds: IntArray, unit: int) -> IntArray:
    """Find the beginnings of units in runs that begin at ``bounds``, with the end of the last, (units + 1,) int64."""
    starts = [np.arange(low, high, unit) for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
    cuts: IntArray = np.concatenate([*starts, bounds[-1:]]).astype(np.int64)
    return cuts


def _unit_rows(places: IntArray, cuts: IntArray) -> Iterator[tuple[int, int, int, int]]:
    """Yield each unit's inputs, from and to, and its range among the kept inputs, at ``places``."""
    rows = np.searchsorted(places, cuts)
    return zip(*(each.tolist() for each in (cuts[:-1], cuts[1:], rows[:-1], rows[1:])), strict=True)


def _cut(values: Values, low: int, high: int) -> Any:
    return values.cut(low, high) if isinstance(values, Ragged) else values[low:high]


@dataclass(frozen=True, slots=True)
class PackedUnit:
    """The sequences of a unit; ``piece_ids`` are the sample ids of all pieces in them, ``fields`` those of batches."""

    packed: Packed
    piece_ids: IntArray
    fields: Collection[str]

    def ids(self, row: int) -> IntArray:
        """List the sample ids of a sequence's documents, by their ``document_ids``."""
        low, high = self.packed.layout.bounds[row : row + 2]
        return self.piece_ids[low:high]


LENGTHS = ("cu_seqlens", "max_seqlen")  # of a batch's documents
Made = tuple[Any, list[tuple[Counters, dict[str, int]]]]  # a batch, and what it adds to the metrics


def start_batches(maker: BatchMaker, outputs: Collected, steps: Sequence[StepRows]) -> Iterator[UnfinishedBatch]:
    """Start the batches of some steps; each output is a row of a ``PackedUnit``.

    One job of the pool makes their arrays, of which batches are views: threads that make many small arrays at the same
    time mostly wait for one another. Only what ``collate`` makes has a job a batch, so that its errors are those of its
    own batch.
    """
    together = [steps] if maker.options.collate is None else [[step] for step in steps]
    for some in together:
        future = maker.pool.submit(_make, maker, outputs, some)
        for place, step in enumerate(some):
            yield PackedBatch(maker, future, place, step.num_rows)


@dataclass(frozen=True, slots=True)
class PackedBatch(UnfinishedBatch):
    """The batch of one of the steps that ``future`` makes. Fields: see ``Packing``."""

    maker: BatchMaker
    future: Future[list[Made]]
    place: int
    num_rows: int

    def result(self) -> Any:
        try:
            made = self.future.result()
        except CancelledError as exc:
            raise LoaderClosedError("the loader was closed while a batch was being made") from exc
        batch, counted = made[self.place]
        made[self.place] = None, []  # batches live as long as their user keeps them
        for counters, amounts in counted:
            counters.add(**amounts)
        return self.maker.finish(batch, self.num_rows)

    @property
    def is_done(self) -> bool:
        return self.future.done()

    def cancel(self) -> None:
        self.future.cancel()


def _make(maker: BatchMaker, outputs: Collected, steps: Sequence[StepRows]) -> list[Made]:
    """Make the batches on a thread of the pool."""
    picked = [step.picked for step in steps]
    every = [i for each in picked for i in each]
    units: list[PackedUnit] = [outputs.samples[i] for i in every]
    packs, rows = [unit.packed for unit in units], outputs.rows[every].tolist()
    seq_len, names = packs[0].seq_len, units[0].fields
    filled: dict[str, Any] = dict(fill(packs, rows, seq_len, names))
    sources = None if outputs.sources is None else outputs.sources[every]
    if sources is not None and maker.options.with_ids:
        filled[SOURCE] = sources
    segments = join_segments(packs, rows)
    ends = np.cumsum(segments)
    amounts = np.array([packed.counts_by_sequence[row] for packed, row in zip(packs, rows, strict=True)])
    made = []
    stop = 0
    for step, each in zip(steps, picked, strict=True):
        start, stop = stop, stop + len(each)
        last = start + step.num_rows
        low, high = np.searchsorted(ends, [start * seq_len, last * seq_len], side="right")
        fields: dict[str, Any] = {name: values[start:last] for name, values in filled.items()}
        if maker.options.collate is None:
            lengths = dict(zip(LENGTHS, cumulative_lengths(segments[low:high]), strict=True))
            fields.update((name, value) for name, value in lengths.items() if name in names)
        valid = slice(start, start + step.num_valid)
        counted = [(maker.counters, _amounts(amounts[valid].sum(axis=0), seq_len))]
        if sources is not None:
            for source in np.unique(sources[valid]).tolist():
                own = amounts[valid][sources[valid] == source]
                counted.append((outputs.counts[source], _amounts(own.sum(axis=0), seq_len)))
        made.append((_finish(maker, fields, units[start:last], rows[start:last], step.num_valid), counted))
    return made


def _finish(
    maker: BatchMaker, fields: dict[str, Any], units: Sequence[PackedUnit], rows: Sequence[int], num_valid: int
) -> Any:
    """Finish a batch of rows whose ``fields`` are filled, of which ``num_valid`` count."""
    options = maker.options
    if options.pad:
        fields[VALID] = np.arange(len(rows)) < num_valid
    if options.collate is not None:
        samples = [{name: values[i] for name, values in fields.items()} for i in range(len(rows))]
        for sample, unit, row in zip(samples, units, rows, strict=True):
            if options.with_ids:
                sample[IDS] = unit.ids(row)
            if options.pad:
                sample[VALID] = bool(sample[VALID])
        return options.collate(samples)
    if options.with_ids:
        fields[IDS] = lay_side_by_side([unit.ids(row) for unit, row in zip(units, rows, strict=True)])
    return {
        n: torch.from_numpy(of_field) if isinstance(of_field, np.ndarray) else of_field
        for n, of_field in fields.items()
    }


def count_packed(counters: Counters, packed: Packed, sequences: IntArray) -> None:
    """Add the totals of some rows of ``counts_by_sequence`` to the metrics."""
    counters.add(**_amounts(packed.counts_by_sequence[sequences].sum(axis=0), packed.seq_len))


def _amounts(sums: IntArray, seq_len: int) -> dict[str, int]:
    counts = add_counts(sums)
    return {
        "packed_sequences": counts.sequences,
        "packed_documents": counts.documents,
        "packed_tokens": counts.tokens,
        "padding_tokens": counts.sequences * seq_len - counts.tokens,
        "cut_documents": counts.cut_documents,
        "truncated_documents": counts.truncated_documents,
        "truncated_tokens": counts.truncated_tokens,
        "dropped_documents": counts.dropped_documents,
        "dropped_tokens": counts.dropped_tokens,
    }


def lay_side_by_side(arrays: Sequence[IntArray]) -> IntArray:
    """Stack n arrays into (n, longest) int64, filled up with -1."""
    table = np.full((len(arrays), max(map(len, arrays), default=0)), -1, np.int64)
    for row, array in enumerate(arrays):
        table[row, : len(array)] = array
    return table
