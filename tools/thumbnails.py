"""Small pictures of a data set's first images, for terminals and pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..loader.columns import KEY_COLUMN, Block, BytesColumn
from ..loader.decoding.images.kind import image_kind
from ..loader.errors import ConfigError, DecodeError

WIDTH, HEIGHT = 24, 24

Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """An image of one sample, at most WIDTH x HEIGHT pixels. ``pixels``: (height, width, 3) uint8 RGB."""

    name: str
    pixels: Pixels


def make_thumbnails(block: Block, count: int) -> tuple[Thumbnail, ...]:
    """The images of the first ``count`` samples of a chunk; none where they cannot be decoded on this machine."""
    rows = np.arange(min(count, block.samples))
    columns = {name: column for name, column in block.columns.items() if isinstance(column, BytesColumn)}
    keys = columns[KEY_COLUMN].take(rows) if KEY_COLUMN in columns else [f"sample {row}" for row in rows.tolist()]
    found = []
    for name, column in columns.items():
        for key, value in zip(keys, column.take(rows), strict=True):
            if isinstance(value, bytes) and image_kind(value) is not None:
                pixels = _shrink(value)
                if pixels is not None:
                    found.append(Thumbnail(f"{key} {name}", pixels))
    return tuple(found[:count])


def _shrink(data: bytes) -> Pixels | None:
    try:
        import cv2

        from ..loader.decoding.images.images import ImageDecoder

        whole: Any = ImageDecoder(layout="hwc")(memoryview(data), None)
    except (ImportError, ConfigError, DecodeError):
        return None
    height, width = whole.shape[:2]
    scale = min(WIDTH / width, HEIGHT / height, 1.0)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    small: Pixels = cv2.resize(whole, size, interpolation=cv2.INTER_AREA)
    return small
