"""The manifest: the chunks of a data set. O(chunks) numbers, stored as an Arrow table, identified by a fingerprint."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import xxhash

from ...storage import ObjectInfo
from ..arrow_arrays import view_numbers, wrap_numbers
from ..errors import DatasetError, MemoryLimitError
from ..formats.hive import stored_schema, with_path_columns
from ..formats.shard import ChunkRef, ShardIndex
from ..order.cached import cached_property

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
        lists = pa.LargeListArray.from_arrays(wrap_numbers(self.starts), wrap_numbers(self.sums))
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
        parts = cls(view_numbers(lists.offsets), view_numbers(lists.values))
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


_MOST = 1 << 60  # samples, or bytes, of a whole data set: sums stay within int64
_SHOWN = 100  # characters of what is wrong


def find_misfit(
    shards: Sequence[ObjectInfo],
    *,
    shard_index: IntArray,
    offsets: IntArray,
    lengths: IntArray,
    samples: IntArray,
    memory: IntArray,
) -> str | None:
    """Describe a contradiction between a manifest's shards and its chunks, (chunks,) int64 each; None if all fits.

    Chunks lie inside their shards, in rising order, and hold samples; every shard has one. A chunk's number of samples
    is checked when it is opened.
    """
    if not len(shards) or not len(samples):
        return "it has no chunk"
    for shard in shards:
        etag_fits = shard.etag is None or isinstance(shard.etag, str)
        if (
            not isinstance(shard.key, str)
            or type(shard.size) is not int
            or not etag_fits
            or not 0 <= shard.size < _MOST
        ):
            return f"shard {shard.key!r} has the size {shard.size!r} and the ETag {shard.etag!r}"
    in_order = np.diff(shard_index)
    if shard_index[0] != 0 or shard_index[-1] != len(shards) - 1 or not ((in_order == 0) | (in_order == 1)).all():
        return f"its chunks are not those of its {len(shards)} shards, in their order"
    for name, values, least in (
        ("offset", offsets, 0),
        ("length", lengths, 1),
        ("samples", samples, 1),
        ("memory", memory, 0),
    ):
        wrong = (values < least) | (values >= _MOST)
        if wrong.any():
            at = int(np.argmax(wrong))
            return f"chunk {at} has {name} {values[at]}"
    sizes = np.array([shard.size for shard in shards], np.int64)
    outside = offsets + lengths > sizes[shard_index]
    if outside.any():
        at = int(np.argmax(outside))
        stop, shard = int(offsets[at] + lengths[at]), shards[int(shard_index[at])]
        return f"chunk {at} ends at byte {stop} of {shard.key}, which has {shard.size}"
    falling = (np.diff(offsets) < 0) & (in_order == 0)
    if falling.any():
        return f"chunk {int(np.argmax(falling)) + 1} lies before the chunk that it follows"
    if float(samples.sum(dtype=np.float64)) >= _MOST or float(memory.sum(dtype=np.float64)) >= _MOST:
        return "its samples or bytes are too many to count"
    return None


def find_strange_schema(schema: Any, config: Any) -> str | None:
    """Describe an error in the form of a manifest's schema or of its format's settings; None if there is none.

    A schema has ``fields``, a list of names, or ``columns``, names with a type, a name or for JSON lines
    an object, and ``nulls``, a bool.
    """
    if not isinstance(schema, dict) or not isinstance(config, dict):
        return "its schema, or its format's settings, are no object"
    fields, columns = schema.get("fields", []), schema.get("columns", {})
    if not isinstance(fields, list) or not all(isinstance(name, str) for name in fields):
        return f"its schema has the fields {str(fields)[:_SHOWN]}"
    if not isinstance(columns, dict):
        return f"its schema has the columns {str(columns)[:_SHOWN]}"
    for name, column in columns.items():
        fits = isinstance(column, dict) and isinstance(column.get("nulls"), bool)
        if not fits or not isinstance(column.get("type"), (str, dict)):
            return f"its schema has the column {name!r} as {str(column)[:_SHOWN]}"
    return None


MANIFEST_NAME = "penstock-manifest.arrow"
_VERSION = 1
_CLASSES = "classes"  # in the stored schema


@dataclass(frozen=True, eq=False, repr=False)
class Manifest:
    """All chunks of a data set, in sample order.

    ``url`` is the root that shard keys are relative to. It, ``checksums`` and ``parts`` (checksums of what may be read
    of a chunk without the whole, or None) are not part of the fingerprint, so a copy of a data set elsewhere can
    continue from a state taken here. ``companions``: by the keys of shards, the objects that said how those are read,
    such as an ``.idx``, where there were any. ``classes``: the names for the numbers in ``cls``, where they are known;
    empty where parts of the data set number classes differently. Neither is part of the fingerprint.

    Arrays, one element per chunk, int64: ``shard_index`` into ``shards``, ``offsets`` and ``lengths`` in bytes,
    ``samples``, ``memory`` (estimated bytes once opened), and ``checksums`` (uint64 XXH3-64 of the chunk's bytes) or
    None.

    ``root``: values of columns that the URL's own folders tell of all shards (``year=2024``). Columns that stand in
    paths are in ``schema``, but follow from the keys, and are not stored.
    """

    url: str
    format: str
    config: Mapping[str, Any]
    schema: Mapping[str, Any]
    shards: Sequence[ObjectInfo]
    shard_index: IntArray
    offsets: IntArray
    lengths: IntArray
    samples: IntArray
    memory: IntArray
    checksums: np.ndarray[tuple[int, ...], np.dtype[np.uint64]] | None = field(default=None)
    parts: PartSums | None = field(default=None)
    companions: Mapping[str, ObjectInfo] = field(default_factory=dict)
    classes: tuple[str, ...] | None = field(default=None)
    root: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:  # of millions of chunks, too
        return (
            f"{type(self).__name__}({self.url!r}, format={self.format!r}, {self.num_samples} samples in "
            f"{self.num_chunks} chunks of {len(self.shards)} shards)"
        )

    @property
    def num_chunks(self) -> int:
        """The number of chunks."""
        return len(self.samples)

    @property
    def lacks_parts(self) -> bool:
        """True if it has no checksums of parts of chunks that may be read; an older penstock stored none."""
        return self.parts is None and self.format in FORMATS_IN_PARTS

    @property
    def checks_all(self) -> bool:
        """True if it has checksums of all that may be read."""
        return self.checksums is not None and not self.lacks_parts

    @property
    def num_samples(self) -> int:
        """The number of samples: ids are 0 to one less."""
        return int(self.first_ids[-1])

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks, as they are stored."""
        return int(self.lengths.sum())

    @property
    def fields(self) -> list[str]:
        """The names of the samples' fields or columns."""
        return list(self.schema.get("fields") or self.schema.get("columns") or ())

    @property
    def has_columns(self) -> bool:
        """True if fields are columns, which have types; False if they are files, which have only names."""
        return "columns" in self.schema

    @cached_property
    def first_ids(self) -> IntArray:
        """(chunks + 1,) int64: the sample id of each chunk's first sample, then the number of samples."""
        ids = np.zeros(len(self.samples) + 1, np.int64)
        np.cumsum(self.samples, out=ids[1:])
        return ids

    @cached_property
    def _shard_first_ids(self) -> IntArray:
        first_chunk = np.searchsorted(self.shard_index, np.arange(len(self.shards)))
        return self.first_ids[first_chunk]

    def chunk(self, index: int, memory_limit: int = sys.maxsize) -> ChunkRef:
        """The chunk of an index: its shard, its bytes in it, its number of samples, and the memory that it may take."""
        shard = int(self.shard_index[index])
        return ChunkRef(
            shard=self.shards[shard],
            offset=int(self.offsets[index]),
            length=int(self.lengths[index]),
            samples=int(self.samples[index]),
            first_row=int(self.first_ids[index] - self._shard_first_ids[shard]),
            memory=int(self.memory[index]),
            memory_limit=memory_limit,
        )

    def shard_of(self, sample_id: int) -> tuple[str, int]:
        """The shard key of a sample and the sample's ordinal in it."""
        chunk = int(np.searchsorted(self.first_ids, sample_id, side="right")) - 1
        shard = int(self.shard_index[chunk])
        return self.shards[shard].key, int(sample_id - self._shard_first_ids[shard])

    def name_sample(self, sample_id: int) -> str:
        """Name a sample for messages."""
        return f"sample {sample_id}"

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits over what determines the sample ids: format, shard keys and sizes, chunks.

        ETags are left out: a copy of a data set in another store has different ones, and is the same data set.
        """
        digest = xxhash.xxh3_128()
        digest.update(json.dumps([_VERSION, self.format, self.config], sort_keys=True).encode())
        for shard in self.shards:
            digest.update(f"{shard.key}\0{shard.size}\n".encode())
        for column in (self.shard_index, self.offsets, self.lengths, self.samples):
            digest.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
        return digest.hexdigest()

    def _checksum(self) -> str:
        """32 hex digits over what is stored but not part of the fingerprint."""
        digest = xxhash.xxh3_128()
        digest.update(json.dumps([self._stored_schema(), [shard.etag for shard in self.shards]]).encode())
        if self.companions:
            digest.update(json.dumps(self._list_companions()).encode())
        digest.update(np.ascontiguousarray(self.memory, dtype="<i8").tobytes())
        if self.checksums is not None:
            digest.update(np.ascontiguousarray(self.checksums, dtype="<u8").tobytes())
        return digest.hexdigest()

    def _stored_schema(self) -> dict[str, Any]:
        """The shards' own schema with the names of classes, which an older penstock keeps there without a look."""
        schema = dict(stored_schema(self.schema))
        return schema if self.classes is None else {**schema, _CLASSES: list(self.classes)}

    def below(self, root: Mapping[str, str]) -> Manifest:
        """The same shards where the URL's own folders tell of these columns.

        Raises:
            FormatError: a column that stands in paths has the name that the nulls of another one need.
        """
        schema = with_path_columns(self.schema, self.format, [shard.key for shard in self.shards], root)
        return self if schema == self.schema else replace(self, schema=schema, root=root)

    def _list_companions(self) -> list[list[Any]]:
        return [[shard, info.key, info.size, info.etag] for shard, info in self.companions.items()]

    @staticmethod
    def build(
        url: str,
        format: str,  # noqa: A002 - the field's name everywhere
        config: Mapping[str, Any],
        schema: Mapping[str, Any],
        shards: Sequence[tuple[ObjectInfo, ShardIndex]],
        checksums: np.ndarray[tuple[int, ...], np.dtype[np.uint64]] | None = None,
    ) -> Manifest:
        """Build a manifest from the shards' indexes; shards without samples are left out.

        Raises:
            DatasetError: no shard holds a sample.
        """
        kept = [(info, index) for info, index in shards if index.chunks]
        spans = [span for _, index in kept for span in index.chunks]
        if not spans:
            raise DatasetError(
                f"{url}: none of its {len(shards)} {format} shards holds a sample; check the URL and the files"
            )
        rows = np.array([(s.offset, s.length, s.samples, s.memory) for s in spans], dtype=np.int64)
        counts = np.array([len(index.chunks) for _, index in kept], dtype=np.int64)
        return Manifest(
            url=url,
            format=format,
            config=dict(config),
            schema=dict(schema),
            shards=tuple(info for info, _ in kept),
            shard_index=np.repeat(np.arange(len(kept), dtype=np.int64), counts),
            offsets=rows[:, 0].copy(),
            lengths=rows[:, 1].copy(),
            samples=rows[:, 2].copy(),
            memory=rows[:, 3].copy(),
            checksums=checksums,
        ).below({})

    def to_bytes(self) -> bytes:
        """An Arrow IPC stream: one row per chunk, everything else in the schema's metadata.

        That of ``parts`` follows, where an older penstock stops reading.
        """
        shards = {
            "keys": [shard.key for shard in self.shards],
            "sizes": [shard.size for shard in self.shards],
            "etags": [shard.etag for shard in self.shards],
        }
        metadata = {
            "penstock": str(_VERSION),
            "format": self.format,
            "config": json.dumps(dict(self.config), sort_keys=True),
            "schema": json.dumps(self._stored_schema()),
            "shards": json.dumps(shards),
            "fingerprint": self.fingerprint,
            "checksum": self._checksum(),
        }
        if self.companions:
            metadata["companions"] = json.dumps(self._list_companions())
        if self.root:
            metadata["root"] = json.dumps(dict(self.root))
        columns = {
            "shard": wrap_numbers(self.shard_index),
            "offset": wrap_numbers(self.offsets),
            "length": wrap_numbers(self.lengths),
            "samples": wrap_numbers(self.samples),
            "memory": wrap_numbers(self.memory),
        }
        if self.checksums is not None:
            columns["checksum"] = wrap_numbers(self.checksums)
        table = pa.table(columns).replace_schema_metadata(metadata)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(table)
        whole: bytes = sink.getvalue().to_pybytes()
        return whole if self.parts is None else whole + self.parts.to_bytes(self.fingerprint)

    @staticmethod
    def from_bytes(data: bytes | memoryview, url: str, where: str = "manifest") -> Manifest:
        """Read what ``to_bytes`` wrote.

        Raises:
            DatasetError: the bytes are no manifest, have another version, or are damaged.
        """
        try:
            stream = pa.BufferReader(pa.py_buffer(data))
            table = pa.ipc.open_stream(stream, options=UNTHREADED).read_all()
            metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
            if metadata.get("penstock") != str(_VERSION):
                raise DatasetError(
                    f"{where}: a manifest of version {metadata.get('penstock')}, this penstock reads {_VERSION}; "
                    "build it anew with `penstock index`"
                )
            shards = json.loads(metadata["shards"])
            schema = json.loads(metadata["schema"])
            classes = schema.pop(_CLASSES, None)
            if not (classes is None or (isinstance(classes, list) and all(isinstance(name, str) for name in classes))):
                raise ValueError(f"its classes are {str(classes)[:100]}")
            columns = {name: view_numbers(table.column(name)) for name in table.column_names}
            dtypes = {name: np.dtype(np.uint64 if name == "checksum" else np.int64) for name in columns}
            if any(columns[name].dtype != dtype for name, dtype in dtypes.items()):
                raise ValueError("columns of other types")
            manifest = Manifest(
                url=url,
                format=metadata["format"],
                config=json.loads(metadata["config"]),
                schema=schema,
                shards=tuple(
                    ObjectInfo(key, size, etag)
                    for key, size, etag in zip(shards["keys"], shards["sizes"], shards["etags"], strict=True)
                ),
                shard_index=columns["shard"],
                offsets=columns["offset"],
                lengths=columns["length"],
                samples=columns["samples"],
                memory=columns["memory"],
                checksums=columns.get("checksum"),
                companions={
                    shard: ObjectInfo(key, size, etag)
                    for shard, key, size, etag in json.loads(metadata.get("companions", "[]"))
                },
                classes=None if classes is None else tuple(classes),
            )
            misfit = find_misfit(
                manifest.shards,
                shard_index=manifest.shard_index,
                offsets=manifest.offsets,
                lengths=manifest.lengths,
                samples=manifest.samples,
                memory=manifest.memory,
            )
            misfit = misfit or find_strange_schema(manifest.schema, manifest.config)
            if misfit is not None:
                raise ValueError(misfit)
            if (manifest.fingerprint, manifest._checksum()) != (metadata["fingerprint"], metadata["checksum"]):
                raise ValueError("its checksum does not fit")
            if stream.tell() < stream.size():
                parts = PartSums.from_stream(stream, manifest.fingerprint, manifest.num_chunks)
                manifest = replace(manifest, parts=parts)
            root = json.loads(metadata.get("root", "{}"))
            if not isinstance(root, dict) or not all(isinstance(value, str) for value in root.values()):
                raise ValueError(f"its root tells {root!r}")
        except MemoryError as exc:
            raise MemoryLimitError(
                f"{where}: memory ran out while this manifest was read ({exc}); where that is more than a manifest can "
                "take, its bytes are damaged: build it anew with `penstock index`"
            ) from exc
        except (
            pa.ArrowException,
            OSError,
            LookupError,
            ValueError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as exc:
            raise DatasetError(
                f"{where}: not a readable manifest ({exc}); build it anew with `penstock index`"
            ) from exc
        return manifest.below(root)
