"""Data sets whose every value follows from its sample's id: whatever is delivered can be checked, at any time."""

from __future__ import annotations

import io
import itertools
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.loader import (
    ArrowFormat,
    JsonlFormat,
    MdsFormat,
    ParquetFormat,
    ShardFormat,
    TarFormat,
    TokensFormat,
    pack,
)
from penstock.loader.columns import AnyArray

# Larger than the least buffer that is used again.
_CHUNK_BYTES = 1_300_000
_SAMPLES = 1400
_SHARDS = 4
_WIDE, _NARROW, _SEQ = 512, 16, 512
_KEY_TOKENS = 4  # of a sequence's tokens, that tell it

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Known:
    """A data set in a folder, its format, and ``value(field, id)``: what a sample has, numbers as arrays."""

    name: str
    shard_format: ShardFormat
    value: Callable[[str, int], Any]
    samples: int

    def stored(self, field: str, sample_id: int) -> Any:
        """The bytes that are stored of what ``value`` says, for files in an archive."""
        value = self.value(field, sample_id)
        return value if field == "__key__" else _STORED[field](value)

    def find(self, sample: Values) -> int:
        """The id of a sample, by what it holds."""
        if "tokens" in sample:
            return _token_ids()[sample["tokens"][:_KEY_TOKENS].tobytes()]
        return int(sample["__key__"] if "__key__" in sample else sample["id"])


def _npy(values: AnyArray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


_STORED: Mapping[str, Callable[[Any], bytes]] = {
    "bin": bytes,
    "cls": lambda value: str(value).encode(),
    "json": lambda value: json.dumps(value).encode(),
    "npy": _npy,
    "txt": str.encode,
}


def words(sample_id: int, count: int, salt: int = 0) -> AnyArray:
    """(count,) uint32 that no other id, salt or place has, but by chance."""
    key = np.uint64((sample_id + 1) * 0x9E3779B97F4A7C15 + salt * 0xD1B54A32D192ED03 & (1 << 64) - 1)
    mixed: AnyArray = (np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)) ^ key
    mixed *= np.uint64(0x94D049BB133111EB)
    return (mixed >> np.uint64(32)).astype(np.uint32)


def blob(sample_id: int) -> bytes:
    return words(sample_id, 1200 + sample_id * 7919 % 2600).tobytes()


def floats(sample_id: int, count: int, salt: int) -> AnyArray:
    return (words(sample_id, count, salt) >> 9).astype(np.float32)


def text(sample_id: int) -> str:
    return f"sample {sample_id} " + "x" * (sample_id % 50)


def integers(sample_id: int, salt: int = 5) -> list[int]:
    return list(map(int, words(sample_id, 3 + sample_id % 20, salt) >> 4))


def meta(sample_id: int) -> dict[str, Any]:
    return {"id": sample_id, "list": integers(sample_id, 6)}


def _tar_value(field: str, sample_id: int) -> Any:
    if field == "npy":
        return floats(sample_id, _NARROW * 4, 1).reshape(_NARROW, 4)
    values = {"bin": blob, "cls": lambda i: i, "json": meta, "txt": text, "__key__": "{:06d}".format}
    return values[field](sample_id)


def _row_value(field: str, sample_id: int) -> Any:
    if field[0] in "fi" and field[1:].isdigit():
        salt = 10 + int(field[1:])
        if field[0] == "f":
            return floats(sample_id, 1, salt)[0]
        return np.int64(words(sample_id, 1, salt)[0]) - (1 << 31)
    values: dict[str, Callable[[int], Any]] = {
        "id": np.int64,
        "u16": lambda i: np.int64(words(i, 1, 4)[0] & 0xFFFF),
        "vec": lambda i: floats(i, _NARROW, 2),
        "wide": lambda i: words(i, _WIDE, 3).astype(np.int64),
        "arr": lambda i: words(i, 4 + i % 9, 7).astype(np.int64),
        "blob": blob,
        "text": text,
        "lst": integers,
        "meta": meta,
        "x": lambda i: np.float64(i) / 4,
    }
    return values[field](sample_id)


def _line_value(field: str, sample_id: int) -> Any:
    values: dict[str, Callable[[int], Any]] = {
        "id": int,
        "x": lambda i: i / 4,
        "text": lambda i: text(i) * 200,
        "lst": integers,
        "meta": meta,
    }
    return values[field](sample_id)


def _token_value(field: str, sample_id: int) -> AnyArray:
    return (words(sample_id, _SEQ, 8) & 0xFFFF).astype(np.int64)


@cache
def _token_ids() -> dict[bytes, int]:
    """Sample ids by their first tokens."""
    return {_token_value("tokens", i)[:_KEY_TOKENS].tobytes(): i for i in range(4 * _SAMPLES)}


