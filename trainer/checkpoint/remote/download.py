"""From the store into a folder that reads like any checkpoint's: the parts that are needed, each one verified."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path

from ....storage.checks import where
from ....storage.errors import NotFoundError, StorageError
from ....storage.hashing import xxh3_64
from ....storage.resolve import open_store
from ....storage.store import ByteRange, Store
from ....storage.threads.daemon_pool import DaemonPool
from ...errors import CheckpointError, CheckpointRoomError
from ..folder import EXTRA_NAME, METADATA_NAME, find_damage, read_manifest, write_manifest
from ..free_space import describe_full_disk, is_full_disk
from ..place import Needs
from ..traffic import TRAFFIC
from .layout import Part, Stored, read_stored
from .staging import Staging

PARTS_AT_ONCE = 8
_URL = re.compile(r"(?P<folder>[A-Za-z][A-Za-z0-9+.-]*://.+)/step-(?P<step>\d+)/?")


def fetch(store: Store, stored: Stored, needs: Needs, folder: Path) -> list[str]:
    """Fetch metadata and ``extra``, then the parts that hold what is needed; files have holes elsewhere.

    Returns one sentence for each part that is missing or not what the manifest says; nothing may be read then.

    Raises:
        CheckpointRoomError: the folder's disk has no room for them.
        StorageError: the store cannot be read, which says nothing about the checkpoint.
    """
    write_manifest(folder, stored.manifest)
    damage = fetch_files(store, stored, {METADATA_NAME: None, EXTRA_NAME: None}, folder)
    return damage or fetch_files(store, stored, needs(folder), folder)


@contextmanager
def opened_checkpoint(checkpoint: str | os.PathLike[str], needs: Needs) -> Iterator[Path]:
    """Yield a folder where what is needed of a checkpoint, verified, can be read; given by its path or its URL.

    Of a checkpoint in an object store, as ``s3://bucket/run/step-100``, only that is fetched, and deleted afterwards.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    match = _URL.fullmatch(os.fspath(checkpoint))
    if match is None:
        folder = Path(checkpoint)
        if damage := find_damage(folder, read_manifest(folder)):
            raise CheckpointError(f"{folder} is damaged: {'; '.join(damage)}; take another checkpoint")
        yield folder
        return
    with closing(Staging()) as staging:
        try:
            with closing(open_store(match["folder"])) as store:
                name = where(store.url, f"step-{match['step']}")
                damage = fetch(store, read_stored(store, int(match["step"])), needs, staging.folder)
        except StorageError as exc:
            raise CheckpointError(str(exc)) from exc
        if damage:
            raise CheckpointError(f"{name} is damaged: {'; '.join(damage)}; take another checkpoint")
        yield staging.folder


def fetch_files(
    store: Store,
    stored: Stored,
    wanted: Mapping[str, Sequence[ByteRange] | None],
    folder: Path,
    advance: Callable[[int], None] = lambda count: None,
) -> list[str]:
    """Fetch the parts that hold the wanted ranges of files, or whole files, as ``fetch``; ``advance`` gets bytes."""
    parts = [part for name, ranges in wanted.items() for part in stored.parts_of(name, ranges)]
    _check_room(folder, sum(part.seal.size for part in parts))
    for name in wanted:
        with (folder / name).open("ab") as file:
            file.truncate(stored.manifest.files[name].size)
    pool = DaemonPool("penstock-download", PARTS_AT_ONCE)
    try:
        waiting = [pool.submit(_fetch_part, store, part, folder) for part in parts]
        try:
            damages = []
            for part, one in zip(parts, waiting, strict=True):
                damages.append(one.result())
                advance(part.seal.size)
            return [damage for damage in damages if damage is not None]
        finally:
            _cancel(waiting)
    except OSError as exc:
        if is_full_disk(exc):
            raise CheckpointRoomError(f"{folder}: {describe_full_disk(exc)}; set TMPDIR to a larger disk") from exc
        raise
    finally:
        pool.close()


def _cancel(futures: Iterable[Future[str | None]]) -> None:
    for future in futures:
        future.cancel()


def _fetch_part(store: Store, part: Part, folder: Path) -> str | None:
    """Write a verified part into its file; returns what is wrong with one that stays wrong when it is fetched again."""
    damage = ""
    for _ in range(2):
        try:
            data = store.get(part.key)
        except NotFoundError:
            return f"{part.key} is missing"
        TRAFFIC.add(len(data))
        found = f"{xxh3_64(data):016x}"
        if len(data) != part.seal.size:
            damage = f"{part.key} has {len(data)} bytes instead of {part.seal.size}"
        elif found != part.seal.xxh3:
            damage = f"{part.key} has checksum {found} instead of {part.seal.xxh3}"
        else:
            with (folder / part.file).open("r+b") as file:
                file.seek(part.start)
                file.write(data)
            return None
    return damage


def _check_room(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise CheckpointRoomError(
            f"{needed_bytes / 1e6:.1f} MB of the checkpoint are to be fetched to {folder.parent}, which has "
            f"{free_bytes / 1e6:.1f} MB free; make room there, or set TMPDIR to a larger disk"
        )
