from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """No thread of a chunk reader outlives the test."""
    from fake_chunks import fetch_threads

    yield
    assert not fetch_threads()
