"""Platforms differ in what their C library has; what one lacks is told, or done without."""

from __future__ import annotations

import mmap
import os
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.storage import ByteRange, LocalStore, ObjectChangedError
from penstock.storage.memory import libc
from penstock.storage.memory.buffers import LEAST_BYTES, Buffers


def test_without_calls_for_pages_files_are_read_and_memory_is_lent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libc, "HAS_PAGE_CALLS", False)
    (tmp_path / "x.tar").write_bytes(b"abc")
    store = LocalStore(tmp_path)
    etag = store.head("x.tar").etag
    assert etag is not None
    assert store.map("x.tar", ByteRange(0, 3), etag=etag) is None
    assert store.get("x.tar", ByteRange(0, 3)) == b"abc"
    assert Buffers().take(LEAST_BYTES).nbytes == LEAST_BYTES
    with (tmp_path / "x.tar").open("rb") as file, pytest.raises(OSError, match="not implemented"):
        libc.map_pages(file.fileno(), 0, 3)


def test_without_glibc_its_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libc, "_LIBC", SimpleNamespace(munmap=libc._LIBC.munmap))
    libc.trim_heap()
    assert libc.count_allocated_bytes() == 0
    libc.set_mmap_threshold(1 << 16)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_glibc_has_what_is_asked_of_its_allocator() -> None:
    assert {"malloc_trim", "mallopt"} <= set(vars(libc._LIBC))


@pytest.mark.skipif(not hasattr(libc._LIBC, "mallinfo2"), reason="needs glibc 2.33")
def test_what_malloc_gave_out_is_counted_until_it_is_freed() -> None:
    before = libc.count_allocated_bytes()
    small, large = [bytes(1000) for _ in range(10_000)], bytes(64 << 20)
    with_both = libc.count_allocated_bytes() - before
    assert with_both >= len(small) * 1000 + len(large)
    del small, large
    assert libc.count_allocated_bytes() - before < with_both - (64 << 20)


@pytest.mark.skipif(not libc.HAS_PAGE_CALLS, reason="needs 64-bit Linux")
def test_an_error_of_the_kernel_is_python_s() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        libc.map_pages(-1, 1, mmap.PAGESIZE)  # half a page in
    with pytest.raises(OSError, match="Cannot allocate memory"):
        libc.populate_pages(mmap.PAGESIZE, mmap.PAGESIZE, write=True)  # nothing is mapped there


def test_a_file_is_told_as_stat_tells_it(tmp_path: Path) -> None:
    file = tmp_path / "ä b.tar"
    file.write_bytes(b"abc")
    for mtime_ns in (0, 1, 1_700_000_000_123_456_789, -1_500_000_001):
        os.utime(file, ns=(0, mtime_ns))
        found = file.stat()
        assert libc.identify(str(file)) in {None, (found.st_mtime_ns, found.st_size, found.st_ino)}
    (tmp_path / "link.tar").symlink_to(file)
    assert libc.identify(str(tmp_path / "link.tar")) == libc.identify(str(file))
    (tmp_path / "broken.tar").symlink_to(tmp_path / "none")
    for other in (tmp_path, tmp_path / "none", tmp_path / "broken.tar", file / "x"):
        assert libc.identify(str(other)) is None


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_where_glibc_is_a_file_is_told(tmp_path: Path) -> None:
    assert libc.identify(__file__) is not None


def test_without_a_call_that_keeps_the_gil_a_changed_file_is_told_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libc, "_WITH_GIL", SimpleNamespace())
    (tmp_path / "x.tar").write_bytes(b"abc")
    store = LocalStore(tmp_path)
    etag = store.head("x.tar").etag
    assert etag is not None
    store.check_unchanged("x.tar", etag)
    (tmp_path / "x.tar").write_bytes(b"abcd")
    with pytest.raises(ObjectChangedError):
        store.check_unchanged("x.tar", etag)
