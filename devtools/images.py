"""Measure the parts of an image's time: codec, resampling, the rest of ImageDecoder, and the loader around it.

python -m devtools images --out benchmarks/results/images.json
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import cv2
import numpy as np
import simplejpeg

from penstock.benchmarks.datasets import make_pictures
from penstock.benchmarks.machine import describe_machine, list_versions
from penstock.loader import DistributedDataLoader, ImageDecoder, pack
from penstock.loader.decoding.images import images
from penstock.loader.limits import usable_cores
from penstock.loader.order.permutation import DECODING, sample_rng

from .arguments import OptionalPath, parse_config

_DISTINCT = 64
_FLAGS: dict[str, dict[str, bool]] = {
    "exact": {},
    "fast upsampling": {"fastupsample": True},
    "fast DCT": {"fastdct": True},
    "both": {"fastupsample": True, "fastdct": True},
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Decodes random crops of made-up photographs of 500 x 375 pixels; microseconds of CPU time an image.

    In turns, on all cores: the bare codec, which decodes what ImageDecoder has it decode and no more; the codec where
    it decodes whole images; the decoder by itself, in a loop over bytes in memory; and a loader's pass over a tar in a
    folder, with its start. In one thread: the decoder's steps, and libjpeg's faster and less exact flags with what they
    cost in quality. By CPU time, since a machine is rarely idle; medians of the rounds.
    """

    qualities: tuple[int, ...] = (90, 98)
    """JPEG qualities: 90 is about 40 KB, 98 about 80 KB."""

    size: int = 224
    """Pixels of the result's side."""

    images: int = 2048
    """Images that each round decodes."""

    rounds: int = 5
    """Rounds, each of all contenders in turn."""

    threads: int = usable_cores()
    """Threads that decode."""

    out: OptionalPath = None
    """Write the results here as JSON, too."""


