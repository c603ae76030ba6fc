"""What a store is composed of, by its URL."""

from __future__ import annotations

from pathlib import Path

from penstock import open_store
from penstock.storage import (
    CacheStore,
    LocalStore,
    MemoryStore,
    RetryStore,
)

DATA = bytes(range(256)) * 40


def test_open_store_gives_local_files_neither_retry_nor_cache(tmp_path: Path) -> None:
    assert isinstance(open_store(tmp_path, cache_dir=tmp_path / "cache"), LocalStore)
    assert isinstance(open_store(tmp_path.as_uri()), LocalStore)
    assert not (tmp_path / "cache").exists()


def test_open_store_composes_cache_over_retry_over_client(memory_url: str, tmp_path: Path) -> None:
    MemoryStore(memory_url).put("x", DATA)
    with_cache = open_store(memory_url, cache_dir=tmp_path, cache_limit=1_000_000)
    assert isinstance(with_cache, CacheStore)
    assert repr(with_cache).startswith("CacheStore(RetryStore(MemoryStore(")
    assert isinstance(open_store(memory_url), RetryStore)
    assert with_cache.get("x") == DATA
    with_cache.close()
