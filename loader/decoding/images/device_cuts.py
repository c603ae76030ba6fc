"""Regions of images on a device that are to be cut out, resized and flipped, and the table of them for a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from ...columns import IntArray
    from .images import ImagePlan


class Cut(NamedTuple):
    """A (3, h, w) uint8 image on the device, the plan of what is taken of it, and the batch's row for that."""

    image: torch.Tensor
    plan: ImagePlan
    row: int


# The columns of a table of cuts, int64: the address of the region's first pixel; the elements from a channel to the
# next, from a row of pixels to the next, and from a pixel to the next; the region's size; the flip; the batch's row.
COLUMNS = ("address", "channel", "line", "pixel", "height", "width", "flip", "row")


def make_table(cuts: Sequence[Cut]) -> IntArray:
    """Make the (n, len(COLUMNS)) table of the cuts."""
    lines = []
    for image, plan, row in cuts:
        region, (channel, line, pixel) = plan.region, image.stride()
        address = image.data_ptr() + region.top * line + region.left * pixel
        lines.append((address, channel, line, pixel, region.height, region.width, plan.flip, row))
    return np.array(lines, np.int64)


def on_device(numbers: Sequence[int] | IntArray, device: torch.device) -> torch.Tensor:
    """Make a tensor of numbers on the device, without the host waiting."""
    made = torch.as_tensor(numbers)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)
