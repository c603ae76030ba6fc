"""Bad samples, in place: each is replaced by another that can be read, decoded and transformed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..columns import KEY_COLUMN, AnyArray, Block
from ..errors import DatasetError, DecodeError
from ..order.permutation import FOR_FAR, FOR_NEAR, FOR_ROWS, IntArray, permutation, random_numbers, stream_key
from ..order.spans import ChunkRows
from ..reading.bad.chunks import DATA_ERRORS
from ..reading.bad.file import Quarantined
from .byte_views import ByteViews
from .gather import gather
from .row_work import ResultValues, RowError, RowResults, RowTask, RowWork
from .rows import copy_sample, copy_value, describe_row
from .values import BatchValues

if TYPE_CHECKING:
    from ..dataset.manifest import Manifest
    from ..order.selecting import Selection
    from ..reading.bad.samples import BadSamples
    from ..reading.chunk_source import ChunkSource
    from .decode import FieldDecoders
    from .rows import Rows


NEAR = 8  # are tried in the bad sample's own chunk
FAR = 8  # are tried in other chunks, one in each


def candidates(
    seed: int, epoch: int, sample_id: int, first_ids: IntArray, samples: IntArray, selection: Selection | None = None
) -> Iterator[tuple[int, int]]:
    """The chunk and row of the samples to try, in order: up to 8 of the same chunk, then one each of up to 8 others.

    ``first_ids`` and ``samples`` (chunks,) int64 are those of the manifest. Samples are of the same selection.
    """
    words = seed, epoch, sample_id
    own = int(np.searchsorted(first_ids, sample_id, side="right")) - 1
    rows = _rows_of(own, samples, selection)
    rows = rows[rows != sample_id - int(first_ids[own])]
    for place in permutation(len(rows), stream_key(FOR_NEAR, *words))[:NEAR].tolist():
        yield own, int(rows[place])
    chunks = np.flatnonzero(samples if selection is None else selection.counts)
    chunks = chunks[chunks != own]
    draws = random_numbers(0, FAR, stream_key(FOR_ROWS, *words)).tolist()
    for place, draw in zip(permutation(len(chunks), stream_key(FOR_FAR, *words)).tolist(), draws, strict=False):
        chunk = int(chunks[place])
        rows = _rows_of(chunk, samples, selection)
        yield chunk, int(rows[draw % len(rows)])


def _rows_of(chunk: int, samples: IntArray, selection: Selection | None) -> IntArray:
    return np.arange(int(samples[chunk]), dtype=np.int64) if selection is None else selection.rows_of(chunk)


_KEPT_BLOCKS = 4


def tell_bad(
    errors: Sequence[RowError],
    rows: Rows,
    epoch: int | AnyArray,
    manifest: Manifest,
    bad: BadSamples,
    *,
    own: IntArray | None = None,
    first_id: int = 0,
) -> None:
    """Count bad rows and write them to the quarantine file; avoided ones are known already.

    Rows of several sources are told of source by source: ``own`` (n,) are the rows of one, in order, its ids begin at
    ``first_id``, and ``epoch`` (rows,) are the epochs of all rows' sources.

    Raises:
        RowError: more are bad than may be; names the row, and in its cause the counts.
    """
    last, count = -1, len(rows.ids) if own is None else len(own)
    for error in sorted(errors, key=lambda each: each.row):
        place = error.row if own is None else int(np.searchsorted(own, error.row))
        if place > last + 1:
            bad.note_good()
        last = place
        of_row = epoch if isinstance(epoch, int) else int(epoch[error.row])
        if error.step == "avoid":
            bad.note_avoided(of_row, [int(rows.ids[error.row]) - first_id])
            continue
        try:
            bad.tell(describe_bad(error, rows, of_row, manifest, bad.manifest, first_id))
        except DatasetError as exc:
            raise RowError(error.row, "result", exc) from exc
    if last < count - 1:
        bad.note_good()


def describe_bad(
    error: RowError, rows: Rows, epoch: int, manifest: Manifest, own: Manifest, first_id: int
) -> Quarantined:
    """Make the quarantine file's record of a bad row: its data set is ``own``, ``manifest`` that of all rows."""
    sample_id = int(rows.ids[error.row]) - first_id
    shard, number = own.shard_of(sample_id)
    chunk = int(np.searchsorted(own.first_ids, sample_id, side="right")) - 1
    key = rows.fields.get(KEY_COLUMN)
    return Quarantined(
        kind="sample",
        id=sample_id,
        samples=1,
        shard=shard,
        offset=own.chunk(chunk).offset,
        number=number,
        key=None if key is None else str(key[error.row]),
        field=getattr(error.cause, "field", None),
        step=error.step,
        reason=f"{describe_row(error.row, rows, manifest)}: {_reason(error)}",
        epoch=epoch,
    )


