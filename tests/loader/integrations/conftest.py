from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from penstock.loader.run import resources


@pytest.fixture(autouse=True)
def loaders_end(settled_imports: None) -> Iterator[None]:
    """Frameworks keep loaders in cycles and caches; none outlives its test."""
    yield
    gc.collect()
    for held in list(resources._ALL):
        held.close()
