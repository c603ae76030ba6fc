"""A per-user cache of manifests on the node, keyed by the listing from which they were built."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from ..errors import DatasetError
from .manifest import Manifest
from .sealed_folder import SealedFolder

if TYPE_CHECKING:
    from ..formats.shard import ShardFormat, ShardTask

_KEPT = 256
# Manifests with other estimates of memory are other manifests: an order that is chosen for a new run depends on them.
_ESTIMATES = 2
# So are those in which a format found other types of columns.
_TYPES = {"jsonl": 2}


class IndexCache:
    """Manifests in a folder that belongs to this user (`SealedFolder`): an index can always be built again."""

    def __init__(self, cache_dir: str | os.PathLike[str] | None = None) -> None:
        self._files = SealedFolder("manifests", cache_dir, kept=_KEPT)

    @property
    def folder(self) -> Path:
        return self._files.path

    def key(
        self,
        url: str,
        tasks: Sequence[ShardTask],
        shard_format: ShardFormat,
        *,
        outdated: Manifest | None = None,
        copied: Manifest | None = None,
        classes: Sequence[str] | None = None,
    ) -> str | None:
        """Identifies a listing read as a format; None if an object has no ETag, because it could change unnoticed.

        ``outdated``: the manifest that some shards are known by. ``copied``: that whose checksums they may have.
        ``classes``: the names of classes that one of these has for them.
        """
        objects = [info for task in tasks for info in (task.info, task.companion) if info is not None]
        if any(info.etag is None for info in objects):
            return None
        digest = xxhash.xxh3_128()
        digest.update(json.dumps([_ESTIMATES, url, shard_format.name, shard_format.config()], sort_keys=True).encode())
        if shard_format.name in _TYPES:
            digest.update(f"types {_TYPES[shard_format.name]}\n".encode())
        if shard_format.name == "tar":
            digest.update(b"links\n")  # were passed over by older indexes
        for task in tasks:
            digest.update(f"{task.info.key}\0{task.info.size}\0{task.info.etag}\n".encode())
            if task.hint is not None:
                digest.update(f"{task.hint!r}\n".encode())
        if outdated is not None:
            digest.update(f"outdated\0{outdated.fingerprint}\0{json.dumps(dict(outdated.schema))}\n".encode())
            if outdated.checksums is not None:
                digest.update(outdated.checksums.tobytes())
        if copied is not None and copied.checksums is not None:
            digest.update(f"copied\0{copied.fingerprint}\n".encode())
            digest.update(copied.checksums.tobytes())
        if classes is not None:
            digest.update(f"classes\0{json.dumps(list(classes))}\n".encode())
        return digest.hexdigest()

    def load(self, key: str, url: str) -> Manifest | None:
        data = self._files.load(key)
        if data is None:
            return None
        try:
            return Manifest.from_bytes(data, url, str(self._files.file(key)))
        except DatasetError:  # of an older penstock
            self._files.forget(key)
            return None

    def save(self, key: str, manifest: Manifest) -> None:
        self._files.save(key, manifest.to_bytes())

    def lock(self, key: str) -> AbstractContextManager[None]:
        """Let one process of this node build what ``key`` names; if locking is impossible, each process builds."""
        return self._files.lock(key)
