"""What a root's URL names: nothing of it is dropped, and no credential of it is shown."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from penstock import open_manifest, open_store
from penstock.storage import NotFoundError, ObjectChangedError, StorageError, Store, UnsupportedURLError
from penstock.storage.clients.bridge import BridgeStore
from penstock.storage.clients.remote import RemoteStore
from penstock.storage.resolve import check_query
from penstock.storage.urls import decode_path, encode_name, split_root

ANONYMOUS = {"anonymous": True}


def prefix_of(url: str, options: dict[str, Any] | None = None) -> str:
    store = RemoteStore(url, options)
    try:
        return store._prefix
    finally:
        store.close()


@pytest.mark.parametrize("name", ["data#2", "ts=10%3A00", "a b", "ü", "50%", "a+b", "x;y=z"])
def test_a_clouds_url_is_a_name_as_it_is(name: str) -> None:
    assert prefix_of(f"s3://bucket/{name}/train/", ANONYMOUS) == f"{name}/train/"
    assert prefix_of(f"s3://bucket/{name}", ANONYMOUS) == f"{name}/"


def test_a_web_address_is_percent_encoded_and_has_no_fragment() -> None:
    assert prefix_of("https://example.org/a%20b/%23/") == "a b/#/"
    with pytest.raises(UnsupportedURLError, match=r"fragment.*%23"):
        RemoteStore("https://example.org/run#2/")


@pytest.mark.parametrize("name", ["a b", "run#2", "50%", "a%20b", "k=v,w/ü?", "a:b@c"])
def test_the_url_of_a_name_names_it(name: str) -> None:
    for root in ("https://example.org/", "s3://bucket/"):
        url = root + encode_name(root, name)
        assert decode_path(url, split_root(url)[2]) == name


@pytest.mark.parametrize(
    "url",
    [
        "https://SECRETTOKEN@example.org/data/",
        "https://user:SECRETTOKEN@example.org/data/",
        "s3://SECRETTOKEN@bucket/data/",
        "abfss://user:SECRETTOKEN@account.dfs.core.windows.net/data",
        "https://example.org?sig=SECRETTOKEN",
        "s3://bucket?X-Amz-Signature=SECRETTOKEN",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UnsupportedURLError) as told:
        open_store(url)
    assert "SECRETTOKEN" not in str(told.value)
    assert "storage_options" in str(told.value)


@pytest.mark.parametrize("scheme", ["az", "abfss", "s3", "gs"])
@pytest.mark.parametrize(
    "query", ["sv=1&sig=SECRETTOKEN", "X-Amz-Signature=SECRETTOKEN", "x-goog-signature=SECRETTOKEN"]
)
def test_a_presigned_url_of_a_cloud_is_refused_and_not_shown(scheme: str, query: str) -> None:
    with pytest.raises(UnsupportedURLError, match="has a query") as told:
        open_manifest(f"{scheme}://bucket/x.tar?{query}")
    assert "SECRETTOKEN" not in str(told.value)


def test_a_glob_with_a_question_mark_before_a_partition_is_no_query() -> None:
    check_query("s3://bucket/a?/k=v/*.parquet")


@pytest.mark.parametrize("password", ["first@second", "first/second"])
def test_no_part_of_a_password_is_shown(password: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(url: str, **options: Any) -> Any:
        raise ValueError(f"cannot open {url}, which has {password}")

    monkeypatch.setattr("penstock.storage.clients.bridge.url_to_fs", fail)
    with pytest.raises(UnsupportedURLError) as told:
        BridgeStore(f"sftp://user:{password}@host/data")
    assert not any(part in str(told.value) for part in ("first", "second"))


class CachingFileSystem(MemoryFileSystem):
    """Keeps what it was told of files, as file systems with listings do, until it is told to forget."""

    protocol = "caching"
    store: dict[str, Any] = {}  # noqa: RUF012 - the base class keeps it so
    pseudo_dirs = [""]  # noqa: RUF012
    known: dict[str, dict[str, Any]] = {}  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        rest = path.partition("://")[2] if "://" in path else path
        return "/" + rest.strip("/") if rest.strip("/") else ""

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if path not in self.known:
            self.known[path] = super().info(path, **options)
        return self.known[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.known.clear()


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    fsspec.register_implementation("caching", CachingFileSystem, clobber=True)
    yield open_store("caching://d")
    CachingFileSystem.store.clear()
    CachingFileSystem.known.clear()


def test_a_file_that_changes_behind_kept_listings_is_noticed(listed: Store) -> None:
    listed.put("a.bin", b"old!")
    etag = next(iter(listed.list())).etag
    assert bytes(listed.get("a.bin", etag=etag)) == b"old!"
    fsspec.filesystem("caching").pipe_file("/d/a.bin", b"new!")
    with pytest.raises(ObjectChangedError, match=r"a\.bin"):
        listed.get("a.bin", etag=etag)


def test_the_hub_is_read_at_one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="install penstock[hf]")
    commits = {"main": "a" * 40}
    files: dict[str, dict[str, bytes]] = {"a" * 40: {"x.bin": b"old!"}}
    asked: list[str] = []

    def repo_info(self: Any, repo_id: str, *, repo_type: str, revision: str | None, **options: Any) -> Any:
        assert (repo_id, repo_type) == ("org/name", "dataset")
        return SimpleNamespace(sha=commits.get(revision or "main", revision))

    def cat_file(self: Any, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        place = self.resolve_path(path)
        asked.append(place.revision)
        return files[place.revision][place.path_in_repo][start:end]

    def info(self: Any, path: str, **options: Any) -> dict[str, Any]:
        place = self.resolve_path(path)
        data = files[place.revision].get(place.path_in_repo)
        if data is None:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(data), "type": "file", "blob_id": str(hash(data))}

    monkeypatch.setattr(hub.HfApi, "repo_info", repo_info)
    monkeypatch.setattr(hub.HfFileSystem, "cat_file", cat_file)
    monkeypatch.setattr(hub.HfFileSystem, "info", info)
    store = open_store("hf://datasets/org/name")
    etag = store.head("x.bin").etag
    commits["main"], files["b" * 40] = "b" * 40, {"x.bin": b"new!"}
    assert bytes(store.get("x.bin", etag=etag)) == b"old!"
    assert asked == ["a" * 40]
    again = open_store("hf://datasets/org/name")
    with pytest.raises(ObjectChangedError):
        again.get("x.bin", etag=etag)
    with pytest.raises((NotFoundError, StorageError)):
        again.head("y.bin")
