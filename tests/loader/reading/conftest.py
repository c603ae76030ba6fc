from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.loader.reading import mapped as mapped_chunks
from penstock.storage import LocalStore


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """No thread of a chunk reader outlives the test."""
    from fake_chunks import fetch_threads

    yield
    assert not fetch_threads()


@pytest.fixture
def small_chunks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are mapped however small they are."""
    monkeypatch.setattr(mapped_chunks, "_LEAST_BYTES", 1)


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of what is mapped."""
    found: list[str] = []
    map_file = LocalStore.map

    def note(self: LocalStore, key: str, *args: Any, **kwargs: Any) -> memoryview | None:
        view = map_file(self, key, *args, **kwargs)
        found.extend([key] if view is not None else [])
        return view

    monkeypatch.setattr(LocalStore, "map", note)
    return found
