"""scikit-learn's handwritten digits as WebDataset tar shards of deliberately uneven size, in any store."""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass

import cv2
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from penstock import open_store

# From a handful of images to hundreds, as data sets of the field are: what balances the ranks is not the shards.
TRAIN_SHARES = (0.31, 0.005, 0.12, 0.04, 0.2, 0.01, 0.08, 0.002, 0.15, 0.033, 0.05)
TEST_SHARES = (0.6, 0.1, 0.3)
TEST_SAMPLES = 360


@dataclass(frozen=True, kw_only=True)
class Written:
    """The number of images in each shard."""

    train: list[int]
    test: list[int]


def write_digits(train_url: str, test_url: str) -> Written:
    """Write the 1,797 images, held-out ones apart; a sample is ``<number>.png`` and ``<number>.cls``."""
    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8), from 0..16
    train, test = train_test_split(
        np.arange(len(images)), test_size=TEST_SAMPLES, stratify=digits.target, random_state=0
    )
    return Written(
        train=_write(train_url, train, images, digits.target, TRAIN_SHARES),
        test=_write(test_url, test, images, digits.target, TEST_SHARES),
    )


def _write(
    url: str, chosen: np.ndarray, images: np.ndarray, labels: np.ndarray, shares: tuple[float, ...]
) -> list[int]:
    cuts = np.rint(np.cumsum(shares[:-1]) * len(chosen)).astype(int)
    parts = np.split(chosen, cuts)
    store = open_store(url)
    try:
        for number, part in enumerate(parts):
            store.put(f"digits-{number:03d}.tar", _make_tar(part, images, labels))
    finally:
        store.close()
    return [len(part) for part in parts]


def _make_tar(numbers: np.ndarray, images: np.ndarray, labels: np.ndarray) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for number in numbers:
            png = cv2.imencode(".png", images[number])[1].tobytes()
            for field, data in (("png", png), ("cls", str(labels[number]).encode())):
                member = tarfile.TarInfo(f"{number:04d}.{field}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return sink.getvalue()
