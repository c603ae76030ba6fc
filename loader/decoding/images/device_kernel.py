"""The kernel, of Triton's, that resizes all images of a group: a program for some pixels of one row of the batch.

Each pixel sums its taps itself, in both directions at once: most crops shrink by less than two, which makes 4 to 16
taps, and reads of neighbours meet in the cache. Positions and weights are those of torch's antialiased bilinear filter
(``_upsample_bilinear2d_aa``), in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .device_cuts import COLUMNS, Cut, make_table, on_device

_BLOCK, _WARPS = 256, 8  # pixels, and groups of 32 threads, of a program
_COLUMNS = tl.constexpr(len(COLUMNS))
_TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2**23: added, it rounds a float32 half to even


# Triton reads annotations as a part of the kernel, and knows none of Python's.
def _resize_pixels(table, out, height, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute ``block`` pixels of (n, height, width, 3) uint8 ``out``; the columns of ``table`` are ``COLUMNS``."""
    entry = table + tl.program_id(0) * _COLUMNS
    source = tl.load(entry).to(tl.pointer_type(tl.uint8))
    channel, line, pixel = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    from_height, from_width = tl.load(entry + 4).to(tl.int32), tl.load(entry + 5).to(tl.int32)
    flip, row = tl.load(entry + 6), tl.load(entry + 7)

    place = tl.program_id(1) * block + tl.arange(0, block)
    is_there = place < height * width
    y, x = place // width, place % width
    x = tl.where(flip != 0, width - 1 - x, x)

    scale_y = tl.div_rn(from_height.to(tl.float32), tl.full((), height, tl.float32))
    scale_x = tl.div_rn(from_width.to(tl.float32), tl.full((), width, tl.float32))
    reach_y, reach_x = tl.maximum(scale_y, 1.0), tl.maximum(scale_x, 1.0)
    center_y, center_x = scale_y * (y.to(tl.float32) + 0.5), scale_x * (x.to(tl.float32) + 0.5)
    first_y = tl.maximum((center_y - reach_y + 0.5).to(tl.int32), 0)
    first_x = tl.maximum((center_x - reach_x + 0.5).to(tl.int32), 0)
    stop_y = tl.minimum((center_y + reach_y + 0.5).to(tl.int32), from_height)
    stop_x = tl.minimum((center_x + reach_x + 0.5).to(tl.int32), from_width)

    total = tl.zeros((block,), tl.float32)
    red, green, blue = tl.zeros((block,), tl.float32), tl.zeros((block,), tl.float32), tl.zeros((block,), tl.float32)
    for tap_y in range((2.0 * reach_y).to(tl.int32) + 2):
        at_y = first_y + tap_y
        weight_y = tl.maximum(1.0 - tl.abs(at_y.to(tl.float32) - center_y + 0.5) / reach_y, 0.0)
        line_there = is_there & (at_y < stop_y)
        for tap_x in range((2.0 * reach_x).to(tl.int32) + 2):
            at_x = first_x + tap_x
            weight = weight_y * tl.maximum(1.0 - tl.abs(at_x.to(tl.float32) - center_x + 0.5) / reach_x, 0.0)
            there = line_there & (at_x < stop_x)
            weight = tl.where(there, weight, 0.0)
            at = source + at_y * line + at_x * pixel
            total += weight
            red += weight * tl.load(at, mask=there, other=0).to(tl.float32)
            green += weight * tl.load(at + channel, mask=there, other=0).to(tl.float32)
            blue += weight * tl.load(at + 2 * channel, mask=there, other=0).to(tl.float32)

    to = out + (row * height * width + place) * 3
    tl.store(to, _round(red / total).to(tl.uint8), mask=is_there)
    tl.store(to + 1, _round(green / total).to(tl.uint8), mask=is_there)
    tl.store(to + 2, _round(blue / total).to(tl.uint8), mask=is_there)


def _round_half_to_even(value):  # type: ignore[no-untyped-def]
    return tl.minimum(tl.maximum((value + _TO_INTEGER) - _TO_INTEGER, 0.0), 255.0)


_round = triton.jit(_round_half_to_even)
_resize_kernel = triton.jit(_resize_pixels)


def resize_together(cuts: Sequence[Cut], pixels: torch.Tensor) -> None:
    """Resize by one kernel. See ``Resize`` of ``device_resize``."""
    _, height, width, _ = pixels.shape
    table = on_device(make_table(cuts), pixels.device)
    _resize_kernel[len(cuts), triton.cdiv(height * width, _BLOCK)](
        table, pixels, height, width, block=_BLOCK, num_warps=_WARPS
    )
