"""A device's codec made up on the CPU, and shards of pictures for it."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from photographs import photograph
from PIL import Image

from penstock.loader import DistributedDataLoader, ImageDecoder, pack
from penstock.loader.decoding.images.device_codec import Lane

PHOTOS = [photograph(name) for name in ("china.jpg", "flower.jpg")]
SIZES = [(320, 240), (240, 320), (257, 201), (64, 48), (500, 375)]
RANDOM = {"size": (56, 72), "crop": "random", "flip": 0.5}
CUDA = {"device": "cuda"}


def encode(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    sink = io.BytesIO()
    image.save(sink, kind, **({"quality": 92} if kind == "JPEG" else {}) | options)
    return sink.getvalue()


def turned(image: Image.Image) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode(image, exif=exif)


def photo(number: int) -> Image.Image:
    return PHOTOS[number % 2].resize(SIZES[number % len(SIZES)], Image.Resampling.BICUBIC)


def picture(number: int) -> bytes:
    """Mostly JPEGs, and of each kind that no device decodes."""
    one = photo(number)
    kinds = {
        3: lambda: encode(one, "PNG"),
        5: lambda: encode(one, progressive=True),
        7: lambda: encode(one.convert("L")),
        9: lambda: encode(one.convert("CMYK")),
        11: lambda: turned(one),
        13: lambda: encode(one, subsampling=0),
    }
    return kinds.get(number, lambda: encode(one))()


def psnr(one: torch.Tensor, other: torch.Tensor) -> float:
    error = (one.double() - other.double()).square().mean().item()
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


class HostCodec:
    """Does what the device's does, and notes it: turns images by EXIF, fails as a whole, waits for nothing itself."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.largest = 0
        self.refused: set[tuple[int, int]] = set()  # heights and widths
        self.error: type[RuntimeError] = RuntimeError
        self.turn = threading.Lock()
        self.lanes = 0
        self.is_idle = False

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        self.lanes += 1
        self.is_idle = True
        try:
            yield self
        finally:
            self.lanes -= 1

    def wait(self) -> None:
        self.is_idle = True

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def decode(self, streams: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert self.lanes, "decoding on no lane"
        assert self.is_idle, "decoding while work is queued, which nvJPEG's engine would not wait for"
        self.is_idle = False
        self.calls.append(len(streams))
        images = []
        for stream in streams:
            data = stream.numpy().tobytes()
            try:
                pixels = simplejpeg.decode_jpeg(data)
            except ValueError as exc:
                raise RuntimeError(f"nvjpegDecode failed: {exc}") from exc
            if pixels.shape[:2] in self.refused:
                raise self.error("made up")
            orientation = Image.open(io.BytesIO(data)).getexif().get(0x0112, 1)
            images.append(torch.from_numpy(np.rot90(pixels, -1).copy() if orientation == 6 else pixels).movedim(-1, 0))
        self.largest = max(self.largest, sum(image.numel() for image in images))
        return images


def write(folder: Path, pictures: Sequence[bytes]) -> str:
    pack(({"__key__": f"{i:03d}", "jpg": data, "cls": i} for i, data in enumerate(pictures)), str(folder), format="tar")
    return str(folder)


def load(url: str, *, on_device: bool, decoder: Any = RANDOM, **options: Any) -> DistributedDataLoader:
    given = decoder | (CUDA if on_device else {})
    given_to_loader = {"batch_size": 8, "with_ids": True, "threads": 2} | options
    return DistributedDataLoader(url, decode={"jpg": ImageDecoder(**given)}, **given_to_loader)


def batches(url: str, **options: Any) -> list[dict[str, Any]]:
    with load(url, **options) as loader:
        return list(loader)
