"""Parquet and Arrow shards: columns, written from record batches or from rows."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pyarrow.types as pt

from ...loader.errors import DatasetError
from ...loader.formats.arrow.columns import describe_type
from ...loader.formats.shard import CHUNK_BYTES
from .exact_arrays import InexactError, is_kin, to_array
from .values import arrow_value
from .writer import SampleWriter, Shard

_MOST_AXES = 8
_ROW_GROUP_ROWS = 65_536
_TABLE_ROWS = 256


class TableWriter(SampleWriter):
    """Takes dicts, or record batches of many samples; cuts them into groups of about a chunk's size.

    A record batch, or the first rows, determine the schema; ``hints`` are types that the source knows. Where the first
    rows have arrays of one shape and dtype, the column is of lists of one length, which readers make tensors of. With
    ``is_whole`` rows are as the source has them, so that a column of it that the first ones lack comes later.
    """

    suffix: str
    takes_batches = True

    def __init__(
        self, shard_bytes: int, hints: Mapping[str, pa.DataType] | None = None, *, is_whole: bool = True
    ) -> None:
        super().__init__()
        self._shard_bytes = shard_bytes
        self._hints = dict(hints or {})
        self._is_whole = is_whole
        self._group_bytes = min(CHUNK_BYTES, shard_bytes)
        self._schema: pa.Schema | None = None
        self._rows: list[dict[str, Any]] = []
        self._shapes: dict[str, set[ArrayShape | None]] = {}  # of the first rows
        self._tables: list[pa.Table] = []
        self._written = 0
        self._sink: io.BytesIO | None = None
        self._writer: Any = None

    def _open(self, sink: io.BytesIO, schema: pa.Schema) -> Any:
        raise NotImplementedError

    def _write(self, table: pa.Table) -> None:
        raise NotImplementedError

    def resume(self, state: Mapping[str, Any], units: int) -> None:
        super().resume(state, units)
        self._written = units
        self._schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(state["schema"])))

    def units(self, item: Any) -> int:
        return int(item.num_rows) if isinstance(item, pa.RecordBatch) else 1

    def rest(self, item: Any, units: int) -> Any:
        return item.slice(units) if isinstance(item, pa.RecordBatch) else item

    def add(self, item: Any) -> list[Shard]:
        if isinstance(item, pa.RecordBatch):
            full = self._add_table(self._take_rows()) if self._rows else []
            self.added += item.num_rows
            return full + self._add_table(self._fit(pa.Table.from_batches([_without_views(item)])))
        if not isinstance(item, Mapping):
            raise DatasetError(f"sample {self.added} is a {type(item).__name__}; tables need dicts")
        if self._schema is None:
            for name, value in item.items():
                if value is not None:
                    self._shapes.setdefault(str(name), set()).add(array_shape(value))
        self._rows.append({str(name): arrow_value(value) for name, value in item.items()})
        self.added += 1
        return self._add_table(self._take_rows()) if len(self._rows) >= _TABLE_ROWS else []

    def finish(self) -> list[Shard]:
        full = self._add_table(self._take_rows()) if self._rows else []
        if self._tables:
            self._write_group()
        return full + self._close_shard()

    def _take_rows(self) -> pa.Table:
        rows, self._rows = self._rows, []
        names = list(dict.fromkeys(name for row in rows for name in row))
        first, last = self.added - len(rows), self.added - 1
        if self._schema is not None and (unknown := sorted(set(names) - set(self._schema.names))):
            raise DatasetError(
                f"samples {first} to {last} have the fields {unknown}, which the first {_TABLE_ROWS} lack; "
                "all samples need the same fields (use None where there is no value)"
            )
        if self._schema is not None:
            fields = [(field.name, field.type) for field in self._schema]
        else:
            names += [name for name in self._hints if name not in names] if self._is_hinted(names) else []
            fields = [(name, self._hints.get(name) or self._fixed_type(name)) for name in names]
        columns = {name: self._array(name, [row.get(name) for row in rows], kind, first) for name, kind in fields}
        return self._fit(pa.table(columns))

    def _fixed_type(self, name: str) -> pa.DataType | None:
        shapes = self._shapes.get(name, set())
        shape = next(iter(shapes)) if len(shapes) == 1 else None
        return None if shape is None else shape.arrow_type

    def _is_hinted(self, names: list[str]) -> bool:
        """Return whether the rows are the source's, which may gain columns later."""
        return self._is_whole and set(names) <= set(self._hints)

    def _array(self, name: str, values: list[Any], kind: pa.DataType | None, first: int) -> pa.Array:
        """A column of samples from number ``first`` on; until there is a schema, ``kind`` is only what was hinted."""
        stacked = None if kind is None else stack_arrays(values, kind)
        if stacked is not None:
            return stacked
        values = [value.tolist() if isinstance(value, np.ndarray) and value.ndim != 1 else value for value in values]
        try:
            try:
                return to_array(values, kind)
            except (pa.ArrowException, OverflowError, TypeError, ValueError):
                if self._schema is not None or kind is None:
                    raise
                return to_array(values)  # a function has changed the column's type
        except InexactError as exc:
            raise DatasetError(
                f"sample {first + exc.row}, field {name!r}: does not fit the column of earlier samples: {exc}; give "
                "all samples values of one type"
            ) from exc
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as exc:
            last = first + len(values) - 1
            raise DatasetError(
                f"samples {first} to {last}, field {name!r}: do not fit one column, that of earlier samples: {exc}; "
                "give all samples values of one type"
            ) from exc

    def _fit(self, table: pa.Table) -> pa.Table:
        if self._schema is None:
            empty = [field.name for field in table.schema if pa.types.is_null(field.type)]
            if empty:
                raise DatasetError(f"the fields {empty} have no value in the first {len(table)} samples; drop them")
            self._schema = table.schema
            return table
        if table.schema.equals(self._schema):
            return table
        if set(table.schema.names) != set(self._schema.names):
            raise DatasetError(
                f"rows {self.added - len(table)} to {self.added - 1} have the columns {table.schema.names}, earlier "
                f"ones {self._schema.names}; pack them as two data sets, or make them alike with a map"
            )
        where = f"rows {self.added - len(table)} to {self.added - 1}"
        for field in self._schema:
            found = table.schema.field(field.name).type
            if not is_kin(found, field.type):
                raise DatasetError(
                    f"{where} have {found} in column {field.name!r}, earlier ones {field.type}; make them alike with "
                    "a map"
                )
        try:
            return table.select(self._schema.names).cast(self._schema)
        except (pa.ArrowException, ValueError) as exc:
            raise DatasetError(f"{where} do not fit the columns of earlier ones: {exc}") from exc

    def _add_table(self, table: pa.Table) -> list[Shard]:
        full: list[Shard] = []
        rows = max(1, -(-len(table) * self._group_bytes // max(1, table.nbytes)))
        for first in range(0, len(table), rows):
            self._tables.append(table.slice(first, rows))
            held = sum(part.nbytes for part in self._tables)
            if held >= self._group_bytes or sum(map(len, self._tables)) >= _ROW_GROUP_ROWS:
                self._write_group()
                if self._sink is not None and self._sink.tell() >= self._shard_bytes:
                    full += self._close_shard()
        return full

    def _write_group(self) -> None:
        assert self._schema is not None
        table = pa.concat_tables(self._tables)
        try:
            if self._writer is None:
                self._sink = io.BytesIO()
                self._writer = self._open(self._sink, self._schema)
            self._write(table)
        except pa.ArrowException as exc:
            first, last = self._written, self._written + len(table) - 1
            raise DatasetError(
                f"samples {first} to {last} cannot be written to {self.suffix} shards ({exc}); change them with map="
            ) from exc
        self._written += len(table)
        self._tables = []

    def _close_shard(self) -> list[Shard]:
        if self._writer is None or self._sink is None:
            return []
        self._writer.close()
        data = self._sink.getvalue()
        self._sink = self._writer = None
        assert self._schema is not None
        schema = base64.b64encode(self._schema.serialize().to_pybytes()).decode()
        return [Shard(data, self._written, {"schema": schema})]


def _without_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with dictionaries of text and bytes, not of views of them (Polars'), which pyarrow does not decode."""
    for place, column in enumerate(batch.columns):
        value = column.type.value_type if pt.is_dictionary(column.type) else None
        if value is not None and (pt.is_string_view(value) or pt.is_binary_view(value)):
            values = column.dictionary.cast(pa.large_string() if pt.is_string_view(value) else pa.large_binary())
            plain = pa.DictionaryArray.from_arrays(column.indices, values, ordered=column.type.ordered)
            batch = batch.set_column(place, batch.schema.names[place], plain)
    return batch


def _parquet_kind(kind: pa.DataType) -> pa.DataType:
    """The type as which a column of times, or of vectors of them, comes back from Parquet."""
    if pt.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_parquet_kind(kind.value_type)), kind.list_size)
    if pt.is_timestamp(kind) and kind.unit == "s":
        return pa.timestamp("ms", kind.tz)
    if pt.is_date64(kind):
        return pa.date32()
    return pa.time32("ms") if kind == pa.time32("s") else kind


class ParquetWriter(TableWriter):
    """Parquet with zstd pages; a row group is a chunk, read by one GET."""

    suffix = ".parquet"

    def notes(self) -> list[str]:
        kinds = {field.name: field.type for field in self._schema or ()}
        return [
            f"column {name!r} is converted to {describe_type(found)}, since Parquet has no {describe_type(kind)}"
            for name, kind in kinds.items()
            if (found := _parquet_kind(kind)) != kind
        ]

    def _open(self, sink: io.BytesIO, schema: pa.Schema) -> Any:
        return pyarrow.parquet.ParquetWriter(sink, schema, compression="zstd")

    def _write(self, table: pa.Table) -> None:
        self._writer.write_table(table, row_group_size=len(table))


class ArrowWriter(TableWriter):
    """Arrow IPC files, not compressed, so that batches are read in place; a record batch is a chunk."""

    suffix = ".arrow"

    def _fit(self, table: pa.Table) -> pa.Table:
        fitted = TableWriter._fit(self, table)
        if any(pa.types.is_dictionary(field.type) for field in fitted.schema):
            # A file can hold one dictionary a column; batches come with their own.
            plain = [
                field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
                for field in fitted.schema
            ]
            self._schema = pa.schema(plain, metadata=fitted.schema.metadata)
            fitted = fitted.cast(self._schema)
        return fitted

    def _open(self, sink: io.BytesIO, schema: pa.Schema) -> Any:
        return pa.ipc.new_file(sink, schema)

    def _write(self, table: pa.Table) -> None:
        self._writer.write_table(table.combine_chunks())


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """Shape and dtype that arrays have in common."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def arrow_type(self) -> pa.DataType:
        """Lists of one length of such lists, down to numbers."""
        kind = pa.from_numpy_dtype(self.dtype)
        for size in reversed(self.shape):
            kind = pa.list_(kind, size)
        return kind


def array_shape(value: Any) -> ArrayShape | None:
    """The shape of an array of numbers or truth values that has some; None for all else."""
    is_plain = isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.isnative
    if not is_plain or not value.size or not 1 <= value.ndim <= _MOST_AXES:
        return None
    return ArrayShape(value.shape, value.dtype)


def stack_arrays(values: Sequence[Any], kind: pa.DataType) -> pa.Array | None:
    """The arrays of n samples, (n, ...) once stacked, as a column of lists of one length; None if they do not fit."""
    sizes, leaf = [], kind
    while pt.is_fixed_size_list(leaf):
        sizes.append(leaf.list_size)
        leaf = leaf.value_type
    if not sizes or any(not isinstance(value, np.ndarray) or value.shape != tuple(sizes) for value in values):
        return None
    stacked = np.stack(values)
    if pa.from_numpy_dtype(stacked.dtype) != leaf:
        return None
    array = pa.array(stacked.reshape(-1))
    for size in reversed(sizes):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array
