"""A per-user cache of manifests on the node, keyed by the listing from which they were built."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from ...storage import ObjectInfo
from ...storage.files import TEMPORARY_PREFIX, write_all
from ...storage.own_folder import OwnFolder
from ..errors import DatasetError
from ..formats.shard import ShardFormat
from .manifest import Manifest

_KEPT = 256
# Manifests with other estimates of memory are other manifests: an order that is chosen for a new run depends on them.
_ESTIMATES = 2
# A suspended builder keeps its lock: after this long, another process builds as well.
_LOCK_PATIENCE_S = 600.0
_OURS = re.compile(rf"[0-9a-f]{{32}}(-copy)?\.(arrow|lock)|{re.escape(TEMPORARY_PREFIX)}.*")
_SEAL_BYTES = 16


def cache_home(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """``cache_dir``, else $PENSTOCK_CACHE, else $XDG_CACHE_HOME/penstock, else ~/.cache/penstock."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    if os.environ.get("PENSTOCK_CACHE"):
        return Path(os.environ["PENSTOCK_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "penstock"


class IndexCache:
    """Manifests in a folder that belongs to this user, each sealed with a checksum of its content and its key.

    Every disk failure means 'not cached', because an index can always be built again; a folder that is not this user's
    alone is an AccessDeniedError. Files are written atomically; damaged ones, and those of another key, are removed.
    """

    def __init__(self, cache_dir: str | os.PathLike[str] | None = None) -> None:
        # The user id separates users of a shared folder: nobody reads a manifest that another user could have written.
        self._folder = cache_home(cache_dir) / f"manifests-{os.geteuid()}"

    @property
    def folder(self) -> Path:
        return self._folder

    def key(self, url: str, shards: Sequence[ObjectInfo], shard_format: ShardFormat) -> str | None:
        """Identifies a listing read as a format; None if a shard has no ETag, because it could change unnoticed."""
        if any(info.etag is None for info in shards):
            return None
        digest = xxhash.xxh3_128()
        digest.update(json.dumps([_ESTIMATES, url, shard_format.name, shard_format.config()], sort_keys=True).encode())
        for info in shards:
            digest.update(f"{info.key}\0{info.size}\0{info.etag}\n".encode())
        return digest.hexdigest()

    def load(self, key: str, url: str) -> Manifest | None:
        try:
            folder = OwnFolder(self._folder)
            data = _read(folder, f"{key}.arrow")
        except OSError:
            return None
        try:
            if data[-_SEAL_BYTES:] != _seal(key, data[:-_SEAL_BYTES]):
                raise DatasetError("another key's manifest, a damaged one, or one of an older penstock")
            return Manifest.from_bytes(data[:-_SEAL_BYTES], url, str(self._folder / f"{key}.arrow"))
        except DatasetError:
            with suppress(OSError):
                folder.delete(f"{key}.arrow")
            return None

    def save(self, key: str, manifest: Manifest) -> None:
        with suppress(OSError):
            folder, data = OwnFolder(self._folder), manifest.to_bytes()
            with folder.replacing(f"{key}.arrow") as fd:
                write_all(fd, data)
                write_all(fd, _seal(key, data))
            _prune(folder)

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Let one process of this node build what ``key`` names; if locking is impossible, each process builds."""
        try:
            folder = OwnFolder(self._folder)
        except OSError:
            yield
            return
        with folder.lock(f"{key}.lock", wait_s=_LOCK_PATIENCE_S):
            yield


def _seal(key: str, data: bytes) -> bytes:
    digest = xxhash.xxh3_128(key.encode())
    digest.update(data)
    return digest.digest()


def _read(folder: OwnFolder, name: str) -> bytes:
    """A file's content; its time is renewed."""
    with os.fdopen(folder.open(name, os.O_RDONLY), "rb") as file:
        with suppress(OSError):  # a read-only file system
            os.utime(file.fileno())
        return file.read()


def _prune(folder: OwnFolder) -> None:
    """Keep the most recently used manifests, and delete what killed processes left; other files are not touched."""
    with folder.scan() as entries:
        files = [
            (entry.stat(follow_symlinks=False).st_mtime, entry.name) for entry in entries if _OURS.fullmatch(entry.name)
        ]
    files.sort(reverse=True)
    for _, name in [file for file in files if file[1].endswith(".arrow")][_KEPT:]:
        folder.delete(name)
    long_ago = time.time() - 86_400
    for modified, name in files:
        # This includes lock files: a process that still holds one would lock a deleted name, and at worst one index
        # is built twice.
        if not name.endswith(".arrow") and modified < long_ago:
            folder.delete(name)
