"""Decoding no more of a JPEG than a region needs, where its pixels are bit for bit those of whole decoding."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ...errors import ConfigError
from .jpeg_stream import plain_jpeg
from .regions import Region, pad_region
from .turbojpeg import VARIABLE, TurboJpeg, find_turbojpeg

Pixels = np.ndarray[Any, np.dtype[Any]]

# Colour of half the resolution is interpolated between neighbours, of which a region's edge has none.
_MARGIN = 2
_MCU_SIDE = 8
# How finely the luminance is sampled, relative to colour, (horizontally, vertically).
_SAMPLINGS = {(1, 1): "444", (2, 1): "422", (1, 2): "440", (2, 2): "420"}
# Beyond, or below, too little is won to be worth another look at the header.
_LARGEST_SHARE = 0.9
_LEAST_PIXELS = 128 * 128


def decode_region(data: bytes | memoryview, height: int, width: int, region: Region) -> Pixels | None:
    """Decode ``region`` of a JPEG of (height, width) to (h, w, 3) uint8 RGB; None if it must be decoded whole.

    It must where the region is nearly all of it, where no library is found (see ``find_turbojpeg``), and where the
    JPEG is not of the most usual kind: baseline, YCbCr, in one scan, and with an end. (Libraries that are around have
    known faults with other kinds.) Damage below the region is not seen. After any error or warning,
    the image is decoded whole, which reports the damage.
    """
    if height * width < _LEAST_PIXELS or region.height * region.width > _LARGEST_SHARE * height * width:
        return None
    library = exact_library()
    plain = None if library is None else plain_jpeg(data)
    if library is None or plain is None or (plain.height, plain.width) != (height, width):
        return None
    if plain.sampling not in _SAMPLINGS or not plain.is_one_scan(data):
        return None
    return _decode(library, data, height, width, region, plain.sampling)


def _decode(
    library: TurboJpeg, data: bytes | memoryview, height: int, width: int, region: Region, sampling: tuple[int, int]
) -> Pixels | None:
    padded = pad_region(region, height, width, _MARGIN, _MCU_SIDE * sampling[0])
    pixels = library.decode(data, height, width, padded)
    return None if pixels is None else _cut(pixels, region, padded.top, padded.left)


def _cut(pixels: Pixels, region: Region, top: int, left: int) -> Pixels:
    """View ``region`` in pixels that begin at (top, left)."""
    return pixels[region.top - top :, region.left - left :][: region.height, : region.width]


@functools.cache
def exact_library() -> TurboJpeg | None:
    """Find the library to decode regions with; None without one, or where its pixels differ from simplejpeg's.

    Raises:
        ConfigError: the environment names a library that cannot be used.
    """
    library = find_turbojpeg()
    if library is None or _agrees(library):
        return library
    if library.is_named:
        raise ConfigError(
            f"{VARIABLE}={library.path} decodes other pixels than simplejpeg does; leave the variable out, or empty"
        )
    return None


def _agrees(library: TurboJpeg) -> bool:
    """Return whether both decode a made-up image alike: a library may be built in another way, or be wrong."""
    import simplejpeg  # of an extra: images.py says so where it is missing

    height, width = 61, 93
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    for sampling, name in _SAMPLINGS.items():
        data = simplejpeg.encode_jpeg(noise, quality=90, colorsubsampling=name)
        whole = simplejpeg.decode_jpeg(data)
        for region in (Region(0, 0, 30, 40), Region(17, 21, 25, 33), Region(30, 50, height - 30, width - 50)):
            found = _decode(library, data, height, width, region, sampling)
            if found is None or not np.array_equal(found, _cut(whole, region, 0, 0)):
                return False
    return True
