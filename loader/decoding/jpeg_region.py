"""Decoding no more of a JPEG than a region needs, where its pixels are bit for bit those of whole decoding."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..errors import ConfigError
from .jpeg_stream import PlainJpeg, plain_jpeg
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


def usual_jpeg(data: bytes | memoryview) -> PlainJpeg | None:
    """What the header says of a JPEG whose regions can be decoded: a baseline, YCbCr one, in one scan, with an end.

    None for all others (libraries that are around have known faults with them), and where no library is found (see
    ``find_turbojpeg``).
    """
    plain = None if exact_library() is None else plain_jpeg(data)
    return plain if plain is not None and plain.one_scan and plain.sampling in _SAMPLINGS else None


def plan_part(jpeg: PlainJpeg, region: Region) -> Region | None:
    """What has to be decoded for a region; None where that is nearly all, and the JPEG is better decoded whole."""
    return _pad(region, jpeg.height, jpeg.width, jpeg.sampling) if _pays(jpeg.height, jpeg.width, region) else None


def _pays(height: int, width: int, region: Region) -> bool:
    return height * width >= _LEAST_PIXELS and region.height * region.width <= _LARGEST_SHARE * height * width


def decode_region(
    data: bytes | memoryview, height: int, width: int, region: Region, part: Region | None = None
) -> Pixels | None:
    """(h, w, 3) uint8 RGB of ``region`` of a JPEG of (height, width); None where that image is to be decoded whole.

    ``part`` is what ``plan_part`` says; None asks it. Damage below the part is not seen. Any error and any warning of
    what is read leaves it to the whole decoding to say what is wrong.
    """
    if part is None:
        jpeg = usual_jpeg(data) if _pays(height, width, region) else None
        if jpeg is None or (jpeg.height, jpeg.width) != (height, width):
            return None
        part = plan_part(jpeg, region)
    library = exact_library()
    return None if part is None or library is None else _decode(library, data, height, width, region, part)


def _pad(region: Region, height: int, width: int, sampling: tuple[int, int]) -> Region:
    return pad_region(region, height, width, _MARGIN, _MCU_SIDE * sampling[0])


def _decode(
    library: TurboJpeg, data: bytes | memoryview, height: int, width: int, region: Region, part: Region
) -> Pixels | None:
    pixels = library.decode(data, height, width, part)
    return None if pixels is None else _cut(pixels, region, part.top, part.left)


def _cut(pixels: Pixels, region: Region, top: int, left: int) -> Pixels:
    """The view of ``region`` in pixels that begin at (top, left)."""
    return pixels[region.top - top :, region.left - left :][: region.height, : region.width]


@functools.cache
def exact_library() -> TurboJpeg | None:
    """The library that regions are decoded by; None where there is none, or its pixels are not those of simplejpeg's.

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
    """Whether both decode the same pixels of a made-up image: a library may be built in another way, or be wrong."""
    import simplejpeg  # of an extra: images.py says so where it is missing

    height, width = 61, 93
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    for sampling, name in _SAMPLINGS.items():
        data = simplejpeg.encode_jpeg(noise, quality=90, colorsubsampling=name)
        whole = simplejpeg.decode_jpeg(data)
        for region in (Region(0, 0, 30, 40), Region(17, 21, 25, 33), Region(30, 50, height - 30, width - 50)):
            part = _pad(region, height, width, sampling)
            found = _decode(library, data, height, width, region, part)
            if found is None or not np.array_equal(found, _cut(whole, region, 0, 0)):
                return False
    return True
