"""Checks that every store shares: keys, ETags, lengths. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from .errors import ObjectChangedError, ShortReadError, StorageError
from .store import ByteRange


def is_key(key: str) -> bool:
    """Return whether a key names an object below a root: it has no empty, '.' or '..' part, and no NUL."""
    # The cheap test first: this runs on every read.
    if not key or "\0" in key or key[0] == "/":
        return False
    if "." not in key and "//" not in key and key[-1] != "/":
        return True
    return all(part not in {"", ".", ".."} for part in key.split("/"))


def check_key(url: str, key: str) -> None:
    """Refuse a key that is empty, absolute, or could leave the root.

    Raises:
        StorageError: the key has an empty, '.' or '..' part, or a NUL.
    """
    if is_key(key):
        return
    raise StorageError(
        f"{key!r} is no key below {url}: keys are like 'train/shard-000.tar', with no '/' at either end, "
        "no empty part, and no part that is '.' or '..'"
    )


def where(url: str, key: str, byte_range: ByteRange | None = None) -> str:
    """Name an object, and a range of it, in a message: ``s3://bucket/train/a.tar[0:512]``."""
    full = f"{url.rstrip('/')}/{key}" if key else url
    return full if byte_range is None else f"{full}[{byte_range.start}:{byte_range.stop}]"


def check_etag(url: str, key: str, wanted: str | None, found: str | None) -> None:
    """Raise ObjectChangedError if an ETag is ``wanted`` and the object has another one."""
    if wanted is not None and wanted != found:
        raise ObjectChangedError(
            f"{where(url, key)} has changed: expected ETag {wanted}, found {found}; "
            "list or index the data again, and do not write to it while it is read"
        )


def changed_before_write(url: str, key: str, wanted: str | None) -> ObjectChangedError:
    """Build the error for a conditional write that was not done."""
    if wanted is None:
        return ObjectChangedError(f"{where(url, key)} is there already, and nothing was written; read it")
    return ObjectChangedError(
        f"{where(url, key)} is gone or has changed since its ETag was {wanted}, and nothing was written; read it again"
    )


def check_inside(url: str, key: str, byte_range: ByteRange, size: int) -> None:
    """Raise a permanent ShortReadError if the range goes past the end of an object of ``size`` bytes."""
    if byte_range.stop > size:
        raise past_the_end(url, key, byte_range, size)


def past_the_end(url: str, key: str, byte_range: ByteRange, size: int | None) -> ShortReadError:
    """Build the ShortReadError for a range past the end; it is not transient, because a retry reads the same."""
    has = "" if size is None else f" of {size} bytes"
    error = ShortReadError(
        f"{where(url, key, byte_range)} goes past the end of the object{has}; "
        "it was cut off, or the index belongs to another version: index the data again"
    )
    error.transient = False
    return error


def check_length(url: str, key: str, byte_range: ByteRange | None, wanted: int, got: int) -> None:
    """Raise ShortReadError if a read returned the wrong number of bytes."""
    if wanted != got:
        raise ShortReadError(f"{where(url, key, byte_range)}: wanted {wanted} bytes, got {got}; the transfer broke off")


def bare_etag(etag: str | None) -> str | None:
    """The ETag without its quotes: some services quote it in headers but not in listings."""
    if etag is not None and len(etag) >= 2 and etag[0] == etag[-1] == '"':
        return etag[1:-1]
    return etag or None


def etag_of(meta: Mapping[str, Any]) -> str | None:
    """The ETag; for servers that send none, the Last-Modified time and the size."""
    etag = bare_etag(meta["e_tag"])
    modified: datetime | None = meta["last_modified"]
    if etag is None and modified is not None and modified.timestamp() > 0:
        return f"modified-{modified.timestamp():.0f}-{meta['size']}"
    return etag


def is_strong(etag: str) -> bool:
    """Return whether If-Match can ask for this ETag."""
    return not etag.startswith(("W/", "modified-"))
