"""Object stores and web servers through obstore (Rust): s3, gs, az and their kin, http and https."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import obstore
import obstore.exceptions

from ..checks import (
    bare_etag,
    changed_before_write,
    check_etag,
    check_inside,
    check_key,
    check_length,
    etag_of,
    is_strong,
    past_the_end,
    where,
)
from ..errors import NotFoundError, ObjectChangedError, ShortReadError, StorageError, UnsupportedURLError
from ..options import DIRECT_OPTION, configure, environment_secrets, find_secrets, is_s3, is_true, limit_options
from ..ranges import read_ranges
from ..retrying.adaptive_timeout import TimeLimit
from ..store import ByteRange, ObjectInfo, byte_view
from ..urls import WEB_SCHEMES, decode_path, parse_remote
from .direct import DirectReads, fallback_reason, plain_urls, sign_with, times_of
from .odd_keys import has_name, leave_out_odd
from .remote_errors import Translator
from .shared import open_shared
from .signed_listing import list_pages, sign_queries

if TYPE_CHECKING:
    from .web import WebClient

# Larger objects are uploaded in parts. Smaller ones are not: an upload in parts whose process is killed leaves what no
# listing shows, and costs money.
MULTIPART_BYTES = 64 << 20
_Infos = list[ObjectInfo]  # inside the class, list is a verb

# What obstore raises: its own errors, and Python's for bad arguments and missing objects.
_FOREIGN = (obstore.exceptions.BaseError, OSError, ValueError, TypeError)


class _Runtime:
    """obstore's threads: one set per process, started by the first request, and missing in a forked child."""

    used = False
    lost = False

    @classmethod
    def _note_fork(cls) -> None:
        cls.lost = cls.lost or cls.used


os.register_at_fork(after_in_child=_Runtime._note_fork)


