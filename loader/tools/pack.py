"""Writing a data set: samples to shards, shards to a store, and the manifest last."""

from __future__ import annotations

import inspect
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import xxhash

from ...storage import NotFoundError, ObjectInfo, Store, open_store
from ...storage.memory import MemoryStore
from ..dataset.manifest import MANIFEST_NAME, Manifest
from ..dataset.source import UNFINISHED
from ..errors import ConfigError, DatasetError
from ..formats.detect import make_format
from ..formats.shard import ShardFormat, ShardIndex, ShardTask
from ..progress import show_progress
from .pack_shards import ParquetWriter, ShardWriter, TarWriter, TokensWriter
from .pack_sources import Sample, open_samples

SHARD_BYTES = 64 << 20
_UPLOADS = 4
_OURS = re.compile(r"shard-\d{6,}\.(tar|parquet|bin)")


PackSource: TypeAlias = (
    str | Path | Iterable[Sample] | Iterable[pa.RecordBatch] | Iterable[Sequence[int]] | Iterable[str]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSummary:
    """What ``pack`` wrote. ``classes`` are the names for the numbers in ``cls``; ``dropped`` says what was dropped."""

    url: str
    format: str
    shards: int
    samples: int
    bytes: int
    seconds: float
    fingerprint: str
    classes: tuple[str, ...] = ()
    dropped: str | None = None

    def __str__(self) -> str:
        return (
            f"{self.url}: {self.samples:,} samples, {self.bytes:,} bytes of {self.format} in "
            f"{self.shards} {'shard' if self.shards == 1 else 'shards'}, "
            f"packed in {self.seconds:.1f} s"
        )


def pack(
    source: PackSource,
    target_url: str | Path,
    *,
    format: Literal["tar", "parquet", "tokens"] = "tar",  # noqa: A002 - the word that users know
    shard_bytes: int = SHARD_BYTES,
    seq_len: int | None = None,
    dtype: str = "uint16",
    tokenizer: Callable[[str], Sequence[int]] | None = None,
    field: str | None = None,
    checksums: bool = True,
    overwrite: bool = False,
    progress: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    source_storage_options: Mapping[str, Any] | None = None,
) -> PackSummary:
    """Write a folder, a table or an iterable of samples as shards of about ``shard_bytes``, and their manifest.

    Files of a folder are grouped into samples by their name up to the first dot. If every file lies in one of several
    subfolders, the subfolders are classes and each sample gets a ``cls``. Each row of a table (.jsonl, .csv, .parquet)
    is a sample, and so is each row of Arrow record batches, for parquet only. ``seq_len``, ``dtype``, ``tokenizer`` and
    ``field`` (the field that holds text or integers) apply to tokens only. With ``checksums`` the manifest has one per
    chunk, which readers verify.

    Each shard is written whole and the manifest last, so that an interrupted pack is detected and can be run again. A
    target that is not empty is refused unless ``overwrite``.

    Raises:
        ConfigError: the arguments contradict each other.
        DatasetError: the source is empty, a sample cannot be written, or the target is not empty.
    """
    writer, shard_format = _make_writer(format, shard_bytes, seq_len, dtype, tokenizer, field)
    started = time.monotonic()
    url = str(target_url).rstrip("/") + "/"
    store = open_store(url, storage_options=storage_options)
    try:
        batches = format == "parquet"
        with open_samples(source, source_storage_options, batches=batches) as (samples, classes):  # type: ignore[arg-type]
            before = _check_target(store, shard_format, overwrite=overwrite)
            store.put(MANIFEST_NAME, UNFINISHED)
            with show_progress("packing", None, unit="samples", enabled=progress) as advance:
                shards = _cut(writer, samples, advance)
                written = list(_put_shards(store, shard_format, shards, writer.suffix, checksums=checksums))
        if not written:
            raise DatasetError(f"{url}: the source has no samples; nothing was packed")
        left = sorted(before - {info.key for info, _, _ in written} - {MANIFEST_NAME})
        if left:
            raise DatasetError(
                f"{url}: packed, but {len(left)} earlier shards are still there ({', '.join(left[:3])}"
                f"{', ...' if len(left) > 3 else ''}) and would be read as part of it; delete them and pack again"
            )
        schema: Mapping[str, Any] = written[0][1].schema
        for info, index, _ in written[1:]:
            if index.schema != schema:
                schema = shard_format.merge_schema(schema, index.schema, info.key)
        manifest = Manifest.build(
            url,
            shard_format.name,
            shard_format.config(),
            schema,
            [(info, index) for info, index, _ in written],
            np.concatenate([sums for _, _, sums in written]) if checksums else None,
        )
        store.put(MANIFEST_NAME, manifest.to_bytes())
        return PackSummary(
            url=store.url,
            format=format,
            shards=len(manifest.shards),
            samples=manifest.num_samples,
            bytes=sum(info.size for info in manifest.shards),
            seconds=time.monotonic() - started,
            fingerprint=manifest.fingerprint,
            classes=classes,
            dropped=writer.dropped,
        )
    finally:
        store.close()


def pack_once(source: PackSource, target_url: str | Path, **options: Any) -> PackSummary | None:
    """``pack`` with its ``options`` if the target is empty; otherwise do nothing and return None.

    A target that an interrupted pack left behind is packed again.

    Raises:
        ConfigError, DatasetError: as ``pack``.
    """
    if unknown := sorted(set(options) - set(inspect.signature(pack).parameters)):
        raise ConfigError(f"{', '.join(unknown)}: unknown options of pack")
    store = open_store(str(target_url).rstrip("/") + "/", storage_options=options.get("storage_options"))
    try:
        keys = {info.key for info in store.list()}
        is_whole = bool(keys) and not (MANIFEST_NAME in keys and bytes(store.get(MANIFEST_NAME)) == UNFINISHED)
    except NotFoundError:
        is_whole = False  # the first put creates the folder or bucket, or fails
    finally:
        store.close()
    return None if is_whole else pack(source, target_url, **options)


def _make_writer(
    name: str,
    shard_bytes: int,
    seq_len: int | None,
    dtype: str,
    tokenizer: Callable[[str], Sequence[int]] | None,
    field: str | None,
) -> tuple[ShardWriter, ShardFormat]:
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes={shard_bytes}: needs 1 or more")
    if name == "tokens":
        if seq_len is None or seq_len < 1:
            raise ConfigError(f"seq_len={seq_len}: packing tokens needs a sequence length, 1 or more")
        tokens = TokensWriter(shard_bytes, seq_len=seq_len, dtype=dtype, tokenizer=tokenizer, field=field)
        return tokens, make_format("tokens", {"seq_len": seq_len, "dtype": dtype})
    if seq_len is not None or tokenizer is not None or field is not None:
        raise ConfigError(f"seq_len, tokenizer and field apply to format='tokens', not {name!r}")
    if name == "tar":
        return TarWriter(shard_bytes), make_format("tar")
    if name == "parquet":
        return ParquetWriter(shard_bytes), make_format("parquet")
    raise ConfigError(f"format={name!r}: pack writes tar, parquet or tokens")


def _check_target(store: Store, shard_format: ShardFormat, *, overwrite: bool) -> set[str]:
    """Check that the target may be written. Returns the keys of the shards that it holds already."""
    try:
        listing = list(store.list())
    except NotFoundError:
        return set()  # the first put creates the folder or bucket, or fails
    there = {info.key for info in listing}
    if not there:
        return there
    unfinished = MANIFEST_NAME in there and bytes(store.get(MANIFEST_NAME)) == UNFINISHED
    others = sorted(key for key in there if key != MANIFEST_NAME and not _OURS.fullmatch(key))
    if not overwrite and (others or not unfinished):
        named = ", ".join(sorted(there)[:2])
        raise DatasetError(
            f"{store.url}: not empty (it holds {len(there)} objects: {named}{', ...' if len(there) > 2 else ''}); "
            "choose another target, or give overwrite=True (--overwrite) to replace its shards"
        )
    return {task.info.key for task in shard_format.shards(store, listing)}


def _cut(writer: ShardWriter, samples: Iterable[Any], advance: Callable[[int], None]) -> Iterator[bytes]:
    for sample in samples:
        yield from writer.add(sample)
        advance(sample.num_rows if isinstance(sample, pa.RecordBatch) else 1)
    yield from writer.finish()


def _put_shards(
    store: Store, shard_format: ShardFormat, shards: Iterable[bytes], suffix: str, *, checksums: bool
) -> Iterator[tuple[ObjectInfo, ShardIndex, np.ndarray[Any, Any]]]:
    """Index, checksum and put shards, a few at a time; results in the order of the shards."""

    def put_one(number: int, data: bytes) -> tuple[ObjectInfo, ShardIndex, np.ndarray[Any, Any]]:
        name = f"shard-{number:06d}{suffix}"
        memory = MemoryStore()
        index = shard_format.index_shard(memory, ShardTask(memory.put(name, data)))
        view = memoryview(data)
        spans = index.chunks if checksums else ()
        sums = [xxhash.xxh3_64_intdigest(view[span.offset : span.offset + span.length]) for span in spans]
        return store.put(name, data), index, np.array(sums, np.uint64)

    running: deque[Future[tuple[ObjectInfo, ShardIndex, np.ndarray[Any, Any]]]] = deque()
    pool = ThreadPoolExecutor(_UPLOADS, "penstock-pack")
    try:
        for number, data in enumerate(shards):
            # Bounded, so that a slow store does not fill memory with shards.
            if len(running) >= _UPLOADS:
                yield running.popleft().result()
            running.append(pool.submit(put_one, number, data))
        while running:
            yield running.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
