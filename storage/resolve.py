"""From a URL to a store: encryption over cache over retry over the client that the URL's scheme names.

Each client and layer is imported by the first URL that needs it: those of clouds and the web take 0.2 seconds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from .clients.local import LocalStore
from .errors import UnsupportedURLError
from .files import in_home
from .options import ENCRYPTION_OPTION, MAPPED_OPTION
from .store import Store
from .suggestions import did_you_mean, must_be
from .urls import CLOUD_SCHEMES, WEB_SCHEMES

if TYPE_CHECKING:
    from .retrying.retry import RetryConfig

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
_SIGNATURE = re.compile(r"&(sig|signature|x-amz-signature|x-goog-signature|x-amz-credential)=", re.IGNORECASE)


def split_url(url: str | os.PathLike[str]) -> tuple[str, str]:
    """Split the URL of one object into its folder and its key: ``s3://b/x/a.tar`` -> (``s3://b/x``, ``a.tar``).

    The key of a URL that ends in '/', or that is only a bucket or host, is ''. Local paths stay paths.
    """
    text = os.fspath(url)
    check_query(text)
    found = _SCHEME.match(text)
    start = found.end() if found else 0
    if found and found.group(1).lower() != "file" and "/" not in text[start:]:
        return text, ""
    folder, slash, key = text[start:].rpartition("/")
    if not slash:
        return (text[:start] + "" if found else "."), key
    return text[:start] + (folder or ("/" if not found or found.group(1).lower() == "file" else "")), key


def check_query(url: str) -> None:
    """Refuse a presigned URL before its signature becomes part of a key, and of messages.

    Raises:
        UnsupportedURLError: a web URL has a query, or a cloud's one with a signature.
    """
    found = _SCHEME.match(url)
    scheme, query = found.group(1).lower() if found else "", url.partition("?")[2]
    # Without an '=' it may be a glob, and in a cloud also with one, as of '?/k=v/*'.
    is_signed = scheme in CLOUD_SCHEMES and _SIGNATURE.search(f"&{query}") is not None
    if found and (is_signed or (scheme in WEB_SCHEMES and "=" in query)):
        host = url[found.end() :].partition("?")[0].partition("/")[0].rpartition("@")[2]
        raise UnsupportedURLError(
            f"a URL at {host} has a query; presigned URLs are not read, because their signatures would be kept with "
            "the index: give s3://, gs:// or az:// URLs and credentials in storage_options=, and write %3F for a '?' "
            "in a name"
        )


def open_client(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Store:
    """Open the bare client for a URL or path, without encryption, retry and cache.

    Raises:
        UnsupportedURLError: nothing here reads such a URL, or ``storage_options`` do not fit it.
    """
    text = os.fspath(url)
    if storage_options and ENCRYPTION_OPTION in storage_options:
        raise UnsupportedURLError(f"{ENCRYPTION_OPTION} is an option of open_store; a bare client reads what is stored")
    found = _SCHEME.match(text)
    scheme = found.group(1).lower() if found else "file"
    if scheme in CLOUD_SCHEMES | WEB_SCHEMES:
        from .clients.remote import RemoteStore

        return RemoteStore(text, storage_options)
    options = dict(storage_options or {})
    maps = options.pop(MAPPED_OPTION, True) if scheme == "file" else True
    if not isinstance(maps, bool) and maps != "views":
        raise UnsupportedURLError(
            f"storage_options={{{MAPPED_OPTION!r}: {maps!r}}}: {must_be(maps, (True, False, 'views'))}"
        )
    if scheme in {"file", "mem"} and options:
        known = f"takes {MAPPED_OPTION!r} alone" if scheme == "file" else "takes no storage_options"
        meant = did_you_mean(options, [MAPPED_OPTION] if scheme == "file" else [])
        raise UnsupportedURLError(f"{text}: {scheme} {known}, got {sorted(options)}{meant}")
    if scheme == "mem":
        from .memory_store import MemoryStore

        return MemoryStore(text)
    if scheme != "file":
        from .clients.bridge import BridgeStore

        return BridgeStore(text, storage_options)
    if not found:
        return LocalStore(in_home(text), maps=maps)
    host, _, path = text[found.end() :].partition("/")
    if host not in {"", "localhost"}:
        raise UnsupportedURLError(f"{text!r} names a file of another host; write file:///absolute/path")
    # What is percent-encoded is decoded, unless it is a name as it is: our own URLs of files encode nothing.
    literal = "/" + path
    is_there = os.path.exists(literal)  # noqa: PTH110 - False for what is no path at all
    return LocalStore(literal if is_there else unquote(literal), maps=maps)


def open_store(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_limit: int | None = None,
    retry: RetryConfig | None = None,
) -> Store:
    """Open the root that a URL or local path names: cache over retry over client. Sends no request.

    Local files get no retry and no cache. Without ``cache_dir`` nothing is cached; ``cache_limit`` is in bytes, for all
    jobs that share the folder. With ``encryption_key`` among the ``storage_options`` what is written is encrypted, and
    what is read has to be. The store, with its ``storage_options``, can be pickled for worker processes.

    Raises:
        UnsupportedURLError: nothing here reads such a URL, or ``storage_options`` do not fit it.
        CacheFullError, AccessDeniedError: the cache's folder can't be written, or belongs to another user; there is no
            key.
    """
    if not isinstance(storage_options, Mapping | None):
        raise UnsupportedURLError(f"storage_options of type {type(storage_options).__name__}: give a dict of options")
    options = dict(storage_options or {})
    key = options.pop(ENCRYPTION_OPTION, None)
    client = open_client(url, options)
    if isinstance(client, LocalStore):
        return client if key is None else _encrypt(client, key)
    from .retrying.retry import RetryStore

    identity: str = getattr(client, "identity", client.url)
    store: Store = RetryStore(client, retry, host=_host(client, identity))
    try:
        if cache_dir is not None:
            from .caching.cache import CacheStore

            store = CacheStore(store, Path(in_home(cache_dir)), cache_limit, identity=identity)
        return store if key is None else _encrypt(store, key)
    except BaseException:
        store.close()
        raise


def _encrypt(store: Store, key: Any) -> Store:
    from .encryption.store import EncryptedStore

    return EncryptedStore(store, key)


def _host(client: Store, identity: str) -> str:
    """The unit of throttling: a bucket at an endpoint, or a web server."""
    parts = urlsplit(client.url)
    return f"{parts.scheme}://{parts.netloc}{identity[len(client.url) :]}"
