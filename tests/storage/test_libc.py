"""Platforms differ in what their C library has; what one lacks is told, or done without."""

from __future__ import annotations

import mmap
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.storage import ByteRange, LocalStore, libc
from penstock.storage.buffers import LEAST_BYTES, Buffers


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
    libc.set_mmap_threshold(1 << 16)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_glibc_has_what_is_asked_of_its_allocator() -> None:
    assert {"malloc_trim", "mallopt"} <= set(vars(libc._LIBC))


@pytest.mark.skipif(not libc.HAS_PAGE_CALLS, reason="needs 64-bit Linux")
def test_an_error_of_the_kernel_is_python_s() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        libc.map_pages(-1, 1, mmap.PAGESIZE)  # half a page in
    with pytest.raises(OSError, match="Cannot allocate memory"):
        libc.populate_pages(mmap.PAGESIZE, mmap.PAGESIZE, write=True)  # nothing is mapped there
