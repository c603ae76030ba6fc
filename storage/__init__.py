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
from .store import ByteRange, ObjectInfo, Store

__all__ = [
    "AccessDeniedError",
    "ByteRange",
    "CacheFullError",
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
]