def _reason(error: RowError) -> str:
    cause = error.cause
    text = str(cause) if isinstance(cause, DecodeError) else f"{type(cause).__name__}: {cause}"
    return f"transform=: {text}" if error.step == "transform" else text


@dataclass(frozen=True, slots=True)
class Substitutes:
    """Reads what may replace bad samples of one data set: single samples, of whose chunks the last few are kept.

    ``avoided`` ids are bad without being tried. Joint ids of the data set begin at ``first_id``.
    """

    chunks: ChunkSource
    bad: BadSamples
    selection: Selection | None
    avoided: frozenset[int]
    first_id: int
    _blocks: OrderedDict[int, Block] = field(default_factory=OrderedDict)

    def read(self, chunk: int, row: int, decoders: FieldDecoders) -> Rows:
        """Read a sample, whose id is that in the data set. Raises the errors of reading."""
        if chunk not in self._blocks:
            self._blocks[chunk] = self.chunks.load(chunk)
            while len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(chunk)
        group = ChunkRows(chunk, np.array([row]), np.zeros(1, np.int64))
        return gather([(group, self._blocks[chunk])], 1, self.chunks.manifest.first_ids, decoders)


class Replacer:
    """Finds and places substitutes for bad rows: samples of the same source. Used by the thread that finishes batches.

    ``manifest`` is that of all sources, by whose joint ids rows are told apart.
    """

    def __init__(self, of_sources: Sequence[Substitutes], manifest: Manifest) -> None:
        self._of_sources = of_sources
        self._manifest = manifest
        self._edges = np.array([of.first_id for of in of_sources[1:]], np.int64)

    def replace(
        self,
        task: RowTask,
        rows: Rows,
        results: RowResults,
        decoders: FieldDecoders,
        work: RowWork,
        keys: AnyArray | None = None,
    ) -> IntArray:
        """Put another sample into each place of ``results.failed``; return the ids of all rows then, (n,).

        ``keys`` (n, 3): the seed, epoch and sample id of each row in its own source, where there are several.

        Raises:
            DatasetError: more samples are bad than may be, or nothing is found that could replace one.
        """
        ids = rows.ids.copy()
        numbers = np.searchsorted(self._edges, rows.ids, side="right")
        epochs: int | AnyArray = task.epoch if keys is None else keys[:, 1]
        for number in np.unique(numbers[[error.row for error in results.failed]]).tolist():
            errors = [error for error in results.failed if numbers[error.row] == number]
            self._tell(errors, rows, epochs, self._of_sources[number], np.flatnonzero(numbers == number))
        found: dict[tuple[int, int], tuple[Rows, RowTask, RowResults]] = {}  # a padded batch repeats samples
        for error in sorted(results.failed, key=lambda each: each.row):
            of, sample_id = self._of_sources[numbers[error.row]], int(rows.ids[error.row])
            own = (work.seed, task.epoch, sample_id) if keys is None else keys[error.row].tolist()
            seed, epoch, own_id = own
            if (sample_id, epoch) not in found:
                key = seed, epoch, own_id
                found[sample_id, epoch] = self._find(error, rows, key, results, decoders, work, of)
            other, its_task, its_results = found[sample_id, epoch]
            _place(error.row, task, results, its_task, its_results)
            ids[error.row] = other.ids[0] + of.first_id
        return ids

    def _tell(
        self,
        errors: Sequence[RowError],
        rows: Rows,
        epoch: int | AnyArray,
        of: Substitutes,
        own: IntArray | None = None,
    ) -> None:
        too_many: BaseException | None = None
        try:
            first_id = 0 if own is None else of.first_id
            manifest = of.chunks.manifest if own is None else self._manifest
            tell_bad(errors, rows, epoch, manifest, of.bad, own=own, first_id=first_id)
        except RowError as exc:
            too_many = exc.cause
        if too_many is not None:
            raise too_many

    def _find(
        self,
        error: RowError,
        rows: Rows,
        key: tuple[int, int, int],
        results: RowResults,
        decoders: FieldDecoders,
        work: RowWork,
        of: Substitutes,
    ) -> tuple[Rows, RowTask, RowResults]:
        manifest = of.chunks.manifest
        seed, epoch, _ = key
        tried = 0
        last = _reason(error)
        for chunk, row in candidates(*key, manifest.first_ids, manifest.samples, of.selection):
            tried += 1
            try:
                other = of.read(chunk, row, decoders)
            except (*DATA_ERRORS, DecodeError) as exc:
                last = str(exc)
                continue
            encoded = {
                name: decoder
                for name, values in other.fields.items()
                if isinstance(values, list) and (decoder := decoders.settled.get(name)) is not None
            }
            its_key = np.array([(seed, epoch, int(other.ids[0]))], np.uint64)
            its_task = RowTask(epoch, 0, other.ids, other.fields, encoded, its_key, of.avoided)
            its_results = work.allocate(its_task)
            work.run(its_task, its_results, 0, 1, lambda: False)
            work.finish(its_task, its_results, lambda: False)
            if its_results.failed:
                last = _reason(its_results.failed[0])
                self._tell(its_results.failed, other, epoch, of)
            elif work.transform is not None or _fits(results, its_results):
                of.bad.note_good()
                return other, its_task, its_results
        where = describe_row(error.row, rows, self._manifest)
        raise DatasetError(
            f"{where} is bad ({_reason(error)}), and none of {tried} other samples can replace it; the last: {last}"
        ) from error.cause


