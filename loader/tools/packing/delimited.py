"""CSV files as samples: a row is a sample."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.csv

from ....storage import ByteRange, ObjectInfo, Store
from ...errors import DatasetError, FormatError
from .source import Batch

_BLOCK_BYTES = 16 << 20  # the first block settles the types
_READ_BYTES = 8 << 20


class CsvSource:
    """The rows of CSV files with a header, as record batches; Arrow finds the types in the first 16 MiB of each."""

    def __init__(self, store: Store, listing: Sequence[ObjectInfo]) -> None:
        if not listing:
            raise DatasetError(f"{store.url}: holds no CSV files")
        self._store = store
        self._files = listing
        self.total = None
        self.identity: Any = ["csv", [[info.key, info.size, info.etag] for info in listing]]
        self.has_members = False
        self.hints: Mapping[str, pa.DataType] = {}
        self.classes: tuple[str, ...] = ()
        self.notes: Sequence[str] = ()

    def batches(self, first_piece: int = 0) -> Iterator[Batch]:
        for piece in range(first_piece, len(self._files)):
            for batch in self._read(self._files[piece]):
                yield Batch(piece, batch)

    def _read(self, info: ObjectInfo) -> Iterator[pa.RecordBatch]:
        raw = io.BufferedReader(_ObjectFile(self._store, info), _READ_BYTES)
        try:
            stream: Any = gzip.GzipFile(fileobj=raw) if info.key.lower().endswith(".gz") else raw
            options = pyarrow.csv.ReadOptions(block_size=_BLOCK_BYTES)
            yield from pyarrow.csv.open_csv(stream, read_options=options)
        except (pa.ArrowException, EOFError, gzip.BadGzipFile) as exc:
            raise FormatError(f"{self._store.url}/{info.key}", f"cannot be read as a table: {exc}") from exc

    def before(self, piece: int) -> int:
        return 0

    def close(self) -> None:
        self._store.close()


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
