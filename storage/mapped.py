"""Parts of files mapped into memory: the pages in which the kernel keeps a file, in place of a copy of them.

A file that is cut short under a mapping ends, with SIGBUS, whoever touches a page behind its end. So who maps one asks
whether the file is still the same before he looks, and after, as what is written to it shows through; and nothing is
mapped of file systems that may tell that late, as those of a network, or cannot say that a page is not to be had.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import weakref
from pathlib import Path
from typing import Any

# On a disk of this machine, or in its memory; of an overlay's files, the layers below it tell.
_OWN_DISKS = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "tmpfs", "xfs"})
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14: a page that cannot be had is an error, and no signal
_FAILED = ctypes.c_void_p(-1).value

_kinds: dict[int, str] = {}  # by device; a file system that is mounted later on the same one is of the same kind
_libc: Any = None


def kind_of_disk(device: int) -> str:
    """The name of the file system of a device (``st_dev``); '' where that is not known."""
    if device not in _kinds:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:
            mounts = ""
        found = re.findall(rf"^\d+ \d+ {os.major(device)}:{os.minor(device)} .*? - (\S+)", mounts, re.MULTILINE)
        _kinds[device] = str(found[0]) if found else ""
    return _kinds[device]


def can_map(device: int) -> bool:
    """Whether parts of files on this device can be mapped safely."""
    return _open_libc() is not None and kind_of_disk(device) in _OWN_DISKS


def map_range(fd: int, start: int, nbytes: int) -> memoryview | None:
    """Bytes of a file, read-only, mapped until the last reference to them is gone; None where the kernel cannot.

    All of their pages are in memory then, though they may be dropped later, and be read anew when they are touched.

    Raises:
        OSError: there is no memory, the range ends behind the file's last page, or the disk fails.
    """
    import numpy as np  # not at the start: the command line need not wait for it

    libc = _open_libc()
    skipped = start % mmap.ALLOCATIONGRANULARITY
    size = skipped + nbytes
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, start - skipped)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    raw: Any = (ctypes.c_ubyte * nbytes).from_address(address + skipped)
    pages: Any = np.frombuffer(
        raw, np.uint8
    )  # the garbage collector does not track arrays (`penstock.storage.buffers`)
    weakref.finalize(pages, libc.munmap, address, size).atexit = False  # the process's end unmaps it
    if libc.madvise(address, size, _POPULATE_READ):
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS):
            return None
        # A page behind the file's end is "bad address" to the call.
        raise OSError(errno.EIO if code == errno.EFAULT else code, os.strerror(code))
    return memoryview(pages).toreadonly()


def _open_libc() -> Any:
    """The C library's calls; None where they are not to be had, or not as they are on 64-bit Linux."""
    global _libc
    if (
        _libc is None
        and ctypes.sizeof(ctypes.c_long) == ctypes.sizeof(ctypes.c_longlong)
        and hasattr(mmap, "MAP_SHARED")
    ):
        libc: Any = ctypes.CDLL(None, use_errno=True)
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.mmap.restype = ctypes.c_void_p
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        _libc = libc
    return _libc