def _fits(results: RowResults, found: RowResults) -> bool:
    """Return whether the values fit the batch's arrays: they have all of these fields, in the same shapes."""
    for name, values in results.values.items():
        there = found.values.get(name)
        if isinstance(values, BatchValues) and not isinstance(there, BatchValues):
            return False
        if isinstance(values, np.ndarray) and not (
            isinstance(there, np.ndarray) and there.shape[1:] == values.shape[1:]
        ):
            return False
    return True


def _place(row: int, task: RowTask, results: RowResults, its_task: RowTask, found: RowResults) -> None:
    if results.samples:
        sample = found.samples[0]
        results.samples[row] = None if sample is None else copy_sample(sample)  # it may take several places
        return
    new = [name for name in found.values if name not in results.values]
    task.encoded.update({name: decoder for name, decoder in its_task.encoded.items() if name in new})
    for name in [*results.values, *new]:
        there = found.values.get(name)
        given = results.values.get(name, [None] * len(task.ids))
        # Values decoded together copy by themselves: a copy made here would wait for all work queued on this device.
        value = None if there is None else there[0] if isinstance(given, BatchValues) else copy_value(there[0])
        if given is task.fields.get(name) and isinstance(given, np.ndarray | list):
            given = given.copy()  # what chunks share with batches is not to be changed
        results.values[name] = _with_value(given, row, value)


def _with_value(values: ResultValues, row: int, value: Any) -> ResultValues:
    """Replace one row's value among the values of a field."""
    changed: Any = list(values) if isinstance(values, ByteViews) else values
    changed[row] = value
    return ByteViews(changed) if isinstance(values, ByteViews) else values
