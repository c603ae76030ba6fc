"""Token files: one long run of integers, cut into sequences of equal length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from ...storage import ByteRange, ObjectInfo, Store
from ..columns import ArrayColumn, Block
from ..errors import ConfigError, FormatError
from .schema import choose_columns, merge_columns
from .shard import CHUNK_BYTES, ChunkRef, ChunkSpan, ShardIndex, ShardTask

_DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_SUFFIXES = (".bin", ".tokens", ".u16", ".u32")
_SUFFIX_DTYPES = {".u16": "uint16", ".u32": "uint32"}

# Megatron's .idx: magic, u64 version, u8 dtype code, u64 sequences, u64 documents; then int32 lengths and int64
# pointers of the sequences, int64 first sequences of the documents, and in multimodal sets an int8 mode a sequence.
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER_BYTES = 34
_MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_MEGATRON_FLOATS = {6: "float64", 7: "float32"}


@dataclass(frozen=True, slots=True)
class TokensFormat:
    """Sample i of a shard is its tokens [i * (seq_len - overlap), i * (seq_len - overlap) + seq_len).

    A shard is a raw little-endian file of ``dtype`` (.bin, .tokens; .u16 and .u32 name their dtype themselves), or
    Megatron's .bin with an .idx beside it, which names the dtype. Sequences run across the borders of documents. The
    tokens at a shard's end that do not fill a sequence are left out. With ``overlap=1`` a sequence's last token is the
    next one's first, so that inputs and shifted targets together use every token.

    The column ``tokens`` is (samples, seq_len) in the stored dtype, a view of the chunk's bytes.
    """

    seq_len: int
    dtype: str = "uint16"
    overlap: int = 0
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise ConfigError(f"seq_len={self.seq_len}: a sequence has at least one token")
        if not 0 <= self.overlap < self.seq_len:
            raise ConfigError(f"overlap={self.overlap}: needs 0 <= overlap < seq_len={self.seq_len}")
        if self.dtype not in _DTYPES:
            raise ConfigError(f"dtype={self.dtype!r}: tokens are one of {', '.join(_DTYPES)}")
        if self.chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes={self.chunk_bytes}: needs at least 1")

    @property
    def name(self) -> str:
        return "tokens"

    def config(self) -> dict[str, Any]:
        return asdict(self)

    def shards(self, store: Store, listing: Sequence[ObjectInfo]) -> list[ShardTask]:
        """Token files; the hint is the Megatron index beside one, if it is there."""
        by_key = {info.key: info for info in listing}
        found = [info for info in listing if PurePosixPath(info.key).suffix in _SUFFIXES]
        return [ShardTask(info, by_key.get(str(PurePosixPath(info.key).with_suffix(".idx")))) for info in found]

    def index_shard(self, store: Store, task: ShardTask) -> ShardIndex:
        info = task.info
        dtype = np.dtype(self._dtype_of(store, task))
        if info.size == 0:
            raise FormatError(info.key, "holds no bytes; remove it or write it again")
        if info.size % dtype.itemsize:
            raise FormatError(
                info.key,
                f"its {info.size} bytes are no whole number of {dtype.name} tokens; give its dtype, or write it again",
                offset=info.size - info.size % dtype.itemsize,
            )
        tokens = info.size // dtype.itemsize
        if tokens < self.seq_len:
            raise FormatError(
                info.key, f"its {tokens} tokens do not fill one sequence of seq_len={self.seq_len}; shorten seq_len"
            )
        stride = self.seq_len - self.overlap
        samples = (tokens - self.seq_len) // stride + 1
        per_chunk = max(1, (self.chunk_bytes // dtype.itemsize - self.overlap) // stride)
        spans = []
        for first in range(0, samples, per_chunk):
            count = min(per_chunk, samples - first)
            length = ((count - 1) * stride + self.seq_len) * dtype.itemsize
            spans.append(ChunkSpan(first * stride * dtype.itemsize, length, count, length))
        column = {"type": dtype.name, "nulls": False, "shape": [self.seq_len]}
        return ShardIndex(spans, {"columns": {"tokens": column}, "seen_in": info.key})

    def _dtype_of(self, store: Store, task: ShardTask) -> str:
        if task.hint is not None:
            return read_megatron_index(store, task.hint, task.info)
        return _SUFFIX_DTYPES.get(PurePosixPath(task.info.key).suffix, self.dtype)

    def merge_schema(self, known: Mapping[str, Any], new: Mapping[str, Any], shard: str) -> Mapping[str, Any]:
        return merge_columns(known, new, shard)

    def open_shard(self, store: Store, shard: ObjectInfo) -> None:
        return None

    def chunk_ranges(self, chunk: ChunkRef, header: Any, columns: Sequence[str] | None) -> list[ByteRange]:
        return [chunk.byte_range]

    def open_chunk(
        self,
        chunk: ChunkRef,
        header: Any,
        parts: Sequence[memoryview],
        columns: Sequence[str] | None,
        schema: Mapping[str, Any],
    ) -> Block:
        names = choose_columns(schema["columns"], columns)
        dtype = np.dtype(schema["columns"]["tokens"]["type"]).newbyteorder("<")
        (data,) = parts
        if data.nbytes != chunk.length:
            raise FormatError(
                chunk.shard.key, f"got {data.nbytes} bytes of a chunk of {chunk.length}", offset=chunk.offset
            )
        tokens = np.frombuffer(data, dtype)
        # (samples * stride + overlap,) -> (samples, seq_len); rows share their overlap, so the view is read-only.
        rows = np.lib.stride_tricks.as_strided(
            tokens,
            (chunk.samples, self.seq_len),
            ((self.seq_len - self.overlap) * dtype.itemsize, dtype.itemsize),
            writeable=False,
        )
        return Block(chunk.samples, data.nbytes, {"tokens": ArrayColumn(rows)} if names else {})


def read_megatron_index(store: Store, index: ObjectInfo, data: ObjectInfo) -> str:
    """The dtype that a Megatron .idx names, after checking that its sizes fit itself and its .bin.

    Raises:
        FormatError: the index is not one, or not that of ``data``.
    """
    if index.size < _HEADER_BYTES:
        raise FormatError(index.key, f"{index.size} bytes are too few for the {_HEADER_BYTES} of a Megatron index")
    header = bytes(store.get(index.key, ByteRange(0, _HEADER_BYTES), etag=index.etag))
    if header[:9] != _MAGIC:
        raise FormatError(index.key, f"starts with {header[:9]!r}, a Megatron index with {_MAGIC!r}", offset=0)
    version, code = int.from_bytes(header[9:17], "little"), header[17]
    if version != 1:
        raise FormatError(index.key, f"is of version {version}; version 1 is read", offset=9)
    if code not in _MEGATRON_DTYPES:
        known = _MEGATRON_FLOATS.get(code, "unknown")
        raise FormatError(index.key, f"has dtype code {code} ({known}); tokens are integers", offset=17)
    sequences, documents = (int.from_bytes(header[at : at + 8], "little") for at in (18, 26))
    expected = _HEADER_BYTES + 12 * sequences + 8 * documents
    if index.size not in (expected, expected + sequences):
        raise FormatError(
            index.key,
            f"{sequences} sequences and {documents} documents take {expected} bytes, the file has {index.size}",
            offset=18,
        )
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    indexed = 0
    if sequences:
        last_length = _HEADER_BYTES + 4 * (sequences - 1)
        last_pointer = _HEADER_BYTES + 4 * sequences + 8 * (sequences - 1)
        length, pointer = store.get_ranges(
            index.key,
            [ByteRange(last_length, last_length + 4), ByteRange(last_pointer, last_pointer + 8)],
            etag=index.etag,
        )
        indexed = int.from_bytes(pointer, "little") + int.from_bytes(length, "little") * dtype.itemsize
    if indexed != data.size:
        raise FormatError(
            data.key, f"has {data.size} bytes, and its index {index.key} speaks of {indexed}; they are not of one set"
        )
    return dtype.name