def _table(ids: range) -> pa.Table:
    scalars = {f"f{n}": np.array([_row_value(f"f{n}", i) for i in ids]) for n in range(5)}
    scalars |= {f"i{n}": np.array([_row_value(f"i{n}", i) for i in ids]) for n in range(4)}
    vec = np.concatenate([_row_value("vec", i) for i in ids])
    wide = np.concatenate([words(i, _WIDE, 3) for i in ids])
    return pa.table(
        {
            "id": np.array(ids),
            **scalars,
            "u16": np.array([_row_value("u16", i) for i in ids], np.uint16),
            "vec": pa.FixedSizeListArray.from_arrays(pa.array(vec), _NARROW),
            "wide": pa.FixedSizeListArray.from_arrays(pa.array(wide), _WIDE),
            "blob": pa.array([blob(i) for i in ids], pa.binary()),
            "text": pa.array([text(i) for i in ids]),
            "lst": pa.array([integers(i) for i in ids], pa.list_(pa.int64())),
        }
    )


def _shards() -> list[range]:
    edges = np.linspace(0, _SAMPLES, _SHARDS + 1).astype(int).tolist()
    return [range(low, high) for low, high in itertools.pairwise(edges)]


def _write_tar(folder: Path) -> None:
    def samples() -> Any:
        for i in range(_SAMPLES):
            yield {"__key__": f"{i:06d}", **{name: of(_tar_value(name, i)) for name, of in _STORED.items()}}

    pack(samples(), folder, format="tar", shard_bytes=4 << 20, progress=False)


def _write_parquet(folder: Path) -> None:
    for number, ids in enumerate(_shards()):
        pq.write_table(_table(ids), folder / f"{number:02d}.parquet", row_group_size=110, compression="snappy")


def _write_arrow(folder: Path) -> None:
    for number, ids in enumerate(_shards()):
        table = _table(ids)
        with pa.ipc.new_file(folder / f"{number:02d}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=110)


def _write_jsonl(folder: Path) -> None:
    for number, ids in enumerate(_shards()):
        lines = (json.dumps({n: _line_value(n, i) for n in ("id", "x", "text", "lst", "meta")}) for i in ids)
        (folder / f"{number:02d}.jsonl").write_text("\n".join(lines) + "\n")


def _write_tokens(folder: Path) -> None:
    for number, ids in enumerate(_shards()):
        every = np.concatenate([_token_value("tokens", i) for i in range(4 * ids.start, 4 * ids.stop)])
        every.astype("<u2").tofile(folder / f"{number:02d}.bin")


def _write_mds(folder: Path) -> None:
    entries = []
    names = ["arr", "blob", "id", "text", "vec", "wide"]
    encodings = ["ndarray:int64", "bytes", "int", "str", f"ndarray:float32:{_NARROW}", f"ndarray:int64:{_WIDE}"]
    sizes = [None, None, 8, None, 4 * _NARROW, 8 * _WIDE]
    for number, ids in enumerate(_shards()):
        samples = []
        for i in ids:
            array = _row_value("arr", i)
            shaped = bytes([1 << 2 | 1]) + struct.pack("<H", len(array)) + array.tobytes()
            free = [shaped, blob(i), text(i).encode()]
            fixed = [struct.pack("<q", i), floats(i, _NARROW, 2).tobytes(), _row_value("wide", i).tobytes()]
            head = struct.pack("<III", *map(len, free))
            samples.append(head + free[0] + free[1] + fixed[0] + free[2] + fixed[1] + fixed[2])
        about = json.dumps({"column_names": names}).encode()
        first = 4 * (len(ids) + 2) + len(about)
        offsets = first + np.cumsum([0, *map(len, samples)])
        raw = struct.pack("<I", len(ids)) + offsets.astype("<u4").tobytes() + about + b"".join(samples)
        path = folder / f"shard.{number:05d}.mds"
        path.write_bytes(raw)
        entries.append(
            {
                "format": "mds",
                "samples": len(ids),
                "raw_data": {"basename": path.name, "bytes": len(raw), "hashes": {}},
                "zip_data": None,
                "column_names": names,
                "column_encodings": encodings,
                "column_sizes": sizes,
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))


_WRITERS: dict[str, tuple[Callable[[Path], None], ShardFormat, Callable[[str, int], Any], int]] = {
    "tar": (_write_tar, TarFormat(chunk_bytes=_CHUNK_BYTES), _tar_value, _SAMPLES),
    "parquet": (_write_parquet, ParquetFormat(chunk_bytes=_CHUNK_BYTES), _row_value, _SAMPLES),
    "arrow": (_write_arrow, ArrowFormat(chunk_bytes=_CHUNK_BYTES), _row_value, _SAMPLES),
    "jsonl": (_write_jsonl, JsonlFormat(chunk_bytes=_CHUNK_BYTES), _line_value, _SAMPLES),
    "mds": (_write_mds, MdsFormat(chunk_bytes=_CHUNK_BYTES), _row_value, _SAMPLES),
    "tokens": (_write_tokens, TokensFormat(seq_len=_SEQ, chunk_bytes=_CHUNK_BYTES), _token_value, 4 * _SAMPLES),
}
NAMES = tuple(_WRITERS)


def write_known(name: str, folder: Path) -> Known:
    """Write the data set ``name`` to a folder of this name, unless it exists."""
    write, shard_format, value, samples = _WRITERS[name]
    target = folder / name
    if not target.exists():
        draft = folder / f".{name}"
        draft.mkdir(parents=True)
        write(draft)
        draft.rename(target)
    return Known(name, shard_format, lru_cache(30_000)(value), samples)
