"""Layout of a checkpoint in an object store: keys, the manifest, what may be deleted. No tensors, no ranks.

``data/step-N.ID/FILE.00000`` and on are the parts of a file; ID is new for each save, so that no data is ever written
over. ``manifests/step-N.json`` is written last: it makes the checkpoint, and is deleted first. What no manifest names
is the leftover of a killed save. Parts are objects of their own, not those of a multipart upload, because a killed
multipart upload leaves what no listing shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ....storage.checks import where
from ....storage.errors import NotFoundError
from ....storage.store import ByteRange, Store
from ...errors import CheckpointError
from ..folder import FileSeal, Manifest, decode_manifest, encode_manifest
from ..retention import Retention

PROBES = "probe/"
_MANIFESTS = "manifests/"
_DATA = "data/"
_MANIFEST_KEY = re.compile(r"manifests/step-(\d+)\.json")
_DATA_KEY = re.compile(r"(data/step-(\d+)\.[0-9a-f]+/).+")
# S3 deletes up to a thousand objects in one request.
_DELETE_AT_ONCE = 1000


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file of a checkpoint: its seal as a whole, and that of each part in order."""

    seal: FileSeal
    parts: Sequence[FileSeal]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One object: bytes ``start`` and on of a file."""

    key: str
    file: str
    start: int
    seal: FileSeal


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A checkpoint as it is in the store."""

    manifest: Manifest
    save_id: str
    parts: Mapping[str, Sequence[FileSeal]]

    def parts_of(self, name: str, ranges: Sequence[ByteRange] | None = None) -> Iterator[Part]:
        """The parts of a file, or those that some of its ranges touch."""
        borders = accumulate((seal.size for seal in self.parts[name]), initial=0)
        for number, (start, stop) in enumerate(pairwise(borders)):
            if ranges is None or any(one.start < stop and start < one.stop for one in ranges):
                key = part_key(self.manifest.step, self.save_id, name, number)
                yield Part(key=key, file=name, start=start, seal=self.parts[name][number])


def part_key(step: int, save_id: str, name: str, number: int) -> str:
    return f"{_DATA}step-{step}.{save_id}/{name}.{number:05d}"


def manifest_key(step: int) -> str:
    return f"{_MANIFESTS}step-{step}.json"


def list_stored(store: Store) -> list[int]:
    """Return the steps that have a manifest, newest first."""
    found = [_MANIFEST_KEY.fullmatch(info.key) for info in store.list(_MANIFESTS)]
    return sorted((int(match[1]) for match in found if match), reverse=True)


def write_stored(store: Store, manifest: Manifest, save_id: str, files: Mapping[str, StoredFile]) -> None:
    """Write the manifest, which makes the checkpoint; all its parts must have been uploaded."""
    parts = {name: [[part.size, part.xxh3] for part in file.parts] for name, file in sorted(files.items())}
    store.put(manifest_key(manifest.step), encode_manifest(manifest, {"save": save_id, "parts": parts}).encode())


def read_stored(store: Store, step: int) -> Stored:
    """Read a checkpoint's manifest.

    Raises:
        CheckpointError: it is missing or damaged.
        StorageError: the store cannot be read, which says nothing about the checkpoint.
    """
    key = manifest_key(step)
    name = where(store.url, key)
    try:
        data = bytes(store.get(key))
    except NotFoundError as exc:
        raise CheckpointError(f"{name} is missing") from exc
    manifest, body = decode_manifest(data, name)
    try:
        parts = {
            file: [FileSeal(size=size, xxh3=xxh3) for size, xxh3 in seals] for file, seals in body["parts"].items()
        }
        stored = Stored(manifest=manifest, save_id=str(body["save"]), parts=parts)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise CheckpointError(f"{name} cannot be read: {type(exc).__name__}: {exc}") from exc
    if manifest.step != step or parts.keys() != manifest.files.keys():
        raise CheckpointError(f"{name} is of step {manifest.step}, or does not name the parts of its files")
    return stored


def find_missing(store: Store, stored: Stored) -> list[str]:
    """Return one sentence for each part that is not there or has another size, by a listing alone."""
    step, save_id = stored.manifest.step, stored.save_id
    sizes = {info.key: info.size for info in store.list(f"{_DATA}step-{step}.{save_id}/")}
    damage = []
    for part in (part for name in stored.parts for part in stored.parts_of(name)):
        if part.key not in sizes:
            damage.append(f"{part.key} is missing")
        elif sizes[part.key] != part.seal.size:
            damage.append(f"{part.key} has {sizes[part.key]} bytes instead of {part.seal.size}")
    return damage


def remove_replaced(store: Store, step: int, save_id: str) -> None:
    """Delete the data of earlier saves of a step."""
    kept = f"{_DATA}step-{step}.{save_id}/"
    _delete(store, (info.key for info in store.list(f"{_DATA}step-{step}.") if not info.key.startswith(kept)))


def remove_stored(store: Store, step: int) -> None:
    """Delete a checkpoint; killed halfway, it leaves what ``remove_leftovers`` knows and no half checkpoint."""
    store.delete([manifest_key(step)])
    _delete(store, (info.key for info in store.list(f"{_DATA}step-{step}.")))


def remove_leftovers(store: Store) -> list[str]:
    """Delete the data of killed saves and deletions, and return what it was of; what a manifest names stays.

    Data of a step whose manifest cannot be read stays too, for a person may want to look.
    """
    ids: dict[int, str | None] = {}
    for step in list_stored(store):
        try:
            ids[step] = read_stored(store, step).save_id
        except CheckpointError:
            ids[step] = None
    doomed: dict[str, list[str]] = {}
    for info in store.list(_DATA):
        match = _DATA_KEY.fullmatch(info.key)
        if match is None:
            continue  # foreign
        step = int(match[2])
        if step not in ids or (ids[step] is not None and match[1] != f"{_DATA}step-{step}.{ids[step]}/"):
            doomed.setdefault(match[1].removeprefix(_DATA).rstrip("/"), []).append(info.key)
    _delete(store, (key for keys in doomed.values() for key in keys))
    _delete(store, (info.key for info in store.list(PROBES)))
    return sorted(doomed)


def prune_stored(store: Store, retention: Retention, *, damaged: Iterable[int]) -> None:
    """Delete the checkpoints that need not stay; damaged ones neither count nor go."""
    metrics: dict[int, float | None] = {}
    for step in set(list_stored(store)) - set(damaged):
        try:
            metrics[step] = read_stored(store, step).manifest.metric_by(retention.measure)
        except CheckpointError:
            continue
    for step in sorted(set(metrics) - retention.choose(metrics)):
        remove_stored(store, step)


def _delete(store: Store, keys: Iterable[str]) -> None:
    listed = list(keys)
    for first in range(0, len(listed), _DELETE_AT_ONCE):
        store.delete(listed[first : first + _DELETE_AT_ONCE])
