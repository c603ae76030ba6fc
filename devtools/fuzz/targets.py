"""Every parser of bytes or text that somebody else wrote, with valid inputs and the words that mean something to it."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.loader.counters import Counters
from penstock.loader.dataset.build import assemble, index_one, prepare_index
from penstock.loader.dataset.listing import expand_braces, is_glob, match_glob
from penstock.loader.dataset.manifest import Manifest
from penstock.loader.dataset.source import Selection
from penstock.loader.decoding.decode import FieldDecoders, field_decoder
from penstock.loader.decoding.gather import gather
from penstock.loader.decoding.row_job import collate_values
from penstock.loader.decoding.row_work import RowError, RowTask, RowWork
from penstock.loader.decoding.rows import explain_row_error
from penstock.loader.errors import DecodeError
from penstock.loader.formats.arrow.ipc import ArrowFormat
from penstock.loader.formats.arrow.parquet import ParquetFormat
from penstock.loader.formats.detect import make_format, sniff_format
from penstock.loader.formats.json.jsonl import JsonlFormat
from penstock.loader.formats.mds import MdsFormat
from penstock.loader.formats.shard import ShardFormat
from penstock.loader.formats.tar.format import TarFormat
from penstock.loader.formats.tokens import TokensFormat
from penstock.loader.order.plan import EpochPlan
from penstock.loader.order.selecting import Subset
from penstock.loader.order.spans import ChunkRows
from penstock.loader.order.state import LoaderState
from penstock.loader.reading.chunk_source import ChunkSource
from penstock.storage import MemoryStore, ObjectInfo
from penstock.storage.clients.autoindex import parse_index
from penstock.tools.audit import audit

from . import seeds
from .images import run_image, run_region

# Mends the checksums of an input, in place.
Repair = Callable[[bytearray], None]
# So small that a shard of some hundred bytes has several chunks.
_CHUNK_BYTES = 1024
_CHUNKS = 64
_PATTERN_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parser: ``run`` has it read some bytes, ``seeds`` makes valid ones. ``about`` is a line for people."""

    about: str
    run: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    words: tuple[bytes, ...] = ()
    repair: Repair | None = None


def read_objects(objects: Mapping[str, bytes], shard_format: ShardFormat) -> None:
    """Index a data set of these objects, read its manifest back, and read all samples as the loader does."""
    store = MemoryStore()
    for key, data in objects.items():
        store.put(key, data)
    selection = Selection(url=store.url, listing=tuple(store.list()), chosen=None, saved=None)
    pending = prepare_index(store, selection, shard_format)
    assert not isinstance(pending, Manifest)
    manifest = assemble(pending, {i: index_one(store, shard_format, task) for i, task in enumerate(pending.tasks)})
    read_samples(store, Manifest.from_bytes(manifest.to_bytes(), manifest.url))


def read_samples(store: MemoryStore, manifest: Manifest) -> None:
    """Open the first chunks of a data set, gather and decode their samples, and collate them."""
    chunks = ChunkSource(manifest, make_format(manifest.format, manifest.config), store, None, Counters())
    decoders, work = FieldDecoders("auto"), RowWork(transform=None, seed=0)
    for index in range(min(manifest.num_chunks, _CHUNKS)):
        block = chunks.load(index)
        every = np.arange(block.samples)
        rows = gather([(ChunkRows(index, every, every), block)], block.samples, manifest.first_ids, decoders)
        encoded = {name: found for name in rows.fields if (found := decoders.settled.get(name)) is not None}
        task = RowTask(0, 0, rows.ids, rows.fields, encoded)
        results = work.allocate(task)
        failed: RowError | None = None
        try:
            work.run(task, results, 0, block.samples, lambda: False)
        except RowError as error:
            failed = error
        if failed is not None:
            raise explain_row_error(failed, rows, manifest)
        for values in results.values.values():
            if isinstance(values, list):
                collate_values(values)


def _shards(shard_format: ShardFormat, key: str, **others: bytes) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        read_objects({key: data, **others}, shard_format)

    return run


def _packed(shard_format: ShardFormat, stem: str) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        ending = {b"\x1f": ".gz", b"B": ".bz2"}.get(data[:1], ".zst")
        read_objects({stem + ending: data}, shard_format)

    return run


def _run_token_index(data: bytes) -> None:
    tokens = np.arange(seeds.MEGATRON_TOKENS, dtype="<i4").tobytes()
    read_objects({"a.bin": tokens, "a.idx": data}, TokensFormat(seq_len=8, chunk_bytes=128))


def _run_mds_index(data: bytes) -> None:
    read_objects({"index.json": data, "s.mds": seeds.mds_shard()}, MdsFormat(_CHUNK_BYTES))


