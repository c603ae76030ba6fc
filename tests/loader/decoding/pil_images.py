"""Photographs, and what PIL makes of them."""

import io
import math
from typing import Any

import numpy as np
from photographs import photograph
from PIL import Image

PHOTO = photograph("china.jpg")


def encode(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    sink = io.BytesIO()
    image.save(sink, kind, **({"quality": 92} if kind == "JPEG" else {}) | options)
    return sink.getvalue()


def photo(width: int, height: int, source: Image.Image = PHOTO) -> Image.Image:
    return source.resize((width, height), Image.Resampling.BICUBIC)


def by_pil(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    error = np.mean((one.astype(np.float64) - other.astype(np.float64)) ** 2)
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)
