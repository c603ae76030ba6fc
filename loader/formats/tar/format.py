"""WebDataset shards: tar archives whose members ``KEY.FIELD`` stand together by key.

Which members count, and how names split into key and field, follows the webdataset library; damage that it silently
ignores is an error here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...columns import KEY_COLUMN, Block, BytesColumn, Column, IntArray
from ...errors import FormatError
from ..base import BaseFormat, refuse_change, refuse_empty, whole_part
from ..chunks import cut_samples
from ..compressed import codec_of, decompress, decompressed_pieces, hidden_codec
from ..names import SUFFIXES
from ..schema import choose_columns
from ..shard import CHUNK_BYTES, ChunkRef, ChunkSpan, ShardIndex, ShardTask
from ..windows import PieceWindows, ShardWindows, Windows
from .again import doubt_keys
from .blocks import BLOCK
from .census import Census, refuse_duplicates, take_census, take_linked_census
from .headers import read_members, refuse_truncation
from .links import join_tied, place_links
from .names import RESERVED_FIELDS, NameTable, group_names
from .small import take_small_census

if TYPE_CHECKING:
    from ....storage import ObjectInfo, Store

_SMALL_BYTES = 64


@dataclass(frozen=True, slots=True)
class TarFormat(BaseFormat):
    """Reads .tar shards, plain or compressed with gzip, bzip2 or zstd; a compressed one is one chunk.

    Columns are the fields as bytes, and always ``__key__`` as text (bytes that are not UTF-8 as ``\\xNN``). A field
    that a sample lacks is missing there (a start of -1).
    """

    name: ClassVar[str] = "tar"
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES["tar"]
    min_chunk_bytes: ClassVar[int] = BLOCK

    chunk_bytes: int = CHUNK_BYTES

    def index_shard(self, store: Store, task: ShardTask) -> ShardIndex:
        info = task.info
        refuse_empty(info)
        codec = codec_of(info.key)
        with self._open_windows(store, info, codec) as windows:
            census = self._take_census(windows, info, codec)
        if census.is_linked:
            with self._open_windows(store, info, codec) as windows:
                census = take_linked_census(windows, info.key)
        doubt = census.doubt
        if len(census.again):
            with self._open_windows(store, info, codec) as windows:
                doubt = "; ".join(filter(None, [doubt, doubt_keys(windows, info.key, census)]))
        starts, stops, counts = census.starts, census.stops, None
        if codec is not None:
            samples = len(starts)
            chunks = [ChunkSpan(0, info.size, samples, census.length)] if samples else []
        else:
            if census.placed is not None:
                starts, stops, counts = join_tied(starts, stops, census.placed, info.key)
            chunks = cut_samples(starts, stops, self.chunk_bytes, counts)
        return ShardIndex(chunks, {"fields": sorted(census.fields)}, doubt)

    def _open_windows(self, store: Store, info: ObjectInfo, codec: str | None) -> AbstractContextManager[Windows]:
        return ShardWindows(store, info) if codec is None else _open_pieces(store, info, codec)

    def _take_census(self, windows: Windows, info: ObjectInfo, codec: str | None) -> Census:
        if codec is not None:
            return take_census(windows, info.key)
        whole = windows.read(0, BLOCK)
        if bytes(whole[257:261]) != b"usta" and (problem := hidden_codec(bytes(whole[:4]))):
            raise FormatError(info.key, problem, offset=0)
        small = take_small_census(whole) if len(whole) == info.size else None
        return small or take_census(windows, info.key)

    def merge_schema(self, known: Mapping[str, Any], new: Mapping[str, Any], shard: str) -> Mapping[str, Any]:
        return {"fields": sorted({*known.get("fields", ()), *new.get("fields", ())})}

    def opened_bytes(
        self, chunk: ChunkRef, header: Any, columns: Sequence[str] | None, schema: Mapping[str, Any]
    ) -> int:
        # Each field of each sample has a start and a stop, whether the sample has the field or not.
        return chunk.memory + 16 * chunk.samples * (1 + len(schema["fields"]))

    @property
    def is_framed(self) -> bool:
        return True  # headers state sizes, and data are skipped

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
        shard, base = chunk.shard.key, chunk.offset
        chosen = choose_columns([KEY_COLUMN, *schema["fields"]], columns)
        run = whole_part(chunk, parts)
        codec = codec_of(shard)
        if codec is not None:
            run = decompress(run, codec, chunk)
        members = read_members(run, shard, base, whole=True)
        refuse_truncation(members, len(run), shard, base, padded=codec is not None)
        if members.links:
            members = place_links(members).members
        table = group_names(members.names)
        refuse_change(chunk, table.samples)
        starts = np.full((len(table.fields), table.samples), -1, np.int64)
        stops = np.full_like(starts, -1)
        at = members.starts[table.members]
        starts[table.codes, table.rows] = at
        stops[table.codes, table.rows] = at + members.sizes[table.members]
        if np.count_nonzero(starts >= 0) != len(at) or not RESERVED_FIELDS.isdisjoint(table.fields):
            refuse_duplicates(table, members, frozenset(), shard, base)
        keys = _key_column(table)
        found = {name: code for code, name in enumerate(table.fields)}
        block: dict[str, Column] = {KEY_COLUMN: keys}
        for name in (name for name in chosen if name != KEY_COLUMN):
            code = found.get(name)
            if code is None:
                absent = np.full(table.samples, -1, np.int64)
                block[name] = BytesColumn(run, absent, absent)
            else:
                block[name] = _field_column(run, starts[code], stops[code])
        nbytes = len(run) + len(keys.buffer) + 16 * table.samples * len(block)
        return Block(table.samples, nbytes, block)


@contextmanager
def _open_pieces(store: Store, info: ObjectInfo, codec: str) -> Iterator[Windows]:
    with closing(decompressed_pieces(store, info, codec)) as pieces:
        yield PieceWindows(pieces)


def _field_column(run: memoryview, starts: IntArray, stops: IntArray) -> BytesColumn:
    """A field's values where they lie in the chunk; small ones side by side in a buffer of their own.

    A label of a few bytes is then not a cache miss of its own, somewhere in the megabytes of the chunk, when it is
    gathered: its block has just been read here.
    """
    sizes = stops - starts
    total = int(sizes.sum())
    if total > _SMALL_BYTES * len(sizes):
        return BytesColumn(run, starts, stops)
    ends = np.cumsum(sizes)
    packed = np.frombuffer(run, np.uint8)[np.repeat(starts - (ends - sizes), sizes) + np.arange(total)]
    return BytesColumn(memoryview(packed.tobytes()), np.where(starts >= 0, ends - sizes, -1), ends)


def _key_column(table: NameTable) -> BytesColumn:
    first = np.flatnonzero(np.diff(table.rows, prepend=-1))
    names, dots = table.names[first], table.dots[first]
    if (names > 127).any():
        keys = [
            name[:dot].tobytes().decode("utf-8", "backslashreplace").encode()
            for name, dot in zip(names, dots, strict=True)
        ]
        stops = np.cumsum([len(key) for key in keys])
        return BytesColumn(memoryview(b"".join(keys)), stops - [len(key) for key in keys], stops, text=True)
    width = int(dots.max(initial=1))
    starts = np.arange(len(names), dtype=np.int64) * width
    data = names[:, :width].tobytes()
    return BytesColumn(memoryview(data), starts, starts + dots, text=True, ascii=data.decode("ascii"))
