"""Checksums of the parts of chunks that may be read without the whole: the columns of a row group, say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa
import xxhash

if TYPE_CHECKING:
    from ..columns import IntArray

SumArray = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]

# To start Arrow's threads takes longer than to read an index that is not huge.
UNTHREADED = pa.ipc.IpcReadOptions(use_threads=False)

FORMATS_IN_PARTS = frozenset({"parquet", "mds"})  # whose chunks may be read in part


@dataclass(frozen=True, slots=True, eq=False)
class PartSums:
    """``sums`` of all chunks in their order, uint64 XXH3-64; those of chunk i are ``sums[starts[i]:starts[i + 1]]``.

    The format's ``chunk_parts`` says which bytes each sum covers, so only 8 bytes a part are kept.
    """

    starts: IntArray
    sums: SumArray

    @classmethod
    def join(cls, chunks: Sequence[SumArray]) -> Self:
        """The sums of all chunks."""
        starts = np.zeros(len(chunks) + 1, np.int64)
        np.cumsum([len(sums) for sums in chunks], out=starts[1:])
        return cls(starts, np.concatenate([*chunks]).astype(np.uint64))

    def of(self, chunk: int) -> SumArray:
        return self.sums[self.starts[chunk] : self.starts[chunk + 1]]

    def take(self, chunks: IntArray) -> Self:
        """Those of some chunks."""
        return self.join([self.of(chunk) for chunk in chunks.tolist()])

    def to_bytes(self, fingerprint: str) -> bytes:
        """An Arrow IPC stream of one list a chunk, which belongs to the manifest with that fingerprint."""
        lists = pa.LargeListArray.from_arrays(pa.array(self.starts), pa.array(self.sums))
        table = pa.table({"parts": lists}).replace_schema_metadata({"checksum": self._checksum(fingerprint)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]

    @classmethod
    def from_stream(cls, stream: pa.BufferReader, fingerprint: str, num_chunks: int) -> Self:
        """Read what ``to_bytes`` wrote. Raises ValueError, KeyError or what Arrow raises where it is something else."""
        table = pa.ipc.open_stream(stream, options=UNTHREADED).read_all()
        (lists,) = table.column("parts").chunks
        parts = cls(lists.offsets.to_numpy(), lists.values.to_numpy())
        types_fit = parts.starts.dtype == np.int64 and parts.sums.dtype == np.uint64
        if not types_fit or len(parts.starts) != num_chunks + 1:
            raise ValueError("its checksums of parts are not those of its chunks")
        if table.schema.metadata[b"checksum"].decode() != parts._checksum(fingerprint):
            raise ValueError("its checksums of parts do not fit")
        return parts

    def _checksum(self, fingerprint: str) -> str:
        digest = xxhash.xxh3_128(fingerprint.encode())
        digest.update(np.ascontiguousarray(self.starts, "<i8").tobytes())
        digest.update(np.ascontiguousarray(self.sums, "<u8").tobytes())
        return digest.hexdigest()
