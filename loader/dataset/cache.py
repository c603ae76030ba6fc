"""A per-user cache on the node: sealed files, which can be made again at any time; manifests, by their listing."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from ...storage.files import TEMPORARY_PREFIX, in_home, write_all
from ...storage.own_folder import OwnFolder
from ..errors import DatasetError
from .manifest import Manifest

if TYPE_CHECKING:
    from ..formats.shard import ShardFormat, ShardTask


# A suspended builder keeps its lock: after this long, another process builds as well.
_LOCK_PATIENCE_S = 600.0
_OURS = re.compile(rf"[0-9a-f]{{32}}(-copy)?\.(arrow|lock)|{re.escape(TEMPORARY_PREFIX)}.*")
_SEAL_BYTES = 16
_RENEWED_S = 60.0  # a file's time, which tells what was used last; each time is a write to the disk
_NO_HOME = "this user has no home folder: give cache_dir=, or set PENSTOCK_CACHE"


def cache_home(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """``cache_dir``, else $PENSTOCK_CACHE, else $XDG_CACHE_HOME/penstock, else ~/.cache/penstock.

    Raises:
        FileNotFoundError: none of these is there, as in a container whose user has no home.
    """
    if cache_dir is not None:
        return Path(in_home(cache_dir))
    if os.environ.get("PENSTOCK_CACHE"):
        return Path(in_home(os.environ["PENSTOCK_CACHE"]))
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "penstock"
    try:
        return Path("~/.cache/penstock").expanduser()
    except RuntimeError as exc:
        raise FileNotFoundError(_NO_HOME) from exc


class SealedFolder:
    """Files by key, 32 hex digits, of which the ``kept`` that were used last stay, to a minute.

    Every disk failure means 'not there', as does a user without a home; a folder that is not this user's alone is an
    AccessDeniedError. Files are written atomically; damaged ones, and those of another key, are removed.
    """

    def __init__(self, name: str, cache_dir: str | os.PathLike[str] | None, *, kept: int) -> None:
        # The user id separates users of a shared folder: nobody reads what another user could have written.
        self._name = f"{name}-{os.geteuid()}"
        self._home: Path | None = None
        with suppress(FileNotFoundError):
            self._home = cache_home(cache_dir)
        self._kept = kept

    @property
    def path(self) -> Path:
        """The folder.

        Raises:
            FileNotFoundError: there is none (see ``cache_home``).
        """
        if self._home is None:
            raise FileNotFoundError(_NO_HOME)
        return self._home / self._name

    def file(self, key: str) -> Path:
        """Return the path of a key's file."""
        return self.path / f"{key}.arrow"

    def load(self, key: str) -> bytes | None:
        """The content of a key's file; None where there is none that is whole."""
        try:
            data = _read(OwnFolder(self.path), f"{key}.arrow")
        except OSError:
            return None
        if data[-_SEAL_BYTES:] == _seal(key, data[:-_SEAL_BYTES]):
            return data[:-_SEAL_BYTES]
        self.forget(key)
        return None

    def save(self, key: str, data: bytes | memoryview) -> None:
        with suppress(OSError):
            folder = OwnFolder(self.path)
            with folder.replacing(f"{key}.arrow") as fd:
                write_all(fd, data)
                write_all(fd, _seal(key, data))
            self._prune(folder)

    def forget(self, key: str) -> None:
        """Remove the file of a key."""
        with suppress(OSError):
            OwnFolder(self.path).delete(f"{key}.arrow")

    @contextmanager
    def lock(self, key: str, *, wait_s: float = _LOCK_PATIENCE_S) -> Iterator[None]:
        """Let one process of this node make what ``key`` names; if locking is impossible, each process does."""
        try:
            folder = OwnFolder(self.path)
        except OSError:
            yield
            return
        with folder.lock(f"{key}.lock", wait_s=wait_s):
            yield

    def _prune(self, folder: OwnFolder) -> None:
        """Keep the files that were used last, and delete what killed processes left; other files are not touched."""
        with folder.scan() as entries:
            files = [
                (entry.stat(follow_symlinks=False).st_mtime, entry.name)
                for entry in entries
                if _OURS.fullmatch(entry.name)
            ]
        files.sort(reverse=True)
        for _, name in [file for file in files if file[1].endswith(".arrow")][self._kept :]:
            folder.delete(name)
        long_ago = time.time() - 86_400
        for modified, name in files:
            # This includes lock files: a process that still holds one would lock a deleted name, and at worst a file
            # is made twice.
            if not name.endswith(".arrow") and modified < long_ago:
                folder.delete(name)


def _seal(key: str, data: bytes | memoryview) -> bytes:
    digest = xxhash.xxh3_128(key.encode())
    digest.update(data)
    return digest.digest()


def _read(folder: OwnFolder, name: str) -> bytes:
    """A file's content; its time is renewed where it is older than a minute."""
    with os.fdopen(folder.open(name, os.O_RDONLY), "rb") as file:
        with suppress(OSError):  # a read-only file system
            if os.fstat(file.fileno()).st_mtime < time.time() - _RENEWED_S:
                os.utime(file.fileno())
        return file.read()


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
