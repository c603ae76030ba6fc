"""Writers of shards, one class per format: each turns a stream of samples into the bytes of one shard after another."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from ..columns import KEY_COLUMN
from ..errors import ConfigError, DatasetError
from .pack_sources import Sample

# A row group is a chunk, read by one GET: about as large as the chunks of other formats.
_ROW_GROUP_BYTES = 4 << 20
_ROW_GROUP_ROWS = 65_536
_TABLE_ROWS = 256


class ShardWriter(Protocol):
    """Takes samples; returns the shards that they filled, and at the end what is left."""

    suffix: str

    def add(self, sample: Any) -> list[bytes]: ...

    def finish(self) -> list[bytes]: ...

    @property
    def dropped(self) -> str | None:
        """What did not fit into a shard and was dropped, in words; None if nothing was."""
        ...


class TarWriter:
    """WebDataset tar: members ``key.field``; a sample without a ``__key__`` gets its ordinal as key."""

    suffix = ".tar"
    dropped = None

    def __init__(self, shard_bytes: int) -> None:
        self._shard_bytes = shard_bytes
        self._count = 0
        self._last_key = ""
        self._buffer = io.BytesIO()
        self._tar = self._new_tar()

    def _new_tar(self) -> tarfile.TarFile:
        self._buffer = io.BytesIO()
        return tarfile.open(fileobj=self._buffer, mode="w", format=tarfile.PAX_FORMAT)

    def add(self, sample: Any) -> list[bytes]:
        if not isinstance(sample, Mapping):
            raise DatasetError(f"sample {self._count} is a {type(sample).__name__}; tar shards need dicts")
        key = str(sample.get(KEY_COLUMN, f"{self._count:09d}"))
        if not key or "." in key.rpartition("/")[2]:
            raise DatasetError(f"sample {self._count} has the key {key!r}; a key must not have a dot in its last part")
        if key == self._last_key:
            raise DatasetError(f"sample {self._count} has the key {key!r} of the one before it; keys must be unique")
        fields = {name: value for name, value in sample.items() if name != KEY_COLUMN and value is not None}
        if not fields:
            raise DatasetError(f"sample {self._count} ({key}) has no fields")
        members = [(f"{key}.{name}", encode_field(name, value, key)) for name, value in fields.items()]
        size = sum(1024 + len(data) for _, data in members)
        full: list[bytes] = []
        if self._buffer.tell() and self._buffer.tell() + size > self._shard_bytes:
            full = self.finish()
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            self._tar.addfile(member, io.BytesIO(data))
        self._count += 1
        self._last_key = key
        return full

    def finish(self) -> list[bytes]:
        if not self._buffer.tell():
            return []
        self._tar.close()
        data = self._buffer.getvalue()
        self._tar = self._new_tar()
        return [data]


def encode_field(name: str, value: Any, key: str) -> bytes:
    """Encode a field's value as the bytes of a tar member, by the extension of the field's name.

    bytes are kept, str becomes UTF-8, numbers are written as text; ``.npy`` takes arrays, ``.json`` any JSON value.
    """
    kind = name.rpartition(".")[2]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if kind == "json":
        try:
            return json.dumps(value, ensure_ascii=False).encode()
        except (TypeError, ValueError) as exc:
            raise DatasetError(f"sample {key!r}, field {name!r}: {exc}") from exc
    if kind == "npy":
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise DatasetError(f"sample {key!r}, field {name!r}: an array of Python objects; use an array of numbers")
        sink = io.BytesIO()
        np.save(sink, array, allow_pickle=False)
        return sink.getvalue()
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bool, int, float, np.integer, np.floating)):
        return str(value.item() if isinstance(value, np.generic) else value).encode()
    raise DatasetError(
        f"sample {key!r}, field {name!r}: cannot write a {type(value).__name__}; use bytes or str, "
        "or a field name that ends in .json or .npy"
    )


class ParquetWriter:
    """Parquet with zstd pages and row groups of a chunk's size; takes dicts, or record batches of many samples.

    The first rows determine the schema.
    """

    suffix = ".parquet"
    dropped = None

    def __init__(self, shard_bytes: int) -> None:
        self._shard_bytes = shard_bytes
        self._group_bytes = min(_ROW_GROUP_BYTES, shard_bytes)
        self._schema: pa.Schema | None = None
        self._rows: list[dict[str, Any]] = []
        self._tables: list[pa.Table] = []
        self._count = 0
        self._sink: io.BytesIO | None = None
        self._writer: Any = None

    def add(self, sample: Any) -> list[bytes]:
        if isinstance(sample, pa.RecordBatch):
            self._count += sample.num_rows
            return self._add_table(self._fit(pa.Table.from_batches([sample])))
        if not isinstance(sample, Mapping):
            raise DatasetError(f"sample {self._count} is a {type(sample).__name__}; Parquet shards need dicts")
        self._rows.append({name: _plain(value) for name, value in sample.items()})
        self._count += 1
        return self._add_table(self._take_rows()) if len(self._rows) >= _TABLE_ROWS else []

    def finish(self) -> list[bytes]:
        full = self._add_table(self._take_rows()) if self._rows else []
        if self._tables:
            self._write_group()
        return full + self._close_shard()

    def _take_rows(self) -> pa.Table:
        rows, self._rows = self._rows, []
        names = list(dict.fromkeys(name for row in rows for name in row))
        first = self._count - len(rows)
        if self._schema is not None and (unknown := sorted(set(names) - set(self._schema.names))):
            raise DatasetError(
                f"samples {first} to {self._count - 1} have the fields {unknown}, which the first {_TABLE_ROWS} lack; "
                "all samples need the same fields (use None where there is no value)"
            )
        try:
            if self._schema is not None:
                return pa.Table.from_pylist(rows, schema=self._schema)
            return self._fit(pa.table({name: pa.array([row.get(name) for row in rows]) for name in names}))
        except (pa.ArrowException, OverflowError, TypeError) as exc:
            raise DatasetError(
                f"samples {first} to {self._count - 1} do not fit the columns of earlier samples: {exc}"
            ) from exc

    def _fit(self, table: pa.Table) -> pa.Table:
        if self._schema is None:
            empty = [field.name for field in table.schema if pa.types.is_null(field.type)]
            if empty:
                raise DatasetError(f"the fields {empty} have no value in the first {len(table)} samples; drop them")
            self._schema = table.schema
        return table

    def _add_table(self, table: pa.Table) -> list[bytes]:
        full: list[bytes] = []
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
        if self._writer is None:
            self._sink = io.BytesIO()
            self._writer = pyarrow.parquet.ParquetWriter(self._sink, self._schema, compression="zstd")
        table = pa.concat_tables(self._tables)
        self._writer.write_table(table, row_group_size=len(table))
        self._tables = []

    def _close_shard(self) -> list[bytes]:
        if self._writer is None or self._sink is None:
            return []
        self._writer.close()
        data = self._sink.getvalue()
        self._sink = self._writer = None
        return [data]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value if value.ndim == 1 else value.tolist()
    return value.item() if isinstance(value, np.generic) else value


class TokensWriter:
    """Raw little-endian tokens, one text after another; every shard holds whole sequences."""

    suffix = ".bin"

    def __init__(
        self,
        shard_bytes: int,
        *,
        seq_len: int,
        dtype: str,
        tokenizer: Callable[[str], Sequence[int]] | None,
        field: str | None,
    ) -> None:
        if dtype not in ("uint16", "uint32"):
            raise ConfigError(f"dtype={dtype!r}: packed tokens are uint16 or uint32")
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._limit = np.iinfo(dtype).max
        self._seq_len = seq_len
        self._shard_tokens = max(1, shard_bytes // self._dtype.itemsize // seq_len) * seq_len
        self._tokenizer = tokenizer
        self._field = field
        self._count = 0
        self._held: list[np.ndarray[Any, Any]] = []
        self._held_tokens = 0
        self._dropped = 0

    @property
    def dropped(self) -> str | None:
        if not self._dropped:
            return None
        return f"the last {self._dropped} tokens, which do not fill a sequence of {self._seq_len}"

    def add(self, sample: Any) -> list[bytes]:
        tokens = self._tokens(sample)
        self._count += 1
        self._held.append(tokens)
        self._held_tokens += len(tokens)
        full = []
        while self._held_tokens >= self._shard_tokens:
            full.append(self._take(self._shard_tokens))
        return full

    def finish(self) -> list[bytes]:
        whole = self._held_tokens // self._seq_len * self._seq_len
        last = [self._take(whole)] if whole else []
        self._dropped = self._held_tokens
        return last

    def _take(self, tokens: int) -> bytes:
        run = np.concatenate(self._held) if len(self._held) > 1 else self._held[0]
        self._held = [run[tokens:]]
        self._held_tokens = len(run) - tokens
        return run[:tokens].tobytes()

    def _tokens(self, sample: Any) -> np.ndarray[Any, Any]:
        value = sample
        if isinstance(sample, Mapping):
            value = self._pick(sample)
        if isinstance(value, (bytes, bytearray)):
            try:
                value = value.decode()
            except UnicodeDecodeError as exc:
                raise DatasetError(f"sample {self._count} is not UTF-8 text ({exc}); use text or integers") from exc
        if isinstance(value, str):
            if self._tokenizer is None:
                raise ConfigError("the samples are text; give tokenizer=, a function from str to a list of integers")
            value = self._tokenizer(value)
        array = np.asarray(value)
        if array.size == 0:
            return np.empty(0, self._dtype)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DatasetError(
                f"sample {self._count} is {array.dtype} of shape {array.shape}; tokens must be a list of integers"
            )
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > self._limit:
            raise DatasetError(
                f"sample {self._count} has token {low if low < 0 else high}, which {self._dtype.name} cannot hold"
                + ("; use dtype='uint32'" if low >= 0 and high < 1 << 32 else "")
            )
        return array.astype(self._dtype)

    def _pick(self, sample: Sample) -> Any:
        if self._field is not None:
            if self._field not in sample:
                raise DatasetError(f"sample {self._count} has no field {self._field!r}; it has {sorted(sample)}")
            return sample[self._field]
        names = [name for name in sample if name != KEY_COLUMN]
        for name in ("tokens", "input_ids", "text", "txt"):
            if name in names:
                return sample[name]
        raise ConfigError(
            f"sample {self._count} has the fields {sorted(names)}; name the one with the text with field="
        )
