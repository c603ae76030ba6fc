"""Shards that are one compressed stream: read whole for a chunk, or piece by piece for an index.

Streams of gzip, bzip2 and zstd, and of MDS brotli and blocks of snappy. All go through Arrow's codecs, which release
the GIL, read on over frames that were joined, and notice truncation.
"""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import zstandard

from ..errors import FormatError
from .shard import refuse_large
from .windows import ShardWindows

if TYPE_CHECKING:
    from ...storage import ObjectInfo, Store
    from .shard import ChunkRef

PIECE_BYTES = 4 << 20
# Deflate cannot shrink by more; a hint beyond it is damage. Zstandard can, but then starts small and grows.
_MAX_RATIO = 1032
# The longest header of a Zstandard frame (RFC 8878, 3.1.1.1).
_ZSTD_HEADER_BYTES = 18

_CODECS = {
    **dict.fromkeys((".gz", ".tgz"), "gzip"),
    **dict.fromkeys((".bz2", ".tbz2"), "bz2"),
    **dict.fromkeys((".zst", ".zstd", ".tzst"), "zstd"),
    ".br": "brotli",
    ".snappy": "snappy",
}
# Snappy repeats 64 bytes with 2 at most (its format_description.txt, 2.2).
_SNAPPY_RATIO = 32
_MAGICS = {"gzip": b"\x1f\x8b", "bz2": b"BZh", "zstd": b"\x28\xb5\x2f\xfd"}


def codec_of(key: str) -> str | None:
    """'gzip', 'bz2', 'zstd', 'brotli' or 'snappy' by the key's suffix, None for a shard that is not compressed."""
    return next((codec for suffix, codec in _CODECS.items() if key.lower().endswith(suffix)), None)


def hidden_codec(head: bytes) -> str:
    """Explain that a shard begins as a compressed stream though its name does not say so; '' if it does not."""
    found = next((codec for codec, magic in _MAGICS.items() if head.startswith(magic)), None)
    if found is None:
        return ""
    ending = next(suffix for suffix, codec in _CODECS.items() if codec == found)
    return f"is compressed with {found}, which its name does not tell; let it end in {ending}"


def decompress(data: memoryview, codec: str, chunk: ChunkRef) -> memoryview:
    """The decompressed bytes of a whole shard, in one buffer of the size that the index found.

    It grows where that is too low, but never beyond the chunk's ``memory_limit``, whatever the stream holds.

    Raises:
        FormatError: the stream is damaged or cut off.
        MemoryLimitError: it holds more than the limit.
    """
    shard, most = chunk.shard.key, chunk.memory_limit
    _check_magic(data, codec, shard)
    refuse_large(chunk, chunk.memory)
    if codec == "snappy":
        return _open_snappy(data, chunk)
    buffer = np.empty(min(chunk.memory or _size_hint(data, codec), most), np.uint8)
    filled = 0
    with _translated(shard, codec), pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(data)), codec) as stream:
        while True:
            if filled == len(buffer):
                more = stream.read(PIECE_BYTES)
                if not more:
                    break
                refuse_large(chunk, filled + len(more), at_least=True)
                grown = np.empty(min(max(len(buffer) * 3 // 2, filled + 4 * len(more)), most), np.uint8)
                grown[:filled] = buffer[:filled]
                grown[filled : filled + len(more)] = np.frombuffer(more, np.uint8)
                buffer, filled = grown, filled + len(more)
                continue
            got = stream.readinto(memoryview(buffer.data)[filled:])
            if got == 0:
                break
            filled += got
    if filled < len(buffer) * 3 // 4:
        buffer = buffer[:filled].copy()
    return memoryview(buffer.data)[:filled].toreadonly()


def _open_snappy(data: memoryview, chunk: ChunkRef) -> memoryview:
    """A snappy block, which begins with its size, a varint. Raises FormatError and MemoryLimitError."""
    size = shift = 0
    for byte in data[:5]:
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    if size > _SNAPPY_RATIO * len(data):
        problem = f"the snappy block of {len(data)} bytes claims to hold {size}; fetch or write it again"
        raise FormatError(chunk.shard.key, problem)
    refuse_large(chunk, size)
    with _translated(chunk.shard.key, "snappy"):
        return memoryview(pa.Codec("snappy").decompress(pa.py_buffer(data), size))


def decompressed_pieces(store: Store, shard: ObjectInfo, codec: str) -> Generator[memoryview, None, None]:
    """The decompressed bytes of a shard in pieces of at most PIECE_BYTES, read ahead in ranged GETs.

    A caller that may stop early must close the generator, which ends the threads that read ahead.

    Raises:
        FormatError: the stream is damaged or cut off.
    """
    with ShardWindows(store, shard) as windows, _translated(shard.key, codec):
        _check_magic(windows.read(0), codec, shard.key)
        source = pa.PythonFile(_WindowsFile(windows), mode="r")
        with pa.CompressedInputStream(source, codec) as stream:
            while piece := stream.read_buffer(PIECE_BYTES):
                yield memoryview(piece)


class _WindowsFile(io.RawIOBase):
    """A shard's windows as the file that Arrow reads from."""

    def __init__(self, windows: ShardWindows) -> None:
        super().__init__()
        self._windows = windows
        self._offset = 0
        self._window = memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not len(self._window):
            self._window = self._windows.read(self._offset)
            self._offset += len(self._window)
        size = len(self._window) if size < 0 else size
        taken, self._window = self._window[:size], self._window[size:]
        return bytes(taken)


def _check_magic(data: memoryview, codec: str, shard: str) -> None:
    found = bytes(data[:4])
    if not found:
        raise FormatError(shard, "holds no bytes; remove it or write it again", offset=0)
    if not found.startswith(_MAGICS.get(codec, b"")) and not (codec == "zstd" and found[1:] == b"\x2a\x4d\x18"):
        raise FormatError(
            shard,
            f"starts with {found!r}, which is not a {codec} stream; correct its suffix, or write it again",
            offset=0,
        )


def _size_hint(data: memoryview, codec: str) -> int:
    """Decompressed size that the stream states, within plausible bounds; a guess if it states none."""
    if codec == "gzip":
        hint = int.from_bytes(data[-4:], "little")
    elif codec == "bz2":
        hint = 0
    else:
        try:
            hint = zstandard.frame_content_size(data[:_ZSTD_HEADER_BYTES])  # -1 where the frame does not state it
        except zstandard.ZstdError:  # a skippable frame, or damage that the decompressor will name
            hint = 0
    return max(min(hint, _MAX_RATIO * len(data)), 2 * len(data), 1 << 16)


@contextmanager
def _translated(shard: str, codec: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as exc:
        raise FormatError(shard, f"the {codec} stream is damaged or cut off ({exc}); fetch or write it again") from exc
