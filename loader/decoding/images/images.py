"""The fused image decoder: JPEG, PNG or WebP bytes become a cropped, resized, flipped RGB array in one step.

Importing this file turns off OpenCV's own thread pool for the whole process: the loader decodes many images at once on
threads of its own, and a pool inside each would only contend with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import simplejpeg

from ....storage.suggestions import did_you_mean, unknown_choice
from ...errors import ConfigError, DecodeError
from .jpeg_region import decode_region
from .jpeg_stream import is_dct, jpeg_size
from .kind import image_kind, image_size, keep_tiff_colours
from .regions import Region, center_region, random_region, scale_region

# A block of 8x8 pixels takes a bit of a JPEG at the least. A smaller JPEG fails when it is decoded.
_JPEG_PIXELS_PER_BYTE = 8 * 64
_SMALL_PIXELS = 1 << 24
# A header that claims more pixels than this counts as damage, or as an attack on the machine's memory.
MAX_PIXELS = 1 << 28

_UNUSUAL_SAMPLING = "subsampling level"


def read_header(data: bytes | memoryview) -> tuple[int, int, bool]:
    """Read height, width and whether simplejpeg can decode it; (0, 0, False) if it is not a JPEG.

    Raises:
        DecodeError: a JPEG's header is damaged, or claims too many pixels.
    """
    if image_kind(data) != "jpeg":
        return 0, 0, False
    colorspace: str | None
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except (KeyError, ValueError) as exc:
        # It knows no sampling but the usual ones. OpenCV, as PIL, decodes whatever libjpeg does.
        is_unknown = isinstance(exc, KeyError) or _UNUSUAL_SAMPLING in str(exc)
        size = jpeg_size(data) if is_unknown else None
        if size is None:
            why = "it states no size" if isinstance(exc, KeyError) else exc
            raise DecodeError(f"damaged JPEG header ({len(data)} bytes): {why}") from exc
        (height, width), colorspace = size, None
    check_pixels(height, width)
    if height * width > max(_SMALL_PIXELS, _JPEG_PIXELS_PER_BYTE * len(data)):
        raise DecodeError(f"damaged JPEG: it claims to be {width}x{height}, which {len(data)} bytes cannot hold")
    return height, width, colorspace in ("YCbCr", "Gray", "RGB")


def check_pixels(height: int, width: int) -> None:
    """Raise DecodeError for an image that is too large."""
    if height * width > MAX_PIXELS:
        raise DecodeError(
            f"the image claims to be {width}x{height}; no more than {MAX_PIXELS} pixels are decoded. "
            "Store it smaller, or give decode= a function of your own"
        )


try:
    import cv2
    import simplejpeg
except ImportError as exc:
    raise ConfigError(
        f"decoding images needs {exc.name or 'OpenCV and simplejpeg'}, which is not installed; "
        "pip install 'penstock[images]', or ask for raw bytes with decode=None"
    ) from exc

cv2.setNumThreads(0)

Pixels = np.ndarray[Any, np.dtype[Any]]

_DEFAULT_SCALE = (0.08, 1.0)
_DEFAULT_RATIO = (3 / 4, 4 / 3)
# Scaling in libjpeg is a box filter. At least this ratio is left to the resampling, whose filter is better.
_LEAST_RESAMPLING = 1.2
_THREE_TAPS = 2.1
_LEAST_WEIGHT = 1 / 512  # less is nothing in eight bits
_BGR_FLAGS = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
# Warnings of libjpeg that cost no pixel; every other warning is damage.
_HARMLESS_WARNINGS = ("extraneous bytes", "Adobe", "JFIF", "Inconsistent progression")


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """An image's height and width, the region of it that is taken, and whether that is flipped."""

    height: int
    width: int
    region: Region
    flip: bool


