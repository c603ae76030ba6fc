"""Token files: one long run of integers, cut into sequences of equal length."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, ClassVar

import numpy as np

from ...storage import ByteRange, ObjectInfo, Store
from ...storage.suggestions import unknown_choice
from ..columns import ArrayColumn, Block, IntArray
from ..errors import ConfigError, FormatError
from .schema import choose_columns
from .shard import (
    CHUNK_BYTES,
    SUFFIXES,
    BaseFormat,
    ChunkRef,
    ChunkSpan,
    ShardIndex,
    ShardTask,
    check_whole,
    find_shards,
    has_suffix,
    refuse_empty,
    whole_part,
)

DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
SUFFIX_DTYPES = {".u16": "uint16", ".u32": "uint32"}

# Megatron's .idx: magic, u64 version, u8 dtype code, u64 sequences, u64 documents; then int32 lengths and int64
# pointers of the sequences, int64 first sequences of the documents, and in multimodal sets an int8 mode a sequence.
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER_BYTES = 34
_MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
INDEX_AGAIN = "index the data set again"
_MEGATRON_FLOATS = {6: "float64", 7: "float32"}
# The first int32 of llm.c's token files, GPT-2's and Llama 3's, before a version of 1; tokens begin after 1,024 bytes.
_LLM_C_MAGICS = (20240520, 20240801)
_LITDATA_CHUNK = re.compile(r"chunk-\d+-\d+(\.\w+)?\.bin")


@dataclass(frozen=True, slots=True)
class TokensFormat(BaseFormat):
    """Sample i of a shard is its tokens [i * (seq_len - overlap), i * (seq_len - overlap) + seq_len).

    A shard is a raw little-endian file of ``dtype`` (.bin, .tokens; .u16 and .u32 fix their own dtype), or a file of
    Megatron's with its .idx beside it, which states the dtype. Sequences cross document boundaries. Tokens at a shard's
    end that do not fill a sequence are dropped. With ``overlap=1`` the last token of a sequence is the first of the
    next, so that inputs and shifted targets together use every token.

    The column ``tokens`` is (samples, seq_len) in the stored dtype, a view of the chunk's bytes.
    """

    name: ClassVar[str] = "tokens"
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES["tokens"]

    seq_len: int
    dtype: str = "uint16"
    overlap: int = 0
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        BaseFormat.__post_init__(self)
        check_whole("seq_len", self.seq_len)
        check_whole("overlap", self.overlap)
        if self.seq_len < 1:
            raise ConfigError(f"seq_len={self.seq_len}: a sequence has at least one token")
        if not 0 <= self.overlap < self.seq_len:
            raise ConfigError(f"overlap={self.overlap}: must be at least 0 and less than seq_len={self.seq_len}")
        if self.dtype not in DTYPES:
            raise ConfigError(unknown_choice("dtype", self.dtype, DTYPES))

    def shards(self, store: Store, listing: Sequence[ObjectInfo], named: Collection[str] = ()) -> list[ShardTask]:
        """Token files; the hint is the Megatron index beside one, if there is one."""
        return find_token_shards(listing, named)

    def index_shard(self, store: Store, task: ShardTask) -> ShardIndex:
        info = task.info
        dtype = np.dtype(self._dtype_of(store, task))
        refuse_empty(info)
        if info.size % dtype.itemsize:
            raise FormatError(
                info.key,
                f"its {info.size} bytes are not a whole number of {dtype.name} tokens; give its dtype, or write it "
                "again",
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
        return SUFFIX_DTYPES.get(PurePosixPath(task.info.key).suffix.lower(), self.dtype)

    @property
    def opens_in_place(self) -> bool:
        return True

    def open_chunk(
        self,
        chunk: ChunkRef,
        header: Any,
        parts: Sequence[memoryview],
        columns: Sequence[str] | None,
        schema: Mapping[str, Any],
    ) -> Block:
        names = choose_columns(schema["columns"], columns)
        stored = schema["columns"]["tokens"]["type"]
        if stored not in DTYPES:
            raise FormatError(
                chunk.shard.key, f"its index says that its tokens are {stored!r}; {INDEX_AGAIN}", offset=chunk.offset
            )
        dtype = np.dtype(stored).newbyteorder("<")
        data = whole_part(chunk, parts)
        stride = self.seq_len - self.overlap
        needed = ((chunk.samples - 1) * stride + self.seq_len) * dtype.itemsize
        if needed != data.nbytes:
            sequences = f"{chunk.samples} sequences of {self.seq_len} tokens"
            problem = f"{sequences} take {needed} bytes, but its chunk has {data.nbytes}"
            raise FormatError(chunk.shard.key, f"{problem}; {INDEX_AGAIN}", offset=chunk.offset)
        refuse_header(chunk, data)
        tokens = np.frombuffer(data, dtype)
        # (samples * stride + overlap,) -> (samples, seq_len); rows share their overlap, so the view is read-only.
        rows = np.lib.stride_tricks.as_strided(
            tokens,
            (chunk.samples, self.seq_len),
            (stride * dtype.itemsize, dtype.itemsize),
            writeable=False,
        )
        return Block(chunk.samples, data.nbytes, {"tokens": ArrayColumn(rows)} if names else {})


def find_token_shards(listing: Sequence[ObjectInfo], named: Collection[str]) -> list[ShardTask]:
    """Token files; the hint is the Megatron index beside one, if there is one.

    Raises:
        FormatError: they are litdata's chunks, which have other things than tokens in them.
    """
    by_key = {info.key: info for info in listing}
    found = find_shards(listing, TokensFormat.suffixes, named)
    for info in found:
        folder, slash, name = info.key.rpartition("/")
        if _LITDATA_CHUNK.fullmatch(name) and f"{folder}{slash}index.json" in by_key:
            raise FormatError(
                info.key,
                "is a chunk of litdata's by its name and the index.json beside it, with a table of offsets before the "
                "tokens; read it with litdata's StreamingDataset, and pack() what that yields",
            )
    return [
        ShardTask(info, next((by_key[key] for key in index_keys(info.key) if key in by_key), None)) for info in found
    ]


def refuse_header(chunk: ChunkRef, data: memoryview) -> None:
    """Raise FormatError where a shard begins with the header of llm.c's token files, which would be read as tokens."""
    if chunk.offset or data.nbytes < 8:
        return
    magic, version = np.frombuffer(data[:8], "<i4").tolist()
    if magic in _LLM_C_MAGICS and version == 1:
        raise FormatError(
            chunk.shard.key,
            f"begins with a header of llm.c's ({magic}, version {version}), which would be read as tokens; write what "
            "follows its 1,024 bytes as a file of its own",
            offset=0,
        )


