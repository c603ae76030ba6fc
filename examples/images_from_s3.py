"""Train an image classifier on WebDataset shards, straight from a bucket.

    python examples/images_from_s3.py                                   on made-up images in a temporary folder
    python examples/images_from_s3.py s3://bucket/imagenet/train/       on yours: samples of .jpg and .cls
    torchrun --nproc-per-node=8 examples/images_from_s3.py s3://...     the same, on eight ranks

JPEGs are decoded, cropped at random, resized and flipped by threads, straight into the batch; on a GPU the batch is
there before it is asked for. For the crops of a sample, seed, epoch and sample decide: not the rank, nor a restart.
Needs penstock[images].
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock import DistributedDataLoader, ImageDecoder, pack

CLASSES = 4


def make_images(count: int) -> Iterator[dict[str, Any]]:
    """Noise with a bright stripe; the class is its direction."""
    rng = np.random.default_rng(0)
    for number in range(count):
        label = number % CLASSES
        mask = np.zeros((96, 128), np.float32)
        angle = np.pi * label / CLASSES
        ends = np.array([64, 48]) + np.outer([-60, 60], [np.cos(angle), np.sin(angle)])
        cv2.line(mask, *(tuple(map(int, end)) for end in ends), 1.0, 14)
        pixels = np.clip(rng.normal(90, 30, (96, 128, 3)) + 120 * mask[..., None], 0, 255).astype(np.uint8)
        yield {"__key__": f"{number:06d}", "jpg": cv2.imencode(".jpg", pixels)[1].tobytes(), "cls": label}


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        if options.url is None:
            pack(make_images(2000), f"{folder}/train", shard_bytes=1 << 20)
        train(options.url or f"{folder}/train", options)


def train(url: str, options: argparse.Namespace) -> None:
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 5, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * 4 * 4, options.classes),
    ).to(device)  # fmt: skip
    if "RANK" in os.environ:
        dist.init_process_group()
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with DistributedDataLoader(
        url,
        batch_size=options.batch_size,
        columns=["jpg", "cls"],
        decode={"jpg": ImageDecoder(size=options.size, crop="random", flip=0.0)},
        device=device,
    ) as loader:
        for epoch in range(options.epochs):
            right = seen = 0
            for batch in loader:
                images = batch["jpg"].float().div_(255)  # (B, 3, size, size) uint8
                scores = model(images)
                loss = nn.functional.cross_entropy(scores, batch["cls"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                right += int((scores.argmax(1) == batch["cls"]).sum())
                seen += len(images)
            if os.environ.get("RANK", "0") == "0":
                waited_s = loader.metrics().consumer_wait_s
                print(f"epoch {epoch}: accuracy {right / seen:.3f}, {waited_s:.1f} s spent waiting for data")
    if dist.is_initialized():
        dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="prefix of the shards; credentials come from the environment")
    parser.add_argument("--classes", type=int, default=CLASSES)
    parser.add_argument("--size", type=int, default=64, help="pixels")
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--epochs", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
