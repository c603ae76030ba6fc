"""The manifests that this user's processes built, kept on the node and keyed by the listing they were built from."""

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
# A builder that was stopped, not killed, holds its lock: after this long another one builds, too.
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
    """Manifests below one folder of this user's own.

    Every failure of the disk means 'not cached': an index can always be built anew. Files are written beside their
    place and renamed, so readers see whole ones; damaged ones are removed.
    """

    def __init__(self, cache_dir: str | os.PathLike[str] | None = None) -> None:
        # The user id keeps users of a shared folder apart: nobody reads a manifest that another could have written.
        self._folder = cache_home(cache_dir) / f"manifests-{os.geteuid()}"

    @property
    def folder(self) -> Path:
        return self._folder

    def key(self, url: str, shards: Sequence[ObjectInfo], shard_format: ShardFormat) -> str | None:
        """What identifies a listing, read as a format; None where a shard has no ETag: it could have changed."""
        if any(info.etag is None for info in shards):
            return None
        digest = xxhash.xxh3_128()
        digest.update(json.dumps([1, url, shard_format.name, shard_format.config()], sort_keys=True).encode())
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
        """Let one process of this node build what ``key`` names; where nothing can be locked, each builds its own."""
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
        """Keep the manifests used last, and drop what killed processes left."""
        files = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in [path for path in files if path.suffix == ".arrow"][_KEPT:]:
            path.unlink(missing_ok=True)
        long_ago = time.time() - 86_400
        for path in files:
            # Lock files that nobody used for a day, too: whoever holds one open would lock a name that is gone, and
            # only build twice.
            if path.suffix != ".arrow" and path.stat().st_mtime < long_ago:
                path.unlink(missing_ok=True)
