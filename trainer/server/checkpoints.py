"""Checkpoints of a server, in a folder or an object store: shards write their buckets, and a manifest makes them count.

They lie as the trainer's own do in a store. A file has whole buckets in each of its parts, and an index beside it says
where, so that any number of shards reads those that it holds. Each bucket has its checksum, and each part.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from ...storage.checks import where
from ...storage.hashing import xxh3_64
from ...storage.store import ByteRange, Store
from ..checkpoint.folder import FileSeal, Manifest
from ..checkpoint.remote.layout import (
    Stored,
    StoredFile,
    find_missing,
    list_stored,
    part_key,
    prune_stored,
    read_stored,
    remove_leftovers,
    remove_replaced,
    write_stored,
)
from ..checkpoint.retention import UNKNOWN, Retention
from ..errors import CheckpointError

PART_BYTES = 32 << 20
_RUN = "run.json"


@dataclass(frozen=True, kw_only=True)
class Place:
    """A bucket's bytes in a part of a checkpoint."""

    key: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class SavedServer:
    """A whole checkpoint: what else was saved of the run, and the places of all buckets."""

    step: int
    run: Mapping[str, Any]
    buckets: Mapping[int, Place]


def new_save() -> str:
    """The name of a save, by which its files differ from those of another save of the same step."""
    return uuid.uuid4().hex[:12]


def write_shard(
    store: Store, step: int, save: str, shard: str, snapshots: Iterable[tuple[int, bytes]]
) -> dict[str, StoredFile]:
    """Write the snapshots of a shard's buckets by number; returns what ``complete`` wants of each shard.

    Raises:
        StorageError: the store does not take them.
    """
    name = f"{shard}.buckets"
    seals: list[FileSeal] = []
    index: list[tuple[int, int, int, int]] = []  # bucket, part, start, stop
    total = xxhash.xxh3_64()
    part = bytearray()

    def put() -> None:
        data = bytes(part)
        store.put(part_key(step, save, name, len(seals)), data)
        seals.append(FileSeal(size=len(data), xxh3=f"{xxh3_64(data):016x}"))
        total.update(data)
        part.clear()

    for number, data in snapshots:
        if part and len(part) + len(data) > PART_BYTES:
            put()
        index.append((number, len(seals), len(part), len(part) + len(data)))
        part += data
    put()
    whole = FileSeal(size=sum(seal.size for seal in seals), xxh3=total.hexdigest())
    text = json.dumps(index).encode()
    return {name: StoredFile(seal=whole, parts=seals), **_put_small(store, step, save, f"{shard}.index", text)}


def complete(
    store: Store, step: int, save: str, shards: Iterable[Mapping[str, StoredFile]], run: Mapping[str, Any], *, keep: int
) -> None:
    """Write the manifest, which makes the checkpoint, and delete all but the ``keep`` newest.

    ``run`` is what else belongs to the moment, as JSON.

    Raises:
        StorageError: the store does not take it; then there is no such checkpoint.
    """
    files: dict[str, StoredFile] = _put_small(store, step, save, _RUN, json.dumps(dict(run)).encode())
    count = 0
    for shard in shards:
        files.update(shard)
        count += 1
    manifest = Manifest(
        step=step,
        world_size=count,
        metric=None,
        torch_version=str(torch.__version__),
        files={name: file.seal for name, file in files.items()},
    )
    write_stored(store, manifest, save, files)
    remove_replaced(store, step, save)
    prune_stored(store, Retention(keep_last=keep, keep_best=0, measure=UNKNOWN), damaged=())
    remove_leftovers(store)


def find_newest(store: Store, note: Callable[[str], None]) -> SavedServer | None:
    """Find the newest checkpoint that is whole, every byte of it; ``note`` gets a sentence for each that is not.

    Raises:
        StorageError: the store cannot be read.
    """
    for step in list_stored(store):
        try:
            stored = read_stored(store, step)
            _verify(store, stored)
            return read_saved(store, step)
        except CheckpointError as exc:
            note(f"the checkpoint of step {step} is not used: {exc}")
    return None


def read_saved(store: Store, step: int) -> SavedServer:
    """Read what a checkpoint consists of.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    stored = read_stored(store, step)
    save = stored.save_id
    places: dict[int, Place] = {}
    for name in stored.parts:
        if name.endswith(".index"):
            file = f"{name.removesuffix('.index')}.buckets"
            for number, part, start, stop in json.loads(_get(store, stored, name)):
                places[number] = Place(key=part_key(step, save, file, part), start=start, stop=stop)
    return SavedServer(step=step, run=json.loads(_get(store, stored, _RUN)), buckets=places)


def read_buckets(store: Store, saved: SavedServer, numbers: Collection[int]) -> Iterator[tuple[str, bytes]]:
    """Read buckets of a checkpoint, those that it has: the place for messages, and the bytes, not checked.

    Raises:
        StorageError: a part is missing, shorter than it was, or cannot be read.
    """
    by_key: dict[str, list[tuple[int, Place]]] = {}
    for number in sorted(numbers):
        place = saved.buckets.get(number)
        if place is not None:
            by_key.setdefault(place.key, []).append((number, place))
    for key, several in by_key.items():
        found = store.get_ranges(key, [ByteRange(place.start, place.stop) for _, place in several])
        for (number, _), data in zip(several, found, strict=True):
            yield f"bucket {number} in {where(store.url, key)}", bytes(data)


def _put_small(store: Store, step: int, save: str, name: str, data: bytes) -> dict[str, StoredFile]:
    store.put(part_key(step, save, name, 0), data)
    seal = FileSeal(size=len(data), xxh3=f"{xxh3_64(data):016x}")
    return {name: StoredFile(seal=seal, parts=[seal])}


def _get(store: Store, stored: Stored, name: str) -> bytes:
    """Read a small file, checked.

    Raises:
        CheckpointError: it is not as it was written.
    """
    if name not in stored.parts:
        raise CheckpointError(f"{name} is not among its files: it is no checkpoint of a parameter server")
    (part,) = stored.parts_of(name)
    data = bytes(store.get(part.key))
    _check(store, part.key, data, part.seal)
    return data


def _verify(store: Store, stored: Stored) -> None:
    missing = find_missing(store, stored)
    if missing:
        raise CheckpointError("; ".join(missing))
    for name in stored.parts:
        for part in stored.parts_of(name):
            _check(store, part.key, bytes(store.get(part.key)), part.seal)


def _check(store: Store, key: str, data: bytes, seal: FileSeal) -> None:
    if len(data) != seal.size or f"{xxh3_64(data):016x}" != seal.xxh3:
        raise CheckpointError(f"{where(store.url, key)} is damaged: it is not as it was written")
