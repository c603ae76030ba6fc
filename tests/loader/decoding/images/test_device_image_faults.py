"""What no device decodes: refused, damaged or odd images, and arguments that cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from device_pictures import SIZES, HostCodec, batches, load, picture, psnr, write

from penstock.loader import DistributedDataLoader, ImageDecoder, Mixture, Source
from penstock.loader.decoding import replace
from penstock.loader.decoding.images import device_codec, device_images
from penstock.loader.decoding.images.device_images import DeviceFallbackWarning
from penstock.loader.errors import ConfigError, DecodeError, MemoryLimitError


@pytest.mark.slow
def test_an_image_beyond_a_groups_bytes_is_left_to_the_cpu(pictures, codec, monkeypatch):
    monkeypatch.setattr(device_images, "_GROUP_BYTES", 3 * 400 * 400)
    on_cpu, on_device = (batches(pictures, on_device=on, shuffle=False) for on in (False, True))
    for one, other in zip(on_cpu, on_device, strict=True):
        for number, plain, decoded in zip(one["cls"].tolist(), one["jpg"], other["jpg"], strict=True):
            assert torch.equal(plain, decoded) or SIZES[number % 5] != (500, 375)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::penstock.loader.reading.bad.samples.BadSampleWarning")
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::penstock.loader.reading.bad.samples.BadSampleWarning")
def test_what_replaces_an_image_is_copied_on_a_lane_alone(damaged, codec, monkeypatch):
    """Anywhere else the copy would be queued on another stream, which the lane that reads it does not wait for."""
    copied: list[Any] = []
    monkeypatch.setattr(replace, "copy_value", lambda value: copied.append(value) or value)
    with load(damaged, on_device=True, on_error="replace", max_errors=10) as loader:
        assert len(list(loader)) == 3
        assert len(loader.bad_samples) == 4
    assert copied
    assert not [value for value in copied if isinstance(value, torch.Tensor)]


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