@dataclass(frozen=True, kw_only=True)
class ImageDecoder:
    """Decodes an image to (height, width, 3) uint8 RGB, with crop, resize and flip fused into the decoding.

    ``size`` is the side of the resulting square, or (height, width); None keeps each image's own shape.

    ``crop`` says which part of the image is resized to ``size``:

    - None: all of it, whatever its aspect.
    - "center": what torchvision's Resize(``resize``) and CenterCrop(``size``) leave. ``resize`` is the length in
      pixels that the image's short side would have; by default the usual 256/224 of ``size`` (256 for 224). Give
      ``resize=size`` for no margin. An image that is too narrow for the crop is enlarged until it fits, not padded.
    - "random": a random part with an area of ``scale`` (least, most) of the image's and an aspect ratio
      (width / height) drawn log-uniformly from ``ratio``, as torchvision's RandomResizedCrop draws it.

    ``flip`` is the probability of a horizontal flip.

    ``layout`` is that of the loader's samples and batches: "chw" for (3, height, width), in channels-last memory, or
    "hwc" for (height, width, 3). A call of the decoder itself returns (height, width, 3) whatever the layout.

    Formats, BMP, GIF and TIFF too, are recognised by content, not by name. Grey, palette and 16-bit images become 8-bit
    RGB, CMYK is converted, alpha is dropped, of an animation the first frame is taken, and EXIF orientation is ignored
    (as PIL does). A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if that is still larger than the result; else no
    more of it than the crop needs, where a libturbojpeg 3 is found (as with penstock[images]). The pixels are the same
    without it, but damage below the crop is seen only without. The library gets baseline JPEGs in YCbCr (4:4:4, 4:2:2,
    4:4:0, 4:2:0). A JPEG that is cut short is always an error. Reduction is low-pass filtered as in PIL's antialiased
    bilinear resize: of the same region, the two agree to about 35 dB PSNR or better on photographs; an edge that is no
    multiple of 8 pixels can cost a little of that. A region is placed to within half a pixel of the output.

    ``device="cuda"`` has a loader's batches decoded on the loader's device: JPEGs by nvJPEG, as whole images of which
    the same regions as on the CPU are cut, resized with an antialiased bilinear filter, and flipped there. Pixels
    are close, not equal: the filters differ by 36 dB and more, 28 where the CPU decodes at half size. Decoded on the
    CPU, and copied: PNG, WebP, grey, CMYK, RGB and progressive JPEGs, unusual subsampling, more than 256 MiB of pixels,
    crops more than 8 times as large as the result, files that are cut short, and what the codec refuses. At most four
    groups of up to 128 images and 256 MiB are decoded at once. A call of the decoder itself stays on the CPU.

    An instance holds no mutable state; any number of threads may use it, and the heavy calls release the GIL.
    """

    size: int | tuple[int, int] | None = None
    crop: Literal["center", "random"] | None = None
    resize: int | None = None
    scale: tuple[float, float] = _DEFAULT_SCALE
    ratio: tuple[float, float] = _DEFAULT_RATIO
    flip: float = 0.0
    layout: Literal["chw", "hwc"] = "chw"
    device: Literal["cuda"] | None = None

    def __post_init__(self) -> None:
        if self.crop not in (None, "center", "random"):
            raise ConfigError(unknown_choice("crop", self.crop, ("center", "random", None)))
        if self.size is not None:
            sides = self.size if isinstance(self.size, tuple) else (self.size, self.size)
            if len(sides) != 2 or any(not isinstance(side, int) or side < 1 for side in sides):
                raise ConfigError(f"size={self.size!r} is no image size; use a positive int, (height, width), or None")
        elif self.crop is not None:
            raise ConfigError(f"crop={self.crop!r} needs a size; give size=224, or leave crop out")
        if self.resize is not None and (self.crop != "center" or self.resize < 1):
            raise ConfigError(f"resize={self.resize!r} must be a positive int, and goes with crop='center' only")
        if self.crop != "random" and (self.scale != _DEFAULT_SCALE or self.ratio != _DEFAULT_RATIO):
            raise ConfigError(f"scale={self.scale!r} and ratio={self.ratio!r} go with crop='random' only")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ConfigError(f"scale={self.scale!r} must be (least, most) shares of the area, within 0 to 1")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ConfigError(f"ratio={self.ratio!r} must be (least, most) of width / height, above 0")
        if not 0 <= self.flip <= 1:
            raise ConfigError(f"flip={self.flip!r} is no probability; use 0 to 1")
        if self.layout not in ("chw", "hwc"):
            raise ConfigError(unknown_choice("layout", self.layout, ("chw", "hwc")))
        if self.device not in (None, "cuda"):
            raise ConfigError(
                f"device={self.device!r}: must be 'cuda', for the loader's device, or None for the CPU"
                f"{did_you_mean(self.device, ['cuda'])}"
            )
        if self.device is not None and self.size is None:
            raise ConfigError(f"device={self.device!r} needs a size, so that batches are one tensor; give size=224")

    is_image = True

    @property
    def takes_rng(self) -> bool:
        """Return whether decoding draws random numbers; if not, ``rng`` may be None."""
        return self.crop == "random" or 0 < self.flip < 1

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """(height, width, 3) of every result; None if each image keeps its own."""
        if self.size is None:
            return None
        height, width = self.size if isinstance(self.size, tuple) else (self.size, self.size)
        return height, width, 3

    @property
    def slot(self) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
        """Shape and dtype of every result; None if they differ from image to image."""
        return None if self.shape is None else (self.shape, np.dtype(np.uint8))

    def __call__(self, data: bytes | memoryview, rng: np.random.Generator | None = None) -> Pixels:
        """Decode into an array of its own. See ``decode_into``."""
        shape = self.shape
        if shape is not None:
            out: Pixels = np.empty(shape, np.uint8)
            self.decode_into(data, out, rng)
            return out
        height, width, is_jpeg = read_header(data)
        pixels = _decode_jpeg(data, height, width, 1) if is_jpeg else _decode_other(data)
        return _flip(pixels) if self._draw_flip(rng) else pixels

    decode = __call__

    def decode_into(self, data: bytes | memoryview, out: Pixels, rng: np.random.Generator | None = None) -> None:
        """Decode into ``out``, a C-contiguous (height, width, 3) uint8 array of this decoder's ``shape``.

        Raises:
            DecodeError: the bytes are no readable image, or the image is damaged or truncated.
        """
        if self.shape is None or out.shape != self.shape or out.dtype != np.uint8 or not out.flags.c_contiguous:
            raise ConfigError(
                f"the slot is {out.shape} {out.dtype}, but this decoder fills C-contiguous {self.shape} uint8"
            )
        plan = self.plan(data, rng)
        if plan is not None:
            self.decode_planned(data, plan, out)
            return
        pixels = _decode_other(data)
        height, width = pixels.shape[:2]
        region = self._choose_region(height, width, rng)
        _resample(_cut(pixels, region, height, width), out)
        if self._draw_flip(rng):
            _flip(out)

    def plan(self, data: bytes | memoryview, rng: np.random.Generator | None) -> ImagePlan | None:
        """Plan the decoding of a JPEG by its header, and draw its random numbers; None, drawing nothing, for others.

        Raises:
            DecodeError: the header is damaged, or claims too many pixels.
        """
        height, width, is_jpeg = read_header(data)
        if not is_jpeg:
            return None
        return ImagePlan(height, width, self._choose_region(height, width, rng), self._draw_flip(rng))

    def decode_planned(self, data: bytes | memoryview, plan: ImagePlan, out: Pixels) -> None:
        """Decode a JPEG into ``out``, as in ``decode_into``, by its plan."""
        assert self.shape is not None
        _resample(_decode_part(data, plan, self.shape), out)
        if plan.flip:
            _flip(out)

    def _choose_region(self, height: int, width: int, rng: np.random.Generator | None) -> Region:
        assert self.shape is not None
        out_height, out_width, _ = self.shape
        if self.crop == "center":
            return center_region(height, width, out_height, out_width, self.resize)
        if self.crop == "random":
            return random_region(height, width, self.scale, self.ratio, _needed(rng))
        return Region(0, 0, height, width)

    def _draw_flip(self, rng: np.random.Generator | None) -> bool:
        if self.flip in (0, 1):
            return self.flip == 1
        return bool(_needed(rng).random() < self.flip)


