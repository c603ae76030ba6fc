"""Images have one layout, in samples and in batches, with and without a transform, in threads and in processes."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import row_functions
import torch

from penstock import DistributedDataLoader, ImageDecoder

SHAPES = {"chw": (3, 24, 32), "hwc": (24, 32, 3)}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    """12 images of different widths; the name of the field does not say that they are images."""
    import cv2

    folder: Path = tmp_path_factory.mktemp("images")
    with tarfile.open(folder / "images.tar", "w") as tar:
        for number in range(12):
            pixels = np.random.default_rng(number).integers(0, 255, (40, 50 + number, 3), np.uint8)
            data = bytes(cv2.imencode(".png", pixels)[1])
            member = tarfile.TarInfo(f"{number:03d}.png")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return str(folder)


def first_batch(folder: str, **options: Any) -> Any:
    with DistributedDataLoader(folder, batch_size=4, **options) as loader:
        return next(iter(loader))


def stack(samples: list[dict[str, Any]]) -> torch.Tensor:
    return torch.from_numpy(np.stack([sample["png"] for sample in samples]))


@pytest.mark.slow
@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("processes", [0, 2])
def test_a_transform_and_a_collate_see_the_layout_of_the_batch(images: str, layout: Any, processes: int) -> None:
    decode = {"png": ImageDecoder(size=(24, 32), crop="random", flip=0.5, layout=layout)}
    plain = first_batch(images, decode=decode)["png"]
    assert plain.shape == (4, *SHAPES[layout])
    kept = first_batch(images, decode=decode, transform=row_functions.keep, processes=processes)["png"]
    shapes = first_batch(images, decode=decode, transform=row_functions.add_shapes, processes=processes)["shape"]
    collated = first_batch(images, decode=decode, collate=stack, processes=processes)
    assert shapes.tolist() == [list(SHAPES[layout])] * 4
    assert torch.equal(kept, plain)
    assert torch.equal(collated, plain)


def test_both_layouts_hold_the_same_pixels(images: str) -> None:
    chw, hwc = (
        first_batch(images, decode={"png": ImageDecoder(size=24, crop="random", layout=layout)})["png"]
        for layout in ("chw", "hwc")
    )
    assert torch.equal(chw.permute(0, 2, 3, 1), hwc)
    assert chw.is_contiguous(memory_format=torch.channels_last)
    assert hwc.is_contiguous()


@pytest.mark.parametrize("decode", ["auto", {"png": ImageDecoder()}, {"png": ImageDecoder(layout="hwc")}])
def test_images_of_their_own_shapes_have_that_layout_too(images: str, decode: Any) -> None:
    plain = first_batch(images, decode=decode)["png"]
    kept = first_batch(images, decode=decode, transform=row_functions.keep)["png"]
    channels = -1 if isinstance(decode, dict) and decode["png"].layout == "hwc" else 0
    assert all(image.shape[channels] == 3 for image in plain)
    assert all(torch.equal(one, other) for one, other in zip(plain, kept, strict=True))


def test_a_transform_draws_other_numbers_than_the_crop_and_the_flip(images: str) -> None:
    drawn: dict[str, list[float]] = {"decoder": [], "transform": []}

    def decoder(data: bytes, rng: np.random.Generator) -> int:
        drawn["decoder"] += rng.random(50).tolist()
        return 0

    def transform(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        drawn["transform"] += rng.random(50).tolist()
        return sample

    with DistributedDataLoader(images, batch_size=4, decode={"png": decoder}, transform=transform, threads=1) as loader:
        assert len(list(loader)) == 3
    assert not set(drawn["decoder"]) & set(drawn["transform"])
    assert abs(np.corrcoef(drawn["decoder"][:600], drawn["transform"][:600])[0, 1]) < 0.15
