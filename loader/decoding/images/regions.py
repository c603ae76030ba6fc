"""Regions of images that crops take: arithmetic on sizes, alike for every way of decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_EVAL_MARGIN = 256 / 224
_CROP_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of an image in whole pixels."""

    top: int
    left: int
    height: int
    width: int


def center_region(height: int, width: int, out_height: int, out_width: int, resize: int | None) -> Region:
    """Compute the part of an image that is left once its short side is ``resize`` and the centre is cropped."""
    fit = max(out_height / height, out_width / width)
    zoom = fit * _EVAL_MARGIN if resize is None else max(fit, resize / min(height, width))
    cut_height = min(height, max(1, round(out_height / zoom)))
    cut_width = min(width, max(1, round(out_width / zoom)))
    return Region((height - cut_height) // 2, (width - cut_width) // 2, cut_height, cut_width)


def random_region(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], rng: np.random.Generator
) -> Region:
    """Draw a random part of an image, by the algorithm of torchvision's RandomResizedCrop (Szegedy et al., 2014).

    Ten draws of area and aspect are tried; if none fits, it is the largest centred part whose aspect is in ``ratio``.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    *draws, place_y, place_x = rng.random(2 * _CROP_ATTEMPTS + 2).tolist()  # one call, as each lets other threads run
    for area_draw, aspect_draw in zip(draws[::2], draws[1::2], strict=True):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * area_draw)
        aspect = math.exp(low + (high - low) * aspect_draw)
        cut_width, cut_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < cut_width <= width and 0 < cut_height <= height:
            top = int(place_y * (height - cut_height + 1))
            left = int(place_x * (width - cut_width + 1))
            return Region(top, left, cut_height, cut_width)
    aspect = min(max(width / height, ratio[0]), ratio[1])
    cut_width = min(width, max(1, round(height * aspect)))
    cut_height = min(height, max(1, round(width / aspect)))
    return Region((height - cut_height) // 2, (width - cut_width) // 2, cut_height, cut_width)


def scale_region(region: Region, factor_y: float, factor_x: float) -> Region:
    """Scale a region by the factors, each edge to the nearest pixel."""
    top, left = round(region.top * factor_y), round(region.left * factor_x)
    stop, right = round((region.top + region.height) * factor_y), round((region.left + region.width) * factor_x)
    return Region(top, left, max(1, stop - top), max(1, right - left))


def pad_region(region: Region, height: int, width: int, margin: int, step: int) -> Region:
    """Pad a region by ``margin`` pixels, as far as the image goes, its left edge on a multiple of ``step``."""
    top, left = max(0, region.top - margin), max(0, region.left - margin) // step * step
    stop, right = region.top + region.height + margin, region.left + region.width + margin
    return Region(top, left, min(height, stop) - top, min(width, right) - left)