def in_threads(work: Callable[[int], object], count: int, threads: int) -> int:
    """Call ``work`` with 0 to ``count`` - 1, shared out to threads beforehand; the count."""

    def run(first: int) -> None:
        for number in range(first, count, threads):
            work(number)

    running = [threading.Thread(target=run, args=(first,)) for first in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return count


def timed(work: Callable[[], int]) -> tuple[float, float]:
    """Microseconds for each image that ``work`` says it decoded: of CPU time of all threads, and of wall time."""
    started, cpu = time.perf_counter(), time.process_time()
    count = work()
    return 1e6 * (time.process_time() - cpu) / count, 1e6 * (time.perf_counter() - started) / count


def compare(pictures: Sequence[bytes], config: Config) -> dict[str, Any]:
    """CPU and wall time an image of the codec, the decoder and the loader, round by round."""
    decoder = ImageDecoder(size=config.size, crop="random", flip=0.5)
    slots = np.empty((config.images, config.size, config.size, 3), np.uint8)

    def by_codec(number: int) -> None:
        data = pictures[number % len(pictures)]
        plan = decoder.plan(data, sample_rng(0, 0, number, DECODING))
        assert plan is not None
        images._decode_part(data, plan, slots.shape[1:])

    def by_whole(number: int) -> None:
        data = pictures[number % len(pictures)]
        plan = decoder.plan(data, sample_rng(0, 0, number, DECODING))
        assert plan is not None
        reduction = images._choose_reduction(plan.region, slots.shape[1:])
        images._decode_jpeg(data, plan.height, plan.width, reduction)

    def by_decoder(number: int) -> None:
        decoder.decode_into(pictures[number % len(pictures)], slots[number], sample_rng(0, 0, number, DECODING))

    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        rows = ({"__key__": f"{i:06d}", "jpg": pictures[i % len(pictures)]} for i in range(config.images))
        pack(rows, folder, format="tar", progress=False)

        def by_loader() -> int:
            # One loader a round: it decodes ahead, also of the next pass, while nobody takes batches.
            decode = {"jpg": decoder}
            with DistributedDataLoader(folder, batch_size=64, decode=decode, threads=config.threads) as loader:
                for batch in loader:
                    del batch
                loader.close()
                return loader.metrics().decoded_rows

        contenders: dict[str, Callable[[], int]] = {
            "codec": lambda: in_threads(by_codec, config.images, config.threads),
            "whole images": lambda: in_threads(by_whole, config.images, config.threads),
            "decoder": lambda: in_threads(by_decoder, config.images, config.threads),
            "loader": by_loader,
        }
        by_loader()  # reads the index, and warms the page cache
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for _ in range(config.rounds):
            for name, work in contenders.items():
                runs[name].append(timed(work))
    median = {name: statistics.median(cpu for cpu, _ in own) for name, own in runs.items()}
    return {
        "cpu_us": median,
        "wall_us": {name: statistics.median(wall for _, wall in own) for name, own in runs.items()},
        "cpu_ratio": {name: median[name] / median["codec"] for name in median},
        "runs": runs,
    }


def split(pictures: Sequence[bytes], config: Config) -> dict[str, float]:
    """Microseconds an image of each of the decoder's steps, in one thread: the least of the rounds."""
    decoder = ImageDecoder(size=config.size, crop="random", flip=0.5)
    out = np.empty((config.size, config.size, 3), np.uint8)
    least: dict[str, float] = {}
    for turn in range(config.rounds):
        spent: dict[str, float] = {}
        for number, data in enumerate(pictures):
            marks = [("", time.thread_time())]
            rng = sample_rng(0, turn, number, DECODING)
            marks.append(("random numbers", time.thread_time()))
            plan = decoder.plan(data, rng)
            assert plan is not None
            marks.append(("header and crop box", time.thread_time()))
            pixels = images._decode_part(data, plan, out.shape)
            marks.append(("libjpeg: Huffman, DCT, colour", time.thread_time()))
            images._resample(pixels, out)
            marks.append(("resampling into the slot", time.thread_time()))
            if plan.flip:
                images._flip(out)
            marks.append(("flip", time.thread_time()))
            for (_, begun), (name, ended) in pairwise(marks):
                spent[name] = spent.get(name, 0.0) + 1e6 * (ended - begun) / len(pictures)
        least = {name: min(value, least.get(name, math.inf)) for name, value in spent.items()}
    return least


def try_flags(pictures: Sequence[bytes], config: Config) -> dict[str, dict[str, float | None]]:
    """Microseconds and PSNR (dB, against the exact decoding; the worst picture's) of libjpeg's flags."""
    exact = [simplejpeg.decode_jpeg(data) for data in pictures]
    results: dict[str, dict[str, float | None]] = {}
    for name, flags in _FLAGS.items():
        spent, worst = [], None
        for _ in range(config.rounds):
            begun = time.thread_time()
            decoded = [simplejpeg.decode_jpeg(data, **flags) for data in pictures]
            spent.append(1e6 * (time.thread_time() - begun) / len(pictures))
        if flags:
            worst = min(cv2.PSNR(one, other) for one, other in zip(exact, decoded, strict=True))
        results[name] = {"us": min(spent), "psnr_db": worst}
    return results


def main(config: Config) -> None:
    results = []
    for quality in config.qualities:
        pictures = make_pictures(_DISTINCT, 375, 500, quality=quality)
        found = {
            "quality": quality,
            "mean_bytes": statistics.mean(map(len, pictures)),
            **compare(pictures, config),
            "steps_us": split(pictures, config),
            "flags": try_flags(pictures, config),
        }
        results.append(found)
        print_result(found)
    if config.out is not None:
        report = {
            "command": shlex.join(["python", "-m", "devtools.images", *sys.argv[1:]]),
            "config": asdict(config) | {"out": None},
            "machine": describe_machine(),
            "versions": list_versions(),
            "results": results,
        }
        config.out.write_text(json.dumps(report, indent=1) + "\n")


def print_result(found: dict[str, Any]) -> None:
    print(f"quality {found['quality']}, {found['mean_bytes'] / 1e3:.0f} KB an image; microseconds an image")
    print("  on all cores                   CPU    wall   CPU of the codec's")
    for name, cpu in found["cpu_us"].items():
        print(f"    {name:26} {cpu:7.0f} {found['wall_us'][name]:7.0f} {found['cpu_ratio'][name]:9.2f}")
    print("  the decoder's steps, in one thread")
    for name, spent in found["steps_us"].items():
        print(f"    {name:30} {spent:7.1f}")
    print("  libjpeg's flags                       worst PSNR")
    for name, flags in found["flags"].items():
        quality = "" if flags["psnr_db"] is None else f"{flags['psnr_db']:9.1f} dB"
        print(f"    {name:26} {flags['us']:7.0f} {quality}".rstrip())


if __name__ == "__main__":
    main(parse_config(Config))