class RemoteStore:
    """Objects below ``scheme://bucket/prefix`` or ``https://host/folder``.

    Mutable state: obstore's client, and under a lock the same store with other time limits.
    """

    def __init__(
        self, url: str, storage_options: Mapping[str, Any] | None = None, *, direct: DirectReads | None = None
    ) -> None:
        """Open the root; sends no request.

        ``storage_options``: see `penstock.storage.options`. ``direct`` is another store's, where this is the same one
        with other limits; obstore's client for these is made when it is first used.

        Raises:
            UnsupportedURLError: the URL or an option is not understood.
        """
        scheme, authority, path = parse_remote(url)
        self._options = dict(storage_options or {})
        self._lock = threading.Lock()
        self._limited: dict[TimeLimit, RemoteStore] = {}
        self._is_http = scheme in WEB_SCHEMES
        self._is_s3 = is_s3(scheme)
        self._url = url.rstrip("/")
        prefix = decode_path(url, path).strip("/")
        if prefix and not has_name(prefix):
            raise UnsupportedURLError(
                f"{self._url!r}: names with an empty, '.' or '..' part or a control character can't be read; check the "
                "URL, or rename what lies there"
            )
        self._prefix = prefix + "/" if prefix else ""
        self._origin = origin = f"{scheme}://{authority}"
        config: Any
        client: Any
        config, client = configure(scheme, self._options)
        self.identity = f"{self._url} at {config['endpoint']}" if "endpoint" in config else self._url
        self._errors = Translator(self._url, find_secrets(self._options, config, environment_secrets()))
        self._open = partial(open_shared, origin, config, client, is_http=self._is_http)
        self._settings = config, client
        self._opened: Any = None
        self._is_closed = False
        if direct is None:
            try:
                self._opened = self._open()
            except _FOREIGN as exc:
                raise self._errors.translate_opening(exc) from None
        # obstore takes custom headers along to whatever host a redirect names.
        self._web = _open_web(origin, client) if self._is_http else None
        self._carrier = self._web if client.get("default_headers") else None
        self.indirect: str | None = f"{DIRECT_OPTION}=False"
        if self._options.get(DIRECT_OPTION) is None or is_true(self._options[DIRECT_OPTION]):
            self.indirect = fallback_reason(scheme, origin, config, client)
        self._direct = direct
        if self.indirect is None:
            self._times = times_of(client)
        if self.indirect is None and direct is None:
            sign = plain_urls(origin) if self._is_http else sign_with(self._client)
            self._direct = DirectReads(sign, origin if self._is_http else config["endpoint"], client)

    def __reduce__(self) -> tuple[type[RemoteStore], tuple[str, dict[str, Any]]]:
        return (RemoteStore, (self._url, self._options))

    def __repr__(self) -> str:
        reads = "direct" if self.indirect is None else f"by obstore ({self.indirect})"
        return f"RemoteStore({self._url!r}, ranges={reads!r})"

    @property
    def url(self) -> str:
        return self._url

    @property
    def _client(self) -> Any:
        """obstore's client; None once the store is closed."""
        if self._opened is None and not self._is_closed:
            self._opened = self._open()
        return self._opened

    def within(self, limit: TimeLimit) -> RemoteStore:
        """The same store with requests that break off past ``limit``, or past what its options say where that is less.

        obstore's time limits belong to a client, so there is one for each limit.
        """
        with self._lock:
            store = self._limited.get(limit)
            if store is None:
                # Connections and signatures are the same whatever the limit.
                options = limit_options(self._options, limit)
                store = self._limited[limit] = RemoteStore(self._url, options, direct=self._direct)
        return store

    def get(self, key: str, byte_range: ByteRange | None = None, *, etag: str | None = None) -> memoryview:
        check_key(self._url, key)
        self._check_process()
        if byte_range is not None and not len(byte_range):
            info = self.head(key)
            check_etag(self._url, key, etag, info.etag)
            check_inside(self._url, key, byte_range, info.size)
            return memoryview(b"")
        options: Any = {}
        if byte_range is not None:
            options["range"] = (byte_range.start, byte_range.stop)
        if etag is not None and is_strong(etag):
            options["if_match"] = f'"{etag}"'
        try:
            path = self._prefix + key
            if self._carrier is not None:
                with closing(self._carrier.get(path, options=options)) as answer:
                    return self._receive(answer, key, byte_range, etag)
            if self._direct is not None and byte_range is not None:
                direct = self._direct.get(path, options, self._times)
                if direct is not None:
                    with closing(direct):
                        return self._receive(direct, key, byte_range, etag)
            return self._receive(obstore.get(self._client, path, options=options), key, byte_range, etag)
        except _FOREIGN as exc:
            raise self._errors.translate(exc, key, byte_range) from self._errors.cause(exc)

    def _receive(self, answer: Any, key: str, byte_range: ByteRange | None, etag: str | None) -> memoryview:
        # This catches servers that ignore If-Match, and ETags that If-Match cannot express.
        check_etag(self._url, key, etag, etag_of(answer.meta))
        start, stop = answer.range
        if byte_range is not None and (start, stop) != (byte_range.start, byte_range.stop):
            if start == byte_range.start and stop == answer.meta["size"] < byte_range.stop:
                raise past_the_end(self._url, key, byte_range, answer.meta["size"])
            raise ShortReadError(f"{where(self._url, key, byte_range)}: bytes {start} to {stop - 1} came instead")
        data = memoryview(answer.bytes()).toreadonly()
        check_length(self._url, key, byte_range, stop - start, len(data))
        return data

    def get_ranges(self, key: str, ranges: Sequence[ByteRange], *, etag: str | None = None) -> list[memoryview]:
        return read_ranges(lambda r: self.get(key, r, etag=etag), ranges)

    def head(self, key: str) -> ObjectInfo:
        check_key(self._url, key)
        self._check_process()
        try:
            path = self._prefix + key
            meta: Any = obstore.head(self._client, path) if self._carrier is None else self._carrier.head(path)
        except _FOREIGN as exc:
            raise self._errors.translate(exc, key) from self._errors.cause(exc)
        return ObjectInfo(key, meta["size"], etag_of(meta))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        if prefix.rpartition("/")[0]:
            check_key(self._url, prefix.rpartition("/")[0])
        self._check_process()
        found = self._list_index(prefix) if self._is_http else self._list_bucket(prefix)
        found.sort(key=lambda info: info.key)
        return iter(found)

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        check_key(self._url, key)
        self._check_process()
        view = byte_view(data)
        try:
            in_parts = len(view) > MULTIPART_BYTES
            path = self._prefix + key
            result: Any = (
                obstore.put(self._client, path, view, use_multipart=in_parts)
                if self._carrier is None
                else self._carrier.put(path, view)
            )
        except _FOREIGN as exc:
            raise self._errors.translate(exc, key) from self._errors.cause(exc)
        return self._describe_put(key, view, result)

    def put_if(self, key: str, data: bytes | bytearray | memoryview, *, etag: str | None) -> ObjectInfo:
        check_key(self._url, key)
        self._check_process()
        if self._is_http:
            raise StorageError(f"{where(self._url, key)}: web servers have no conditional writes; use an object store")
        try:
            result = self._put_if(self._prefix + key, byte_view(data), etag)
        except obstore.exceptions.AlreadyExistsError:
            result = None
        except _FOREIGN as exc:
            error = self._errors.translate(exc, key)
            is_changed = isinstance(error, ObjectChangedError) or (
                etag is not None and isinstance(error, NotFoundError)
            )
            if not is_changed:
                raise error from self._errors.cause(exc)
            result = None
        if result is None:
            raise changed_before_write(self._url, key, etag)
        return self._describe_put(key, byte_view(data), result)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(self._url, key)
        self._check_process()
        paths = [self._prefix + key for key in keys]
        try:
            if self._carrier is not None:
                self._carrier.delete(paths)
            elif paths:
                obstore.delete(self._client, paths)
        except _FOREIGN as exc:
            error = self._errors.translate(exc, keys[0])
            if not isinstance(error, NotFoundError):
                raise error from self._errors.cause(exc)
            if len(keys) > 1:  # the services that miss one stop there
                for key in keys:
                    self.delete([key])

    def close(self) -> None:
        """Release the client; its connections close when the last store and the last read that use them end."""
        self._is_closed = True
        self._opened = None
        if self._direct is not None:
            self._direct.close()
        if self._web is not None:
            self._web.close()
        with self._lock:
            for store in self._limited.values():
                store.close()

    def _put_if(self, path: str, view: memoryview, etag: str | None) -> Any:
        """Write if the object still has this ETag and return obstore's result, else None; raises obstore's errors."""
        if etag is None:
            return obstore.put(self._client, path, view, mode="create", use_multipart=False)
        version = {}
        if self._origin.startswith(("gs:", "gcs:")):  # it compares versions, which are no part of an ETag
            meta: Any = obstore.head(self._client, path)
            if etag_of(meta) != etag:
                return None
            version = {"version": meta["version"]}
        for form in (f'"{etag}"', etag):  # Ceph 16 compares the text without quotes
            mode: Any = {"e_tag": form, **version}
            try:
                return obstore.put(self._client, path, view, mode=mode, use_multipart=False)
            except obstore.exceptions.PreconditionError:
                continue
        return None

    def _describe_put(self, key: str, view: memoryview, result: Mapping[str, Any]) -> ObjectInfo:
        etag = bare_etag(result["e_tag"])
        return ObjectInfo(key, len(view), etag) if etag is not None else self.head(key)

    def _check_process(self) -> None:
        """Raise instead of hanging: in a forked child no thread would serve the request."""
        if _Runtime.lost:
            raise StorageError(
                f"{self._url} can't be read in a process that was forked after the first request to a remote store; "
                "start workers with the 'spawn' or 'forkserver' method"
            )
        _Runtime.used = True

    def _list_bucket(self, prefix: str) -> _Infos:
        """List the folder around ``prefix``, because obstore's prefixes are whole path segments."""
        start, cut = self._prefix + prefix, len(self._prefix)
        folder = start.rpartition("/")[0]
        try:
            try:
                pages = obstore.list(self._client, prefix=folder or None, chunk_size=1000)
                found = [_describe(meta, cut) for page in pages for meta in page if meta["path"].startswith(start)]
            except obstore.exceptions.InvalidPathError as exc:
                found = self._list_signed(start, exc)
        except _FOREIGN as exc:
            error = self._errors.translate(exc, prefix, listing=True)
            raise error from self._errors.cause(exc)
        return drop_folder_markers(leave_out_odd(self._url, found))

    def _list_signed(self, start: str, refused: Exception) -> _Infos:
        """List as ``_list_bucket`` where a key is one that obstore refuses; such keys are among those found."""
        if not self._is_s3:
            raise StorageError(
                f"{self._url} can't be listed: {str(refused).partition(chr(10))[0]}; rename or delete that object, or "
                "name the shards by a brace pattern like shard-{000..099}.tar or a list"
            ) from refused
        config, client = self._settings
        folder = start[: start.rfind("/") + 1]
        sign = sign_queries(lambda settings: open_shared(self._origin, settings, client, is_http=False), config)
        with closing(_open_web(sign({}).partition("?")[0], client)) as web:
            metas = list_pages(web.read_url, sign, folder)
            return [_describe(meta, len(self._prefix)) for meta in metas if meta["path"].startswith(start)]

    def _list_index(self, prefix: str) -> _Infos:
        """List through the server's own index pages, with a HEAD request for each file's size and ETag."""
        from .autoindex import list_index

        web = self._web
        assert web is not None

        def read_page(folder: str) -> bytes:
            # obstore refuses responses without a Content-Length, and index pages are generated as they are sent.
            try:
                return web.read_page(self._prefix + folder)
            except OSError as exc:
                if str(exc) in {"status code: 403", "status code: 405"}:
                    return b""
                raise self._errors.translate(exc, folder, listing=True) from self._errors.cause(exc)

        return list_index(self._url, prefix, read_page, self.head)


def _open_web(origin: str, client: Mapping[str, Any]) -> WebClient:
    from .web import WebClient  # whose library buckets need not wait for

    return WebClient(origin, client)


def _describe(meta: Mapping[str, Any], cut: int) -> ObjectInfo:
    """An object of a listing, whose key begins after ``cut`` characters of its path."""
    return ObjectInfo(meta["path"][cut:], meta["size"], etag_of(meta))


def drop_folder_markers(found: Sequence[ObjectInfo]) -> _Infos:
    """Drop the empty objects 'a/' that some tools create for folders; obstore lists them as 'a'."""
    folders = {info.key[: slash.start()] for info in found for slash in re.finditer("/", info.key)}
    return [info for info in found if info.size or info.key not in folders]
