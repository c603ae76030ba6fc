"""Gathered rows of a span of batches, or of one: their ids, and the values of their fields, some still in chunks."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..columns import KEY_COLUMN, AnyArray, IntArray, Ragged
from ..errors import ConfigError, DecodeError
from ..reading.mapped import looking_at
from .byte_views import ByteViews
from .late_rows import LateFields, make_all

if TYPE_CHECKING:
    from ..dataset.manifest import Manifest
    from .batch_memory import BatchMemory
    from .decode import FieldDecoder
    from .row_work import RowError


# Where fewer are copied from a mapped file at once, asking for the file costs more than reading it.
_LEAST_LOOK_BYTES = 64 << 10
_IMAGE_GROWTH = 10  # pixels take about this many times the bytes of the encoded image
_SIZED = {bytes, memoryview, str}


Values = AnyArray | ByteViews | Ragged | list[Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """Gathered rows: ``ids`` (n,) int64 sample ids, and each field's values, an array (n, ...) or a list of n.

    ``planned``: (n,) the ids that the order asked for, where others take the place of some; None where it is ``ids``.
    ``epochs``: (n,) int64 the epoch of each row's source, where rows of several sources may differ in it.
    ``late``: fields that are still in their chunks, which these keep in memory, until ``complete`` copies them.
    ``names``: where those have places among the others, all of both in the order of batches.
    """

    ids: IntArray
    fields: Mapping[str, Values]
    planned: IntArray | None = None
    late: Sequence[LateFields] = ()
    names: Sequence[str] = ()
    epochs: IntArray | None = None

    @property
    def keeps_chunks(self) -> bool:
        """Return whether chunks must stay in memory until these are copied."""
        return not all(late.is_mapped for late in self.late)

    @property
    def planned_ids(self) -> IntArray:
        """(n,) int64: the ids that the order asked for."""
        return self.ids if self.planned is None else self.planned

    def cut(self, start: int, stop: int) -> Rows:
        fields = {name: _cut(values, start, stop) for name, values in self.fields.items()}
        planned = None if self.planned is None else self.planned[start:stop]
        late = [each.cut(start, stop) for each in self.late]
        epochs = None if self.epochs is None else self.epochs[start:stop]
        return Rows(self.ids[start:stop], fields, planned, late, self.names, epochs)

    def pick(self, indices: Sequence[int]) -> Rows:
        """Pick some rows, in any order and more than once, with values of their own: a transform may change each."""
        fields = {name: _pick(values, indices) for name, values in self.fields.items()}
        rows = np.asarray(indices, np.int64)
        planned = None if self.planned is None else self.planned[rows]
        epochs = None if self.epochs is None else self.epochs[rows]
        return Rows(self.ids[rows], fields, planned, [late.pick(rows) for late in self.late], self.names, epochs)

    def complete(self, memory: BatchMemory | None = None) -> Rows:
        """Copy the late fields, into arrays of ``memory`` if that is given; any thread may ask."""
        return complete_all([self], memory)[0]

    def _with(self, made: Mapping[str, Values]) -> Rows:
        """Replace the late fields by their copies."""
        if not self.late:
            return self
        fields = {**made, **self.fields}
        fields = {name: fields[name] for name in self.names or fields}
        return Rows(self.ids, fields, self.planned, epochs=self.epochs)

    def stay_in_chunks(self, decoders: Mapping[str, FieldDecoder | None]) -> bool:
        """Return whether three quarters or more take no memory of their own yet: they lie in chunks, or are views."""
        kept = sum(late.nbytes for late in self.late)
        kept += sum(v.nbytes for v in self.fields.values() if isinstance(v, ByteViews) and v.are_shared)
        return kept > 0 and 4 * kept >= 3 * self.count_bytes(decoders)

    def count_bytes(self, decoders: Mapping[str, FieldDecoder | None]) -> int:
        """Count the bytes of the rows and of their values once decoded.

        Of lists of Python values, only those that have a length in bytes are counted.
        """
        total = sum(late.nbytes for late in self.late)
        for name, values in self.fields.items():
            if not isinstance(values, list):
                total += values.nbytes
                continue
            sized = values if set(map(type, values)) <= _SIZED else [value for value in values if type(value) in _SIZED]
            encoded = sum(map(len, sized))
            total += encoded
            decoder = decoders.get(name)
            if decoder is not None and decoder.slot is not None:
                shape, dtype = decoder.slot
                total += len(values) * math.prod(shape) * np.dtype(dtype).itemsize
            elif decoder is not None and decoder.is_image:
                total += _IMAGE_GROWTH * encoded
        return total


def complete_all(parts: Sequence[Rows], memory: BatchMemory | None = None) -> list[Rows]:
    """``Rows.complete`` of each, asking once for all whether the files that they are mapped from are as they were.

    Raises:
        ObjectChangedError, NotFoundError: one of the files is not.
    """
    late = [each for rows in parts for each in rows.late]
    files = {id(file): file for each in late for file in each.mapped()}.values()  # those of a span are of one list
    places = [each.at for each in late if each.at is not None]
    values = sum(len(rows.ids) * len(rows.late) for rows in parts)
    is_little = len(places) == len(late) and sum(at.nbytes for at in places) < _LEAST_LOOK_BYTES * len(files)
    with looking_at(files, values, in_vain=values if is_little else 0):
        made = make_all([rows.late for rows in parts], memory)
    return [rows._with(fields) for rows, fields in zip(parts, made, strict=True)]


def _cut(values: Values, start: int, stop: int) -> Values:
    return values.cut(start, stop) if isinstance(values, Ragged) else values[start:stop]


def _pick(values: Values, rows: Sequence[int]) -> Values:
    if isinstance(values, ByteViews):
        return values.pick(rows)
    if isinstance(values, Ragged):
        return values.take(np.asarray(rows, np.int64))
    return values[list(rows)] if isinstance(values, np.ndarray) else [copy_value(values[i]) for i in rows]


def copy_value(value: Any) -> Any:
    """Copy an array, a tensor, or a list, tuple, dict, set or bytearray, with all of these in it; others stay."""
    torch = sys.modules.get("torch")  # who has no tensors need not wait for it
    if isinstance(value, np.ndarray):
        return value.copy()
    if torch is not None and isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(map(copy_value, value))
    if type(value) is dict:
        return copy_sample(value)
    return type(value)(value) if type(value) in (set, bytearray) else value


def copy_sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a sample by ``copy_value`` of each field."""
    return {name: copy_value(value) for name, value in sample.items()}


def explain_row_error(error: RowError, rows: Rows, manifest: Manifest) -> Exception:
    """Make the error that users see: ours name the sample; those of a transform keep their type and get a note."""
    where, cause = describe_row(error.row, rows, manifest), error.cause
    if error.step != "transform" and isinstance(cause, DecodeError | ConfigError):
        kind = DecodeError if isinstance(cause, DecodeError) else ConfigError
        explained: Exception = kind(f"{where}: {cause}")
        explained.__cause__ = cause
        return explained
    cause.add_note(f"in {'transform=' if error.step == 'transform' else 'decoding'} of {where}")
    return cause


def describe_row(row: int, rows: Rows, manifest: Manifest) -> str:
    """Describe a row's sample for people: its id, its place in its shard, and its key where it has one."""
    sample_id = int(rows.ids[row])
    shard, number = manifest.shard_of(sample_id)
    key = rows.fields.get(KEY_COLUMN)
    named = f", key {key[row]!r}" if key is not None else ""
    return f"{manifest.name_sample(sample_id)} (number {number} of {shard}{named})"
