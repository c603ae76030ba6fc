"""The parts of a root's URL: a web address is percent-encoded, a cloud's is a name as it is, as for its own tools."""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from .errors import UnsupportedURLError

CLOUD_SCHEMES = frozenset({"s3", "s3a", "gs", "gcs", "az", "azure", "adl", "abfs", "abfss"})
WEB_SCHEMES = frozenset({"http", "https"})
# Up to the last @ of the authority; a password may itself have one, or a slash.
PASSWORD = re.compile(r"://[^/@:]*:(?:[^/]*|[^@]*)@")
_AUTHORITY = re.compile(r"[^:\[\]?#]+(:\d*)?|\[[0-9A-Fa-f:.]+\](:\d*)?")
_PLAIN = "/:@!$&'()*+,;="  # RFC 3986, section 3.3: what a path's segments may have as it is


def split_root(url: str) -> tuple[str, str, str]:
    """Scheme, authority and path of a URL; the path begins without a slash, and is as it is written."""
    scheme, _, rest = url.partition("://")
    authority, _, path = rest.partition("/")
    return scheme.lower(), authority, path


def parse_remote(url: str) -> tuple[str, str, str]:
    """Split the URL of a cloud or a web server as ``split_root`` does.

    Raises:
        UnsupportedURLError: the URL is no such one, or has credentials, a query or, for a web server, a fragment.
    """
    scheme, authority, path = split_root(url)
    if scheme not in CLOUD_SCHEMES | WEB_SCHEMES or not authority:
        raise UnsupportedURLError(f"{url!r} names no bucket or host; write e.g. s3://bucket/prefix")
    user, mark, _ = authority.rpartition("@")
    has_user = bool(mark) and (not scheme.startswith("abfs") or ":" in user)  # which writes 'container@account'
    if has_user or path.partition("?")[2] or not _AUTHORITY.fullmatch(authority):
        raise UnsupportedURLError(
            f"the {scheme} URL carries credentials or a query, or its port is no number; "
            "use storage_options= for credentials"
        )
    if scheme in WEB_SCHEMES and "#" in path:
        raise UnsupportedURLError(f"{url!r} has a fragment, which no server gets; write %23 for a '#' in a name")
    return scheme, authority, path


def decode_path(url: str, path: str) -> str:
    """The name that a path in such a URL stands for."""
    return unquote(path) if _is_web(url) else path


def encode_name(url: str, name: str) -> str:
    """Encode the name of an object or folder as such a URL writes it."""
    return quote(name, safe=_PLAIN) if _is_web(url) else name


def without_password(url: str) -> str:
    """A URL as it may be shown: without user and password, where it has a password."""
    return PASSWORD.sub("://", url)


def _is_web(url: str) -> bool:
    return url.partition("://")[0].lower() in WEB_SCHEMES
