"""What is done to the rows of lanes: from inputs to outputs. Each kind of stream has one kind of work."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..columns import IntArray
from ..config.keep import BoolArray, Sieve
from ..decoding.batch import UnfinishedBatch
from ..decoding.copies import copy_sample
from ..decoding.row_job import RowJob
from ..decoding.rows import Rows
from ..order.spans import ChunkRows
from ..pipeline.assembler import Equipment
from ..pipeline.tuning import mean_row_bytes
from ..reading.bad.quarantine import ReplacesChunks
from .row_reader import RowReader, pick_rows


@dataclass(frozen=True, slots=True)
class Yield:
    """The outputs of some inputs, in order: ``places`` (outputs,) says which input each comes from, from 0.

    ``ids`` (inputs,) are all inputs' sample ids. Each output is a row of a chunk, ``chunks`` and ``rows`` (outputs,),
    that is yet to be gathered; or it is in ``samples``, ready to be joined, or it is one of the ``rows`` of something
    there that several outputs share. ``nbytes``: what all this takes, about.
    ``failed``: what the input after the last one here raised, if work ended there.

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
        """(inputs,): which inputs are in an output."""
        if self.kept is not None:
            return self.kept
        stays = np.zeros(len(self.ids), np.bool_)
        stays[self.places] = True
        return stays


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

    It may look at nothing but its inputs, so that every rank and every resume finds the same. It gets runs of whole
    units: of ``unit`` inputs each, counted from a lane's beginning, of which the last of a lane may be shorter. Of a
    unit it may make any number of outputs: sequences packed from documents, say.
    """

    @property
    def unit(self) -> int:
        """How many inputs are worked on together."""

    @property
    def one_each(self) -> bool:
        """Whether each input yields one output or none; else outputs may be made of several inputs."""

    @property
    def gives_samples(self) -> bool:
        """Whether outputs are ready to be joined, else rows of chunks."""

    @property
    def output_bytes(self) -> int:
        """What an output takes in a batch, about."""

    @property
    def reader(self) -> RowReader:
        """What gathers rows of chunks."""

    def start(self, groups: Sequence[ChunkRows], bounds: IntArray, epoch: int) -> PendingYield:
        """Begin with inputs that ``groups`` are the rows of, targets from 0. Raises where reading fails.

        ``bounds`` (runs + 1,) are where runs of consecutive inputs of a lane begin; each begins with a unit.
        """

    def join(self, outputs: Collected, steps: Sequence[StepRows]) -> Iterator[UnfinishedBatch]:
        """A batch for each step of its rows of the outputs; begun when it is asked for."""


@dataclass(frozen=True, slots=True)
class Collected:
    """n outputs in the order of batches: ``samples`` and ``rows`` as in ``Yield``, and their sample ids."""

    samples: Sequence[Any]
    rows: IntArray
    ids: IntArray


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
        """The samples that the batch is made of: all rows and, of a batch without any, one that shows its fields."""
        own = self.high - self.low
        if self.num_rows <= own:
            return range(self.low, self.high)
        return [self.low + i % own for i in range(self.num_rows)]


class FilterWork:
    """Drops what ``sieve`` does not keep, then, with ``may_drop``, what the transform returns None for; or nothing.

    With ``skips``, which needs ``may_drop``, bad samples too: of bad chunks, and what cannot be decoded or transformed.
    """

    unit = 1
    one_each = True

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

    def start(self, groups: Sequence[ChunkRows], bounds: IntArray, epoch: int) -> PendingYield:
        sifted = self.reader.sift(groups, int(bounds[-1]), epoch)
        ids, kept, chunks, rows = sifted.ids, sifted.places, sifted.chunks, sifted.rows
        if not self.gives_samples:
            if ids is None:  # nothing is dropped: all is known without reading
                ids = self._equipment.source.manifest.first_ids[chunks] + rows
            return Ready(Yield(ids, kept, chunks, rows, None, ids.nbytes + 3 * kept.nbytes))
        if not len(kept):
            assert ids is not None
            return Ready(Yield(ids, kept, chunks, rows, []))
        gathered = self.reader.gather(pick_rows(chunks, rows), len(kept), epoch)
        ids = self.reader.inputs(gathered) if ids is None else ids
        are_read = self.reader.are_read(gathered)
        if not are_read.all():
            kept, gathered = kept[are_read], gathered.pick(np.flatnonzero(are_read).tolist())
            if not len(kept):
                return Ready(Yield(ids, kept, chunks[are_read], rows[are_read], []))
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
    """Work that is done."""

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
