"""Images that are decoded on a device: by a codec made up on the CPU, and by the real one where there is a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from device_pictures import RANDOM, batches, encode, load, photo, psnr, turned

from penstock.loader.decoding.images import device_images
from penstock.loader.decoding.images.device_images import DeviceFallbackWarning
from penstock.loader.decoding.images.jpeg_stream import plain_jpeg


@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_regions_flips_and_order_are_those_of_the_cpu(pictures, codec, layout):
    decoder = RANDOM | {"layout": layout}
    on_cpu = batches(pictures, on_device=False, decoder=decoder)
    on_device = batches(pictures, on_device=True, decoder=decoder)
    assert len(on_device) == 3
    for one, other in zip(on_cpu, on_device, strict=True):
        assert one["cls"].tolist() == other["cls"].tolist()
        assert one["jpg"].shape == other["jpg"].shape
        assert one["jpg"].stride() == other["jpg"].stride()
        assert other["jpg"].dtype == torch.uint8
        for number, plain, decoded in zip(one["cls"].tolist(), one["jpg"], other["jpg"], strict=True):
            assert psnr(plain, decoded) > 28, number
            if number in (3, 5, 7, 9):  # what no device decodes
                assert torch.equal(plain, decoded), number
    assert min(codec.calls) >= 4  # by batches, of which some rows are not for the device


def test_a_centre_crop_is_close_to_the_cpus(pictures, codec):
    decoder = {"size": 48, "crop": "center"}
    both = (batches(pictures, on_device=on, decoder=decoder, shuffle=False) for on in (False, True))
    for one, other in zip(*both, strict=True):
        assert psnr(one["jpg"], other["jpg"]) > 36


def by_id(taken: Sequence[dict[str, Any]]) -> dict[int, torch.Tensor]:
    return {i: pixels for batch in taken for i, pixels in zip(batch["__id__"].tolist(), batch["jpg"], strict=True)}


@pytest.mark.slow
def test_any_number_of_ranks_and_a_resume_give_the_same_pixels(pictures, codec):
    alone = batches(pictures, on_device=True)
    whole = by_id(alone)
    assert len(whole) == 24
    with load(pictures, on_device=True) as loader:
        next(iter(loader))
        state = loader.state_dict()
    rest: dict[int, torch.Tensor] = {}
    for rank in (0, 1):
        with load(pictures, on_device=True, batch_size=4, rank=rank, world_size=2) as loader:
            loader.load_state_dict(state)
            rest |= by_id(list(loader))
    assert set(rest) == set(by_id(alone[1:]))
    assert all(torch.equal(whole[i], pixels) for i, pixels in rest.items())


def test_one_sample_is_decoded_on_the_cpu_and_a_peek_is_the_first_batch(pictures, codec):
    with load(pictures, on_device=True) as loader, load(pictures, on_device=False) as plain:
        looked = loader.peek()
        for number in (0, 3):
            assert isinstance(loader.dataset[number]["jpg"], np.ndarray)
            assert np.array_equal(loader.dataset[number]["jpg"], plain.dataset[number]["jpg"])
        first = next(iter(loader))
        assert torch.equal(looked["jpg"], first["jpg"])
        assert isinstance(loader.dataset[3]["jpg"], np.ndarray)


@pytest.mark.parametrize("last_batch", ["pad", "partial"])
def test_a_last_batch_that_is_not_full_is_that_of_the_cpu(pictures, codec, last_batch):
    for one, other in zip(
        *(batches(pictures, on_device=on, batch_size=7, last_batch=last_batch) for on in (False, True)), strict=True
    ):
        assert one["jpg"].shape == other["jpg"].shape
        assert one["__id__"].tolist() == other["__id__"].tolist()


def test_images_are_decoded_in_groups_of_bounded_size(pictures, codec, monkeypatch):
    expected = batches(pictures, on_device=True)
    codec.calls.clear()
    monkeypatch.setattr(device_images, "_GROUP_BYTES", 3 * 500 * 375 + 300_000)
    codec.largest = 0
    grouped = batches(pictures, on_device=True)
    assert len(codec.calls) > 6
    assert codec.largest <= 3 * 500 * 375 + 300_000
    assert all(torch.equal(one["jpg"], other["jpg"]) for one, other in zip(expected, grouped, strict=True))


def test_plain_jpegs_are_told_from_others():
    one = photo(0)
    for data in (
        encode(one),
        encode(one, subsampling=0),
        encode(one, subsampling=1),
        turned(one),
        encode(one, optimize=True),
    ):
        found = plain_jpeg(data)
        assert found is not None
        assert (found.height, found.width) == (one.height, one.width)
    at = plain_jpeg(turned(one)).exif[0]
    assert turned(one)[at : at + 4] == b"Exif"
    others = [
        encode(one, progressive=True),
        encode(one.convert("L")),
        encode(one.convert("CMYK")),
        encode(one, "PNG"),
        encode(one, keep_rgb=True),
        encode(one)[:-2],
        encode(one) + b"\0",
        encode(one)[:100],
        b"",
    ]
    assert [plain_jpeg(data) for data in others] == [None] * len(others)


def test_no_bytes_make_reading_a_header_raise():
    rng = np.random.default_rng(0)
    good = np.frombuffer(turned(photo(0)), np.uint8)
    for _ in range(2000):
        bad = good[: int(rng.integers(2, 700))].copy()
        bad[rng.integers(0, len(bad), 4)] = rng.integers(0, 256, 4)
        plain_jpeg(bad.tobytes() + b"\xff\xd9")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here")
def test_on_a_real_device_batches_are_close_to_the_cpus_and_memory_stays_flat(pictures):
    pytest.importorskip("torchcodec", reason="needs torchcodec, which decodes JPEGs on the device")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeviceFallbackWarning)
        on_device = batches(pictures, on_device=True, device="cuda")
    for one, other in zip(batches(pictures, on_device=False), on_device, strict=True):
        assert other["jpg"].device.type == "cuda"
        assert one["__id__"].tolist() == other["__id__"].tolist()
        for number, plain, decoded in zip(one["cls"].tolist(), one["jpg"], other["jpg"].cpu(), strict=True):
            assert psnr(plain, decoded) > 28, number
    peaks = []
    with load(pictures, on_device=True, device="cuda") as loader:
        for epoch in range(30):
            for batch in loader:
                batch["jpg"].float().mean()
            torch.cuda.synchronize()
            if epoch in (9, 29):
                peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= 1.1 * peaks[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here")
def test_on_a_real_device_decoding_changes_no_memory_that_queued_work_still_reads(pictures):
    pytest.importorskip("torchcodec", reason="needs torchcodec, which decodes JPEGs on the device")
    with load(pictures, on_device=True, device="cuda") as loader:
        for _ in range(5):
            kept = [(batch["jpg"], batch["jpg"].clone()) for batch in loader]
            values = [torch.full((1 << 20,), float(i), device="cuda") for i in range(16)]
            torch.cuda._sleep(50_000_000)
            sums = [value.sum() for value in values]
            del values
            for batch in loader:
                del batch
            assert [each.item() for each in sums] == [float(i) * (1 << 20) for i in range(16)]
            assert all(torch.equal(one, other) for one, other in kept)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here")
def test_on_a_real_device_a_late_resize_still_sees_its_images(pictures, monkeypatch):
    """Groups follow each other on one stream, in one memory, into which nvJPEG's engine writes without waiting."""
    pytest.importorskip("torchcodec", reason="needs torchcodec, which decodes JPEGs on the device")
    monkeypatch.setattr(device_images, "_GROUP_IMAGES", 2)
    expected = batches(pictures, on_device=True, device="cuda")
    cut = device_images._cut

    def cut_late(*given: Any) -> torch.Tensor:
        torch.cuda._sleep(20_000_000)
        return cut(*given)

    monkeypatch.setattr(device_images, "_cut", cut_late)
    for one, other in zip(expected, batches(pictures, on_device=True, device="cuda"), strict=True):
        assert torch.equal(one["jpg"], other["jpg"])
