"""CSV files as samples: a row is a sample."""

from __future__ import annotations

import gzip
import io
import re
import reprlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from ...loader.errors import DatasetError, FormatError
from ...storage import ByteRange, ObjectInfo, Store
from ...storage.threads.daemon_pool import DaemonPool
from .csv_types import (
    BLOCK_BYTES,
    HEAD_BYTES,
    OddIntegerError,
    find_decimal_commas,
    find_types,
    merge_types,
    open_rows,
    to_integers,
)
from .dialect import Dialect, find_dialect
from .samples import Batch, SourceOptions

_READ_BYTES = 8 << 20
_THREADS = 4  # that look at the first bytes of files
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_COLUMN = re.compile(r"In CSV column #(\d+)")
_STRADDLES = "straddling object"
_MISFIT = "CSV conversion error"
_SETTLED = f"the first {BLOCK_BYTES >> 20} MiB of each file settle what a column holds"


class CsvSource:
    """The rows of CSV files with a header, as record batches. Each file may have a delimiter of its own.

    A column has one type over all files, which the first 16 MiB of each settle.
    """

    def __init__(self, store: Store, listing: Sequence[ObjectInfo], options: SourceOptions) -> None:
        if not listing:
            raise DatasetError(f"{store.url}: holds no CSV files")
        self._store = store
        self._files = listing
        self._given = options.delimiter, options.decimal_point
        self._dialects: dict[str, Dialect] = {}
        self.total = None
        self.identity: Any = ["csv", [[info.key, info.size, info.etag] for info in listing]]
        self.identity += [list(self._given)] if any(self._given) else []
        self.has_members = False
        self.hints: Mapping[str, pa.DataType] = {}
        self.classes = options.classes or ()
        self.notes: Sequence[str] = ()  # complete once rows were read

    def batches(self, first_piece: int = 0) -> Iterator[Batch]:
        types = self._settle_types()
        for piece in range(first_piece, len(self._files)):
            for batch in self._read(self._files[piece], types):
                yield Batch(piece, batch)

    def _settle_types(self) -> dict[str, pa.DataType]:
        types: dict[str, pa.DataType] = {}
        notes: dict[str, str] = {}
        with DaemonPool("penstock-csv", _THREADS) as pool:
            for info, looked in [(info, pool.submit(self._look, info)) for info in self._files]:
                self._dialects[info.key], found, kept, commas = looked.result()
                for name, kind in found.items():
                    types[name] = merge_types(types[name], kind) if name in types else kind
                for name, text in kept.items():
                    note = f"column {name!r} is kept as text: a number would change {reprlib.repr(text)}"
                    notes.setdefault(name, note)
                for name, text in commas.items():
                    note = (
                        f"column {name!r} is kept as text, with values like {text!r}; if the comma is a decimal point, "
                    )
                    notes.setdefault(name, note + "give decimal_point=',' (--decimal-point ,)")
        for name, kind in types.items():
            if pt.is_binary(kind):
                notes[name] = f"column {name!r} is not UTF-8, so its values are bytes"
        self.notes = list(notes.values())
        return types

    def _look(self, info: ObjectInfo) -> tuple[Dialect, dict[str, pa.DataType], dict[str, str], dict[str, str]]:
        """The dialect of a file, the types of its columns, and of those that stay text a value that says why."""
        with self._translated(info):
            head = self._open(info).read(HEAD_BYTES)
            if head.startswith(_UTF16):
                raise ValueError("it is UTF-16; write it as UTF-8")
            dialect = find_dialect(head, info.key, *self._given)
            types, kept = find_types(head, dialect)
            return dialect, types, kept, find_decimal_commas(head, dialect, types)

    def _open(self, info: ObjectInfo) -> Any:
        raw = io.BufferedReader(_ObjectFile(self._store, info), _READ_BYTES)
        return gzip.GzipFile(fileobj=raw) if info.key.lower().endswith(".gz") else raw

    def _read(self, info: ObjectInfo, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        integers = {name for name, kind in types.items() if pt.is_int64(kind)}
        asked = {name: pa.string() if name in integers else kind for name, kind in types.items()}
        names: list[str] = list(asked)
        before = 0
        with self._translated(info, names):
            reader = open_rows(self._open(info), self._dialects[info.key], asked)
            names[:] = reader.schema.names
            for batch in reader:
                yield _with_integers(batch, integers, before)
                before += batch.num_rows

    @contextmanager
    def _translated(self, info: ObjectInfo, names: Sequence[str] = ()) -> Iterator[None]:
        """Translate errors of reading a file into sentences that name it."""
        try:
            yield
        except (pa.ArrowException, ValueError, EOFError, gzip.BadGzipFile, zlib.error) as exc:
            problem = str(exc)
            if _STRADDLES in problem:
                problem = f"a row is longer than {BLOCK_BYTES >> 20} MiB, or a quote in it is never closed"
            if _MISFIT in problem:
                problem += f"; {_SETTLED}: correct the value, or move its row to the beginning"
            problem = _COLUMN.sub(lambda found: f"column {_name(names, int(found[1]))}", problem)
            raise FormatError(f"{self._store.url}/{info.key}", f"cannot be read as a table: {problem}") from exc

    def before(self, piece: int) -> int:
        return 0

    def close(self) -> None:
        self._store.close()


def _name(names: Sequence[str], number: int) -> str:
    return repr(names[number]) if number < len(names) else f"#{number}"


def _with_integers(batch: pa.RecordBatch, names: set[str], before: int) -> pa.RecordBatch:
    """Rows whose columns ``names`` are integers, out of their text. Raises ValueError for a value that is none."""
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns.append(to_integers(column) if name in names else column)
        except OddIntegerError as exc:
            raise ValueError(
                f"column {name!r} is one of integers, but holds {reprlib.repr(exc.text)} in row "
                f"{before + exc.row + 1} below the header; {_SETTLED}: correct the value, or move its row to the "
                "beginning, so that all are text"
            ) from exc
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


class _ObjectFile(io.RawIOBase):
    """An object as a file that is read from its beginning to its end."""

    def __init__(self, store: Store, info: ObjectInfo) -> None:
        super().__init__()
        self._store = store
        self._info = info
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self._at + len(view), self._info.size)
        if stop == self._at:
            return 0
        data = self._store.get(self._info.key, ByteRange(self._at, stop), etag=self._info.etag)
        view[: len(data)] = data
        self._at = stop
        return len(data)
