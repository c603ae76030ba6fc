"""Checking again what a quarantine file names: which of its samples and chunks are still bad."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..loader.columns import Block
from ..loader.counters import Counters
from ..loader.dataset.index import open_manifest
from ..loader.dataset.manifest import Manifest
from ..loader.dataset.source import Source
from ..loader.dataset.splits import Split
from ..loader.decoding.decode import FieldDecoders
from ..loader.decoding.gather import gather
from ..loader.decoding.images.kind import ImageFields
from ..loader.decoding.row_work import RowError, RowTask, RowWork
from ..loader.formats.detect import make_format
from ..loader.formats.shard import ShardFormat
from ..loader.order.spans import ChunkRows
from ..loader.progress import show_progress
from ..loader.reading.bad.file import Paths, Quarantined, read_quarantine
from ..loader.reading.chunk_source import ChunkSource
from ..storage import PenstockError, open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class Rechecked:
    """Result for one quarantined sample or chunk: ``problem`` is None if it can be read and decoded now.

    ``is_gone``: its shard, or its place there, is no longer in the data set. ``is_decoded``: it decodes, which is all
    that can be checked of a sample whose transform failed, since the transform is not known here.
    """

    entry: Quarantined
    problem: str | None = None
    is_gone: bool = False
    is_decoded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecheckResult:
    """Results of ``recheck`` for all entries, in the order of their ids."""

    url: str
    format: str
    seconds: float
    entries: tuple[Rechecked, ...]

    @property
    def ok(self) -> bool:
        """Return whether all entries are good now."""
        return all(entry.problem is None for entry in self.entries)


def recheck(
    source: Source | Manifest,
    quarantine: Paths,
    *,
    split: Split | None = None,
    storage_options: Mapping[str, Any] | None = None,
    format: ShardFormat | str | None = None,  # noqa: A002 - the word that users know
    progress: bool = True,
) -> RecheckResult:
    """Read again what quarantine files, or folders of them, name, and decode samples as ``decode="auto"`` does.

    Samples are found by shard and number, so the data set may have been mended and indexed anew since.

    Raises:
        ConfigError: a file cannot be read, or is damaged.
        DatasetError, FormatError, StorageError: as ``open_manifest`` does.
    """
    started = time.monotonic()
    manifest = open_manifest(source, split=split, storage_options=storage_options, format=format, progress=progress)
    entries = read_quarantine(quarantine, manifest, "quarantine", is_same=False)
    store = open_store(manifest.url, storage_options=storage_options)
    try:
        chunks = ChunkSource(manifest, make_format(manifest.format, manifest.config), store, None, Counters())
        checker = _Checker(chunks)
        found = []
        with show_progress("verifying", len(entries), unit="entries", enabled=progress) as advance:
            for entry in entries:
                found.append(checker.check(entry))
                advance(1)
    finally:
        store.close()
    return RecheckResult(
        url=store.url, format=manifest.format, seconds=time.monotonic() - started, entries=tuple(found)
    )


class _Checker:
    """Keeps the chunk that was read last: entries come in the order of their ids."""

    def __init__(self, chunks: ChunkSource) -> None:
        self._chunks = chunks
        self._decoders = FieldDecoders("auto")
        self._decoders.are_images = ImageFields(chunks)
        self._decoders.of_columns = chunks.manifest.has_columns
        self._last: tuple[int, Block] | None = None

    def check(self, entry: Quarantined) -> Rechecked:
        places = _places(self._chunks.manifest, entry)
        if not places:
            return Rechecked(entry=entry, is_gone=True)
        try:
            for chunk, row in places:
                block = self._load(chunk)
                rows = np.arange(block.samples) if row is None else np.array([row])
                self._decode(chunk, block, rows)
        except RowError as exc:
            return Rechecked(entry=entry, problem=f"{type(exc.cause).__name__}: {exc.cause}")
        except PenstockError as exc:
            return Rechecked(entry=entry, problem=str(exc))
        return Rechecked(entry=entry, is_decoded=entry.step == "transform")

    def _load(self, chunk: int) -> Block:
        if self._last is None or self._last[0] != chunk:
            self._last = chunk, self._chunks.load(chunk)
        return self._last[1]

    def _decode(self, chunk: int, block: Block, rows: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        targets = np.arange(len(rows))
        manifest = self._chunks.manifest
        gathered = gather([(ChunkRows(chunk, rows, targets), block)], len(rows), manifest.first_ids, self._decoders)
        encoded = {
            name: decoder for name in gathered.fields if (decoder := self._decoders.settled.get(name)) is not None
        }
        work = RowWork(transform=None, seed=0)
        for row in range(len(rows)):  # one by one: decoded images of a whole chunk may not fit into memory
            one = gathered.cut(row, row + 1)
            task = RowTask(0, row, one.ids, one.fields, encoded)
            work.run(task, work.allocate(task), 0, 1, lambda: False)


def _places(manifest: Manifest, entry: Quarantined) -> list[tuple[int, int | None]]:
    """The chunk and row of a sample; of a chunk, the chunk where it began, or all of its shard, and None."""
    shards = [number for number, shard in enumerate(manifest.shards) if shard.key == entry.shard]
    chunks = np.flatnonzero(np.isin(manifest.shard_index, shards)).tolist()
    if entry.number is None:
        refs = {chunk: manifest.chunk(chunk) for chunk in chunks}
        here = [c for c, ref in refs.items() if ref.offset <= entry.offset < ref.offset + max(ref.length, 1)]
        return [(chunk, None) for chunk in here or chunks]
    before = 0
    for chunk in chunks:
        samples = int(manifest.samples[chunk])
        if entry.number < before + samples:
            return [(chunk, entry.number - before)]
        before += samples
    return []