def _needed(rng: np.random.Generator | None) -> np.random.Generator:
    if rng is None:
        raise ConfigError("this ImageDecoder crops or flips at random: give it the sample's generator as rng")
    return rng


def _choose_reduction(region: Region, shape: tuple[int, int, int]) -> int:
    """Choose the largest of 8, 4, 2, 1 by which the region may shrink in decoding and stay larger than ``shape``.

    libjpeg can scale by any eighth, but only these have SIMD code; the others take longer than full size does.
    """
    ratio = min(region.height / shape[0], region.width / shape[1])
    return next((reduction for reduction in (8, 4, 2) if ratio >= reduction * _LEAST_RESAMPLING), 1)


def _decode_part(data: bytes | memoryview, plan: ImagePlan, shape: tuple[int, int, int]) -> Pixels:
    """Decode the plan's region of a JPEG, perhaps reduced.

    Reduced ones are decoded whole: warnings decide on their size, and those below the region would go unseen.
    """
    height, width, region = plan.height, plan.width, plan.region
    reduction = _choose_reduction(region, shape)
    if reduction > 1 and not is_dct(data):
        reduction = 1
    part = decode_region(data, height, width, region) if reduction == 1 else None
    return _cut(_decode_jpeg(data, height, width, reduction), region, height, width) if part is None else part


