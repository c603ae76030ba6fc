"""Calls of the C library that Python's modules lack: pages of memory, and statistics of the allocator.

Each function says what it does on a platform that lacks its call: glibc and musl on 64-bit Linux have those of pages,
glibc alone those of the allocator. Errors are Python's: an OSError with its errno.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import struct
import sys
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

# MADV_POPULATE_READ and MADV_POPULATE_WRITE of Linux 5.14: a page that cannot be had is an error, and no signal.
_POPULATE_READ, _POPULATE_WRITE = 22, 23
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_KEPT_BLOCK_BYTES = 16 << 20  # several batches; glibc itself goes up to 32 MiB
_FAILED = ctypes.c_void_p(-1).value
_AT_FDCWD = -100
_STATX_IDENTITY = 0x341  # the type, the time of the last change, the inode, the size
_STATX_BYTES = 256
# Of struct statx: the mask of what is filled in, the mode, the inode, the size, the time in seconds and nanoseconds.
_STATX = struct.Struct("=I24xH2xQQ64xqI")
# Offsets of files are longs there, and the numbers above mean what they say.
HAS_PAGE_CALLS = sys.platform == "linux" and ctypes.sizeof(ctypes.c_long) == ctypes.sizeof(ctypes.c_longlong)
_LARGE, _SMALL = 4, 7  # of struct mallinfo2: hblkhd, bytes of blocks from the kernel; uordblks, of all others in use


class _MallInfo(ctypes.Structure):
    _fields_ = (("sizes", ctypes.c_size_t * 10),)


def map_pages(fd: int, offset: int, nbytes: int, *, private: bool = False) -> int:
    """The address of a part of a file, mapped read-only, which begins at a whole number of pages.

    ``private``: a write, which should not happen, goes to a copy of the page; otherwise it ends the process.

    Raises:
        OSError: the kernel refuses, or the platform has no such call (ENOSYS).
    """
    if not HAS_PAGE_CALLS:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    access = (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE) if private else (mmap.PROT_READ, mmap.MAP_SHARED)
    address = _LIBC.mmap(None, nbytes, *access, fd, offset)
    if address == _FAILED:
        raise _last_error()
    return int(address)


def unmap_pages(address: int, nbytes: int) -> None:
    """End a mapping of `map_pages`. Nothing may refer to it any more."""
    _LIBC.munmap(address, nbytes)


def drop_pages(address: int, nbytes: int) -> None:
    """Let go of the pages that hold these bytes of a mapping of `map_pages`, which is not private.

    The kernel keeps them as long as it likes, and they come back when they are touched. So failures are ignored.
    """
    skipped = address % mmap.PAGESIZE
    _LIBC.madvise(address - skipped, skipped + nbytes, mmap.MADV_DONTNEED)


def populate_pages(address: int, nbytes: int, *, write: bool) -> bool:
    """Have the kernel bring pages into memory, to be read or written to, in one call without the GIL.

    That costs two thirds of what a fault for each page costs. Returns False where the kernel or the platform does not
    know the call: pages then come when they are touched.

    Raises:
        OSError: there is no memory, a page is behind its file's end (EFAULT), or the disk fails.
    """
    if not HAS_PAGE_CALLS:
        return False
    if not _LIBC.madvise(address, nbytes, _POPULATE_WRITE if write else _POPULATE_READ):
        return True
    error = _last_error()
    if error.errno in (errno.EINVAL, errno.ENOSYS):
        return False
    raise error


def identify(path: str) -> tuple[int, int, int] | None:
    """(mtime_ns, size, inode) of a regular file on this machine; None where ``os.stat`` must be asked for them.

    It keeps the GIL: with many files, taking it back each time would take longer than the call.
    """
    statx = getattr(_WITH_GIL, "statx", None)
    if statx is None:
        return None
    answer, arguments = _question(path)
    if statx(*arguments):
        return None
    mask, mode, inode, size, seconds, nanoseconds = _STATX.unpack_from(answer)
    if mask & _STATX_IDENTITY != _STATX_IDENTITY or not stat.S_ISREG(mode):
        return None
    return seconds * 10**9 + nanoseconds, size, inode


@lru_cache(4096)
def _question(path: str) -> tuple[ctypes.Array[ctypes.c_char], Sequence[Any]]:
    """Room for statx's answer, and its arguments, which take as long to make as the call takes.

    Threads that ask for one file share the room: a call fills it whole, under the GIL, so that what is read there is
    its own answer or a later one.
    """
    answer = (ctypes.c_char * _STATX_BYTES)()
    name, at = ctypes.c_char_p(os.fsencode(path)), ctypes.c_void_p(ctypes.addressof(answer))
    return answer, (ctypes.c_int(_AT_FDCWD), name, ctypes.c_int(0), ctypes.c_uint(_STATX_IDENTITY), at)


def trim_heap() -> None:
    """Give the system what the allocator keeps of freed memory; without glibc nothing is done."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def count_allocated_bytes() -> int:
    """Bytes that malloc gave out and that were not freed, of all threads; 0 where no glibc of 2.33 or newer tells."""
    if not hasattr(_LIBC, "mallinfo2"):
        return 0
    sizes = _LIBC.mallinfo2().sizes
    return int(sizes[_LARGE] + sizes[_SMALL])


def set_mmap_threshold(nbytes: int) -> None:
    """Have freed blocks of ``nbytes`` or more returned to the system; without glibc nothing is done."""
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_M_MMAP_THRESHOLD, nbytes)


@cache
def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next batch, 32 MiB of each of its heaps; other allocators are left alone.

    By default glibc returns the end of a heap to the kernel once 128 KiB there are free, and the next batch takes it
    page by page. But it keeps up to twice the largest block that was ever freed, and maps only larger ones: any program
    that frees a large array has it so (mallopt(3), M_MMAP_THRESHOLD). Here one is allocated, and freed untouched: once
    a process, because a second one would come from a heap, and be cleared page by page.
    """
    bytes(_KEPT_BLOCK_BYTES)


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def _declare() -> Any:
    libc: Any = ctypes.CDLL(None, use_errno=True)
    calls: dict[str, tuple[Any, list[Any]]] = {
        "mmap": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]),
        "munmap": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_size_t]),
        "madvise": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]),
        "malloc_trim": (ctypes.c_int, [ctypes.c_size_t]),
        "mallopt": (ctypes.c_int, [ctypes.c_int, ctypes.c_int]),
        "mallinfo2": (_MallInfo, []),
    }
    for name, (result, arguments) in calls.items():
        if hasattr(libc, name):
            call = getattr(libc, name)
            call.restype, call.argtypes = result, arguments
    return libc


def _declare_with_gil() -> Any:
    libc: Any = ctypes.PyDLL(None)
    if sys.platform == "linux" and hasattr(libc, "statx"):
        libc.statx.restype = ctypes.c_int
        libc.statx.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
    return libc


_LIBC = _declare()
_WITH_GIL = _declare_with_gil()
