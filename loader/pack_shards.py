"""Samples into shards: one small class a format, each turning samples into the bytes of one shard after another."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from .errors import ConfigError, DatasetError
from .pack_sources import KEY_FIELD, Sample

# A row group is a chunk: read by one GET, and of one order of size with the chunks of other formats.
_ROW_GROUP_BYTES = 4 << 20
_ROW_GROUP_ROWS = 65_536
_SAMPLED_ROWS = 64


class ShardWriter(Protocol):
    """Takes samples; hands out a shard's bytes when one is full, and the last one at the end."""

    suffix: str

    def add(self, sample: Any) -> bytes | None: ...

    def finish(self) -> bytes | None: ...

    @property
    def dropped(self) -> str | None:
        """What was left over and is in no shard, in words."""
        ...


class TarWriter:
    """WebDataset tar: members ``key.field``; without a ``__key__`` the sample's ordinal is its key."""

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

    def add(self, sample: Any) -> bytes | None:
        if not isinstance(sample, Mapping):
            raise DatasetError(f"sample {self._count} is a {type(sample).__name__}; tar shards are made of dicts")
        key = str(sample.get(KEY_FIELD, f"{self._count:09d}"))
        if not key or "." in key.rpartition("/")[2]:
            raise DatasetError(f"sample {self._count} has the key {key!r}; a key has no dot in its last part")
        if key == self._last_key:
            raise DatasetError(f"sample {self._count} has the key {key!r} of the one before it; keys are unique")
        fields = {name: value for name, value in sample.items() if name != KEY_FIELD and value is not None}
        if not fields:
            raise DatasetError(f"sample {self._count} ({key}) has no fields")
        members = [(f"{key}.{name}", encode_field(name, value, key)) for name, value in fields.items()]
        size = sum(1024 + len(data) for _, data in members)
        full = None
        if self._buffer.tell() and self._buffer.tell() + size > self._shard_bytes:
            full = self.finish()
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            self._tar.addfile(member, io.BytesIO(data))
        self._count += 1
        self._last_key = key
        return full

    def finish(self) -> bytes | None:
        if not self._buffer.tell():
            return None
        self._tar.close()
        data = self._buffer.getvalue()
        self._tar = self._new_tar()
        return data


def encode_field(name: str, value: Any, key: str) -> bytes:
    """A field's value as the bytes of a tar member, by the last part of its name.

    bytes stay, str is UTF-8; numbers are written as text; ``.npy`` takes arrays and ``.json`` anything that JSON has.
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
            raise DatasetError(f"sample {key!r}, field {name!r}: an array of Python objects; give numbers")
        sink = io.BytesIO()
        np.save(sink, array, allow_pickle=False)
        return sink.getvalue()
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bool, int, float, np.integer, np.floating)):
        return str(value.item() if isinstance(value, np.generic) else value).encode()
    raise DatasetError(
        f"sample {key!r}, field {name!r}: cannot write a {type(value).__name__}; give bytes or str, "
        "or name the field .json or .npy"
    )


class ParquetWriter:
    """Parquet with zstd pages and row groups of a chunk's size; the first rows fix the schema."""

    suffix = ".parquet"
    dropped = None

    def __init__(self, shard_bytes: int) -> None:
        self._shard_bytes = shard_bytes
        self._schema: pa.Schema | None = None
        self._rows: list[dict[str, Any]] = []
        self._group_rows = _SAMPLED_ROWS
        self._count = 0
        self._sink: io.BytesIO | None = None
        self._writer: Any = None

    def add(self, sample: Any) -> bytes | None:
        if not isinstance(sample, Mapping):
            raise DatasetError(f"sample {self._count} is a {type(sample).__name__}; parquet shards are made of dicts")
        self._rows.append({name: _plain(value) for name, value in sample.items()})
        self._count += 1
        if len(self._rows) < self._group_rows:
            return None
        if self._group_rows == _SAMPLED_ROWS:
            # The first rows are the measure: how many of the like fill a row group?
            row_bytes = max(1, self._table().nbytes // _SAMPLED_ROWS)
            group_bytes = min(_ROW_GROUP_BYTES, self._shard_bytes)
            self._group_rows = max(_SAMPLED_ROWS + 1, min(_ROW_GROUP_ROWS, group_bytes // row_bytes))
            if len(self._rows) * row_bytes < group_bytes:
                return None
        self._write_group()
        return self._close_shard() if self._sink is not None and self._sink.tell() >= self._shard_bytes else None

    def finish(self) -> bytes | None:
        if self._rows:
            self._write_group()
        return self._close_shard()

    def _table(self) -> pa.Table:
        try:
            table = pa.Table.from_pylist(self._rows, schema=self._schema)
        except (pa.ArrowException, OverflowError, TypeError) as exc:
            first = self._count - len(self._rows)
            raise DatasetError(
                f"samples {first} to {self._count - 1} do not fit the columns of those before them: {exc}"
            ) from exc
        if self._schema is not None:
            unknown = {name for row in self._rows for name in row} - set(self._schema.names)
            if unknown:
                raise DatasetError(
                    f"a sample before number {self._count} has the fields {sorted(unknown)}, which the first "
                    f"{_SAMPLED_ROWS} lack; give every sample the same fields (None where there is no value)"
                )
        return table

    def _write_group(self) -> None:
        table = self._table()
        if self._schema is None:
            empty = [field.name for field in table.schema if pa.types.is_null(field.type)]
            if empty:
                raise DatasetError(
                    f"the fields {empty} have no value in the first {len(self._rows)} samples; drop them"
                )
            self._schema = table.schema
        if self._writer is None:
            self._sink = io.BytesIO()
            self._writer = pyarrow.parquet.ParquetWriter(self._sink, self._schema, compression="zstd")
        self._writer.write_table(table, row_group_size=len(table))
        self._rows = []

    def _close_shard(self) -> bytes | None:
        if self._writer is None or self._sink is None:
            return None
        self._writer.close()
        data = self._sink.getvalue()
        self._sink = self._writer = None
        return data


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value if value.ndim == 1 else value.tolist()
    return value.item() if isinstance(value, np.generic) else value


class TokensWriter:
    """Raw little-endian tokens, one text after the other; every shard but the last holds whole sequences."""

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

    def add(self, sample: Any) -> bytes | None:
        tokens = self._tokens(sample)
        self._count += 1
        self._held.append(tokens)
        self._held_tokens += len(tokens)
        return self._take(self._shard_tokens) if self._held_tokens >= self._shard_tokens else None

    def finish(self) -> bytes | None:
        """The next shard of what is held; called until it gives None."""
        whole = min(self._held_tokens, self._shard_tokens) // self._seq_len * self._seq_len
        if not whole:
            self._dropped = self._held_tokens
            return None
        return self._take(whole)

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
                raise DatasetError(f"sample {self._count} is no UTF-8 text ({exc}); give text or integers") from exc
        if isinstance(value, str):
            if self._tokenizer is None:
                raise ConfigError("the samples are text: give tokenizer=, a callable from str to integers")
            value = self._tokenizer(value)
        array = np.asarray(value)
        if array.size == 0:
            return np.empty(0, self._dtype)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DatasetError(
                f"sample {self._count} is {array.dtype} of shape {array.shape}; tokens are a list of integers"
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
        names = [name for name in sample if name != KEY_FIELD]
        for name in ("tokens", "input_ids", "text", "txt"):
            if name in names:
                return sample[name]
        raise ConfigError(f"sample {self._count} has the fields {sorted(names)}; say which holds the text with field=")


def finish_all(writer: ShardWriter) -> Iterator[bytes]:
    while (data := writer.finish()) is not None:
        yield data
