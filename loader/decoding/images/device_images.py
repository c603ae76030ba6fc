"""The images of a batch, decoded on a device: plain JPEGs there, in groups; all others on the CPU, and copied."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...errors import ConfigError, DecodeError, MemoryLimitError
from ..values import BatchValues
from .device_cuts import Cut
from .device_resize import choose_resize, place
from .jpeg_stream import plain_jpeg

if TYPE_CHECKING:
    from ...columns import AnyArray
    from .device_codec import DeviceCodec, Lane
    from .images import ImageDecoder, ImagePlan

# Limits of the images on the device at once, by lane: bytes of whole and of resized ones, and their number.
_GROUP_BYTES = 256 << 20
_GROUP_IMAGES = 128
_MOST_SHRINKING = 8  # libjpeg decodes at an eighth then; the device would decode all of it
_EXIF_NAME_BYTES = 4
# Errors that no image causes. Both are RuntimeErrors, as are a codec's errors of an image.
_FATAL = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
_refusing: set[torch.device] = set()  # devices whose refusals were warned of


class DeviceFallbackWarning(UserWarning):
    """The device's decoder refused an image that the CPU decodes."""


class _Planned:
    """A JPEG that the device decodes: its bytes, the plan for it, and where EXIF begins in it."""

    __slots__ = ("data", "exif", "nbytes", "plan")

    def __init__(self, data: memoryview, plan: ImagePlan, exif: tuple[int, ...]) -> None:
        self.data = data
        self.plan = plan
        self.exif = exif
        self.nbytes = 3 * plan.height * plan.width

    def copy_into(self, room: memoryview) -> None:
        """Copy the JPEG without EXIF, by which decoders turn images that are to stay as they are."""
        room[:] = self.data  # with the GIL: to get it back would take longer, with threads that prepare other images
        for at in self.exif:
            room[at : at + _EXIF_NAME_BYTES] = bytes(_EXIF_NAME_BYTES)


def _copy_together(planned: Sequence[_Planned], room: torch.Tensor) -> list[torch.Tensor]:
    """Copy the JPEGs, one behind the other, into memory of their bytes."""
    sizes = [len(one.data) for one in planned]
    whole, at, streams = room.numpy(), 0, []
    for one, size in zip(planned, sizes, strict=True):
        part = whole[at : at + size]
        one.copy_into(part.data)
        streams.append(torch.from_numpy(part))
        at += size
    return streams


