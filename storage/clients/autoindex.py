"""Lists a web server through its own index pages: nginx (HTML or JSON), Apache, Python's http.server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

from ..errors import NotFoundError, StorageError, ThrottledError, UnsupportedURLError
from ..store import ObjectInfo
from ..threads.daemon_pool import DaemonPool

HEAD_THREADS = 16
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
# A server can make up folders and names for ever.
MAX_DEPTH = 32
MAX_FOLDERS = 10_000
MAX_FILES = 1_000_000


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.title = ""
        self.links: list[str] = []
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_title = tag == "title"
        self.links.extend(value for name, value in attrs if tag == "a" and name == "href" and value)

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data
            self._in_title = False


def parse_index(page: bytes) -> list[str] | None:
    """The names on an index page, folders with a '/' at the end; None if this is no index page.

    Recognised by the JSON of nginx's ``autoindex_format json``, or by a title that starts with "Index of" or "Directory
    listing".
    """
    try:
        text = page.decode()
    except UnicodeDecodeError:
        return None
    if text.lstrip().startswith("["):
        try:
            return [entry["name"] + ("/" if entry["type"] == "directory" else "") for entry in json.loads(text)]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
    if "<" not in text[:1000]:
        return None
    parser = _Links()
    try:
        parser.feed(text)
    except AssertionError:  # what html.parser has for a markup declaration that is none
        return None
    if not parser.title.strip().lower().startswith(("index of", "directory listing")):
        return None
    names: dict[str, None] = {}  # a page may have two links a file: its icon, too
    for link in parser.links:
        try:
            parts = urlsplit(link)
        except ValueError:
            continue
        name = unquote(parts.path).removeprefix("./")
        own = not (parts.scheme or parts.netloc or parts.query) and name not in {"", "/", ".", "..", "../"}
        if own and "/" not in name.rstrip("/"):
            names[name] = None
    return list(names)


def list_index(
    url: str, prefix: str, read_page: Callable[[str], bytes], head: Callable[[str], ObjectInfo]
) -> list[ObjectInfo]:
    """Every file whose key starts with ``prefix``; ``read_page`` returns a folder's page ('' or 'a/b/').

    Raises:
        UnsupportedURLError: the server shows no index, or one that is too deep or too large.
    """
    start = prefix.rpartition("/")[0]
    folders = [start + "/" if start else ""]
    files: list[str] = []
    pages = 0
    while folders:
        folder = folders.pop()
        pages += 1
        try:
            names = parse_index(read_page(folder))
        except NotFoundError:
            if not folder:
                raise
            continue
        if names is None:
            raise UnsupportedURLError(
                f"{url} can't be listed: web servers do not list their files, and this one shows no index page; "
                "name the shards with a brace pattern like shard-{000..099}.tar, or give a list of URLs"
            )
        for name in names:
            key = folder + name
            if name.endswith("/") and (key.startswith(prefix) or prefix.startswith(key)):
                folders.append(key)
            elif not name.endswith("/") and key.startswith(prefix):
                files.append(key)
        depth = folder.count("/") - start.count("/")
        if depth > MAX_DEPTH or pages + len(folders) > MAX_FOLDERS or len(files) > MAX_FILES:
            raise UnsupportedURLError(
                f"{url}: the index pages go deeper than {MAX_DEPTH} folders, or show more than {MAX_FOLDERS} folders "
                f"or {MAX_FILES} files (at {folder[:100]!r}); give a folder further down, a brace pattern or a list "
                "of URLs"
            )
    return _head_all(head, files)


def _head_all(head: Callable[[str], ObjectInfo], files: Sequence[str]) -> list[ObjectInfo]:
    """Request the head of each file. Those that fail for now are requested again, fewer at a time.

    A server that bears fewer would otherwise refuse some of a whole listing each time.
    """
    found: dict[str, ObjectInfo] = {}
    threads, pause_s = HEAD_THREADS, _FIRST_PAUSE_S
    while True:
        known = len(found)
        failure = _head_some(head, [key for key in files if key not in found], threads, found)
        if failure is None:
            return [found[key] for key in files]
        if len(found) == known and (threads == 1 or not isinstance(failure, ThrottledError)):
            raise failure
        time.sleep(pause_s)
        threads, pause_s = max(1, threads // 2), min(2 * pause_s, _LONGEST_PAUSE_S)


def _head_some(
    head: Callable[[str], ObjectInfo], files: Sequence[str], threads: int, found: dict[str, ObjectInfo]
) -> StorageError | None:
    """Adds what is answered to ``found``; returns a failure, None where there was none."""
    failures: list[StorageError] = []
    in_a_row = 0

    def ask(key: str) -> None:
        nonlocal in_a_row
        if in_a_row >= 2 * threads:  # nothing is answered now
            return
        try:
            found[key] = head(key)
            in_a_row = 0
        except StorageError as exc:
            if not exc.transient:
                raise
            failures.append(exc)
            in_a_row += 1

    with DaemonPool("penstock-head", threads) as pool:
        for _ in pool.map(ask, files):
            pass
    return failures[-1] if failures else None
