"""Images per second, and CPU time an image: of the loader decoding on the CPU and on the device, and of the bare codec.

Nothing trains, so that decoding alone is the limit. Runs in the measured process, see feeding.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.benchmarks.harness.process_time import tree_cpu_s
from penstock.loader import ConfigError, DistributedDataLoader, ImageDecoder
from penstock.loader.decoding.images import device_codec
from penstock.loader.decoding.images.device_cuts import Cut
from penstock.loader.decoding.images.device_resize import choose_resize, resize_each
from penstock.storage import PenstockError

_WARM_STEPS, _WARM_S = 3, 3.0  # threads and processes that a loader starts later are there then
_BARE_IMAGES = 128
_SIDE, _RESIZES = 224, 20


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Batches of ``rows`` random crops of the JPEGs at ``url``, to 224 px on ``device``, for ``seconds`` each way."""

    device: str
    url: str
    rows: int
    seconds: float


def run_decoding(asked: Decoding) -> dict[str, Any]:
    """Measure rates by way: "cpu", and with "threads" alone; "device", and "bare"; "refused" if there is no codec.

    The bare codec decodes whole images, neither cut nor resized. "resize": the milliseconds that this takes for the
    same images, as "chosen" for the device, and "each" by torch's operations.
    """
    device = torch.device(asked.device)
    result: dict[str, Any] = {
        "cpu": _rate_of_loader(asked, device, on_device=False),
        "threads": _rate_of_loader(asked, device, on_device=False, processes=0),
    }
    try:
        result["device"] = _rate_of_loader(asked, device, on_device=True)
        result["bare"] = _rate_of_codec(asked, device)
        result["resize"] = _time_of_resize(asked, device)
    except ConfigError as exc:
        result["refused"] = str(exc)
    return result


def _rate_of_loader(asked: Decoding, device: torch.device, *, on_device: bool, **options: Any) -> dict[str, float]:
    decoder = ImageDecoder(size=_SIDE, crop="random", flip=0.5, device="cuda" if on_device else None)
    where = device if device.type == "cuda" else None
    with DistributedDataLoader(
        asked.url, batch_size=asked.rows, decode={"jpg": decoder}, device=where, **options
    ) as loader:
        batches = _endless(loader)

        def take() -> int:
            taken = next(batches)
            _wait(device)
            return len(taken["jpg"])

        return _rate(take, asked.seconds)


def _encoded(asked: Decoding) -> list[bytes]:
    with DistributedDataLoader(asked.url, batch_size=_BARE_IMAGES, decode=None, columns=["jpg"]) as loader:
        return list(next(iter(loader))["jpg"])


def _streams(encoded: Sequence[bytes]) -> list[torch.Tensor]:
    return [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in encoded]


def _time_of_resize(asked: Decoding, device: torch.device) -> dict[str, float]:
    codec = device_codec.open_codec(device if device.type == "cuda" else None)
    encoded, decoder, rng = _encoded(asked), ImageDecoder(size=_SIDE, crop="random", flip=0.5), np.random.default_rng(0)
    found: dict[str, float] = {}
    with codec.lane() as lane:
        images = codec.decode(_streams(encoded))
        plans = [decoder.plan(one, rng) for one in encoded]
        cuts = [Cut(image, plan, row) for row, (image, plan) in enumerate(zip(images, plans, strict=True)) if plan]
        pixels = torch.empty((len(images), _SIDE, _SIDE, 3), dtype=torch.uint8, device=codec.device)
        for name, resize in (("chosen", choose_resize(codec.device)), ("each", resize_each)):
            times = []
            for _ in range(_RESIZES):
                started = time.perf_counter()
                resize(cuts, pixels)
                lane.wait()
                times.append(time.perf_counter() - started)
            found[name] = 1e3 * statistics.median(times)
    return {"images": len(cuts), **found}


def _rate_of_codec(asked: Decoding, device: torch.device) -> dict[str, float]:
    codec = device_codec.open_codec(device if device.type == "cuda" else None)
    streams = _streams(_encoded(asked))

    def decode() -> int:
        with codec.lane() as lane:
            lane.wait()
            return len(codec.decode(streams))

    return _rate(decode, asked.seconds)


def _endless(loader: DistributedDataLoader) -> Iterator[Any]:
    while True:
        found = False
        for batch in loader:
            found = True
            yield batch
        if not found:
            raise PenstockError("the data set has no full batch")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rate(take: Callable[[], int], seconds: float) -> dict[str, float]:
    began, steps = time.perf_counter(), 0
    while steps < _WARM_STEPS or time.perf_counter() - began < _WARM_S:
        take()
        steps += 1
    images, started, cpu = 0, time.perf_counter(), tree_cpu_s()
    while (spent := time.perf_counter() - started) < seconds or not images:
        images += take()
    return {"images_per_s": images / spent, "cpu_us_per_image": 1e6 * (tree_cpu_s() - cpu) / images}
