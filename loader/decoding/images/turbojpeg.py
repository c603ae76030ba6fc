"""Decoding a region of a JPEG by TurboJPEG's C API 3.0, which no package for Python offers.

https://github.com/libjpeg-turbo/libjpeg-turbo, src/turbojpeg.h
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ConfigError

if TYPE_CHECKING:
    from .regions import Region

VARIABLE = "PENSTOCK_TURBOJPEG"
_SYSTEM_NAME = "libturbojpeg.so.0"
_NEEDED = ("tj3Init", "tj3DecompressHeader", "tj3Get", "tj3SetCroppingRegion", "tj3Decompress8", "tj3Destroy")

_DECOMPRESS, _RGB = 1, 0  # TJINIT_DECOMPRESS, TJPF_RGB
_WIDTH, _HEIGHT = 5, 6  # TJPARAM_JPEGWIDTH, TJPARAM_JPEGHEIGHT


class _Rectangle(ctypes.Structure):
    """tjregion"""

    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int), ("w", ctypes.c_int), ("h", ctypes.c_int))


class _Decompressor:
    """One of the library's decompressors, which serves one thread at a time."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.handle = library.tj3Init(_DECOMPRESS)
        if not self.handle:
            raise MemoryError("libturbojpeg has no memory for a decompressor")

    def __del__(self) -> None:
        if self.handle:
            self._library.tj3Destroy(self.handle)


class _Own(threading.local):
    """The decompressor of each thread that asks for it; destroyed with the thread."""

    def __init__(self, library: Any) -> None:
        self.decompressor = _Decompressor(library)


class TurboJpeg:
    """libturbojpeg. Any number of threads may use it; decoding releases the GIL."""

    def __init__(self, path: str, *, is_named: bool = False) -> None:
        """Load it. ``is_named``: the user asks for this one.

        Raises:
            OSError: it cannot be loaded, or is older than 3.0.
        """
        # What takes less time than another thread's turn keeps the GIL.
        quick, library = ctypes.PyDLL(path), ctypes.CDLL(path)
        missing = [name for name in _NEEDED if not hasattr(library, name)]
        if missing:
            raise OSError(f"{path} has no {missing[0]}: libjpeg-turbo 3.0 or newer is needed")
        quick.tj3Init.restype = ctypes.c_void_p
        quick.tj3Init.argtypes = [ctypes.c_int]
        quick.tj3Destroy.restype = None
        quick.tj3Destroy.argtypes = [ctypes.c_void_p]
        quick.tj3DecompressHeader.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        quick.tj3Get.argtypes = [ctypes.c_void_p, ctypes.c_int]
        quick.tj3SetCroppingRegion.argtypes = [ctypes.c_void_p, _Rectangle]
        self._quick = quick
        self._decompress = library.tj3Decompress8
        self._decompress.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_int
        ]  # fmt: skip
        self._own = _Own(quick)
        self.path = path
        self.is_named = is_named

    def decode(
        self, data: bytes | memoryview, height: int, width: int, region: Region
    ) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """Decode ``region`` of a JPEG of (height, width) to (h, w, 3) RGB; data below it is not looked at.

        Returns None where the library reports an error or a warning, or refuses the region: its left edge has to be a
        multiple of the width of the JPEG's MCUs (8 pixels, times the luminance's horizontal sampling factor).
        """
        inside = 0 <= region.left < region.left + region.width <= width
        if not data or not inside or not 0 <= region.top < region.top + region.height <= height:
            return None
        handle, quick = self._own.decompressor.handle, self._quick
        source = np.frombuffer(data, np.uint8)
        at = source.__array_interface__["data"][0]
        if quick.tj3DecompressHeader(handle, at, source.size):
            return None
        if quick.tj3Get(handle, _WIDTH) != width or quick.tj3Get(handle, _HEIGHT) != height:
            return None
        if quick.tj3SetCroppingRegion(handle, _Rectangle(region.left, region.top, region.width, region.height)):
            return None
        pixels = np.empty((region.height, region.width, 3), np.uint8)
        out = pixels.__array_interface__["data"][0]
        if self._decompress(handle, at, source.size, out, 3 * region.width, _RGB):
            return None
        return pixels


def find_turbojpeg() -> TurboJpeg | None:
    """Find the library that the environment's PENSTOCK_TURBOJPEG names, the package turbojpeg's, or the system's.

    Returns None without one of version 3.0 or newer, or where the variable is set but empty.

    Raises:
        ConfigError: what the variable names cannot be used.
    """
    named = os.environ.get(VARIABLE)
    if named == "":
        return None
    if named is not None:
        try:
            return TurboJpeg(named, is_named=True)
        except OSError as exc:
            raise ConfigError(
                f"{VARIABLE}={named} cannot be used: {exc}; name a libturbojpeg of version 3.0 or newer, leave the "
                "variable out to have one looked for, or empty to do without"
            ) from exc
    for path in _candidates():
        try:
            return TurboJpeg(path)
        except OSError:
            continue
    return None


def _candidates() -> Iterator[str]:
    try:
        package = find_spec("turbojpeg")  # not imported: only the library beside it is of use
    except (ImportError, ValueError):
        package = None
    if package is not None and package.origin is not None:
        yield from map(str, sorted(Path(package.origin).parent.glob("turbojpeg.libs/libturbojpeg*.so*")))
    yield str(Path(sys.prefix, "lib", _SYSTEM_NAME))  # conda's
    yield _SYSTEM_NAME
