"""Fixtures that this folder's tests share with others, and the place of their loaders' pipelines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from exempt_from_places import EXEMPT
from fake_hub import hub
from loader_fixtures import memory_store, own_index_cache, put_shards
from places import PLACE, Nursery, pipelines_in

__all__ = ["hub", "memory_store", "own_index_cache", "put_shards"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if PLACE == "threads":
        return
    for item in items:
        names = item.path.name, getattr(item, "originalname", item.name)
        reason = next((EXEMPT[name] for name in names if name in EXEMPT), None)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(autouse=PLACE != "threads")
def in_place(nursery: Nursery) -> Iterator[None]:
    with nursery.starting(), pipelines_in(PLACE):
        yield