class DeviceImages(BatchValues):
    """(n, height, width, 3) uint8 pixels on the codec's device.

    ``prepare`` chooses region and flip by the sample's generator exactly as the decoder does on the CPU. All work is
    done on a lane of the codec's, and is over when ``decode`` returns, so that any stream may read the pixels then.
    Rows that failed hold arbitrary pixels. ``explain`` makes an error of a field's bytes and the exception.
    """

    def __init__(
        self,
        decoder: ImageDecoder,
        codec: DeviceCodec,
        count: int,
        explain: Callable[[memoryview, Exception], Exception],
    ) -> None:
        assert decoder.shape is not None
        self._decoder = decoder
        self._codec = codec
        self._explain = explain
        self._shape = decoder.shape
        self._planned: dict[int, _Planned] = {}
        self._on_host: dict[int, AnyArray] = {}
        self._left: list[tuple[int, memoryview, ImagePlan | None, np.random.Generator | None]] = []  # for the CPU
        self._failed: list[tuple[int, Exception]] = []
        self._pixels: torch.Tensor | None = None
        self._count = count

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """As of ``BatchValues``; at the end, what the CPU must decode is decoded, beside other threads."""
        with self._codec.turn:
            yield
            left, self._left = self._left, []
        for row, data, plan, rng in left:
            try:
                self._on_host[row] = self._decode_on_host(data, plan, rng)
            except Exception as exc:  # noqa: BLE001 - the row's, which decode() returns
                self._failed.append((row, self._explain(data, exc)))

    def prepare(self, row: int, data: memoryview, rng: np.random.Generator | None) -> None:
        try:
            plain = plain_jpeg(data)
            plan = None if plain is None else self._decoder.plan(data, rng)
            if plain is None or plan is None or not self._suits(plan):
                self._left.append((row, data, plan, rng))
            else:
                self._planned[row] = _Planned(data, plan, plain.exif)
        except Exception as exc:
            raise self._explain(data, exc) from exc

    def _suits(self, plan: ImagePlan) -> bool:
        shrinking = max(plan.region.height / self._shape[0], plan.region.width / self._shape[1])
        return shrinking <= _MOST_SHRINKING and 3 * plan.height * plan.width <= _GROUP_BYTES

    def _decode_on_host(self, data: memoryview, plan: ImagePlan | None, rng: np.random.Generator | None) -> AnyArray:
        out = np.empty(self._shape, np.uint8)
        if plan is None:
            self._decoder.decode_into(data, out, rng)
        else:
            self._decoder.decode_planned(data, plan, out)
        return out

    def decode(self, is_stopped: Callable[[], bool]) -> list[tuple[int, Exception]]:
        failed, self._failed = self._failed, []
        try:
            with self._codec.lane() as lane:
                self._pixels = torch.empty((self._count, *self._shape), dtype=torch.uint8, device=self._codec.device)
                for rows in self._groups():
                    if is_stopped():
                        raise CancelledError
                    failed += self._decode_group(rows, lane)
                self._upload()
                lane.wait()
        except torch.OutOfMemoryError as exc:
            raise MemoryLimitError(
                f"{self._codec.device} has no memory to decode a batch of {self._count} images ({exc}); make room "
                "there, or leave out the ImageDecoder's device= to decode on the CPU"
            ) from exc
        self._planned.clear()
        self._on_host.clear()
        return failed

    def _upload(self) -> None:
        """Copy the images that the CPU decoded."""
        if self._on_host:
            rows = sorted(self._on_host)
            pixels = torch.from_numpy(np.stack([self._on_host[row] for row in rows]))
            assert self._pixels is not None
            place(self._pixels, rows, pixels.to(self._codec.device))

    def _groups(self) -> Iterator[list[int]]:
        """Rows that are decoded by one call."""
        group: list[int] = []
        nbytes, resized = 0, 2 * 4 * math.prod(self._shape)  # float32, and once more in the stack of them
        for row in sorted(self._planned):
            more = self._planned[row].nbytes + resized
            if group and (nbytes + more > _GROUP_BYTES or len(group) == _GROUP_IMAGES):
                yield group
                group, nbytes = [], 0
            group.append(row)
            nbytes += more
        if group:
            yield group

    def _decode_group(self, rows: list[int], lane: Lane) -> list[tuple[int, Exception]]:
        planned = [self._planned[row] for row in rows]
        streams = _copy_together(planned, lane.host_memory(sum(len(one.data) for one in planned)))
        lane.wait()  # see device_codec: queued kernels may still read memory that the images are about to get
        try:
            images = self._codec.decode(streams)
        except _FATAL:
            raise
        except RuntimeError as exc:
            lane.wait()
            if len(rows) > 1:
                return [failed for row in rows for failed in self._decode_group([row], lane)]
            return self._give_to_host(rows[0], str(exc))
        failed: list[tuple[int, Exception]] = []
        fitting: list[Cut] = []
        for row, image in zip(rows, images, strict=True):
            plan = self._planned[row].plan
            if image.dtype == torch.uint8 and image.shape == (3, plan.height, plan.width):
                fitting.append(Cut(image, plan, row))
            else:
                why = f"it gave {image.dtype} {tuple(image.shape)} for {(3, plan.height, plan.width)}"
                failed += self._give_to_host(row, why)
        if fitting:
            assert self._pixels is not None
            choose_resize(self._codec.device)(fitting, self._pixels)
        return failed

    def _give_to_host(self, row: int, why: str) -> list[tuple[int, Exception]]:
        """Have the CPU decode an image that the device refused; return the error if it fails too."""
        planned = self._planned[row]
        try:
            self._on_host[row] = self._decode_on_host(planned.data, planned.plan, None)
        except (DecodeError, MemoryError) as exc:
            return [(row, self._explain(planned.data, exc))]
        device = self._codec.device
        if device not in _refusing:
            _refusing.add(device)
            warnings.warn(
                f"{device} cannot decode a JPEG of {planned.plan.width}x{planned.plan.height} ({why}). The CPU "
                "decodes it and all others that the device refuses; this warning is given once",
                DeviceFallbackWarning,
                stacklevel=2,
            )
        return []

    def tensor(self) -> torch.Tensor:
        if self._pixels is None:
            raise ConfigError("the images were not decoded")
        return self._pixels

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.tensor()[row]

    def __setitem__(self, row: int, value: Any) -> None:
        with self._codec.lane() as lane:
            self.tensor()[row].copy_(value)
            lane.wait()
