"""JPEGs to pixels on a CUDA device: the interface of batch decoders, and the one that torchcodec brings.

nvJPEG's hardware engine does not wait for kernels queued on the stream that it is given: it may write into memory that
these still read (meta-pytorch/torchcodec#1634). So callers of ``decode`` first wait until the lane is
idle, and every lane is left idle.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from ...errors import ConfigError
from .device_resize import choose_resize

# One decodes while others copy JPEGs, or resize images: each of their calls may have to wait for the GIL.
_LANES = 4
_PROBE_SIDE, _PROBE_GREY = 32, 100
_INSTALL = "pip install 'penstock[images-cuda]'"


class Lane(Protocol):
    """A stream of its own for work on a device, with memory that stays."""

    def wait(self) -> None:
        """Wait, without the GIL, until all work queued on the stream is done."""
        ...

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Get (nbytes,) uint8 in host memory, for JPEGs: the same for each call, since new pages cost more than copies.

        It may be written to once ``decode`` has returned.
        """
        ...


class DeviceCodec(Protocol):
    """Decodes whole JPEGs on one device. Used by several threads."""

    @property
    def device(self) -> torch.device: ...

    @property
    def turn(self) -> AbstractContextManager[Any]:
        """Enter to prepare images, one thread at a time.

        That work holds the GIL and lets go of it often: of several threads each would wait for the next to wake up.
        """
        ...

    def lane(self) -> AbstractContextManager[Lane]:
        """Enter an idle lane, whose stream is the calling thread's current one. Waits for one to be free.

        There are few, which bounds the memory of images that are being decoded.
        """
        ...

    def decode(self, streams: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Decode JPEGs in 1-D uint8 tensors in host memory to (3, height, width) uint8 RGB images on the device.

        Raises:
            RuntimeError: one of them cannot be decoded, and so none is.
        """
        ...


class CudaLane:
    """A stream of a CUDA device, and host memory that grows to what is asked for."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        self._memory = torch.empty(0, dtype=torch.uint8)

    def wait(self) -> None:
        # blocking: the thread sleeps instead of spinning on a core that could decode.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        event.synchronize()

    def host_memory(self, nbytes: int) -> torch.Tensor:
        if len(self._memory) < nbytes:
            self._memory = torch.empty(1 << (nbytes - 1).bit_length(), dtype=torch.uint8)
        return self._memory[:nbytes]


class TorchcodecCodec:
    """nvJPEG by ``torchcodec.decoders.decode_jpeg``: a batch in one call, on an engine of its own from A100 on."""

    def __init__(self, device: torch.device, decode_jpeg: Callable[..., Any]) -> None:
        self.device = device
        self.turn = threading.Lock()
        self._decode_jpeg = decode_jpeg
        self._free: SimpleQueue[CudaLane] = SimpleQueue()
        for _ in range(_LANES):
            self._free.put(CudaLane(device))

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        lane = self._free.get()
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(lane.stream):
                try:
                    yield lane
                finally:
                    lane.wait()
        finally:
            self._free.put(lane)

    def decode(self, streams: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        images: list[torch.Tensor] = self._decode_jpeg(list(streams), mode="RGB", device=self.device)
        return images


def open_codec(device: torch.device | None) -> DeviceCodec:
    """Open the codec of a loader's device; one a process and device.

    Raises:
        ConfigError: the loader hands out batches in host memory, or nothing here decodes JPEGs on the device; says what
            to install.
    """
    if device is None:
        raise ConfigError(
            "ImageDecoder(device='cuda') in a loader of batches in host memory; give the loader device='cuda' too, or "
            "leave out the decoder's"
        )
    return _open(device)


@functools.cache
def _open(device: torch.device) -> TorchcodecCodec:
    try:
        from torchcodec.decoders import decode_jpeg
    except Exception as exc:  # torchcodec raises many types where a library that it wants is missing
        raise ConfigError(
            "ImageDecoder(device='cuda') needs torchcodec 0.17 or later, built for this torch and its CUDA; "
            f"{_INSTALL}, or leave out device= to decode on the CPU ({_first_line(exc)})"
        ) from exc
    codec = TorchcodecCodec(device, decode_jpeg)
    try:
        _probe(codec)
    except ConfigError:
        raise
    except Exception as exc:
        raise ConfigError(
            f"ImageDecoder(device='cuda'): torchcodec is installed, but decodes no JPEG on {device}: "
            f"{_first_line(exc)}. Install one that is built for this torch's CUDA ({torch.version.cuda}) with nvJPEG: "
            f"{_INSTALL}; or leave out device= to decode on the CPU"
        ) from exc
    choose_resize(device)  # which may warn, and compiles
    return codec


def _probe(codec: DeviceCodec) -> None:
    """Decode a small grey picture, and look at it. Raises ConfigError where it is another."""
    import numpy as np
    import simplejpeg

    pixels = np.full((_PROBE_SIDE, _PROBE_SIDE, 3), _PROBE_GREY, np.uint8)
    stream = torch.frombuffer(bytearray(simplejpeg.encode_jpeg(pixels)), dtype=torch.uint8)
    with codec.lane() as lane:
        (image,) = codec.decode([stream])
        lane.wait()
        far = (image.cpu().to(torch.int16) - _PROBE_GREY).abs().max().item()
    if image.shape != (3, _PROBE_SIDE, _PROBE_SIDE) or far > 2:
        raise ConfigError(
            f"ImageDecoder(device='cuda'): torchcodec decodes a grey picture on {codec.device} wrongly: "
            f"{tuple(image.shape)}, off by {far}; install another version, or leave out device= to decode on the CPU"
        )


def _first_line(exc: Exception) -> str:
    return f"{type(exc).__name__}: {str(exc).strip().splitlines()[0] if str(exc).strip() else 'no message'}"
