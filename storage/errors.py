"""Errors of the storage room. Every error of the package descends from PenstockError."""

from __future__ import annotations


class PenstockError(Exception):
    """Base of every error that penstock raises on purpose.

    ``is_consequence`` says that it only tells of an error on another rank, which is the cause.
    """

    is_consequence = False


class StorageError(PenstockError):
    """A store could not do what was requested.

    ``transient`` says whether the same request may succeed later; only such errors are retried.
    """

    transient = False


class UnsupportedURLError(StorageError):
    """The URL names no store that can be opened here, or an option does not apply to it.

    The message says which package to install, if one would open it.
    """


class NotFoundError(StorageError):
    """There is no such object, bucket or folder: check the URL."""


class AccessDeniedError(StorageError):
    """The store does not know the caller, or refuses the request: check the credentials.

    For public data, give ``storage_options={"anonymous": True}``.
    """


class NoCredentialsError(AccessDeniedError):
    """There are no credentials, or the service that gives them does not answer."""


class ObjectChangedError(StorageError):
    """The object is not the one that was listed or indexed: its ETag or size differs.

    Do not write to data in use; run ``penstock index`` again.
    """


class DecryptionError(StorageError):
    """An encrypted object is not what was written: it was changed, renamed or cut off, or belongs to another key."""


class ShortReadError(StorageError):
    """The store sent fewer bytes than requested.

    If all tries end so, the object is shorter than indexed, or a proxy truncates.
    """

    transient = True


class ThrottledError(StorageError):
    """The store asked for fewer requests (429, 503, SlowDown) until the deadline of the retries.

    Use fewer processes, a cache, or a higher quota.
    """

    transient = True


class StoreUnavailableError(StorageError):
    """The store did not answer in time, closed the connection or failed (5xx), until the deadline of the retries.

    Check the network and the endpoint. For slow links, open a store with ``RetryConfig(min_bytes_per_s=...)``.
    """

    transient = True


class StoreUnreachableError(StoreUnavailableError):
    """No connection to the host could be made: it has no address, refuses, or does not respond."""


class StoreTimeoutError(StoreUnavailableError):
    """The response did not come within the time that one try may take, or stopped in the middle."""


class CacheFullError(StorageError):
    """The disk under the cache is full or not writable, and no space can be freed: use another ``cache_dir``."""


class ClusterError(PenstockError):
    """Ray is not installed, or its cluster cannot be reached or used; the message says which and what to do."""
