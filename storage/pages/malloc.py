"""Keep memory that batches free inside the C library's allocator."""

from __future__ import annotations

import functools

_LARGEST_BYTES = 16 << 20  # several batches; glibc itself goes up to 32 MiB


@functools.cache
def keep_freed_memory() -> None:
    """Have glibc keep what is freed for the next batch, 32 MiB of each of its heaps; other allocators do as they do.

    It holds for the process, and is done once: again, the block would come from a heap, and be cleared page by page.

    As soon as 128 KiB at the end of a heap are free, it gives them back to the kernel, and takes them page by page
    for the next batch. It keeps twice the size of the largest block that was ever freed, and has only larger ones from
    the kernel: any program that frees a large array has it so (mallopt(3), M_MMAP_THRESHOLD). Here one is made, and
    freed untouched.
    """
    bytes(_LARGEST_BYTES)
