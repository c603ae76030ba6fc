"""Images that are decoded on a device: by a codec made up on the CPU, and by the real one where there is a GPU."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from device_pictures import RANDOM, batches, encode, load, photo, picture, psnr, turned

from penstock.loader import DistributedDataLoader, ImageDecoder, pack
from penstock.loader.decoding.images import device_images
from penstock.loader.decoding.images.device_cuts import COLUMNS, Cut, make_table
from penstock.loader.decoding.images.device_images import DeviceFallbackWarning
from penstock.loader.decoding.images.device_resize import SlowResizeWarning, choose_resize, resize_each
from penstock.loader.decoding.images.images import ImagePlan
from penstock.loader.decoding.images.jpeg_stream import plain_jpeg
from penstock.loader.decoding.images.regions import Region


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("last_batch", ["pad", "partial"])
def test_a_last_batch_that_is_not_full_is_that_of_the_cpu(pictures, codec, last_batch):
    for one, other in zip(
        *(batches(pictures, on_device=on, batch_size=7, last_batch=last_batch) for on in (False, True)), strict=True
    ):
        assert one["jpg"].shape == other["jpg"].shape
        assert one["__id__"].tolist() == other["__id__"].tolist()


@pytest.mark.slow
def test_images_are_decoded_in_groups_of_bounded_size(pictures, codec, monkeypatch):
    expected = batches(pictures, on_device=True)
    codec.calls.clear()
    monkeypatch.setattr(device_images, "_GROUP_BYTES", 3 * 500 * 375 + 300_000)
    codec.largest = 0
    grouped = batches(pictures, on_device=True)
    assert len(codec.calls) > 6
    assert codec.largest <= 3 * 500 * 375 + 300_000
    assert all(torch.equal(one["jpg"], other["jpg"]) for one, other in zip(expected, grouped, strict=True))


@pytest.mark.slow
def test_a_group_is_resized_by_one_call(pictures, codec, monkeypatch):
    calls = []

    def resize(cuts: Sequence[Cut], pixels: torch.Tensor) -> None:
        calls.append(len(cuts))
        resize_each(cuts, pixels)

    expected = batches(pictures, on_device=True)
    codec.calls.clear()
    monkeypatch.setattr(device_images, "choose_resize", lambda device: resize)
    found = batches(pictures, on_device=True)
    assert all(torch.equal(one["jpg"], other["jpg"]) for one, other in zip(expected, found, strict=True))
    assert sorted(calls) == sorted(codec.calls)


@pytest.mark.slow
def test_two_fields_of_images_are_decoded_on_one_device(tmp_path, codec):
    rows = ({"__key__": f"{i:03d}", "jpg": picture(i), "other.jpg": picture(i + 1)} for i in range(16))
    pack(rows, str(tmp_path / "data"), format="tar")
    taken = []
    for device in (None, "cuda"):
        decode = {name: ImageDecoder(size=40, device=device) for name in ("jpg", "other.jpg")}
        with DistributedDataLoader(str(tmp_path / "data"), batch_size=8, decode=decode, threads=2) as loader:
            taken.append(list(loader))
    assert codec.calls
    for one, other in zip(*taken, strict=True):
        assert all(psnr(one[name], other[name]) > 28 for name in ("jpg", "other.jpg"))


def draw_cuts(random: np.random.Generator, rows: Sequence[int], most: int) -> list[Cut]:
    cuts = []
    for row in rows:
        height, width = random.integers(1, most, 2).tolist()
        image = torch.from_numpy(random.integers(0, 256, (3, height, width), np.uint8))
        if row % 3 == 2:
            image = torch.from_numpy(random.integers(0, 256, (height, width, 3), np.uint8)).movedim(-1, 0)
        region_height, region_width = (int(random.integers(1, side + 1)) for side in (height, width))
        top, left = int(random.integers(height - region_height + 1)), int(random.integers(width - region_width + 1))
        region = Region(top, left, region_height, region_width)
        cuts.append(Cut(image, ImagePlan(height, width, region, bool(random.integers(2))), row))
    return cuts


def test_a_table_of_cuts_leads_to_each_pixel_of_their_regions():
    cuts = draw_cuts(np.random.default_rng(0), range(9), 20)
    for (image, plan, row), line in zip(cuts, make_table(cuts), strict=True):
        named = dict(zip(COLUMNS, line.tolist(), strict=True))
        assert (named["row"], bool(named["flip"])) == (row, plan.flip)
        part = plan.region
        inside = image[:, part.top : part.top + part.height, part.left : part.left + part.width]
        for channel, y, x in np.ndindex(3, named["height"], named["width"]):
            at = named["address"] + channel * named["channel"] + y * named["line"] + x * named["pixel"]
            assert ctypes.c_uint8.from_address(at).value == inside[channel, y, x]
        assert inside.shape == (3, named["height"], named["width"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_where_the_kernel_is_not_to_be_had_images_are_resized_one_by_one_and_it_says_why():
    choose_resize.cache_clear()
    with pytest.warns(SlowResizeWarning, match="cuda:0 resizes decoded images one by one, .* Triton and a C compiler"):
        assert choose_resize(torch.device("cuda:0")) is resize_each
    choose_resize.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here")
def test_on_a_real_device_one_kernel_resizes_as_torch_does():
    random, device = np.random.default_rng(1), torch.device("cuda", torch.cuda.current_device())
    resize = choose_resize(device)
    assert resize is not resize_each
    for most, (height, width) in ((60, (17, 30)), (500, (224, 224)), (900, (64, 96)), (40, (1, 1)), (90, (33, 1))):
        rows = sorted(random.choice(40, 30, replace=False).tolist())
        cuts = [Cut(image.to(device), plan, row) for image, plan, row in draw_cuts(random, rows, most)]
        one, other = (torch.full((40, height, width, 3), 9, dtype=torch.uint8, device=device) for _ in range(2))
        resize(cuts, one)
        resize_each(cuts, other)
        assert (one.to(torch.int16) - other.to(torch.int16)).abs().max() <= 1


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
        warnings.simplefilter("error", SlowResizeWarning)
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
    resize = device_images.choose_resize(torch.device("cuda", torch.cuda.current_device()))

    def resize_late(cuts: Sequence[Cut], pixels: torch.Tensor) -> None:
        torch.cuda._sleep(20_000_000)
        resize(cuts, pixels)

    monkeypatch.setattr(device_images, "choose_resize", lambda device: resize_late)
    for one, other in zip(expected, batches(pictures, on_device=True, device="cuda"), strict=True):
        assert torch.equal(one["jpg"], other["jpg"])
