"""URLs that only fsspec reads: memory://, hf://, sftp://, ..."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from fsspec import available_protocols
from fsspec.core import url_to_fs

from ..checks import changed_before_write, check_etag, check_inside, check_key, check_length, is_key, where
from ..errors import AccessDeniedError, NotFoundError, StorageError, StoreUnavailableError, UnsupportedURLError
from ..options import environment_secrets, find_secrets
from ..ranges import read_ranges
from ..store import ByteRange, ObjectInfo
from ..suggestions import did_you_mean
from ..urls import CLOUD_SCHEMES, PASSWORD, WEB_SCHEMES, without_password
from .odd_keys import leave_out_odd

_KNOWN = "known are file, s3, gs, az, http(s), mem, and what fsspec reads with the packages installed here"
_SCHEMES = [*sorted(CLOUD_SCHEMES | WEB_SCHEMES), "file", "mem", *available_protocols()]
_LEAST_SECRET = 6  # characters: shorter ones are parts of any text

# Fields in which fsspec file systems keep what identifies a version of a file, best first.
_ETAG_FIELDS = ("ETag", "etag", "md5Hash", "blob_id", "checksum", "uid", "mtime", "LastModified", "last_modified",
                "modified", "last_commit", "created")  # fmt: skip


class BridgeStore:
    """Files of any fsspec file system.

    Mutable state: that file system, which fsspec shares between its users, and under a lock the place that is read.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        """Open the root with fsspec; ``storage_options`` are those of the file system itself.

        Raises:
            UnsupportedURLError: no such scheme, or the package that reads it is missing.
        """
        self._source = url
        shown = without_password(url)
        self._url = shown.rstrip("/") if not shown.endswith("://") else shown
        self._options = dict(storage_options or {})
        given = {text[3:-1] for text in PASSWORD.findall(url)}
        passwords = {secret for text in given if len(secret := text.partition(":")[2]) >= _LEAST_SECRET}
        self._secrets = find_secrets(self._options, environment_secrets()) | given | passwords
        scheme = url.partition("://")[0]
        try:
            self._fs, root = url_to_fs(url, **self._options)
        except (ImportError, ValueError, TypeError) as exc:
            cure = "install penstock[hf]" if scheme == "hf" and isinstance(exc, ImportError) else _KNOWN
            meant = did_you_mean(scheme, _SCHEMES) if isinstance(exc, ValueError) else ""
            raise UnsupportedURLError(
                f"{scheme}:// can't be opened ({self._scrub(exc)}); {cure}{meant}"
            ) from self._cause(exc)
        except Exception as exc:  # noqa: BLE001 - each file system has errors of its own
            raise self._translate(exc, "") from self._cause(exc)
        self._root = str(root).rstrip("/")
        self._lock = threading.Lock()
        self._read_from: str | None = None

    def __reduce__(self) -> tuple[type[BridgeStore], tuple[str, dict[str, Any]]]:
        return (BridgeStore, (self._source, self._options))

    def __repr__(self) -> str:
        return f"BridgeStore({self._url!r})"

    @property
    def url(self) -> str:
        return self._url

    def _find_root(self) -> str:
        """Find the root to read from; on the Hugging Face Hub pin it to a commit, since fsspec caches a branch's files.

        Raises what the file system raises.
        """
        with self._lock:
            if self._read_from is None:
                self._read_from = _pin(self._fs, self._root)
            return self._read_from

    def get(self, key: str, byte_range: ByteRange | None = None, *, etag: str | None = None) -> memoryview:
        check_key(self._url, key)
        try:
            root = self._find_root()
            path = f"{root}/{key}"
            if byte_range is None:
                data = self._fs.cat_file(path)
            elif len(byte_range):
                data = self._fs.cat_file(path, start=byte_range.start, end=byte_range.stop)
            else:
                data = b""
        except Exception as exc:  # noqa: BLE001 - each file system has errors of its own
            raise self._translate(exc, key, byte_range) from self._cause(exc)
        if etag is not None or byte_range is None or len(data) != len(byte_range) or not data:
            if root == self._root:  # else nothing changes there
                self._fs.invalidate_cache(path.rpartition("/")[0])
            info = self.head(key)  # after the read, to notice a change during it
            check_etag(self._url, key, etag, info.etag)
            if byte_range is not None:
                check_inside(self._url, key, byte_range, info.size)
            check_length(self._url, key, byte_range, info.size if byte_range is None else len(byte_range), len(data))
        return memoryview(data).toreadonly().cast("B")

    def get_ranges(self, key: str, ranges: Sequence[ByteRange], *, etag: str | None = None) -> list[memoryview]:
        return read_ranges(lambda r: self.get(key, r, etag=etag), ranges)

    def head(self, key: str) -> ObjectInfo:
        check_key(self._url, key)
        try:
            info = self._fs.info(f"{self._find_root()}/{key}")
        except Exception as exc:  # noqa: BLE001 - each file system has errors of its own
            raise self._translate(exc, key) from self._cause(exc)
        if info.get("type") == "directory":
            raise NotFoundError(f"{where(self._url, key)} is a folder, not an object")
        return _describe(key, info)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        if folder:
            check_key(self._url, folder)
        try:
            root = self._find_root()
            top = f"{root}/{folder}" if folder else root
            self._fs.invalidate_cache()
            if not self._fs.isdir(top):
                if folder and self._fs.isdir(root or "/"):
                    return iter(())
                raise NotFoundError(f"there is no folder {self._url}; check the URL")
            entries = self._fs.find(top, detail=True)
        except StorageError:
            raise
        except Exception as exc:  # noqa: BLE001 - each file system has errors of its own
            raise self._translate(exc, folder) from self._cause(exc)
        cut = len(root) + 1
        found = [_describe(path[cut:], info) for path, info in entries.items() if path[cut:].startswith(prefix)]
        return iter(sorted(leave_out_odd(self._url, found, is_key), key=lambda info: info.key))

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        """Write an object; as atomic as the file system's own way to write a whole file."""
        check_key(self._url, key)
        path = f"{self._root}/{key}"
        try:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(path, bytes(data))
        except Exception as exc:  # noqa: BLE001 - each file system has errors of its own
            raise self._translate(exc, key) from self._cause(exc)
        with self._lock:
            self._read_from = None
        return self.head(key)

    def put_if(self, key: str, data: bytes | bytearray | memoryview, *, etag: str | None) -> ObjectInfo:
        """Check, then write: file systems have no common way to do both at once."""
        try:
            found: str | None = self.head(key).etag
        except NotFoundError:
            found = None
            is_there = False
        else:
            is_there = True
        if is_there != (etag is not None) or found != etag:
            raise changed_before_write(self._url, key, etag)
        return self.put(key, data)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(self._url, key)
        for key in keys:
            try:
                self._fs.rm_file(f"{self._root}/{key}")
            except FileNotFoundError:
                continue
            except Exception as exc:  # noqa: BLE001 - each file system has errors of its own
                raise self._translate(exc, key) from self._cause(exc)

    def close(self) -> None:
        """Do nothing: fsspec shares the file system with everyone else in the process."""

    def _cause(self, exc: BaseException) -> BaseException | None:
        """Choose the exception to raise from: the given one, unless it or one of its causes holds a secret."""
        last: BaseException | None = exc
        while last is not None:
            if any(secret in f"{last!r} {last}" for secret in self._secrets):
                return None
            last = last.__cause__ or last.__context__
        return exc

    def _scrub(self, exc: BaseException) -> str:
        text = str(exc).strip().partition("\n")[0][:300] or type(exc).__name__
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _translate(self, exc: BaseException, key: str, byte_range: ByteRange | None = None) -> StorageError:
        name, said = where(self._url, key, byte_range), self._scrub(exc)
        if isinstance(exc, (FileNotFoundError, IsADirectoryError, NotADirectoryError)):
            return NotFoundError(f"there is no object {name}; check the key")
        if isinstance(exc, PermissionError):
            return AccessDeniedError(f"{name}: access denied ({said}); check the credentials")
        if isinstance(exc, (ConnectionError, TimeoutError, OSError)):
            return StoreUnavailableError(f"{name}: {said}")
        return StorageError(f"{name}: {type(exc).__name__}: {said}")


def _pin(fs: Any, root: str) -> str:
    """The same place at the commit that a branch is at now, where the file system has branches as the Hub has."""
    if not hasattr(fs, "resolve_path"):
        return root
    from huggingface_hub import HfApi

    place = fs.resolve_path(root)
    info = HfApi(endpoint=fs.endpoint, token=fs.token).repo_info(
        place.repo_id, repo_type=place.repo_type, revision=place.revision
    )
    pinned: str = replace(place, revision=info.sha, _raw_revision=None).unresolve()
    return pinned.rstrip("/")


def _describe(key: str, info: Mapping[str, Any]) -> ObjectInfo:
    size = int(info["size"] or 0)
    for field in _ETAG_FIELDS:
        value = info.get(field)
        if isinstance(value, datetime):  # some file systems return a datetime for one file but a number in listings
            value = value.timestamp()
        if isinstance(value, float):
            value = f"{value:.6f}"
        if value:
            return ObjectInfo(key, size, str(value).strip('"') if "ag" in field else f"{field}-{value}-{size}")
    return ObjectInfo(key, size, None)
