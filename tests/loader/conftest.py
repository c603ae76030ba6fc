"""Fixtures that this folder's tests share with others, and the place of their loaders' pipelines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from exempt_from_places import EXEMPT
from fake_hub import hub
from loader_fixtures import memory_store, own_index_cache, put_shards
from places import PLACE, pipelines_in, quick_starts

__all__ = ["hub", "memory_store", "own_index_cache", "put_shards"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if PLACE == "threads":
        return
    for item in items:
        names = item.path.name, f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
        reason = next((EXEMPT[name] for name in names if name in EXEMPT), None)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=PLACE != "threads")
def nursery() -> Iterator[None]:
    with quick_starts():
        yield


@pytest.fixture(autouse=PLACE != "threads")
def in_place(nursery: None) -> Iterator[None]:
    with pipelines_in(PLACE):
        yield
