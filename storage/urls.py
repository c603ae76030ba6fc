"""The parts of a root's URL: a web address is percent-encoded, a cloud's is a name as it is, as for its own tools."""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

WEB_SCHEMES = frozenset({"http", "https"})
# Up to the last @ of the authority; a password may itself have one, or a slash.
PASSWORD = re.compile(r"://[^/@:]*:(?:[^/]*|[^@]*)@")
_PLAIN = "/:@!$&'()*+,;="  # RFC 3986, section 3.3: what a path's segments may have as it is


def split_root(url: str) -> tuple[str, str, str]:
    """Scheme, authority and path of a URL; the path begins without a slash, and is as it is written."""
    scheme, _, rest = url.partition("://")
    authority, _, path = rest.partition("/")
    return scheme.lower(), authority, path


def decode_path(url: str, path: str) -> str:
    """The name that a path in such a URL stands for."""
    return unquote(path) if _is_web(url) else path


def encode_name(url: str, name: str) -> str:
    """How such a URL writes the name of an object or folder."""
    return quote(name, safe=_PLAIN) if _is_web(url) else name


def without_password(url: str) -> str:
    """A URL as it may be shown: without user and password, where it has a password."""
    return PASSWORD.sub("://", url)


def _is_web(url: str) -> bool:
    return url.partition("://")[0].lower() in WEB_SCHEMES
