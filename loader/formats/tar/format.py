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
from ..compressed import codec_of, decompress, decompressed_pieces, hidden_codec
from ..schema import choose_columns
from ..shard import (
    CHUNK_BYTES,
    SUFFIXES,
    BaseFormat,
    ChunkRef,
    ChunkSpan,
    ShardIndex,
    ShardTask,
    cut_samples,
    refuse_change,
    refuse_empty,
    whole_part,
)
from ..windows import PieceWindows, ShardWindows, Windows
from .blocks import BLOCK, show_name
from .census import Census, find_keys, refuse_duplicates, take_census, take_linked_census
from .headers import read_members, refuse_truncation
from .links import join_tied, place_links
from .names import RESERVED_FIELDS, NameTable, find_field_dot, group_names

if TYPE_CHECKING:
    from ....storage import ObjectInfo, Store


_LOOKED_AT = 16  # pairs


def doubt_keys(windows: Windows, shard: str, census: Census) -> str:
    """Say what is doubtful about a census of which samples seem to share keys; "" where their keys are others.

    A sample whose fields stand apart would come in parts. One with a field that an earlier one has may be repeated on
    purpose, and both are read.

    Raises:
        FormatError: samples are in parts.
    """
    parts = census.again[census.apart][:_LOOKED_AT]
    repeats = census.again[~census.apart]
    found = find_keys(windows, shard, census, np.concatenate([parts, repeats[:_LOOKED_AT]]).ravel())
    for one, other in parts.tolist():
        (key, first, _), (again, second, offset) = found[one], found[other]
        if key == again:
            raise FormatError(
                shard,
                f"member '{second}' is of the sample '{show_name(key)}', which began with '{first}', but other samples "
                "lie between: it would come in parts. Write the shard with the members of each sample one after "
                "another, as `tar --sort=name` or `penstock pack` does",
                offset=offset,
            )
    for one, other in repeats[:_LOOKED_AT].tolist():
        (key, first, _), (again, second, offset) = found[one], found[other]
        if key == again:
            return (
                f"the key '{show_name(key)}' comes again at byte {offset} ('{second}' after '{first}'; {len(repeats)} "
                "such pairs): where a newer sample was appended, as by `tar -r` or `tar -u`, the older one is read, too"
            )
    return ""


# Up to about this many members a loop is faster than arrays.
MOST_MEMBERS = 32

_REGULAR = (0, ord("0"))
_ENDS = (0, ord(" "))


def take_small_census(archive: memoryview) -> Census | None:
    """Return the ``take_census`` of a whole archive; None if it has many members or is not of the plainest form."""
    starts: list[int] = []
    stops: list[int] = []
    every: set[str] = set()
    fields: set[str] = set()
    key: bytes | None = None
    keys: set[bytes] = set()
    at = 0
    for _ in range(MOST_MEMBERS + 1):
        header = bytes(archive[at : at + BLOCK])
        if len(header) < BLOCK:
            return None
        if not header[0]:
            break
        found = _read_header(header)
        if found is None:
            return None
        name, size = found
        dot = find_field_dot(name)
        if dot < 0:
            return None
        field = name[dot + 1 :].decode("ascii").lower()
        if name[:dot] != key:
            key = name[:dot]
            if key in keys:
                return None
            keys.add(key)
            starts.append(at)
            stops.append(0)
            fields = set()
        if field in fields:
            return None
        fields.add(field)
        every.add(field)
        at += BLOCK
        stops[-1] = at + size
        at += -(-size // BLOCK) * BLOCK
    else:
        return None
    if not every or not every.isdisjoint(RESERVED_FIELDS) or bytes(archive[at:]).strip(b"\0"):
        return None
    return Census(np.array(starts, np.int64), np.array(stops, np.int64), frozenset(every), len(archive))


def _read_header(header: bytes) -> tuple[bytes, int] | None:
    """Name and size of a regular file whose header is sound and has no prefix."""
    size, checksum = header[124:135], header[148:154]
    if (
        header[257:262] != b"ustar"
        or header[345]
        or header[156] not in _REGULAR
        or header[135] not in _ENDS
        or header[154] not in _ENDS
        or not (size.isdigit() and checksum.isdigit())
        or b"8" in size + checksum
        or b"9" in size + checksum
        or sum(header) - sum(header[148:156]) + 8 * 32 != int(checksum, 8)
    ):
        return None
    name = header[:100].partition(b"\0")[0]
    if name.endswith(b"/") or not name.isascii():
        return None
    return name, int(size, 8)


_SMALL_BYTES = 64


@dataclass(frozen=True, slots=True)
class TarFormat(BaseFormat):
    """Reads .tar shards, plain or compressed with gzip, bzip2 or zstd; a compressed one is one chunk.

    Columns are the fields as bytes, and always ``__key__`` as text (bytes that are not UTF-8 as ``\\xNN``). A field
    that a sample lacks is missing there (a start of -1). USTAR, GNU long names and PAX headers are supported. Folders,
    members without a dot, and those below a top folder ``__...__`` belong to no sample.

    A link has the content of the member that it names, up to 64 MiB away in a plain archive; a symbolic link out of the
    archive is left out with a ``DoubtfulDatasetWarning``. A repeated key with a repeated field, as after ``tar -r``, is
    another sample, with such a warning.

    Refused, with a ``FormatError``: truncated or joined archives, bad header checksums, sparse members, names over 4096
    bytes, links to something absent, and samples with a field twice, a field ``__key__`` or ``__url__``, or members
    that other samples separate.
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
