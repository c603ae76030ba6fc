"""Packing as work on a lane: a unit of documents in, sequences out, nothing carried from one unit to the next."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..columns import IntArray, Ragged
from ..config.keep import BoolArray, Sieve
from ..decoding.batch import UnfinishedBatch
from ..decoding.batch_values import BatchValues
from ..decoding.row_job import RowJob
from ..decoding.row_work import RowError
from ..decoding.rows import Values
from ..errors import LoaderClosedError
from ..order.spans import ChunkRows
from ..packing.packed import Packed
from ..packing.packer import Packer
from ..pipeline.assembler import Equipment
from ..reading.bad.quarantine import ReplacesChunks
from .packed_batch import PackedUnit, count_packed, start_batches
from .row_reader import RowReader, pick_rows
from .work import Collected, PendingYield, Ready, StepRows, Yield

_NONE: IntArray = np.empty(0, np.int64)


class PackWork:
    """Packs what ``sieve`` keeps of units of ``unit`` samples, decoded and transformed. Threads of the pool pack."""

    gives_samples = True
    one_each = False

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
        is_read = equipment.maker.options.transform is None  # else the transform gets values as ever
        flat = packer.needed if is_read else ()
        self.reader = RowReader(equipment, quarantine, sieve, fields, by_units=True, flat=flat)
        self._packer = packer
        self.unit = unit
        self.output_bytes = packer.sequence_bytes

    def start(self, groups: Sequence[ChunkRows], bounds: IntArray, epoch: int) -> PendingYield:
        sifted = self.reader.sift(groups, int(bounds[-1]))
        cuts = cut_units(bounds, self.unit)
        if not len(sifted.places):
            assert sifted.ids is not None
            return Ready(Yield(sifted.ids, _NONE, _NONE, _NONE, [], kept=np.zeros(len(sifted.ids), np.bool_)))
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
        """The sequences of a unit, or what one of its rows raised. On a thread of the pool.

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
        """The values that are packed, and which of the rows from ``low`` on they are of: not those that are dropped."""
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
    """A unit of n inputs that became m sequences: which of them accounts for which input.

    ``ids`` (n,) are in that order, with ``stays`` (n,); ``places`` (m,). An input is accounted for by the first
    sequence that has a piece of it; those left out, by the last. ``packed`` is None where no input was kept.
    """

    packed: Packed | None
    ids: IntArray
    stays: BoolArray
    places: IntArray
    sequences: PackedUnit | None


def _account(packed: Packed | None, ids: IntArray, inputs: IntArray, fields: Collection[str]) -> _Unit:
    """The unit of inputs with these ``ids`` (n,), of which ``inputs`` were packed."""
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

    def result(self) -> Yield:
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
        return Yield(of_inputs, places, _NONE, of_outputs, samples, nbytes, failed, kept=np.concatenate(stays))

    def cancel(self) -> None:
        self.job.cancel()
        for unit in self.units:
            unit.cancel()


def cut_units(bounds: IntArray, unit: int) -> IntArray:
    """Where units begin in runs that begin at ``bounds``, with the end of the last, (units + 1,) int64."""
    starts = [np.arange(low, high, unit) for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
    cuts: IntArray = np.concatenate([*starts, bounds[-1:]]).astype(np.int64)
    return cuts


def _unit_rows(places: IntArray, cuts: IntArray) -> Iterator[tuple[int, int, int, int]]:
    """For each unit its inputs, from and to, and which of the kept inputs, at ``places``, are its own."""
    rows = np.searchsorted(places, cuts)
    return zip(*(each.tolist() for each in (cuts[:-1], cuts[1:], rows[:-1], rows[1:])), strict=True)


def _cut(values: Values, low: int, high: int) -> Any:
    return values.cut(low, high) if isinstance(values, Ragged) else values[low:high]
