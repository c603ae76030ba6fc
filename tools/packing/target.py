"""The target of ``pack``: shards put one by one, and in the manifest's place a note of how far they go.

The note is the line that tells readers of an unfinished data set, then one line of JSON, then the manifest of the
shards so far. A pack that is run again with the same source and options resumes there. By the note a pack also learns
that another has begun to write here.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ...loader.dataset.build import shard_indexes
from ...loader.dataset.class_names import LABEL_FIELD
from ...loader.dataset.manifest import MANIFEST_NAME, Manifest, SumArray
from ...loader.dataset.source import UNFINISHED, is_unfinished
from ...loader.errors import DatasetError
from ...loader.formats.detect import format_by_name
from ...loader.formats.shard import ChunkRef, ShardFormat, ShardIndex, ShardTask
from ...loader.reading.checksum import manifest_sums, sum_chunk, with_sums
from ...storage import NotFoundError, ObjectInfo, Store
from ...storage.memory_store import MemoryStore
from ...storage.threads.daemon_pool import DaemonPool
from ...storage.threads.interruptible import Thread
from .writer import Shard

_UPLOADS = 4
_SAVE_EVERY_S = 5.0
_INTERRUPTED_S = 2.0  # after Ctrl-C, for the shards that are being put, and for the note of them
OWN_NAME = re.compile(r"shard-\d{6,}\.(tar|parquet|bin|mds|jsonl|arrow)|index\.json")

ChunkSums = tuple[int, SumArray]  # the checksum of a chunk, and those of its parts


@dataclass(frozen=True, slots=True)
class Cursor:
    """Resume point of a pack: after ``units`` units, of which ``into`` came from part ``number`` of source ``piece``.

    ``state`` is the writer's.
    """

    units: int
    piece: int
    number: int
    into: int
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Written:
    """A shard that was put, with its index and its chunks' checksums."""

    info: ObjectInfo
    index: ShardIndex
    sums: list[ChunkSums]


