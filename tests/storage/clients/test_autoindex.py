"""Listings of web servers that bear few requests at a time."""

from __future__ import annotations

import threading
import time

import pytest

from penstock.storage import ObjectInfo, StorageError
from penstock.storage.clients import autoindex
from penstock.storage.clients.autoindex import list_index
from penstock.storage.errors import StoreUnavailableError, ThrottledError

NAMES = [f"{number:03d}.tar" for number in range(60)]
PAGE = ("<title>Index of /</title>" + "".join(f'<a href="{name}">' for name in NAMES)).encode()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoindex, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(autoindex, "_LONGEST_PAUSE_S", 0.05)


class Server:
    """Answers so many requests at a time, and refuses others."""

    def __init__(self, most: int, error: type[StorageError] = ThrottledError) -> None:
        self.most, self.error = most, error
        self.asked = self._running = 0
        self._lock = threading.Lock()

    def head(self, key: str) -> ObjectInfo:
        with self._lock:
            self.asked += 1
            self._running += 1
            is_refused = self._running > self.most
        try:
            if is_refused:
                raise self.error(key)
            time.sleep(0.003)
            return ObjectInfo(key=key, size=1, etag=None)
        finally:
            with self._lock:
                self._running -= 1


@pytest.mark.parametrize("most", [1, 5])
@pytest.mark.parametrize("error", [ThrottledError, StoreUnavailableError])
def test_a_server_that_bears_few_requests_at_a_time_is_listed(most: int, error: type[StorageError]) -> None:
    server = Server(most, error)
    found = list_index("http://host", "", lambda folder: PAGE, server.head)
    assert [info.key for info in found] == NAMES


@pytest.mark.parametrize(("error", "most"), [(ThrottledError, 80), (StoreUnavailableError, 50)])
def test_a_server_that_answers_nothing_is_left_after_few_requests(error: type[StorageError], most: int) -> None:
    server = Server(0, error)
    with pytest.raises(error):
        list_index("http://host", "", lambda folder: PAGE * 100, server.head)
    assert server.asked <= most


def test_a_page_with_two_links_a_file_has_it_once_and_links_that_are_none_are_passed_over() -> None:
    links = "".join(f'<a href="{name}"><img></a><a href="{name}">{name}</a>' for name in ("a.tar", "b.tar"))
    page = f'<title>Index of /</title><a href="http://[x">odd</a>{links}'.encode()
    found = list_index("https://x/", "", lambda folder: page, lambda key: ObjectInfo(key, 1))
    assert [info.key for info in found] == ["a.tar", "b.tar"]
