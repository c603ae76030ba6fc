"""Page-locked memory that CUDA registers, and the stream of the copies that start from it.

Torch's own pinned memory is rounded up to a power of two, and takes ten times as long to make.
"""

from __future__ import annotations

import mmap
import weakref
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from ..columns import AnyArray


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Get the stream for copies to a device: one a process, as torch hands out streams of a small pool in turns."""
    return torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]


def register_memory(nbytes: int, device: torch.device) -> AnyArray | None:
    """Lock (nbytes,) uint8 of whole pages as long as the array or a view lives; None where CUDA refuses.

    A copy's caller keeps it until the copy is done: torch does not know of it. A forked child has none of it.
    """
    pages = mmap.mmap(-1, max(1, nbytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # or else a fork would move pages away from under a copy
        if hasattr(mmap, advice):
            pages.madvise(getattr(mmap, advice))
    whole: AnyArray = np.frombuffer(pages, np.uint8)
    address = whole.ctypes.data
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        if runtime.cudaHostRegister(address, len(whole), 0) != runtime.cudaError.success:
            return None
    weakref.finalize(whole, _unregister, runtime, address, copy_stream(device)).atexit = False
    return whole[:nbytes]


def _unregister(runtime: Any, address: int, stream: torch.cuda.Stream) -> None:
    """Unregister the memory once nothing refers to it, before it is freed."""
    stream.synchronize()
    runtime.cudaHostUnregister(address)
