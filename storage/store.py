"""Contract of every store: seven verbs on keys below one root. The only state is the client behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``start`` (inclusive) to ``stop`` (exclusive) of an object."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"ByteRange({self.start}, {self.stop}): needs 0 <= start <= stop")

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a store: its key below the store's root, its size in bytes and its ETag, if the store has one."""

    key: str
    size: int
    etag: str | None = None


def byte_view(data: bytes | bytearray | memoryview) -> memoryview:
    """The bytes of a buffer, whatever its item type and shape; a copy only if they are not contiguous."""
    view = memoryview(data)
    return view.cast("B") if view.c_contiguous and view.nbytes else memoryview(view.tobytes())


@runtime_checkable
class Store(Protocol):
    """Objects below one root URL; every method may be called from any thread.

    Keys are relative to the root, with '/' between parts and none at the start. Reads return read-only, contiguous
    memoryviews of bytes (format 'B') that own their data or keep it alive.
    """

    @property
    def url(self) -> str:
        """The root, without credentials; for messages."""
        ...

    def get(self, key: str, byte_range: ByteRange | None = None, *, etag: str | None = None) -> memoryview:
        """Read an object or a range of it.

        With ``etag``, the object must still have that ETag.

        Raises:
            NotFoundError, AccessDeniedError, ObjectChangedError, ShortReadError (also for a range past the end),
            ThrottledError, StoreUnavailableError.
        """
        ...

    def get_ranges(self, key: str, ranges: Sequence[ByteRange], *, etag: str | None = None) -> list[memoryview]:
        """Read several ranges of one object, near ones in one request; the result is in the order of ``ranges``."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """Size and ETag of one object. Raises NotFoundError if there is none."""
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with ``prefix``, at any depth, sorted by key (code points).

        Raises NotFoundError if the bucket or root folder itself is missing; a prefix without objects yields nothing.
        """
        ...

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        """Write a whole object. Readers see all of it or, after an error, what was there before."""
        ...

    def put_if(self, key: str, data: bytes | bytearray | memoryview, *, etag: str | None) -> ObjectInfo:
        """Write a whole object if it still has that ETag, or with None if there is none.

        Of several writers one succeeds; where fsspec reads the URL it is a check and then a write, so that writers at
        the same moment may both succeed. After a connection that broke, a retry may find what its own first try wrote:
        read the object to know.

        Raises:
            ObjectChangedError: the object exists already, is gone, or has another ETag.
            StorageError: the server has no conditional writes.
        """
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, many in one request where the service can; those that are not there are no error."""
        ...

    def close(self) -> None:
        """Release connections, threads and files. A closed store must not be used again; closing twice is allowed."""
        ...


def is_encrypted(store: Store) -> bool:
    """Tell whether what a store writes is encrypted, and what it reads has to be."""
    return getattr(store, "encrypts", False)


@runtime_checkable
class DiscardingStore(Store, Protocol):
    """A store that keeps what it read."""

    def discard(self, key: str, byte_range: ByteRange | None = None, *, etag: str) -> None:
        """Forget a range whose content proved to be wrong: the next read fetches it again."""
        ...