def _run_mds_shard(data: bytes) -> None:
    for chunk_bytes in (64, _CHUNK_BYTES):
        read_objects({"index.json": seeds.mds_index(len(data)), "s.mds": data}, MdsFormat(chunk_bytes))


def _run_manifest(data: bytes) -> None:
    store, _ = _table()
    read_samples(store, Manifest.from_bytes(data, store.url))


@functools.cache
def _table() -> tuple[MemoryStore, Manifest]:
    """Make a small data set of a parquet shard in memory, and its manifest."""
    store, shard_format = MemoryStore(), ParquetFormat(64)
    store.put("a.parquet", seeds.parquets()[0])
    selection = Selection(url=store.url, listing=tuple(store.list()), chosen=None, saved=None)
    pending = prepare_index(store, selection, shard_format)
    assert not isinstance(pending, Manifest)
    return store, assemble(pending, {0: index_one(store, shard_format, pending.tasks[0])})


def any_manifest() -> Manifest:
    """Make a small manifest whose shard is in memory: what the target "manifest" reads when all is well."""
    return _table()[1]


def any_state() -> dict[str, Any]:
    """Make a state that fits ``any_manifest``."""
    found: dict[str, Any] = json.loads(_states()[0])
    return found


def _manifests() -> list[bytes]:
    """Make manifests that are not compressed, so that damage reaches their numbers."""
    manifest = _table()[1]
    sums = np.arange(manifest.num_chunks, dtype=np.uint64)
    return [_plain_stream(one.to_bytes()) for one in (manifest, replace(manifest, checksums=sums))]


def _plain_stream(data: bytes) -> bytes:
    table = pa.ipc.open_stream(data).read_all()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _repair_manifest(data: bytearray) -> None:
    """Write the fingerprint and the checksum that fit a damaged manifest, as one who tampers would."""
    try:
        table = pa.ipc.open_stream(bytes(data)).read_all()
        metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
        shards = json.loads(metadata["shards"])
        columns = {name: table.column(name).to_numpy() for name in table.column_names}
        manifest = Manifest(
            url="",
            format=metadata["format"],
            config=json.loads(metadata["config"]),
            schema=json.loads(metadata["schema"]),
            shards=[ObjectInfo(*row) for row in zip(shards["keys"], shards["sizes"], shards["etags"], strict=True)],
            shard_index=columns["shard"],
            offsets=columns["offset"],
            lengths=columns["length"],
            samples=columns["samples"],
            memory=columns["memory"],
            checksums=columns.get("checksum"),
        )
        data[:] = manifest.to_bytes()
    except Exception:  # noqa: BLE001 - what cannot be read stays as it is
        return


def _run_state(data: bytes) -> None:
    try:
        state = json.loads(data)
    except (ValueError, RecursionError):
        return  # the user's own reading of a file
    manifest = _table()[1]
    loaded = LoaderState.from_dict(state)
    loaded.check(fingerprint=manifest.fingerprint, num_samples=manifest.num_samples)
    plan = EpochPlan(manifest.samples, loaded.order, loaded.epoch)
    plan.open_window(0, plan.window_at(0, 0))


def _states() -> list[bytes]:
    manifest = _table()[1]
    state = LoaderState(
        fingerprint=manifest.fingerprint, num_samples=manifest.num_samples, seed=3, shuffle=True, lanes=4, window=2,
        epoch=1, consumed=5,
    )  # fmt: skip
    subset = Subset.share(0.0, 0.5).to_dict()
    states = (state, replace(state, piece=2), replace(state, selection={"subset": subset}))
    return [json.dumps(one.to_dict()).encode() for one in states]


