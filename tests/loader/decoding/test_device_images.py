"""Images that are decoded on a device: by a codec made up on the CPU, and by the real one where there is a GPU."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from photographs import photograph
from PIL import Image

from penstock.loader import DistributedDataLoader, ImageDecoder, Mixture, Source, pack
from penstock.loader.decoding import device_codec, device_images
from penstock.loader.decoding.device_codec import Wait
from penstock.loader.decoding.device_images import DeviceFallbackWarning
from penstock.loader.decoding.jpeg_stream import plain_jpeg
from penstock.loader.errors import ConfigError, DecodeError, MemoryLimitError

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
        self.lanes = 0
        self.is_idle = False

    @contextmanager
    def lane(self) -> Iterator[Wait]:
        self.lanes += 1
        self.is_idle = True
        try:
            yield self._wait
        finally:
            self.lanes -= 1

    def _wait(self) -> None:
        self.is_idle = True

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


@pytest.fixture
def codec(monkeypatch: pytest.MonkeyPatch) -> HostCodec:
    made = HostCodec()
    monkeypatch.setattr(device_codec, "open_codec", lambda device: made)
    monkeypatch.setattr(device_images, "_told", set())
    return made


def write(folder: Path, pictures: Sequence[bytes]) -> str:
    pack(({"__key__": f"{i:03d}", "jpg": data, "cls": i} for i, data in enumerate(pictures)), str(folder), format="tar")
    return str(folder)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("pictures"), [picture(number) for number in range(24)])


def load(url: str, *, on_device: bool, decoder: Any = RANDOM, **options: Any) -> DistributedDataLoader:
    given = decoder | (CUDA if on_device else {})
    given_to_loader = {"batch_size": 8, "with_ids": True, "threads": 2} | options
    return DistributedDataLoader(url, decode={"jpg": ImageDecoder(**given)}, **given_to_loader)


def batches(url: str, **options: Any) -> list[dict[str, Any]]:
    with load(url, **options) as loader:
        return list(loader)


# The same images as on the CPU.


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


# Memory, and what is refused.


def test_images_are_decoded_in_groups_of_bounded_size(pictures, codec, monkeypatch):
    expected = batches(pictures, on_device=True)
    codec.calls.clear()
    monkeypatch.setattr(device_images, "_GROUP_BYTES", 3 * 500 * 375 + 300_000)
    codec.largest = 0
    grouped = batches(pictures, on_device=True)
    assert len(codec.calls) > 6
    assert codec.largest <= 3 * 500 * 375 + 300_000
    assert all(torch.equal(one["jpg"], other["jpg"]) for one, other in zip(expected, grouped, strict=True))


def test_an_image_beyond_a_groups_bytes_is_left_to_the_cpu(pictures, codec, monkeypatch):
    monkeypatch.setattr(device_images, "_GROUP_BYTES", 3 * 400 * 400)
    on_cpu, on_device = (batches(pictures, on_device=on, shuffle=False) for on in (False, True))
    for one, other in zip(on_cpu, on_device, strict=True):
        for number, plain, decoded in zip(one["cls"].tolist(), one["jpg"], other["jpg"], strict=True):
            assert torch.equal(plain, decoded) or SIZES[number % 5] != (500, 375)


def test_an_image_that_the_device_refuses_is_decoded_on_the_cpu_and_said_once(pictures, codec):
    codec.refused = {(201, 257)}
    on_cpu = batches(pictures, on_device=False, shuffle=False)
    with pytest.warns(DeviceFallbackWarning, match="257x201") as told:
        on_device = batches(pictures, on_device=True, shuffle=False)
    assert sum(issubclass(each.category, DeviceFallbackWarning) for each in told) == 1
    for one, other in zip(on_cpu, on_device, strict=True):
        for number, plain, decoded in zip(one["cls"].tolist(), one["jpg"], other["jpg"], strict=True):
            assert psnr(plain, decoded) > 28
            if SIZES[number % 5] == (257, 201):
                assert torch.equal(plain, decoded)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, getattr(torch, "AcceleratorError", None)])
def test_a_device_out_of_memory_or_order_is_no_bad_sample(pictures, codec, error):
    if error is None:
        pytest.skip("this torch has no AcceleratorError")
    codec.refused, codec.error = {(201, 257)}, error
    expected = MemoryLimitError if error is torch.OutOfMemoryError else error
    with load(pictures, on_device=True, on_error="replace") as loader, pytest.raises(expected):
        list(loader)
    assert loader.bad_samples == []


# Damage.


def damage(data: bytes) -> dict[str, bytes]:
    return {
        "cut short": data[: len(data) // 2],
        "no scan": data[:200] + b"\xff\xd9",
        "garbage in the scan": data[:-900] + b"\xff\xd7" * 300 + data[-300:],
        "something else": b"no image",
        "empty": b"",
    }


@pytest.mark.parametrize("kind", list(damage(b"")))
def test_damage_is_told_as_on_the_cpu(codec, tmp_path, kind):
    pictures = [picture(number) for number in range(8)]
    pictures[4] = damage(pictures[4])[kind]
    url = write(tmp_path, pictures)
    told = []
    for on_device in (False, True):
        with pytest.raises(DecodeError, match=r"number 4 of .*key '004'.*field 'jpg'") as raised:
            batches(url, on_device=on_device, batch_size=4, shuffle=False)
        told.append(str(raised.value))
    assert told[0] == told[1]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> str:
    good = [picture(number) for number in range(24)]
    for number, kind in ((4, "cut short"), (10, "no scan"), (17, "something else"), (20, "garbage in the scan")):
        good[number] = damage(good[number])[kind]
    return write(tmp_path_factory.mktemp("damaged"), good)


@pytest.mark.filterwarnings("ignore::penstock.loader.reading.bad_samples.BadSampleWarning")
def test_bad_images_are_replaced_by_the_same_samples_as_on_the_cpu(damaged, codec, tmp_path):
    found = []
    for on_device in (False, True):
        quarantine = tmp_path / str(on_device)
        options = {"on_error": "replace", "max_errors": 10, "quarantine": str(quarantine)}
        with load(damaged, on_device=on_device, **options) as loader:
            taken = list(loader)
            bad = sorted((each.id, each.field, each.reason) for each in loader.bad_samples)
        found.append((taken, bad))
    (on_cpu, bad_on_cpu), (on_device, bad_on_device) = found
    assert [bad_id for bad_id, _, _ in bad_on_cpu] == [4, 10, 17, 20]
    assert bad_on_device == bad_on_cpu
    for one, other in zip(on_cpu, on_device, strict=True):
        assert one["__id__"].tolist() == other["__id__"].tolist()
        assert all(psnr(plain, decoded) > 28 for plain, decoded in zip(one["jpg"], other["jpg"], strict=True))


# What is refused when the loader is made.


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"transform": dict}, "transform="),
        ({"collate": list}, "collate="),
        ({"processes": 2}, "processes="),
        ({"keep": bool}, "keep="),
        ({"on_error": "skip"}, "on_error='skip'"),
    ],
)
def test_what_needs_samples_in_host_memory_is_refused_by_name(pictures, codec, options, named):
    with pytest.raises(ConfigError, match=named):
        load(pictures, on_device=True, **options)


def test_a_mixture_is_refused_whoever_names_the_decoder(pictures, codec):
    decode = {"jpg": ImageDecoder(size=32, device="cuda")}
    for mixture, options in (
        (Mixture({"one": Source(pictures)}), {"decode": decode}),
        (Mixture({"one": Source(pictures, decode=decode)}), {}),
    ):
        with pytest.raises(ConfigError, match="Mixture"):
            DistributedDataLoader(mixture, batch_size=4, **options)


def test_a_decoder_for_a_device_wants_a_loader_with_one(pictures):
    with pytest.raises(ConfigError, match="give the loader device='cuda' too"):
        load(pictures, on_device=True)


@pytest.mark.parametrize("wrong", [{"size": 32, "device": "cuda:1"}, {"size": 32, "device": "cpu"}, {"device": "cuda"}])
def test_a_device_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match="device="):
        ImageDecoder(**wrong)


def test_a_missing_or_useless_codec_is_told_with_what_to_install(monkeypatch):
    class Broken:
        device = torch.device("cpu")
        lane = HostCodec.lane
        lanes = 0

        def __init__(self, *given: Any) -> None:
            pass

        def _wait(self) -> None:
            pass

        def decode(self, streams: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            raise RuntimeError("was not compiled with nvJPEG")

    opened = device_codec._open.__wrapped__
    monkeypatch.setitem(__import__("sys").modules, "torchcodec.decoders", None)
    with pytest.raises(ConfigError, match=r"torchcodec .*penstock\[images-cuda\]"):
        opened(torch.device("cuda", 0))
    fake = type("decoders", (), {"decode_jpeg": None})
    monkeypatch.setitem(__import__("sys").modules, "torchcodec", type("torchcodec", (), {"decoders": fake}))
    monkeypatch.setitem(__import__("sys").modules, "torchcodec.decoders", fake)
    monkeypatch.setattr(device_codec, "TorchcodecCodec", Broken)
    with pytest.raises(ConfigError, match="decodes no JPEG on cuda:0: RuntimeError: was not compiled"):
        opened(torch.device("cuda", 0))


# Which JPEGs a device is given.


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


# On a real device.


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
