"""A per-user cache of manifests on the node, keyed by the listing from which they were built."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import xxhash

from ...storage import ObjectInfo
from ...storage.files import lock_file, write_whole
from ..errors import DatasetError
from ..formats.shard import ShardFormat
from .manifest import Manifest

_KEPT = 256
# Manifests with other estimates of memory are other manifests: an order that is chosen for a new run depends on them.
_ESTIMATES = 2
# A suspended builder keeps its lock: after this long, another process builds as well.
_LOCK_PATIENCE_S = 600.0


def cache_home(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """``cache_dir``, else $PENSTOCK_CACHE, else $XDG_CACHE_HOME/penstock, else ~/.cache/penstock."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    if os.environ.get("PENSTOCK_CACHE"):
        return Path(os.environ["PENSTOCK_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "penstock"


class IndexCache:
    """Manifests in a folder that belongs to this user.

    Every disk failure means 'not cached', because an index can always be built again. Files are written atomically;
    damaged ones are removed.
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
        path = self._folder / f"{key}.arrow"
        try:
            if path.stat().st_uid != os.geteuid():
                return None
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        try:
            return Manifest.from_bytes(data, url, str(path))
        except DatasetError:
            with contextlib.suppress(OSError):
                path.unlink()
            return None

    def save(self, key: str, manifest: Manifest) -> None:
        with contextlib.suppress(OSError):
            self._make_folder()
            write_whole(self._folder / f"{key}.arrow", manifest.to_bytes())
            self._prune()

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Let one process of this node build what ``key`` names; if locking is impossible, each process builds."""
        try:
            self._make_folder()
        except OSError:
            yield
            return
        with lock_file(self._folder / f"{key}.lock", wait_s=_LOCK_PATIENCE_S):
            yield

    def _make_folder(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._folder.stat().st_uid != os.geteuid():
            raise PermissionError(f"{self._folder} belongs to another user")

    def _prune(self) -> None:
        """Keep the most recently used manifests, and delete what killed processes left."""
        files = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in [path for path in files if path.suffix == ".arrow"][_KEPT:]:
            path.unlink(missing_ok=True)
        long_ago = time.time() - 86_400
        for path in files:
            # This includes lock files: a process that still holds one would lock a deleted name, and at worst one index
            # is built twice.
            if path.suffix != ".arrow" and path.stat().st_mtime < long_ago:
                path.unlink(missing_ok=True)