def _run_audit(data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        (Path(folder) / "rank-0.deliveries").write_bytes(data)
        audit(folder)


def _run_pattern(data: bytes) -> None:
    pattern = data.decode("utf-8", "replace")[:_PATTERN_CHARS]
    objects = [
        ObjectInfo(key, 1) for key in ("a/b-00.tar", "a/b-01.tar", "c.tar", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa")
    ]
    for name in expand_braces(pattern)[:10]:
        if is_glob(name):
            match_glob(name, objects)


def _decoding(field: str) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        decoder = field_decoder(field, "auto")
        assert decoder is not None
        value = decoder(memoryview(data), None)
        collate_values([value, value])

    return run


def _run_text(data: bytes) -> None:
    for kind in ("txt", "json", "cls"):
        with contextlib.suppress(DecodeError):
            _decoding(f"x.{kind}")(data)


def _run_magic(data: bytes) -> None:
    sniff_format(data)
    parse_index(data)


_TAR = TarFormat(_CHUNK_BYTES)
_JSON_WORDS = (b'{"a": 1}\n', b"\n", b"\r\n", b"\xff", b"\xed\xa0\x80", b"[" * 2000, b'"a":', b"\0")
_PAGES = (b"<html><title>Index of /</title><a href='x.tar'>x</a></html>", b'[{"name": "a", "type": "file"}]')

TARGETS: dict[str, Target] = {
    "tar": Target(
        about="tar headers, members and their decoders", run=_shards(_TAR, "a.tar"), seeds=seeds.tars,
        words=(b"ustar\x0000", b"19 size=1000000000\n", b"././@LongLink", bytes(512)), repair=seeds.repair_tar,
    ),
    "tar-packed": Target(
        about="compressed tars", run=_packed(_TAR, "a.tar"), seeds=lambda: seeds.compressed(seeds.tars()[:2])
    ),
    "parquet": Target(
        about="Parquet footers and row groups", run=_shards(ParquetFormat(64), "a.parquet"), seeds=seeds.parquets,
        words=(b"PAR1", b"PARE", b"ARROW:schema"),
    ),
    "arrow-file": Target(
        about="Arrow IPC files, with views, dictionaries and nested types", words=(b"ARROW1", b"\xff\xff\xff\xff"),
        run=_shards(ArrowFormat(64), "a.arrow"), seeds=lambda: seeds.arrows(stream=False),
    ),
    "arrow-stream": Target(
        about="Arrow IPC streams", words=(b"\xff\xff\xff\xff",),
        run=_shards(ArrowFormat(64), "a.arrows"), seeds=lambda: seeds.arrows(stream=True),
    ),
    "tokens": Target(
        about="files of tokens", run=_shards(TokensFormat(seq_len=8, chunk_bytes=64), "a.bin"),
        seeds=lambda: [np.arange(64, dtype="<u2").tobytes()],
    ),
    "token-index": Target(about="Megatron's .idx", run=_run_token_index, seeds=seeds.token_indexes),
    "mds-index": Target(
        about="the index.json of MDS", run=_run_mds_index, seeds=lambda: [seeds.mds_index(len(seeds.mds_shard()))],
        words=(b'"ndarray:int8:3,4"', b'"pkl"', b'"jpeg"', b'"uint8"', b'"json"', b'"str_decimal"', b'"../a"'),
    ),
    "mds-shard": Target(about="MDS shards", run=_run_mds_shard, seeds=lambda: [seeds.mds_shard()]),
    "jsonl": Target(
        about="JSON lines", run=_shards(JsonlFormat(_CHUNK_BYTES), "a.jsonl"), seeds=seeds.json_lines, words=_JSON_WORDS
    ),
    "jsonl-packed": Target(
        about="compressed JSON lines", run=_packed(JsonlFormat(_CHUNK_BYTES), "a.jsonl"),
        seeds=lambda: seeds.compressed(seeds.json_lines()),
    ),
    "manifest": Target(
        about="manifest files", run=_run_manifest, seeds=_manifests, words=(b"checksum", b"parquet", b"tokens", b"tar"),
        repair=_repair_manifest,
    ),
    "state": Target(about="states of loaders", run=_run_state, seeds=_states, words=(b'"lanes"', b'"selection"')),
    "audit": Target(about="logs of deliveries", run=_run_audit, seeds=seeds.delivery_logs, words=(b'"rank": 0', b"\n")),
    "pattern": Target(
        about="brace patterns and globs", run=_run_pattern, words=(b"{0..9}", b"{a,b}", b"**", b"[!a]", b"*" * 20),
        seeds=lambda: [b"s3://b/a-{000..010}.{tar,tgz}", b"a/**/b-?[0-9].tar", b"{a,b{c,d}}"],
    ),
    "npy": Target(
        about=".npy values", run=_decoding("x.npy"), seeds=seeds.npys, words=(b"'<f8'", b"(3,)", b"|O", b"|V0")
    ),
    "npz": Target(about=".npz values", run=_decoding("x.npz"), seeds=seeds.npzs, words=(b"PK\x01\x02", b"PK\x05\x06")),
    "text": Target(
        about=".json, .cls and .txt values", seeds=lambda: [b'{"a": [1, 2.5, null]}', b"17", "tëxt".encode()],
        run=_run_text, words=_JSON_WORDS,
    ),
    "image": Target(
        about="headers and pixels of JPEG, PNG, WebP, BMP and TIFF", run=run_image, seeds=seeds.images,
        words=(b"VP8L", b"VP8X", b"IHDR", b"\xff\xd8\xff", b"\xff\xc3", b"II*\0"),
    ),
    "image-part": Target(
        about="parts of JPEGs", run=run_region, seeds=seeds.jpegs, words=(b"\xff\xd8\xff", b"\xff\xd9", b"\xff\xd0")
    ),
    "magic": Target(
        about="first bytes that tell a format, and web servers' index pages", run=_run_magic,
        seeds=lambda: [*_PAGES, *seeds.compressed(seeds.json_lines())],
    ),
}  # fmt: skip