def _decode_jpeg(data: bytes | memoryview, height: int, width: int, reduction: int) -> Pixels:
    """Decode at 1/``reduction`` of the size, rounded up; at full size if libjpeg has harmless warnings."""
    least = {"min_height": -(-height // reduction), "min_width": -(-width // reduction)}
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(data, colorspace="RGB", **least, min_factor=reduction)
    except ValueError as exc:
        if any(warning in str(exc) for warning in _HARMLESS_WARNINGS):
            return _decode_other(data)  # simplejpeg treats any warning as an error
        raise DecodeError(f"damaged JPEG of {width}x{height} pixels, {len(data)} bytes: {exc}") from exc
    return pixels


def _decode_other(data: bytes | memoryview) -> Pixels:
    """Decode what OpenCV can: PNG, WebP, BMP, GIF, TIFF, and JPEGs that simplejpeg cannot decode, such as CMYK."""
    if len(data) == 0:
        raise DecodeError("no image: the field is empty")
    if image_kind(data) != "jpeg":
        size = image_size(data)
        if size is None:
            raise DecodeError(f"no readable image: {len(data)} bytes that start with {bytes(data[:12])!r}")
        check_pixels(*size)
    try:
        pixels: Pixels | None = cv2.imdecode(np.frombuffer(keep_tiff_colours(data), np.uint8), _BGR_FLAGS)
    except cv2.error as exc:
        if exc.code == cv2.Error.StsNoMem:
            raise MemoryError(str(exc.err)) from exc
        raise DecodeError(f"unreadable image of {len(data)} bytes: {exc.err or exc}") from exc
    if pixels is None:
        if image_kind(data) == "jpeg":
            raise DecodeError(f"damaged JPEG of {len(data)} bytes: it is cut short, or of a kind that is not decoded")
        raise DecodeError(f"no readable image: {len(data)} bytes that start with {bytes(data[:12])!r}")
    return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB, dst=pixels)


def _cut(pixels: Pixels, region: Region, height: int, width: int) -> Pixels:
    """View ``region``, in pixels of the full (height, width) image, in its perhaps reduced ``pixels``."""
    part = scale_region(region, pixels.shape[0] / height, pixels.shape[1] / width)
    return pixels[part.top : part.top + part.height, part.left : part.left + part.width]


def _resample(source: Pixels, out: Pixels) -> None:
    """Resize ``source`` into ``out``, with a low-pass filter first if it shrinks.

    PIL's antialiased bilinear filter is a triangle as wide as two output pixels, of which bilinear sampling itself does
    a part. The rest is one separable blur of the source: of three taps for ratios up to 2.1, of a Gaussian's above.
    It takes half of the time of OpenCV's INTER_AREA and comes closer.
    """
    if source.shape == out.shape:
        out[:] = source
        return
    height, width = out.shape[:2]
    if max(source.shape[0] / height, source.shape[1] / width) > 4:
        # Area averaging over many pixels is exact enough, and the only one whose cost does not grow with the ratio.
        near = (min(source.shape[1], 2 * width), min(source.shape[0], 2 * height))
        source = cv2.resize(source, near, interpolation=cv2.INTER_AREA)
    kernel_y, sigma_y = _blur(source.shape[0] / height)
    kernel_x, sigma_x = _blur(source.shape[1] / width)
    if max(kernel_y, kernel_x) > 1:
        source = cv2.GaussianBlur(
            source, (kernel_x, kernel_y), sigmaX=sigma_x, sigmaY=sigma_y, borderType=cv2.BORDER_REPLICATE
        )
    cv2.resize(source, (width, height), dst=out, interpolation=cv2.INTER_LINEAR)


def _blur(ratio: float) -> tuple[int, float]:
    """Choose kernel length and sigma of the blur before sampling every ``ratio``-th pixel; length 1 does nothing.

    Up to 2.1 three taps suffice. Their outer weight is fitted to come closest to PIL's filter on photographs and noise;
    what the variances of the two filters say, (r^2 - 1)/12, costs up to 4 dB. Above, the variance is (r^2 - 1)/6.
    """
    if ratio > _THREE_TAPS:
        sigma = math.sqrt((ratio * ratio - 1) / 6)
        return 2 * math.ceil(2 * sigma) + 1, sigma
    weight = (ratio - 1) * (0.31 - 0.06 * (ratio - 1))
    if weight < _LEAST_WEIGHT:
        return 1, 1.0
    return 3, math.sqrt(-0.5 / math.log(weight / (1 - 2 * weight)))


def _flip(pixels: Pixels) -> Pixels:
    return cv2.flip(pixels, 1, dst=pixels)
