"""Parts of files mapped into memory: the pages in which the kernel keeps a file, in place of a copy of them.

A file that is cut short under a mapping ends, with SIGBUS, whoever touches a page behind its end. So the caller asks
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVarTuple

from . import libc

Ts = TypeVarTuple("Ts")

# On a disk of this machine, or in its memory; of an overlay's files, the layers below it tell.
_OWN_DISKS = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "tmpfs", "xfs"})

_kinds: dict[int, str] = {}  # by device; a file system that is mounted later on the same one is of the same kind


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
    """Return whether parts of files on this device can be mapped safely."""
    return libc.HAS_PAGE_CALLS and kind_of_disk(device) in _OWN_DISKS


def map_range(fd: int, start: int, nbytes: int, *, private: bool = False) -> memoryview | None:
    """Bytes of a file, read-only, mapped until the last reference to them is gone; None where the kernel cannot.

    All of their pages are in memory then, though they may be dropped later, and be read anew when they are touched.
    ``private``: for those who may be careless: torch has no read-only tensors, and what they write stays theirs.

    Raises:
        OSError: there is no memory, the range ends behind the file's last page, or the disk fails.
    """
    skipped = start % mmap.ALLOCATIONGRANULARITY
    size = skipped + nbytes
    address = libc.map_pages(fd, start - skipped, size, private=private)
    return view_pages(address, skipped, nbytes, libc.unmap_pages, address, size)


def view_pages(
    address: int, start: int, nbytes: int, when_gone: Callable[[*Ts], object], *args: *Ts
) -> memoryview | None:
    """Bytes of a mapping at ``address``, whose pages are brought into memory; as ``map_range``.

    ``when_gone(*args)`` is called once the last reference to them is gone, by any thread and at any point.
    """
    import numpy as np  # not at the start: the command line need not wait for it

    raw: Any = (ctypes.c_ubyte * nbytes).from_address(address + start)
    pages: Any = np.frombuffer(raw, np.uint8)  # not tracked by the garbage collector (`penstock.storage.memory.leases`)
    weakref.finalize(pages, when_gone, *args).atexit = False  # the process's end unmaps it
    skipped = start % mmap.ALLOCATIONGRANULARITY
    try:
        is_populated = libc.populate_pages(address + start - skipped, skipped + nbytes, write=False)
    except OSError as exc:
        # A page behind the file's end is "bad address" to the call.
        raise OSError(errno.EIO if exc.errno == errno.EFAULT else exc.errno, exc.strerror) from exc
    return memoryview(pages).toreadonly() if is_populated else None
