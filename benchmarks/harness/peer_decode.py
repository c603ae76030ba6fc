"""Decode the fields of a sample for peers: as ours does, with the libraries that their users use."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from ...loader.decoding.images.kind import image_kind
from ...loader.errors import ConfigError
from .job import Decode, PeerDecode
from .layout import Layout

_SIDE = 224
_SCALE, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
_STACKED_BY_TORCH = 4096  # bytes; from here on torch's stacking, straight into shared memory, saves a copy

Pixels = np.ndarray[Any, np.dtype[Any]]
FieldFunction = Callable[[Any], Any]
ImageFunction = Callable[[bytes], Pixels]


@dataclass(frozen=True, slots=True)
class SampleDecoder:
    """Maps a sample of raw fields to one of decoded fields, and drops what is not in the layout."""

    functions: Mapping[str, Callable[[Any], Any] | None]

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: sample.get(name) if function is None else function(sample.get(name))
            for name, function in self.functions.items()
        }


def make_decoder(layout: Layout, decode: Decode, choice: PeerDecode) -> SampleDecoder | None:
    """The decoder of samples for ``--decode``; None to leave them as they are."""
    if decode == "none":
        return None
    functions = {name: _function_of(name, field, decode, choice) for name, field in layout.items()}
    return SampleDecoder(functions) if any(functions.values()) else None


def _function_of(name: str, field: Mapping[str, Any], decode: Decode, choice: PeerDecode) -> FieldFunction | None:
    if field["kind"] != "bytes":
        return None
    if field.get("image"):
        function: FieldFunction = image_function("random-224" if decode == "224" else "full", choice)
    else:
        reader = _READERS.get(name.lower().rsplit(".", 1)[-1])
        if reader is None:
            return None
        function = reader
    return _Present(function) if field.get("missing") else function


@dataclass(frozen=True, slots=True)
class _Present:
    """Calls a function of bytes where there are any; None elsewhere."""

    function: FieldFunction

    def __call__(self, data: Any) -> Any:
        return self.function(data) if data is not None and len(data) else None


_READERS: dict[str, Callable[[Any], Any]] = {
    "cls": int,
    "cls2": int,
    "index": int,
    "id": int,
    "json": json.loads,
    "txt": lambda data: bytes(data).decode(),
    "text": lambda data: bytes(data).decode(),
    "npy": lambda data: np.load(io.BytesIO(data), allow_pickle=False),
}


def collate(samples: Sequence[Mapping[str, Any]], *, widen: bool = False) -> dict[str, Any]:
    """Collate samples: a field becomes a tensor if its values allow it; ``widen`` turns unsigned numbers into int64."""
    batch: dict[str, Any] = {}
    # Names in the order of their first sample: not every sample has every field.
    for name in dict.fromkeys(name for sample in samples for name in sample):
        if name.startswith("__"):
            continue
        values: list[Any] = [sample.get(name) for sample in samples]
        first = values[0]
        if any(value is None for value in values) or isinstance(first, bytes | memoryview | str | dict | list):
            batch[name] = values
        elif isinstance(first, np.ndarray) and len({value.shape for value in values}) > 1:
            batch[name] = [torch.from_numpy(value) for value in values]
        elif isinstance(first, np.ndarray) and first.nbytes < _STACKED_BY_TORCH:
            batch[name] = torch.from_numpy(np.stack(values))
        else:
            batch[name] = default_collate(values)
        if widen and isinstance(batch[name], torch.Tensor) and batch[name].dtype in (torch.uint16, torch.uint32):
            batch[name] = batch[name].to(torch.int64)
    return batch


def collate_wide(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return collate(samples, widen=True)


def image_function(what: str, choice: PeerDecode) -> ImageFunction:
    """The function that decodes an image: ``what`` is "full", or "random-224" for a random 224 x 224 crop, flipped."""
    if choice == "auto":
        raise ConfigError("the peers' decoder must be chosen before the peers are made")
    if choice == "penstock":
        return _Ours(what)
    return _PillowCrop() if (what, choice) == ("random-224", "pil") else _of_library(what, choice)


def _of_library(what: str, choice: PeerDecode) -> ImageFunction:
    if choice == "pil":
        return _pillow_full
    return _OpenCVCrop() if what == "random-224" else _opencv_full


def fastest_image_function(images: Sequence[bytes], what: str) -> PeerDecode:
    """Whichever of Pillow and OpenCV decodes ``images`` faster on this machine, best of two tries each."""
    took: dict[PeerDecode, float] = {}
    choices: tuple[PeerDecode, ...] = ("pil", "opencv")
    for choice in choices * 2:
        function = image_function(what, choice)
        function(images[0])
        started = time.perf_counter()
        for image in images:
            function(image)
        took[choice] = min(took.get(choice, np.inf), time.perf_counter() - started)
    return min(took, key=lambda choice: took[choice])


class _Ours:
    """penstock's fused decoder, on one image at a time."""

    def __init__(self, what: str) -> None:
        from ...loader import ImageDecoder

        self._decoder = ImageDecoder(size=_SIDE, crop="random", flip=0.5) if what == "random-224" else ImageDecoder()
        self._rng = np.random.default_rng()

    def __call__(self, data: bytes) -> Pixels:
        return self._decoder(data, self._rng)


