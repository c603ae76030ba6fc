"""What a store is composed of, by its URL."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from penstock import open_store
from penstock.storage import (
    CacheStore,
    LocalStore,
    MemoryStore,
    RetryStore,
    UnsupportedURLError,
)

DATA = bytes(range(256)) * 40


def test_open_store_gives_local_files_neither_retry_nor_cache(tmp_path: Path) -> None:
    assert isinstance(open_store(tmp_path, cache_dir=tmp_path / "cache"), LocalStore)
    assert isinstance(open_store(tmp_path.as_uri()), LocalStore)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("scheme", ["s3", "s3a", "gs", "gcs", "az", "azure", "adl", "abfs", "abfss"])
def test_every_scheme_that_the_documentation_names_opens_a_cloud(scheme: str) -> None:
    account = {} if scheme in ("s3", "s3a", "gs", "gcs") else {"account_name": "mine"}
    store = open_store(f"{scheme}://bucket/train/", storage_options={"anonymous": True, **account})
    assert store.url == f"{scheme}://bucket/train"
    store.close()


@pytest.mark.parametrize("name", ["timeout_s", "connect_timeout_s"])
@pytest.mark.parametrize("value", [0, -1, "x", "", float("nan"), float("inf")])
def test_times_that_no_request_could_keep_are_refused(name: str, value: object) -> None:
    with pytest.raises(UnsupportedURLError, match=rf"'{name}': .*: give seconds, more than 0"):
        open_store("s3://bucket/train/", storage_options={"anonymous": True, name: value})


def test_open_store_composes_cache_over_retry_over_client(memory_url: str, tmp_path: Path) -> None:
    MemoryStore(memory_url).put("x", DATA)
    with_cache = open_store(memory_url, cache_dir=tmp_path, cache_limit=1_000_000)
    assert isinstance(with_cache, CacheStore)
    assert repr(with_cache).startswith("CacheStore(RetryStore(MemoryStore(")
    assert isinstance(open_store(memory_url), RetryStore)
    assert with_cache.get("x") == DATA
    with_cache.close()


def test_paths_may_begin_at_the_users_home(memory_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "key").write_bytes(bytes(32))
    with closing(open_store("~/data", storage_options={"encryption_key": "file:~/key"})) as store:
        store.put("a", b"content")
    assert (tmp_path / "data" / "a.penc").is_file()
    with closing(open_store(memory_url, cache_dir="~/cache")) as store:
        store.put("a", b"content")
        store.get("a")
    assert (tmp_path / "cache").is_dir()
