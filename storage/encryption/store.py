"""A store whose objects are encrypted before they are written, and decrypted after they are read.

Keys, sizes and ranges are those of the contents; an object 'a.tar' is stored as 'a.tar.penc'. It goes around the cache,
so that what lies on the node's disk is encrypted too.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ..checks import check_etag, check_inside, check_key, check_length, where
from ..errors import DecryptionError, StorageError
from ..store import ByteRange, DiscardingStore, ObjectInfo, Store, byte_view
from ..urls import decode_path, split_root
from .key import KeySource, load_key
from .layout import (
    ENCRYPTED_SUFFIX,
    FRAME_BYTES,
    HEADER_BYTES,
    Keys,
    Opened,
    encrypt,
    open_header,
    plain_size,
    sealed_range,
)

T = TypeVar("T")
_Views = list[memoryview]  # inside the class, list is a verb
_HEADERS = 4096


class EncryptedStore:
    """A store over another one, whose objects are AES-256-GCM in numbered frames of 64 KiB.

    The key of an object is derived (HKDF-SHA256) from yours and 32 random bytes, which its header holds. Key 'a.tar' is
    stored as 'a.tar.penc', 96 bytes and 0.02% longer. Frames that were changed, cut off, repeated, reordered or taken
    from another object, objects renamed within the data set, and another key are a ``DecryptionError``. While a chunk
    is decrypted, it is in memory twice. Mutable state: the headers of objects read with their ETags, under a lock.
    """

    encrypts = True

    def __init__(self, inner: Store, key: KeySource) -> None:
        """Wrap a store; closing this one closes it too. ``key``: see ``load_key``.

        Raises:
            UnsupportedURLError, AccessDeniedError: there is no key, or the package that encrypts is missing.
        """
        self._inner = inner
        self._source = key
        self._keys = Keys.derive(load_key(key))
        path = inner.url if inner.url.startswith("file://") else "/" + decode_path(inner.url, split_root(inner.url)[2])
        self._path = path.rstrip("/")
        self._headers: OrderedDict[tuple[str, str], Opened] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[EncryptedStore], tuple[Store, KeySource]]:
        return (EncryptedStore, (self._inner, self._source))

    def __repr__(self) -> str:
        return f"EncryptedStore({self._inner!r}, key {self._keys.key_id.hex()})"

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def inner(self) -> Store:
        """The store of what is encrypted."""
        return self._inner

    def get(self, key: str, byte_range: ByteRange | None = None, *, etag: str | None = None) -> memoryview:
        check_key(self.url, key)
        if byte_range is not None:
            return self.get_ranges(key, [byte_range], etag=etag)[0]
        return self._twice(key, None, etag, lambda: self._read_whole(key, etag))

    def get_ranges(self, key: str, ranges: Sequence[ByteRange], *, etag: str | None = None) -> _Views:
        check_key(self.url, key)
        return self._twice(key, ranges, etag, lambda: self._read_ranges(key, ranges, etag))

    def discard(self, key: str, byte_range: ByteRange | None = None, *, etag: str) -> None:
        """Have the cache forget a range, and its object's header; that which is kept here is proven to be right."""
        with self._lock:
            opened = self._headers.get((key, etag))
        if not isinstance(self._inner, DiscardingStore):
            return
        self._inner.discard(key + ENCRYPTED_SUFFIX, ByteRange(0, HEADER_BYTES), etag=etag)
        if byte_range is None:
            self._inner.discard(key + ENCRYPTED_SUFFIX, None, etag=etag)
        elif opened is not None and len(byte_range) and byte_range.stop <= opened.length:
            self._inner.discard(key + ENCRYPTED_SUFFIX, sealed_range(byte_range, opened.length)[0], etag=etag)

    def head(self, key: str) -> ObjectInfo:
        check_key(self.url, key)
        return _describe(self._inner.head(key + ENCRYPTED_SUFFIX))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every encrypted object; others are left out, unless there are none but others.

        Raises:
            DecryptionError: nothing there is encrypted.
        """
        listed = list(self._inner.list(prefix))
        found = [
            _describe(info) for info in listed if info.key.endswith(ENCRYPTED_SUFFIX) and info.key != ENCRYPTED_SUFFIX
        ]
        if listed and not found and not prefix:
            raise DecryptionError(
                f"{self.url}: nothing there is encrypted ({listed[0].key}{', ...' if len(listed) > 1 else ''} is not); "
                "leave encryption_key out to read it, or choose another target to write to"
            )
        found.sort(key=lambda info: info.key)
        return iter(found)

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        check_key(self.url, key)
        view = byte_view(data)
        info = self._inner.put(key + ENCRYPTED_SUFFIX, encrypt(self._keys, key, view))
        return ObjectInfo(key, len(view), info.etag)

    def put_if(self, key: str, data: bytes | bytearray | memoryview, *, etag: str | None) -> ObjectInfo:
        check_key(self.url, key)
        view = byte_view(data)
        info = self._inner.put_if(key + ENCRYPTED_SUFFIX, encrypt(self._keys, key, view), etag=etag)
        return ObjectInfo(key, len(view), info.etag)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(self.url, key)
        self._inner.delete([key + ENCRYPTED_SUFFIX for key in keys])

    def close(self) -> None:
        self._inner.close()

    def _read_whole(self, key: str, etag: str | None) -> memoryview:
        data = self._inner.get(key + ENCRYPTED_SUFFIX, etag=etag)
        opened = open_header(self._keys, bytes(data[:HEADER_BYTES]), f"{self._path}/{key}", where(self.url, key))
        plain = opened.decrypt(data[HEADER_BYTES:], 0, where(self.url, key))
        if len(plain) != opened.length:
            raise DecryptionError(
                f"{where(self.url, key)}: holds {len(plain):,} bytes where {opened.length:,} were encrypted; "
                "write or copy the object again"
            )
        return memoryview(plain).toreadonly()

    def _read_ranges(self, key: str, ranges: Sequence[ByteRange], etag: str | None) -> _Views:
        opened = self._open(key, etag)
        if etag is not None and not any(ranges):
            check_etag(self.url, key, etag, self._inner.head(key + ENCRYPTED_SUFFIX).etag)
        for byte_range in ranges:
            check_inside(self.url, key, byte_range, opened.length)
        found = [sealed_range(byte_range, opened.length) for byte_range in ranges if len(byte_range)]
        parts = iter(
            self._inner.get_ranges(key + ENCRYPTED_SUFFIX, [sealed for sealed, _ in found], etag=etag) if found else []
        )
        result = []
        for byte_range in ranges:
            if not len(byte_range):
                result.append(memoryview(b""))
                continue
            first = byte_range.start // FRAME_BYTES
            plain = opened.decrypt(next(parts), first, where(self.url, key, byte_range))
            start = byte_range.start - first * FRAME_BYTES
            view = memoryview(plain).toreadonly()[start : start + len(byte_range)]
            check_length(self.url, key, byte_range, len(byte_range), len(view))
            result.append(view)
        return result

    def _open(self, key: str, etag: str | None) -> Opened:
        """Open an object by its header, which is cached where an ETag identifies the version."""
        name = None if etag is None else (key, etag)
        with self._lock:
            opened = None if name is None else self._headers.get(name)
            if opened is not None and name is not None:
                self._headers.move_to_end(name)
                return opened
        try:
            header = self._inner.get(key + ENCRYPTED_SUFFIX, ByteRange(0, HEADER_BYTES), etag=etag)
        except StorageError as exc:
            if exc.transient or self._inner.head(key + ENCRYPTED_SUFFIX).size >= HEADER_BYTES:
                raise
            header = memoryview(b"")
        opened = open_header(self._keys, bytes(header), f"{self._path}/{key}", where(self.url, key))
        if name is not None:
            with self._lock:
                self._headers[name] = opened
                if len(self._headers) > _HEADERS:
                    self._headers.popitem(last=False)
        return opened

    def _twice(self, key: str, ranges: Sequence[ByteRange] | None, etag: str | None, read: Callable[[], T]) -> T:
        """Read once more, past any cache, what can't be decrypted: it may have been replaced between two requests."""
        try:
            return read()
        except DecryptionError:
            if etag is not None:
                for byte_range in [None] if ranges is None else ranges:
                    self.discard(key, byte_range, etag=etag)
            return read()


def _describe(info: ObjectInfo) -> ObjectInfo:
    return ObjectInfo(info.key.removesuffix(ENCRYPTED_SUFFIX), plain_size(info.size), info.etag)
