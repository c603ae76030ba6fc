"""The disk cache: bounded, shared, and never in the way."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import struct
import subprocess
import threading
import time
from pathlib import Path

import pytest
import xxhash

from penstock.storage import AccessDeniedError, ByteRange, CacheFullError, CacheStore, Fault, MemoryStore
from penstock.storage.caching.disk import CacheDisk

CHUNK = 10_000
DATA = bytes(i * 11 % 251 for i in range(20 * CHUNK))


def _chunk(i: int) -> ByteRange:
    return ByteRange(i * CHUNK, (i + 1) * CHUNK)


def _entries(folder: Path) -> list[Path]:
    return [path for path in folder.glob("uid-*/v1/entries/*/*") if path.is_file()]


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def memory() -> MemoryStore:
    store = MemoryStore()
    store.put("x", DATA)
    return store


def _gets(memory: MemoryStore) -> int:
    return sum(call.verb == "get" for call in memory.calls)


def test_a_range_is_fetched_once_for_all_stores_on_one_folder(memory: MemoryStore, tmp_path: Path) -> None:
    etag = memory.head("x").etag
    for _ in range(3):
        store = CacheStore(memory, tmp_path, 10**9)
        assert store.get("x", _chunk(1), etag=etag) == DATA[CHUNK : 2 * CHUNK]
        assert store.get_ranges("x", [_chunk(1), _chunk(2)], etag=etag)[1] == DATA[2 * CHUNK : 3 * CHUNK]
    assert _gets(memory) == 2
    assert (store.counts.hits, store.counts.misses) == (3, 0)


def test_many_threads_that_miss_fetch_once(memory: MemoryStore, tmp_path: Path) -> None:
    memory.slow_down(latency_s=0.05)
    store, etag = CacheStore(memory, tmp_path, 10**9), memory.head("x").etag
    threads = [threading.Thread(target=store.get, args=("x", _chunk(0)), kwargs={"etag": etag}) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _gets(memory) == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "longer"])
def test_a_corrupt_entry_is_evicted_and_fetched_again(memory: MemoryStore, tmp_path: Path, damage: str) -> None:
    store, etag = CacheStore(memory, tmp_path, 10**9), memory.head("x").etag
    store.get("x", _chunk(0), etag=etag)
    (entry,) = _entries(tmp_path)
    raw = bytearray(entry.read_bytes())
    raw[5] ^= 1
    entry.write_bytes({"flip": raw, "cut": raw[:-30], "empty": b"", "longer": raw + b"x"}[damage])
    assert store.get("x", _chunk(0), etag=etag) == DATA[:CHUNK]
    assert store.counts.corrupt == 1
    assert store.get("x", _chunk(0), etag=etag) == DATA[:CHUNK]
    assert _gets(memory) == 2


def test_the_bound_holds_and_the_least_recently_used_go_first(memory: MemoryStore, tmp_path: Path) -> None:
    limit = 6 * CHUNK
    store, etag = CacheStore(memory, tmp_path, limit), memory.head("x").etag
    for i in range(5):
        store.get("x", _chunk(i), etag=etag)
    for entry in _entries(tmp_path):
        os.utime(entry, (time.time() - 100,) * 2)
    store.get("x", _chunk(0), etag=etag)  # the oldest entry, and now the last used one
    for i in range(5, 9):
        store.get("x", _chunk(i), etag=etag)
        assert sum(path.stat().st_size for path in _entries(tmp_path)) <= limit
    fetched = _gets(memory)
    for i in (0, 5, 6, 7, 8):
        assert store.get("x", _chunk(i), etag=etag) == DATA[i * CHUNK : (i + 1) * CHUNK]
    assert _gets(memory) == fetched == 9
    store.get("x", _chunk(1), etag=etag)
    assert _gets(memory) == 10


def test_the_bytes_used_are_found_again_when_their_count_is_lost(memory: MemoryStore, tmp_path: Path) -> None:
    store, etag = CacheStore(memory, tmp_path, 10**9), memory.head("x").etag
    store.get("x", _chunk(0), etag=etag)
    used = CacheDisk(tmp_path, 10**9).used_bytes
    assert used == _entries(tmp_path)[0].stat().st_size
    next(tmp_path.glob("uid-*/v1/used")).unlink()
    assert CacheDisk(tmp_path, 10**9).used_bytes == used


def test_an_object_larger_than_the_cache_is_read_past_it(memory: MemoryStore, tmp_path: Path) -> None:
    store = CacheStore(memory, tmp_path, CHUNK)
    assert store.get("x") == DATA
    assert _entries(tmp_path) == []
    assert store.counts.uncached == 1


def test_a_cache_in_which_no_entry_fits_is_told_once(
    memory: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, etag = CacheStore(memory, tmp_path, CHUNK), memory.head("x").etag
    with caplog.at_level(logging.WARNING, "penstock"):
        for i in (0, 1, 0):
            store.get("x", _chunk(i), etag=etag)
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"its limit is {CHUNK:,} bytes" in said
    assert "raise cache_limit=" in said


def test_a_discarded_entry_is_fetched_again(memory: MemoryStore, tmp_path: Path) -> None:
    store, etag = CacheStore(memory, tmp_path, 10**9), memory.head("x").etag
    assert etag
    store.get("x", _chunk(0), etag=etag)
    store.discard("x", _chunk(0), etag=etag)
    store.get("x", _chunk(0), etag=etag)
    assert _gets(memory) == 2


def test_an_error_of_the_store_is_not_kept(memory: MemoryStore, tmp_path: Path) -> None:
    store, etag = CacheStore(memory, tmp_path, 10**9), memory.head("x").etag
    memory.inject(Fault(error=AccessDeniedError))
    with pytest.raises(AccessDeniedError):
        store.get("x", _chunk(0), etag=etag)
    assert store.get("x", _chunk(0), etag=etag) == DATA[:CHUNK]


def test_a_full_disk_costs_speed_and_one_warning_never_the_run(
    memory: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, etag = CacheStore(memory, tmp_path, 10**9), memory.head("x").etag

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(os, "write", refuse)
        for i in range(5):
            assert store.get("x", _chunk(i), etag=etag) == DATA[i * CHUNK : (i + 1) * CHUNK]
    assert store.counts.uncached == 5
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the run continues" in caplog.text
    assert list(tmp_path.glob("uid-*/v1/temporary/*")) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_on_a_disk_smaller_than_the_limit_old_entries_make_room(memory: MemoryStore, tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here; a full disk is also tested by an injected error")
    try:
        store, etag = CacheStore(memory, tmp_path, 10**9), memory.head("x").etag
        for i in list(range(20)) * 2:
            assert store.get("x", ByteRange(i, i + 150_000 - 1000 * i), etag=etag) == DATA[i : i + 150_000 - 1000 * i]
        assert _entries(tmp_path)
        assert store.counts.uncached < 5
        store.close()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_cache_folder_that_can_not_be_made_is_an_error_with_a_cure(memory: MemoryStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CacheFullError, match="give cache_dir= a folder"):
        CacheStore(memory, tmp_path / "file" / "cache", 10**9)


def test_a_cache_that_others_may_write_is_refused(memory: MemoryStore, tmp_path: Path) -> None:
    CacheStore(memory, tmp_path, 10**9)
    (root,) = tmp_path.glob("uid-*")
    assert root.stat().st_mode & 0o777 == 0o700
    root.chmod(0o777)
    with pytest.raises(AccessDeniedError, match="not this user's alone"):
        CacheStore(memory, tmp_path, 10**9)


def test_a_link_in_place_of_the_cache_is_refused(memory: MemoryStore, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"uid-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AccessDeniedError, match=r"a link to .*elsewhere.*remove the link"):
        CacheStore(memory, tmp_path, 10**9)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_link_that_takes_the_place_of_a_cache_in_use_is_not_followed(memory: MemoryStore, tmp_path: Path) -> None:
    store, etag = CacheStore(memory, tmp_path, 10**9), memory.head("x").etag
    store.get("x", _chunk(0), etag=etag)
    (root,) = tmp_path.glob("uid-*")
    root.rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "forged")
    root.symlink_to(tmp_path / "forged")
    before = _files(tmp_path / "forged")
    assert store.get("x", _chunk(1), etag=etag) == DATA[CHUNK : 2 * CHUNK]
    store.discard("x", _chunk(0), etag=etag or "")
    assert _files(tmp_path / "forged") == before


def test_a_cache_folder_that_is_deleted_under_way_is_made_again(
    memory: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    store, etag = CacheStore(memory, folder, 10**9), memory.head("x").etag
    store.get("x", _chunk(0), etag=etag)
    for _ in range(2):
        shutil.rmtree(folder)
        assert store.get("x", _chunk(1), etag=etag) == DATA[CHUNK : 2 * CHUNK]
        gets = _gets(memory)
        assert store.get("x", _chunk(1), etag=etag) == DATA[CHUNK : 2 * CHUNK]
        assert (_gets(memory), len(_entries(folder))) == (gets, 1)
    (root,) = folder.glob("uid-*")
    assert root.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(root / "v1" / "entries")
    store.get("x", _chunk(2), etag=etag)
    assert len(_entries(folder)) == 1
    assert store.counts.uncached == 0
    assert {record.getMessage() for record in caplog.records} == {
        f"the cache folder {folder} was deleted while it was in use; it was made again"
    }
    store.close()
    shutil.rmtree(folder)
    store.get("x", _chunk(2), etag=etag)
    assert not folder.exists()


def test_a_link_in_place_of_a_deleted_cache_is_not_followed(memory: MemoryStore, tmp_path: Path) -> None:
    store, etag = CacheStore(memory, tmp_path, 10**9), memory.head("x").etag
    (root,) = tmp_path.glob("uid-*")
    shutil.rmtree(root)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    root.symlink_to(tmp_path / "elsewhere")
    assert store.get("x", _chunk(1), etag=etag) == DATA[CHUNK : 2 * CHUNK]
    assert store.counts.uncached == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_damaged_cache_is_told_once_and_in_the_end_with_how_much_of_it(
    memory: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, etag = CacheStore(memory, tmp_path, 10**9), memory.head("x").etag
    for i in range(5):
        store.get("x", _chunk(i), etag=etag)
    for entry in _entries(tmp_path):
        entry.write_bytes(b"damaged")
    for i in range(5):
        assert store.get("x", _chunk(i), etag=etag) == DATA[i * CHUNK : (i + 1) * CHUNK]
    assert len(caplog.records) == 1
    store.close()
    store.close()
    assert [record.getMessage() for record in caplog.records[1:]] == [
        f"the cache of {memory.url} had 5 corrupt entries; check its disk"
    ]


def test_entries_that_changed_places_are_misses_and_never_data(memory: MemoryStore, tmp_path: Path) -> None:
    store, etag = CacheStore(memory, tmp_path, 10**9), memory.head("x").etag
    for i in range(4):
        store.get("x", _chunk(i), etag=etag)
    paths = sorted(_entries(tmp_path))
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)
    for i in range(4):
        assert store.get("x", _chunk(i), etag=etag) == DATA[i * CHUNK : (i + 1) * CHUNK]
    assert store.counts.corrupt == 4
    assert sorted(path.read_bytes() for path in paths) == sorted(contents)


def test_entries_of_an_older_cache_are_misses_without_a_word(
    memory: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, etag = CacheStore(memory, tmp_path, 10**9), memory.head("x").etag
    store.get("x", _chunk(0), etag=etag)
    (entry,) = _entries(tmp_path)
    fresh, content = entry.read_bytes(), bytes(DATA[:CHUNK])
    entry.write_bytes(content + struct.pack("<8sQQ", b"penstck1", CHUNK, xxhash.xxh3_64_intdigest(content)))
    assert store.get("x", _chunk(0), etag=etag) == content
    assert (store.counts.corrupt, _gets(memory), caplog.text) == (0, 2, "")
    assert entry.read_bytes() == fresh


def test_a_limit_of_nothing_is_refused(memory: MemoryStore, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit"):
        CacheStore(memory, tmp_path, 0)


def test_a_limit_is_kept_where_the_file_system_has_no_locks(
    memory: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    store, etag = CacheStore(memory, tmp_path, 5 * CHUNK), memory.head("x").etag
    for number in range(20):
        assert store.get("x", _chunk(number), etag=etag) == DATA[number * CHUNK : (number + 1) * CHUNK]
    assert sum(path.stat().st_size for path in _entries(tmp_path)) <= 5 * CHUNK
