"""Images that are fuzzed: whole, at a part of their size, and parts of them. OpenCV is of an extra, and comes late."""

from __future__ import annotations

import contextlib

import numpy as np

from penstock.loader.decoding.decode import field_decoder
from penstock.loader.decoding.row_job import collate_values
from penstock.loader.errors import DecodeError


def run_image(data: bytes) -> None:
    """Decode an image so small that a JPEG is reduced meanwhile, and whole."""
    from penstock.loader.decoding.images.images import ImageDecoder

    with contextlib.suppress(DecodeError):
        ImageDecoder(size=2)(memoryview(data), None)
    whole = field_decoder("x.jpg", "auto")
    assert whole is not None
    value = whole(memoryview(data), None)
    collate_values([value, value])


def run_region(data: bytes) -> None:
    """Decode parts of a JPEG, which have to be those of the whole image where that can be decoded."""
    from penstock.loader.decoding.images import images, jpeg_region  # OpenCV, of an extra

    decoder = images.ImageDecoder(size=64, crop="random", scale=(0.08, 0.8))
    whole: images.Pixels | DecodeError = DecodeError("not decoded yet")
    rng = np.random.default_rng(len(data))
    for turn in range(4):
        plan = decoder.plan(data, rng)
        if plan is None:
            return
        part = jpeg_region.decode_region(data, plan.height, plan.width, plan.region)
        if turn == 0:
            try:
                whole = images._decode_jpeg(data, plan.height, plan.width, 1)
            except DecodeError as exc:
                whole = exc
        if part is not None and not isinstance(whole, DecodeError):
            expected = images._cut(whole, plan.region, plan.height, plan.width)
            assert np.array_equal(part, expected), f"other pixels in {plan.region} of {plan.width}x{plan.height}"
    if isinstance(whole, DecodeError):
        raise whole