class Target:
    """Folder that is packed into. ``job`` identifies the source and options; None: the pack can never be resumed."""

    def __init__(self, store: Store, shard_format: ShardFormat, suffix: str, *, job: str | None, checksums: bool):
        self.written: list[Written] = []
        self.cursor: Cursor | None = None
        self.earlier: set[str] = set()
        self._store = store
        self._format = shard_format
        self._suffix = suffix
        self._job = job
        self._checksums = checksums
        self._saved_at = 0.0
        self._token = secrets.token_hex(8)
        self._noted: ObjectInfo | None = None
        self._noting = threading.Lock()  # held while the note is replaced, and while it is looked at

    def begin(self, *, overwrite: bool) -> None:
        """Check that the target may be written to, find the resume point, and mark the target as unfinished.

        Raises:
            DatasetError: it holds something else.
        """
        try:
            listing = {info.key: info for info in self._store.list()}
        except NotFoundError:
            listing = {}  # the first put creates the folder or bucket, or fails
        note = bytes(self._store.get(MANIFEST_NAME)) if MANIFEST_NAME in listing else b""
        others = [key for key in listing if key != MANIFEST_NAME and not OWN_NAME.fullmatch(key)]
        if listing and not overwrite and (others or not is_unfinished(note)):
            named = ", ".join(sorted(listing)[:2])
            objects = "1 object" if len(listing) == 1 else f"{len(listing):,} objects"
            raise DatasetError(
                f"{self._store.url}: not empty (it holds {objects}: {named}{', ...' if len(listing) > 2 else ''}); "
                "choose another target, or give overwrite=True (--overwrite) to replace its shards"
            )
        self.earlier = {key for key in listing if key != MANIFEST_NAME and format_by_name(key) is not None}
        if not overwrite and is_unfinished(note):
            self._go_on(note, listing)
        self._save()

    def _go_on(self, note: bytes, listing: Mapping[str, ObjectInfo]) -> None:
        """Take over what an interrupted pack of this very job has written, if all of it is still there."""
        line, _, data = note[len(UNFINISHED) :].partition(b"\n")
        if not line or self._job is None:
            return
        try:
            about = json.loads(line)
            if about["job"] != self._job:
                return
            manifest = Manifest.from_bytes(data, self._store.url)
            cursor = Cursor(**about["cursor"])
        except (ValueError, TypeError, KeyError, DatasetError):
            return
        if any(listing.get(shard.key) != shard for shard in manifest.shards):
            return
        sums = manifest_sums(manifest)
        if self._checksums and sums is None:
            return
        first = 0
        for info, index in zip(manifest.shards, shard_indexes(manifest), strict=True):
            stop = first + len(index.chunks)
            self.written.append(Written(info, index, [] if sums is None else sums[first:stop]))
            first = stop
        self.cursor = cursor

    def _save(self) -> None:
        about: dict[str, Any] = {"writer": self._token}
        data = b""
        if self._job is not None and self.cursor is not None:
            about["job"] = self._job
            about["cursor"] = {name: getattr(self.cursor, name) for name in Cursor.__slots__}
            data = self.manifest().to_bytes()
        note = UNFINISHED + json.dumps(about).encode() + b"\n" + data
        self._refuse_another()
        with self._noting:
            self._noted, self._saved_at = self._store.put(MANIFEST_NAME, note), time.monotonic()

    def _refuse_another(self) -> None:
        """Raise DatasetError if what lies in the manifest's place is of another pack, which has begun since."""
        with self._noting:
            if self._noted is not None and not self._is_there(self._noted):
                raise self._is_shared()

    def _is_there(self, info: ObjectInfo) -> bool:
        try:
            return _is_same(self._store.head(info.key), info)
        except NotFoundError:
            return False

    def _is_shared(self) -> DatasetError:
        return DatasetError(
            f"{self._store.url}: another pack wrote here at the same time, or the folder was emptied; what this one "
            "wrote is not whole. When no other runs, run it again with overwrite=True (--overwrite), or give another "
            "target"
        )

    def put_all(self, shards: Iterable[tuple[Shard, Cursor]]) -> None:
        """Put shards, a few at a time, and keep note of those before which none is missing."""
        for written, cursor in self._put(shards):
            self.written.append(written)
            self.cursor = cursor
            if time.monotonic() - self._saved_at >= _SAVE_EVERY_S:
                self._save()

    def _put(self, shards: Iterable[tuple[Shard, Cursor]]) -> Iterator[tuple[Written, Cursor]]:
        running: deque[tuple[Future[Written], Cursor]] = deque()
        pool, patience_s = DaemonPool("penstock-pack", _UPLOADS), None
        try:
            for number, (shard, cursor) in enumerate(shards, start=len(self.written)):
                # Bounded, so that a slow store does not fill memory with shards.
                if len(running) >= _UPLOADS:
                    yield _first(running)
                running.append((pool.submit(self._put_one, number, shard), cursor))
            while running:
                yield _first(running)
        except BaseException as exc:
            patience_s = None if isinstance(exc, Exception) else _INTERRUPTED_S
            self._count_put(running, patience_s)
            saving = Thread(target=self._save_quietly, name="penstock-pack-note")
            saving.start()
            saving.join(patience_s)
            raise
        finally:
            pool.close(None if patience_s is None else 0.0, cancel=True)

    def _count_put(self, running: deque[tuple[Future[Written], Cursor]], patience_s: float | None) -> None:
        """Count shards that are stored already, so that a rerun keeps them, but none behind a missing one."""
        until = None if patience_s is None else time.monotonic() + patience_s
        with suppress(TimeoutError):
            while running and running[0][0].exception(until and max(0.0, until - time.monotonic())) is None:
                written, self.cursor = _first(running)
                self.written.append(written)

    def _save_quietly(self) -> None:
        try:
            self._save()
        except Exception:  # noqa: BLE001 - the error that is under way tells more
            return

    def _put_one(self, number: int, shard: Shard) -> Written:
        name = f"shard-{number:06d}{self._suffix}"
        memory = MemoryStore()
        info = memory.put(name, shard.data)
        index = self._format.index_shard(memory, ShardTask(info, shard.hint))
        sums: list[ChunkSums] = []
        if self._checksums and index.chunks:
            header, first_row = self._format.open_shard(memory, info), 0
            for span in index.chunks:
                chunk = ChunkRef(info, span.offset, span.length, span.samples, first_row)
                sums.append(sum_chunk(memory, self._format, header, chunk))
                first_row += span.samples
        self._refuse_another()
        return Written(self._store.put(name, shard.data), index, sums)

    def manifest(self) -> Manifest:
        """The manifest of the shards so far."""
        schema: Mapping[str, Any] = self.written[0].index.schema
        for each in self.written[1:]:
            if each.index.schema != schema:
                schema = self._format.merge_schema(schema, each.index.schema, each.info.key)
        manifest = Manifest.build(
            self._store.url,
            self._format.name,
            self._format.config(),
            schema,
            [(each.info, each.index) for each in self.written],
        )
        return (
            with_sums(manifest, [sums for each in self.written for sums in each.sums]) if self._checksums else manifest
        )

    def finish(self, samples: int, companions: Mapping[str, bytes], classes: tuple[str, ...] = ()) -> Manifest:
        """Put the companions, and the manifest, with the names of classes if it has labels, in place of the note.

        Raises:
            DatasetError: shards of before would be read along, readers would find another number of samples, or another
                pack has written here meanwhile.
        """
        left = sorted(self.earlier - {each.info.key for each in self.written})
        if left:
            raise DatasetError(
                f"{self._store.url}: packed, but {len(left)} earlier shards are still there ({', '.join(left[:3])}"
                f"{', ...' if len(left) > 3 else ''}) and would be read as part of it; delete them and pack again"
            )
        manifest = self.manifest()
        if manifest.num_samples != samples:
            raise DatasetError(
                f"{self._store.url}: readers would find {manifest.num_samples:,} samples, but {samples:,} were packed; "
                "the data set is left unfinished, please report the keys and fields that did this"
            )
        if classes and LABEL_FIELD in manifest.fields:
            manifest = replace(manifest, classes=classes)
        self._refuse_another()
        for name, data in companions.items():
            self._store.put(name, data)
        whole = self._store.put(MANIFEST_NAME, manifest.to_bytes())
        there = {info.key: info for info in self._store.list()}
        if not all(_is_same(there.get(each.info.key), each.info) for each in self.written):
            if self._is_there(whole):
                self._store.put(MANIFEST_NAME, UNFINISHED)
            raise self._is_shared()
        return manifest


def _is_same(found: ObjectInfo | None, put: ObjectInfo) -> bool:
    """Compare an object that was found with one that was put; not every store has ETags."""
    return found == put or (found is not None and found.size == put.size and None in (found.etag, put.etag))


def _first(running: deque[tuple[Future[Written], Cursor]]) -> tuple[Written, Cursor]:
    """Take the result of the first put; one that failed stays."""
    done, cursor = running[0]
    written = done.result()
    running.popleft()
    return written, cursor
