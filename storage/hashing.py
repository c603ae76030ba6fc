"""Checksums of large buffers, made while other threads compute."""

from __future__ import annotations

import xxhash


def xxh3_64(data: bytes | bytearray | memoryview, seed: int = 0) -> int:
    """The XXH3-64 of ``data``.

    xxhash's functions for a whole buffer keep Python's lock throughout, half a millisecond for 4 MiB; its ``update``
    releases it for large ones.
    """
    digest = xxhash.xxh3_64(seed=seed)
    digest.update(data)
    return digest.intdigest()
