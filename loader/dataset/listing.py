"""Objects that a source names: patterns in it, and which objects exist, looked up in few requests."""

from __future__ import annotations

import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...storage import NotFoundError, ObjectInfo, StorageError, Store, StoreUnreachableError, open_store
from ...storage.threads.daemon_pool import DaemonPool
from ..errors import ConfigError, DatasetError
from ..formats.shard import SUFFIXES, has_suffix
from ..formats.tokens import index_keys
from .manifest import MANIFEST_NAME

FILE = "file://"
README_NAME = "README.md"  # which may list subsets
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAX_EXPANDED = 2_000_000  # of all braces of a pattern together
_MOST_DIGITS = 18
_MAGIC = re.compile(r"[*?\[]")
# In a translated glob: a star, and what lies between it and the part's next star, without a set, which may fit a slash.
_STAR_BEFORE_STAR = re.compile(r"\[\^/\]\*((?:\\.|\[\^/\](?!\*)|[^\\\[\](){}*+?|/])+)(?=\[\^/\]\*)")


def expand_braces(pattern: str) -> list[str]:
    """``a-{00..02}`` is a-00, a-01, a-02; ``{x,y}`` is x, y; several braces multiply, the last one running fastest.

    Raises:
        ConfigError: a range that runs backwards, braces that are neither range nor list, or too many names.
    """
    parts: list[Sequence[str]] = []
    at, count = 0, 1
    for match in _BRACES.finditer(pattern):
        words = _words(match[1], pattern, _MAX_EXPANDED // count)
        parts += [(pattern[at : match.start()],), words]
        at, count = match.end(), count * len(words)
    return ["".join(chosen) for chosen in itertools.product(*parts, (pattern[at:],))]


def _words(body: str, pattern: str, most: int) -> list[str]:
    """Expand the inside of braces into its words. Raises ConfigError if there are more than ``most``."""
    span = _RANGE.fullmatch(body)
    if span is None and "," not in body:
        raise ConfigError(f"{pattern}: {{{body}}} is neither a range like {{000..099}} nor a list like {{a,b}}")
    if span is None:
        words = body.split(",")
        count = len(words)
    elif max(map(len, span.groups())) > _MOST_DIGITS:
        count = most + 1
    else:
        first, last = int(span[1]), int(span[2])
        count = last - first + 1
    if count > most:
        raise ConfigError(
            f"{pattern}: names more than {_MAX_EXPANDED:,} shards with {{{body}}}; give the prefix instead"
        )
    if span is None:
        return words
    if count < 1:
        raise ConfigError(f"{pattern}: the range {{{body}}} runs backwards; write the smaller number first")
    width = len(span[1]) if span[1].startswith("0") else 0
    return [str(number).zfill(width) for number in range(first, last + 1)]


def is_glob(url: str) -> bool:
    """Return whether a URL or path is a glob; an existing local one is taken literally; a web URL may have a query."""
    if url.startswith(("http://", "https://")) and "?" in url:
        return False
    local = url.removeprefix(FILE)
    return _MAGIC.search(url) is not None and ("://" in local or not is_path(Path(local)))


def is_path(path: Path) -> bool:
    """Return whether a file or folder exists."""
    try:
        return path.exists()
    except OSError:  # a name longer than a file's may be
        return False


def fixed_prefix(glob: str) -> str:
    """Return the literal beginning of a glob, up to its first wildcard; every match begins with it."""
    found = _MAGIC.search(glob)
    return glob if found is None else glob[: found.start()]


def match_glob(glob: str, objects: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """The objects whose whole key fits ``glob``, in their order.

    ``*`` and ``?`` stand for characters of one part of a key, ``[...]`` for one of a set, ``**`` for any number of
    parts. A glob that fits no object but folders (``train-*`` or ``train-*/``) stands for all that these hold.

    Raises:
        ConfigError: ``**`` is not a part of its own.
    """
    from fsspec.utils import glob_translate  # which takes 0.1 seconds

    try:
        fits = re.compile(_without_backtracking(glob_translate(glob.rstrip("/")))).match
    except (ValueError, re.error) as exc:
        raise ConfigError(f"{glob}: not a glob ({exc}); write ** between slashes, as in data/**/*.parquet") from exc
    matches = [] if glob.endswith("/") else [info for info in objects if fits(info.key)]
    return matches or [info for info in objects if any(fits(folder) for folder in _folders(info.key))]


def _without_backtracking(regex: str) -> str:
    """The same language: what follows a star may be taken where it first fits, since the next star takes the rest.

    Else a name of many repeats takes a time that grows with the power of the number of stars.
    """
    return _STAR_BEFORE_STAR.sub(r"(?>[^/]*?\1)", regex)


def _folders(key: str) -> list[str]:
    """'a/b/c' lies in the folders 'a' and 'a/b'."""
    parts = key.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


# From this many keys of one folder on, one LIST is cheaper than a HEAD each.
_LIST_FROM = 16
_HEAD_THREADS = 32


def find_companions(store: Store, keys: Iterable[str]) -> Iterator[ObjectInfo]:
    """Find companions of shards: for MDS their folder, whose index.json names the shards; for Megatron .idx files."""
    folders = {key.rpartition("/")[0] for key in keys if has_suffix(key, SUFFIXES["mds"])}
    for folder in sorted(folders):
        yield from store.list(f"{folder}/" if folder else "")
    yield from find_keys(store, [index for key in sorted(keys) for index in index_keys(key)]).values()


def find_keys(store: Store, keys: Sequence[str]) -> dict[str, ObjectInfo]:
    """Those of ``keys`` that exist: by one LIST if many share a folder, else by a HEAD each, in threads."""
    folders: dict[str, list[str]] = {}
    for key in keys:
        folders.setdefault(key.rpartition("/")[0], []).append(key)
    found: dict[str, ObjectInfo] = {}
    single: list[str] = []
    for together in folders.values():
        if len(together) < _LIST_FROM:
            single += together
            continue
        wanted = set(together)
        try:
            prefix = os.path.commonprefix(together)  # noqa: RUF071 - character by character is meant
            found.update((info.key, info) for info in store.list(prefix) if info.key in wanted)
        except NotFoundError:
            continue
        except StoreUnreachableError:
            raise
        except StorageError:
            single += together  # plain web servers do not list
    if single:
        with DaemonPool("penstock-head", _HEAD_THREADS) as pool:
            found.update((info.key, info) for info in pool.map(lambda key: _head(store, key), single) if info)
    return found


def _head(store: Store, key: str) -> ObjectInfo | None:
    try:
        return store.head(key)
    except NotFoundError:
        return None


class Prefix:
    """``listing`` holds its objects, ``manifest`` the bytes of the manifest in it, or the errors of their requests.

    The threads end with these requests. ``store`` belongs to the caller, who closes it.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None, *, with_manifest: bool) -> None:
        store = self.store = open_store(url.rstrip("/") + "/", storage_options=storage_options)
        pool = DaemonPool(f"penstock-open {store.url}")
        try:
            self.listing: Future[list[ObjectInfo]] = pool.submit(lambda: list(store.list()))
            self.manifest: Future[memoryview] | None = pool.submit(store.get, MANIFEST_NAME) if with_manifest else None
        finally:
            pool.close(0)

    def close(self) -> None:
        self.store.close()


_NUMBERED = re.compile(r"(.*?)(\d{1,18})([-_])of\3(\d{1,18})(?!\d)(.*)", re.DOTALL)
_HASH = re.compile(r"-[0-9a-f]{8,}$")
_NAMED = 5
_MOST = 10_000_000  # shards of one name; a larger total is a number of something else


class DoubtfulDatasetWarning(UserWarning):
    """A data set can be read, but its contents suggest that some of it is missing, or comes twice."""


def warn_doubt(text: str) -> None:
    warnings.warn(text, DoubtfulDatasetWarning, stacklevel=2)


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A shard called ``head``, number, "-of-", ``total``, ``rest``, and its format's ending; ``rest`` may be a hash."""

    key: str
    head: str
    digits: str
    dash: str
    total: str
    rest: str
    ending: str

    @property
    def number(self) -> int:
        return int(self.digits)

    @property
    def name(self) -> tuple[str, str]:
        """The prefix that all shards of one list share, and their suffix unless it is a hash."""
        return self.head, "" if self.is_hashed else self.rest

    @property
    def is_hashed(self) -> bool:
        return _HASH.fullmatch(self.rest) is not None

    def call(self, number: int) -> str:
        """The key of another shard of the list."""
        rest = "-*" if self.is_hashed else self.rest
        return f"{self.head}{number:0{len(self.digits)}d}{self.dash}of{self.dash}{self.total}{rest}{self.ending}"


def heed_names(
    url: str,
    keys: Iterable[str],
    suffixes: Sequence[str],
    tell: Callable[[str], None] = warn_doubt,
    *,
    globs: Sequence[str] = (),
) -> None:
    """Refuse shards that come twice by their names, and ``tell`` of those that are missing.

    ``keys`` leave out shards that the caller named one by one: those are as he wants them. With ``globs``, shards that
    come twice get a warning instead of a refusal, and shards that fit none of the globs are not missed.

    Raises:
        DatasetError: names the shards, and what to do.
    """
    stems = _cut_suffixes(list(keys), suffixes)
    numbered = _find_numbered(stems)
    doubled = _find_forms(stems) or _find_writings(numbered)
    root = url.rstrip("/") + "/"
    if doubled and not globs:
        raise DatasetError(
            f"{root}: {doubled}, and samples would come twice. Remove what is not wanted, or name the shards by a "
            f"pattern or a list; {root}** reads all of them"
        )
    if doubled:
        tell(f"{root}: {doubled}; the pattern fits both, so samples may come twice")
    missing = _find_missing(numbered)
    if missing and globs:
        infos = [ObjectInfo(key, 0) for key in missing]
        fitting = {info.key for glob in globs for info in match_glob(glob, infos)}
        missing = [key for key in missing if key in fitting]
    if missing:
        more = f" and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
        are = "is" if len(missing) == 1 else "are"
        tell(
            f"{root}: {', '.join(missing[:_NAMED])}{more} {are} missing, by the names of the other shards, which are "
            "read. If you want only these, name them by a pattern or a list"
        )


def _cut_suffixes(keys: Sequence[str], suffixes: Sequence[str]) -> list[tuple[str, str]]:
    """Keys, each as what is before the format's ending, and that ending."""
    longest = sorted(suffixes, key=len, reverse=True)
    cut = []
    for key in keys:
        lower = key.lower()
        length = next((len(suffix) for suffix in longest if lower.endswith(suffix)), 0)
        cut.append((key[: len(key) - length], key[len(key) - length :]))
    return cut


def _find_numbered(stems: Sequence[tuple[str, str]]) -> list[_Numbered]:
    found = []
    for stem, ending in stems:
        match = _NUMBERED.fullmatch(stem) if "of" in stem else None
        if match is not None and "/" not in match[5] and 0 < int(match[4]) < _MOST:
            head, digits, dash, total, rest = match.groups()
            found.append(_Numbered(stem + ending, head, digits, dash, total, rest, ending))
    return found


def _find_forms(stems: Sequence[tuple[str, str]]) -> str:
    """Describe a shard that is stored in two forms; "" if there is none."""
    if len({ending for _, ending in stems}) < 2:
        return ""
    known: dict[str, str] = {}
    pairs = [(stem + known[stem], stem + ending) for stem, ending in stems if known.setdefault(stem, ending) != ending]
    return f"{' and '.join(pairs[0])} are one shard in two forms, by their names{_more(len(pairs))}" if pairs else ""


def _find_writings(numbered: Sequence[_Numbered]) -> str:
    """Describe two writings of one list of shards, side by side; "" if there are none."""
    totals: dict[tuple[str, str], _Numbered] = {}
    places: dict[tuple[tuple[str, str], int, str], _Numbered] = {}
    pairs = []
    for shard in numbered:
        first = totals.setdefault(shard.name, shard)
        same = places.setdefault((shard.name, shard.number, shard.ending), shard)
        if first.total != shard.total:
            pairs.append((first.key, shard.key))
        elif same is not shard:
            pairs.append((same.key, shard.key))
    if not pairs:
        return ""
    return f"{' and '.join(pairs[0])} are of two writings of one data set, by their names{_more(len(pairs))}"


def _more(count: int) -> str:
    return f" (and {count - 1:,} more)" if count > 1 else ""


def _find_missing(numbered: Sequence[_Numbered]) -> list[str]:
    """The keys of shards that are missing from their lists, in order."""
    lists: dict[tuple[tuple[str, str], str], dict[int, _Numbered]] = {}
    for shard in numbered:
        lists.setdefault((shard.name, shard.total), {})[shard.number] = shard
    missing: list[str] = []
    for there in lists.values():
        example = next(iter(there.values()))
        total = int(example.total)
        first = 1 if total in there and 0 not in there else 0
        if len(there) < total and max(there) < first + total:
            missing += [example.call(number) for number in range(first, first + total) if number not in there]
    return missing
