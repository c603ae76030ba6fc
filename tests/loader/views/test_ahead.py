"""Chunks loaded ahead come in order, within a bound of threads and bytes, and leave no thread."""

from __future__ import annotations

import threading

import pytest
from started_threads import started_threads

from penstock.loader.columns import Block
from penstock.loader.views.samples import load_ahead


class Loads:
    """Counts the chunks that were begun and not yet taken; chunk 7 cannot be read."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self._lock = threading.Lock()

    def load(self, chunk: int) -> Block:
        with self._lock:
            self.begun.append(chunk)
        if chunk == 7:
            raise OSError("bad")
        return Block(chunk, 0)


def lookers() -> list[threading.Thread]:
    return [thread for thread in started_threads() if thread.name == "penstock-look"]


def test_chunks_come_in_order_with_what_was_raised() -> None:
    found = list(load_ahead(Loads().load, lambda chunk: 1, range(40)))
    assert [chunk for chunk, _ in found] == list(range(40))
    assert [block.samples if isinstance(block, Block) else str(block) for _, block in found] == [
        "bad" if chunk == 7 else chunk for chunk in range(40)
    ]
    assert lookers() == []


@pytest.mark.parametrize(("chunk_bytes", "most"), [(1, 9), (100 << 20, 2), (1 << 40, 1)])
def test_no_more_are_loaded_than_the_bounds_allow_and_leaving_early_ends_the_threads(
    chunk_bytes: int, most: int
) -> None:
    loads = Loads()
    ahead = load_ahead(loads.load, lambda chunk: chunk_bytes, range(100))
    for taken, _ in enumerate(ahead, start=1):
        assert max(loads.begun) < taken + most
        if taken == 20:
            break
    ahead.close()  # type: ignore[attr-defined]
    assert lookers() == []
    assert max(loads.begun) < 20 + most
