"""One logical data set, written in every format: what the contract suite reads back."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from penstock.loader import (
    ArrowFormat,
    JsonlFormat,
    MdsFormat,
    ParquetFormat,
    TarFormat,
    TokenDocumentsFormat,
    TokensFormat,
)
from penstock.loader.formats.shard import ShardFormat

SAMPLES = 40
SEQ_LEN = 16
Row = dict[str, object]


def make_rows(start: int, stop: int) -> list[Row]:
    """Samples ``start`` to ``stop`` of the data set: a number, a text and incompressible bytes."""
    return [
        {"number": i, "text": f"sample {i}", "data": np.random.default_rng(i).bytes(300).hex()}
        for i in range(start, stop)
    ]


@dataclass(frozen=True)
class Case:
    """A format, how a shard of some rows is written, and what its samples look like when they are read.

    ``read`` turns a row into what the format stores of it. ``whole`` formats read a shard as one chunk.
    ``checked`` formats notice any flipped byte of the samples.
    """

    form: ShardFormat
    name: str
    write: Callable[[Path, str, list[Row]], None]
    read: Callable[[Row], Row]
    whole: bool = False
    checked: bool = False


def write_tar(folder: Path, key: str, rows: list[Row]) -> None:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for row in rows:
            for field in ("number", "text", "data"):
                value = str(row[field]).encode()
                info = tarfile.TarInfo(f"{row['number']:06d}.{field}")
                info.size = len(value)
                tar.addfile(info, io.BytesIO(value))
    (folder / key).write_bytes(pack(sink.getvalue(), key))


def write_jsonl(folder: Path, key: str, rows: list[Row]) -> None:
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    (folder / key).write_bytes(pack(data, key))


def pack(data: bytes, key: str) -> bytes:
    if key.endswith((".gz", ".bz2")):
        return gzip.compress(data) if key.endswith(".gz") else bz2.compress(data)
    return zstandard.ZstdCompressor(write_checksum=True).compress(data) if key.endswith(".zst") else data


SCHEMA = pa.schema({"number": pa.int64(), "text": pa.string(), "data": pa.string()})


def write_parquet(folder: Path, key: str, rows: list[Row]) -> None:
    table = pa.Table.from_pylist(rows, SCHEMA)
    pq.write_table(table, folder / key, row_group_size=4, write_page_checksum=True)


def write_arrow_file(folder: Path, key: str, rows: list[Row]) -> None:
    with pa.ipc.new_file(str(folder / key), SCHEMA) as writer:
        writer.write_table(pa.Table.from_pylist(rows, SCHEMA), max_chunksize=4)


def write_arrow_stream(folder: Path, key: str, rows: list[Row]) -> None:
    with pa.ipc.new_stream(str(folder / key), SCHEMA) as writer:
        writer.write_table(pa.Table.from_pylist(rows, SCHEMA), max_chunksize=4)


def tokens_of(row: Row) -> list[int]:
    return [int(str(row["number"])) * SEQ_LEN + i for i in range(SEQ_LEN)]


def write_tokens(folder: Path, key: str, rows: list[Row]) -> None:
    np.array([tokens_of(row) for row in rows], "<u2").tofile(folder / key)


def write_megatron(folder: Path, key: str, rows: list[Row]) -> None:
    tokens = np.array([tokens_of(row) for row in rows], "<i4")
    tokens.tofile(folder / key)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 1, 2) + struct.pack("<iqqq", tokens.size, 0, 0, 1)
    (folder / key).with_suffix(".idx").write_bytes(index)


def write_token_documents(folder: Path, key: str, rows: list[Row]) -> None:
    np.concatenate([document_of(row) for row in rows]).astype("<u2").tofile(folder / key)


def write_megatron_documents(folder: Path, key: str, rows: list[Row]) -> None:
    documents = [document_of(row) for row in rows]
    np.concatenate(documents).astype("<i4").tofile(folder / key)
    lengths = np.array([len(document) for document in documents], "<i4")
    pointers = 4 * (np.cumsum(lengths, dtype="<i8") - lengths)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(rows), len(rows) + 1) + lengths.tobytes()
    index += pointers.astype("<i8").tobytes() + np.arange(len(rows) + 1, dtype="<i8").tobytes()
    (folder / key).with_suffix(".idx").write_bytes(index)


def document_of(row: Row) -> list[int]:
    """Tokens of a length of its own, ended by 0."""
    return [*tokens_of(row)[: 1 + int(str(row["number"])) % 7], 0] if row["number"] else [5, 0]


def write_mds(folder: Path, key: str, rows: list[Row]) -> None:
    """A shard in a folder of its own, whose index names it."""
    samples = []
    for row in rows:
        text, data = str(row["text"]).encode(), str(row["data"]).encode()
        samples.append(struct.pack("<II", len(data), len(text)) + data + struct.pack("<q", row["number"]) + text)
    names, encodings, sizes = ["data", "number", "text"], ["str", "int", "str"], [None, 8, None]
    head = json.dumps({"column_names": names}).encode()
    first = 4 * (len(rows) + 2) + len(head)
    offsets = first + np.cumsum([0, *map(len, samples)])
    raw = struct.pack("<I", len(rows)) + offsets.astype("<u4").tobytes() + head + b"".join(samples)
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(raw) if key.endswith(".zstd") else raw
    path = folder / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed)
    form = {"basename": path.name, "bytes": len(packed), "hashes": {}}
    raw_form = form if packed is raw else {**form, "basename": path.stem, "bytes": len(raw)}
    entry = {
        "format": "mds",
        "samples": len(rows),
        "raw_data": raw_form,
        "zip_data": None if packed is raw else form,
        "column_names": names,
        "column_encodings": encodings,
        "column_sizes": sizes,
    }
    (path.parent / "index.json").write_text(json.dumps({"version": 2, "shards": [entry]}))


def same(row: Row) -> Row:
    return dict(row)


def tar_row(row: Row) -> Row:
    fields: Row = {name: str(value).encode() for name, value in row.items()}
    return {"__key__": f"{row['number']:06d}", **fields}


def token_row(row: Row) -> Row:
    return {"tokens": tokens_of(row)}


def document_row(row: Row) -> Row:
    return {"tokens": document_of(row)}


# Chunks of some samples, so that shards have several.
_BYTES = 4096
CASES = {
    "tar": Case(TarFormat(_BYTES), "{}.tar", write_tar, tar_row),
    "tar.gz": Case(TarFormat(_BYTES), "{}.tar.gz", write_tar, tar_row, whole=True, checked=True),
    "tar.bz2": Case(TarFormat(_BYTES), "{}.tar.bz2", write_tar, tar_row, whole=True, checked=True),
    "tar.zst": Case(TarFormat(_BYTES), "{}.tar.zst", write_tar, tar_row, whole=True, checked=True),
    "parquet": Case(ParquetFormat(_BYTES), "{}.parquet", write_parquet, same, checked=True),
    "arrow file": Case(ArrowFormat(_BYTES), "{}.arrow", write_arrow_file, same),
    "arrow stream": Case(ArrowFormat(_BYTES), "{}.arrows", write_arrow_stream, same),
    "tokens": Case(TokensFormat(SEQ_LEN, chunk_bytes=128), "{}.bin", write_tokens, token_row),
    "megatron": Case(TokensFormat(SEQ_LEN, chunk_bytes=128), "{}.bin", write_megatron, token_row),
    "token documents": Case(TokenDocumentsFormat(eos=0, chunk_bytes=64), "{}.bin", write_token_documents, document_row),
    "megatron documents": Case(TokenDocumentsFormat(chunk_bytes=128), "{}.bin", write_megatron_documents, document_row),
    "mds": Case(MdsFormat(_BYTES), "{}/shard.mds", write_mds, same),
    "mds.zstd": Case(MdsFormat(_BYTES), "{}/shard.mds.zstd", write_mds, same, whole=True, checked=True),
    "jsonl": Case(JsonlFormat(_BYTES), "{}.jsonl", write_jsonl, same),
    "jsonl.gz": Case(JsonlFormat(_BYTES), "{}.jsonl.gz", write_jsonl, same, whole=True, checked=True),
    "jsonl.bz2": Case(JsonlFormat(_BYTES), "{}.jsonl.bz2", write_jsonl, same, whole=True, checked=True),
    "jsonl.zst": Case(JsonlFormat(_BYTES), "{}.jsonl.zst", write_jsonl, same, whole=True, checked=True),
}