class _RandomCrop:
    """Draws the crops of torchvision's RandomResizedCrop."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng()

    def _draw(self, height: int, width: int) -> tuple[Any, bool]:
        from ...loader.decoding.images.regions import random_region

        return random_region(height, width, _SCALE, _RATIO, self._rng), bool(self._rng.random() < 0.5)


class _PillowCrop(_RandomCrop):
    """Pillow at its fastest: decodes a JPEG at a fraction of its size where that is enough (draft)."""

    def __call__(self, data: bytes) -> Pixels:
        from PIL import Image

        image: Any = Image.open(io.BytesIO(data))
        width, height = image.size
        region, flip = self._draw(height, width)
        zoom = max(_SIDE / region.width, _SIDE / region.height)
        image.draft("RGB", (int(width * zoom), int(height * zoom)))
        across, down = image.size[0] / width, image.size[1] / height
        left, top = region.left * across, region.top * down
        box = (left, top, left + region.width * across, top + region.height * down)
        image = image.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.BILINEAR, box=box)
        return np.array(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else image)


class _OpenCVCrop(_RandomCrop):
    """OpenCV, decoding at a half, a quarter or an eighth where that is enough, and area averaging."""

    def __call__(self, data: bytes) -> Pixels:
        import cv2

        cv2.setNumThreads(0)
        buffer = np.frombuffer(data, np.uint8)
        height, width = _jpeg_size(data) or _opencv_full(data).shape[:2]
        region, flip = self._draw(height, width)
        ratio = min(region.height, region.width) / _SIDE
        step = next((step for step in (8, 4, 2) if ratio >= step), 1)
        flags = {
            1: cv2.IMREAD_COLOR,
            2: cv2.IMREAD_REDUCED_COLOR_2,
            4: cv2.IMREAD_REDUCED_COLOR_4,
            8: cv2.IMREAD_REDUCED_COLOR_8,
        }
        pixels: Any = cv2.imdecode(buffer, flags[step] | cv2.IMREAD_IGNORE_ORIENTATION)
        top, left = region.top // step, region.left // step
        part = pixels[top : top + max(1, region.height // step), left : left + max(1, region.width // step)]
        shrinks = min(part.shape[:2]) > _SIDE
        part = cv2.resize(part, (_SIDE, _SIDE), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
        part = cv2.cvtColor(part, cv2.COLOR_BGR2RGB)
        pixels = cv2.flip(part, 1) if flip else part
        return np.asarray(pixels)


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """(height, width) from a JPEG's frame header, None if it is not a JPEG; a decoder would take far longer."""
    if image_kind(data) != "jpeg":
        return None
    place = 2
    while place + 9 < len(data):
        marker, length = data[place + 1], int.from_bytes(data[place + 2 : place + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(data[place + 5 : place + 7], "big"), int.from_bytes(
                data[place + 7 : place + 9], "big"
            )
        place += 2 + length
    return None


def _pillow_full(data: bytes) -> Pixels:
    from PIL import Image

    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def _opencv_full(data: bytes) -> Pixels:
    import cv2

    cv2.setNumThreads(0)
    pixels: Any = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    rgb: Pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB, dst=pixels)
    return rgb