def has_free_dtype(key: str) -> bool:
    """Return whether a shard's name leaves open of which type its tokens are."""
    return PurePosixPath(key).suffix.lower() not in SUFFIX_DTYPES


def index_keys(key: str) -> tuple[str, ...]:
    """Keys at which the Megatron index of a token file may be, best first; none for a key that is not a token file."""
    if not has_suffix(key, TokensFormat.suffixes):
        return ()
    path = PurePosixPath(key)
    suffixes = (".IDX", ".idx") if path.suffix.isupper() else (".idx", ".IDX")
    return tuple(str(path.with_suffix(suffix)) for suffix in suffixes)


def read_megatron_index(store: Store, index: ObjectInfo, data: ObjectInfo) -> str:
    """The dtype that a Megatron .idx states, after checking that its sizes agree with each other and with the .bin.

    Raises:
        FormatError: it is not such an index, or not that of ``data``.
    """
    if index.size < _HEADER_BYTES:
        raise FormatError(index.key, f"{index.size} bytes are too few for the {_HEADER_BYTES} of a Megatron index")
    header = bytes(store.get(index.key, ByteRange(0, _HEADER_BYTES), etag=index.etag))
    if header[:9] != _MAGIC:
        raise FormatError(index.key, f"starts with {header[:9]!r}; a Megatron index starts with {_MAGIC!r}", offset=0)
    version, code = int.from_bytes(header[9:17], "little"), header[17]
    if version != 1:
        raise FormatError(index.key, f"is version {version}; only version 1 is supported", offset=9)
    if code not in _MEGATRON_DTYPES:
        known = _MEGATRON_FLOATS.get(code, "unknown")
        raise FormatError(index.key, f"has dtype code {code} ({known}); tokens are integers", offset=17)
    sequences, documents = (int.from_bytes(header[at : at + 8], "little") for at in (18, 26))
    expected = _HEADER_BYTES + 12 * sequences + 8 * documents
    if index.size not in (expected, expected + sequences):
        raise FormatError(
            index.key,
            f"{sequences} sequences and {documents} documents take {expected} bytes, but the file has {index.size}; "
            "copy it again",
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
            data.key,
            f"has {data.size} bytes, but its index {index.key} covers {indexed}: they do not belong together; copy "
            "both again",
        )
    return dtype.name


def read_bounds(store: Store, index: ObjectInfo, data: ObjectInfo) -> IntArray:
    """Read the bounds of a token file's documents from its Megatron .idx: (documents + 1,) int64 in tokens.

    Raises:
        FormatError: it is not such an index, or not that of ``data``, or not of documents one behind another.
    """
    itemsize = np.dtype(read_megatron_index(store, index, data)).itemsize
    raw = store.get(index.key, ByteRange(0, index.size), etag=index.etag)
    sequences, numbers = (int.from_bytes(raw[at : at + 8], "little") for at in (18, 26))
    lengths = np.frombuffer(raw, "<i4", sequences, _HEADER_BYTES)
    pointers = np.frombuffer(raw, "<i8", sequences, _HEADER_BYTES + 4 * sequences)
    firsts = np.frombuffer(raw, "<i8", numbers, _HEADER_BYTES + 12 * sequences)
    ends = np.zeros(sequences + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    if (lengths < 0).any() or (pointers != ends[:-1] * itemsize).any():
        raise FormatError(index.key, "its sequences do not lie one behind another; write the data set again")
    if numbers and (firsts.min() < 0 or firsts.max() > sequences or (np.diff(firsts) < 0).any()):
        raise FormatError(index.key, "its documents do not lie one behind another; write the data set again")
    # Megatron writes the 0 of the first document and the end of the last; either may be left out where that joins none.
    begin, end = (int(firsts[0]), int(firsts[-1])) if numbers else (0, 0)
    if begin > 1 or end < sequences - 1:
        raise FormatError(
            index.key,
            f"its documents are sequences {begin} to {end} of {sequences}, as where a merge of several files left out "
            "the documents of some; write it again, or give the token that ends each document, as in "
            "format=TokenDocumentsFormat(eos=2) (--eos 2)",
        )
    first = [] if numbers and firsts[0] == 0 else [0]
    last = [] if len(firsts) > 1 and firsts[-1] == sequences else [sequences]
    found: IntArray = ends[np.concatenate([first, firsts, last]).astype(np.int64)]
    return found
