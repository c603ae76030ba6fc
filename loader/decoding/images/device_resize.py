"""Regions of images on a device, cut out, resized and flipped into the rows of a batch.

All images of a group by one kernel where Triton compiles it; else each by torch's operations, about five an image. Both
resize with torch's antialiased bilinear filter: the sums' order differs, and so pixels may, by 1.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import interpolate

from .device_cuts import Cut, on_device

_PROBE_SIDE = 24


class SlowResizeWarning(UserWarning):
    """Images on the device are resized one by one, since the kernel for many is not to be had."""


Resize = Callable[[Sequence[Cut], torch.Tensor], None]
"""Puts cuts into their rows of (n, height, width, 3) uint8 pixels; the work is queued on the current stream.

The images must be kept, or freed on that stream, until it is done.
"""


@functools.cache
def choose_resize(device: torch.device) -> Resize:
    """Choose the way to resize on a device; warns, once, of a CUDA device that gets the slower."""
    if device.type != "cuda":
        return resize_each
    try:
        from .device_kernel import resize_together

        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            far = _compare(resize_together, device)
    except Exception as exc:  # noqa: BLE001  # whatever a compiler may raise
        why = f"{type(exc).__name__}: {str(exc).strip().splitlines()[0] if str(exc).strip() else 'no message'}"
    else:
        if far <= 1:
            return resize_together
        why = f"it is off by {far}"
    warnings.warn(
        f"{device} resizes decoded images one by one, not a group by one kernel, which takes Triton and a C compiler: "
        f"{why}",
        SlowResizeWarning,
        stacklevel=2,
    )
    return resize_each


def _compare(resize: Resize, device: torch.device) -> int:
    """Measure by how much the pixels of a small picture differ from those of ``resize_each``, at most."""
    from .images import ImagePlan
    from .regions import Region

    random = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (3, _PROBE_SIDE, _PROBE_SIDE + 5), dtype=torch.uint8, generator=random).to(device)
    regions = Region(2, 1, 21, 17), Region(0, 3, 9, 26)
    plans = [ImagePlan(_PROBE_SIDE, _PROBE_SIDE + 5, region, bool(flip)) for flip, region in enumerate(regions)]
    cuts = [Cut(image, plan, row) for row, plan in enumerate(plans)]
    results = [torch.zeros((2, 11, 13, 3), dtype=torch.uint8, device=device) for _ in range(2)]
    for put, pixels in zip((resize, resize_each), results, strict=True):
        put(cuts, pixels)
    one, other = (pixels.cpu().to(torch.int16) for pixels in results)
    return int((one - other).abs().max())


def resize_each(cuts: Sequence[Cut], pixels: torch.Tensor) -> None:
    """Resize by torch's operations. See ``Resize``."""
    shape = pixels.shape[1:3]
    parts = torch.stack([_cut(cut, shape) for cut in cuts])
    resized = parts.round_().clamp_(0, 255).to(torch.uint8)
    if any(cut.plan.flip for cut in cuts):
        are_flipped = on_device([cut.plan.flip for cut in cuts], pixels.device)
        resized = torch.where(are_flipped[:, None, None, None], resized.flip(-1), resized)
    place(pixels, [cut.row for cut in cuts], resized.permute(0, 2, 3, 1))


def _cut(cut: Cut, shape: torch.Size) -> torch.Tensor:
    """Cut the region out, as (3, height, width) float32 of ``shape``."""
    region = cut.plan.region
    part = cut.image[:, region.top : region.top + region.height, region.left : region.left + region.width]
    whole = part.unsqueeze(0).to(torch.float32)
    if whole.shape[-2:] != shape:
        whole = interpolate(whole, shape, mode="bilinear", antialias=True)
    return whole[0]


def place(pixels: torch.Tensor, rows: Sequence[int], values: torch.Tensor) -> None:
    """Put values (n, ...) into rows of the pixels."""
    first, stop = rows[0], rows[-1] + 1
    if stop - first == len(rows):  # in order
        pixels[first:stop] = values
    else:
        pixels[on_device(rows, pixels.device)] = values
