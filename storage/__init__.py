"""Bytes: one contract for every store, opened from a URL."""

from .errors import (
    AccessDeniedError,
    CacheFullError,
    NotFoundError,
    ObjectChangedError,
    PenstockError,
    ShortReadError,
    StorageError,
    StoreUnavailableError,
    ThrottledError,
    UnsupportedURLError,
)
from .local import LocalStore
from .memory import Call, Fault, MemoryStore
from .resolve import open_client, open_store, split_url
from .store import ByteRange, ObjectInfo, Store

__all__ = [
    "AccessDeniedError",
    "ByteRange",
    "CacheFullError",
    "Call",
    "Fault",
    "LocalStore",
    "MemoryStore",
    "NotFoundError",
    "ObjectChangedError",
    "ObjectInfo",
    "PenstockError",
    "ShortReadError",
    "StorageError",
    "Store",
    "StoreUnavailableError",
    "ThrottledError",
    "UnsupportedURLError",
    "open_client",
    "open_store",
    "split_url",
]
