"""Local files: open descriptors, atomic writes, links."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from penstock.storage import ByteRange, LocalStore, ObjectChangedError, StorageError


def _open_descriptors() -> set[str]:
    links = list(Path("/proc/self/fd").iterdir())
    return {str(link.readlink()) for link in links if link.exists()}


def test_few_files_stay_open_and_none_after_closing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, open_files=3)
    for i in range(8):
        store.put(f"{i}", b"x")
        store.get(f"{i}")
    ours = {path for path in _open_descriptors() if path.startswith(str(tmp_path))}
    assert ours == {str(tmp_path / f"{i}") for i in (5, 6, 7)}
    store.close()
    assert not any(path.startswith(str(tmp_path)) for path in _open_descriptors())


def test_a_file_replaced_or_rewritten_in_place_is_read_anew(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    old = store.put("x", b"old")
    assert store.get("x") == b"old"
    store.put("x", b"new")
    assert store.get("x") == b"new"
    (tmp_path / "x").write_bytes(b"longer than before")
    assert store.get("x") == b"longer than before"
    with pytest.raises(ObjectChangedError):
        store.get("x", ByteRange(0, 1), etag=old.etag)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("x", b"old")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        with pytest.raises(StorageError, match="No space left on device"):
            store.put("x", b"new")
    assert store.get("x") == b"old"
    assert os.listdir(tmp_path) == ["x"]  # noqa: PTH208


def test_what_a_killed_writer_left_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / ".penstock-put-abc").write_bytes(b"half")
    (tmp_path / ".hidden").write_bytes(b"x")
    assert [info.key for info in LocalStore(tmp_path).list()] == [".hidden"]


def test_links_to_folders_are_followed_and_those_back_up_end(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x").write_bytes(b"1")
    root = tmp_path / "root"
    root.mkdir()
    (root / "data").symlink_to(tmp_path / "elsewhere")
    (root / "up").symlink_to(root)
    store = LocalStore(root)
    assert [info.key for info in store.list()] == ["data/x"]
    assert store.get("data/x") == b"1"


def test_a_link_to_nothing_is_listed_and_an_error_when_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    (tmp_path / "itself").symlink_to("itself")
    store = LocalStore(tmp_path)
    assert [(info.key, info.size) for info in store.list()] == [("dangling", 0), ("itself", 0)]
    assert [info.key for info in store.list("d")] == ["dangling"]
    for info in store.list():
        with pytest.raises(StorageError, match=info.key):
            store.get(info.key, etag=info.etag)


def test_a_process_that_may_open_no_more_files_says_how_many_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    store = LocalStore(tmp_path)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"a: this process may have no more than 3 files open; .*ulimit -n"):
            store.get("a")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
