"""Patterns in a source: braces, which name shards without a look at the store, and globs, which need a listing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fsspec.utils import glob_translate

from ...storage import ObjectInfo
from ..errors import ConfigError

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAX_EXPANDED = 10_000_000
_MAGIC = re.compile(r"[*?\[]")


def expand_braces(pattern: str) -> list[str]:
    """``a-{00..02}`` is a-00, a-01, a-02; ``{x,y}`` is x, y; several braces multiply, the last one running fastest.

    Raises:
        ConfigError: a range that runs backwards, or braces that are neither range nor list.
    """
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    body, before, after = match[1], pattern[: match.start()], pattern[match.end() :]
    span = _RANGE.fullmatch(body)
    if span:
        first, last = int(span[1]), int(span[2])
        if last < first:
            raise ConfigError(f"{pattern}: the range {{{body}}} runs backwards; write the smaller number first")
        if last - first >= _MAX_EXPANDED:
            raise ConfigError(
                f"{pattern}: the range {{{body}}} names {last - first + 1} shards; give the prefix instead"
            )
        width = len(span[1]) if span[1].startswith("0") else 0
        words = [str(number).zfill(width) for number in range(first, last + 1)]
    elif "," in body:
        words = body.split(",")
    else:
        raise ConfigError(f"{pattern}: {{{body}}} is neither a range like {{000..099}} nor a list like {{a,b}}")
    rests = expand_braces(after)
    return [f"{before}{word}{rest}" for word in words for rest in rests]


def is_glob(url: str) -> bool:
    """Whether a URL or path is a glob; an existing local path is taken literally, and a web URL may have a query."""
    if url.startswith(("http://", "https://")) and "?" in url:
        return False
    return _MAGIC.search(url) is not None and ("://" in url or not Path(url).exists())


def fixed_prefix(glob: str) -> str:
    """What every match of a glob begins with: all before its first wildcard."""
    found = _MAGIC.search(glob)
    return glob if found is None else glob[: found.start()]


def match_glob(glob: str, objects: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """The objects whose whole key fits ``glob``, in their order.

    ``*`` and ``?`` stand for characters of one part of a key, ``[...]`` for one of a set, ``**`` for any number of
    parts. A glob that fits no object but folders (``train-*`` or ``train-*/``) stands for all that these hold.

    Raises:
        ConfigError: ``**`` is not a part of its own.
    """
    try:
        fits = re.compile(glob_translate(glob.rstrip("/"))).match
    except (ValueError, re.error) as exc:
        raise ConfigError(f"{glob}: not a glob ({exc}); write ** between slashes, as in data/**/*.parquet") from exc
    matches = [] if glob.endswith("/") else [info for info in objects if fits(info.key)]
    return matches or [info for info in objects if any(fits(folder) for folder in _folders(info.key))]


def _folders(key: str) -> list[str]:
    """'a/b/c' lies in the folders 'a' and 'a/b'."""
    parts = key.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]
