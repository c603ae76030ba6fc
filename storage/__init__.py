"""Bytes: one contract for every store, opened from a URL."""

from .cache import CacheStore
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
from .retry import RetryConfig, RetryStore
from .store import ByteRange, ObjectInfo, Store

__all__ = [
    "AccessDeniedError",
    "ByteRange",
    "CacheFullError",
    "CacheStore",
    "Call",
    "Fault",
    "LocalStore",
    "MemoryStore",
    "NotFoundError",
    "ObjectChangedError",
    "ObjectInfo",
    "PenstockError",
    "RetryConfig",
    "RetryStore",
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
