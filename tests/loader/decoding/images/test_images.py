"""The fused image decoder, against PIL and torchvision's definitions."""

import ctypes
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from photographs import photograph
from PIL import Image
from pil_images import PHOTO, by_pil, encode, photo, psnr

from penstock import DistributedDataLoader, pack
from penstock.loader.decoding.images import images
from penstock.loader.decoding.images.images import ImageDecoder
from penstock.loader.decoding.images.jpeg_region import decode_region, exact_library
from penstock.loader.decoding.images.regions import Region, center_region
from penstock.loader.errors import ConfigError, DecodeError
from penstock.loader.order.permutation import DECODING, sample_rng

FLOWER = photograph("flower.jpg")


def resized_by_pil(image: Image.Image, region: Region, height: int, width: int) -> np.ndarray:
    box = (region.left, region.top, region.left + region.width, region.top + region.height)
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR, box=box))


@pytest.mark.parametrize(
    ("mode", "kind", "options"),
    [
        ("RGB", "JPEG", {}),
        ("RGB", "JPEG", {"subsampling": 0}),
        ("RGB", "JPEG", {"progressive": True}),
        ("L", "JPEG", {}),
        ("RGB", "PNG", {}),
        ("L", "PNG", {}),
        ("1", "PNG", {}),
        ("P", "PNG", {}),
        ("RGBA", "PNG", {}),
        ("LA", "PNG", {}),
        ("RGB", "WEBP", {"lossless": True}),
        ("RGB", "WEBP", {"quality": 80}),
    ],
)
def test_a_whole_image_is_bit_for_bit_what_pil_decodes(mode, kind, options):
    data = encode(photo(53, 41).convert(mode), kind, **options)
    pixels = ImageDecoder().decode(memoryview(data))
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    np.testing.assert_array_equal(pixels, np.asarray(by_pil(data)))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_alpha_is_dropped_not_blended(kind):
    colours = np.asarray(photo(50, 40))
    alpha = (np.arange(40 * 50) % 256).astype(np.uint8).reshape(40, 50, 1)
    data = encode(Image.fromarray(np.concatenate([colours, alpha], axis=2)), kind, lossless=True, exact=True)
    np.testing.assert_array_equal(ImageDecoder().decode(data), colours)


@pytest.mark.parametrize("factors", ["14 11 11", "21 11 21", "31 11 11", "22 12 11", "42 11 11", "11 22 22"])
def test_a_jpeg_of_unusual_subsampling_is_what_pil_decodes(factors):
    data = bytearray(encode(photo(157, 203), subsampling=0))
    frame = data.index(b"\xff\xc0")
    for number, factor in enumerate(bytes.fromhex(factors)):
        data[frame + 11 + 3 * number] = factor
    expected = np.asarray(by_pil(bytes(data)))
    np.testing.assert_array_equal(ImageDecoder()(bytes(data)), expected)
    assert ImageDecoder(size=16, crop="center")(bytes(data)).shape == (16, 16, 3)
    for cut in (20, len(data) // 8):
        with pytest.raises(DecodeError):
            ImageDecoder()(bytes(data[:cut]))


def test_a_16_bit_png_keeps_its_high_byte():
    deep = (np.arange(40 * 50).reshape(40, 50) * 32).astype(np.uint16)
    pixels = ImageDecoder().decode(encode(Image.fromarray(deep), "PNG"))
    np.testing.assert_array_equal(pixels, np.repeat((deep >> 8).astype(np.uint8)[:, :, None], 3, axis=2))


def test_a_cmyk_jpeg_becomes_rgb():
    data = encode(photo(64, 48).convert("CMYK"))
    assert psnr(ImageDecoder().decode(data), np.asarray(by_pil(data))) > 40
    assert ImageDecoder(size=16).decode(data).shape == (16, 16, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_ignored(kind):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    data = encode(photo(60, 40), kind, exif=exif)
    assert ImageDecoder().decode(data).shape == (40, 60, 3)


def test_content_counts_and_not_the_name():
    png = encode(photo(30, 20), "PNG")
    np.testing.assert_array_equal(ImageDecoder().decode(png), np.asarray(photo(30, 20)))


@pytest.mark.parametrize("source", [PHOTO, FLOWER])
@pytest.mark.parametrize(
    ("width", "height", "bound_db"),
    [(100, 60, 45), (224, 224, 45), (300, 260, 50), (500, 375, 41), (640, 480, 48), (1024, 768, 39), (2048, 1536, 41)],
)
def test_a_centre_crop_is_pils_antialiased_resize_of_the_same_region(source, width, height, bound_db):
    data = encode(photo(width, height, source))
    pixels = ImageDecoder(size=224, crop="center").decode(data)
    expected = resized_by_pil(by_pil(data), center_region(height, width, 224, 224, None), 224, 224)
    assert psnr(pixels, expected) > bound_db
    assert np.abs(pixels.astype(int) - expected).mean() < 1.5


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("size", [7, 50, 150, 213, 427])
def test_any_ratio_of_reduction_is_filtered_like_pils(kind, size):
    data = encode(PHOTO.crop((0, 0, 640, 424)), kind)
    pixels = ImageDecoder(size=(size, size * 3 // 2)).decode(data)
    expected = by_pil(data).resize((size * 3 // 2, size), Image.Resampling.BILINEAR)
    assert psnr(pixels, np.asarray(expected)) > 35


@pytest.mark.parametrize(("kind", "bound"), [("JPEG", 32), ("PNG", 18)])
@pytest.mark.parametrize(
    ("period", "size"),
    [(2, 21), (2, 48), (2, 64), (2, 90), (3, 21), (3, 48), (3, 64), (3, 90), (5, 21), (5, 48), (5, 64)],
)
def test_stripes_finer_than_a_pixel_of_the_output_fade_instead_of_aliasing(kind, bound, period, size):
    side = 512
    across = (np.arange(side) % period < (period + 1) // 2).astype(np.uint8) * 255
    stripes = Image.fromarray(np.repeat(np.broadcast_to(across, (side, side))[:, :, None], 3, axis=2).copy())
    pixels = ImageDecoder(size=size).decode(encode(stripes, kind))
    assert pixels[2:-2, 2:-2].std() < bound  # plain bilinear sampling leaves up to 120


def test_a_crop_that_mixes_reduction_and_enlargement_is_close_to_pil():
    data = encode(photo(90, 700))
    pixels = ImageDecoder(size=200).decode(data)
    expected = by_pil(data).resize((200, 200), Image.Resampling.BILINEAR)
    assert psnr(pixels, np.asarray(expected)) > 35


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("crop", [None, "center", "random"])
def test_decoding_into_a_slot_writes_that_slot_and_no_other(kind, crop):
    data = encode(photo(70, 56), kind)
    for side in (32, 56, 60, 100, 400):
        decoder = ImageDecoder(size=side, crop=crop, flip=1.0)
        assert decoder.slot == ((side, side, 3), np.dtype(np.uint8))
        batch = np.full((3, side, side, 3), 77, np.uint8)
        decoder.decode_into(data, batch[1], sample_rng(0, 0, 0))
        np.testing.assert_array_equal(batch[1], decoder(data, sample_rng(0, 0, 0)))
        assert (batch[1] != 77).any()
        assert (batch[[0, 2]] == 77).all()


def test_a_slot_of_another_shape_is_refused():
    data = encode(photo(40, 30))
    with pytest.raises(ConfigError, match=r"\(9, 8, 3\)"):
        ImageDecoder(size=8).decode_into(data, np.empty((9, 8, 3), np.uint8))
    with pytest.raises(ConfigError, match="float32"):
        ImageDecoder(size=8).decode_into(data, np.empty((8, 8, 3), np.float32))
    with pytest.raises(ConfigError, match="contiguous"):
        ImageDecoder(size=8).decode_into(data, np.empty((8, 16, 3), np.uint8)[:, ::2])
    assert ImageDecoder().slot is None
    with pytest.raises(ConfigError):
        ImageDecoder().decode_into(data, np.empty((30, 40, 3), np.uint8))


def test_many_threads_fill_one_batch():
    pictures = [encode(photo(90 + 7 * i, 70 + 5 * i)) for i in range(16)]
    decoder = ImageDecoder(size=48, crop="random", flip=0.5)
    batch = np.zeros((16, 48, 48, 3), np.uint8)

    def fill(start: int) -> None:
        for row in range(start, 16, 4):
            decoder.decode_into(pictures[row], batch[row], sample_rng(0, 0, row))

    threads = [threading.Thread(target=fill, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for row, data in enumerate(pictures):
        np.testing.assert_array_equal(batch[row], decoder(data, sample_rng(0, 0, row)))


def another_runs_meanwhile(work: Callable[[], object], within_s: float) -> bool:
    """Whether another thread runs Python during ``work``, which is called again until it does: it has to get a core.

    No thread is switched by time meanwhile: another can only run where the one that works gives up the GIL.
    """
    is_working = has_run = has_ended = False

    def look() -> None:
        nonlocal has_run
        while not (has_run or has_ended):
            has_run = is_working
            time.sleep(1e-4)

    interval, until = sys.getswitchinterval(), time.monotonic() + within_s
    sys.setswitchinterval(3600)
    thread = threading.Thread(target=look)
    try:
        thread.start()
        while not has_run and time.monotonic() < until:
            is_working = True
            work()
            is_working = False
            time.sleep(1e-3)
    finally:
        has_ended = True
        thread.join()
        sys.setswitchinterval(interval)
    return has_run


@pytest.mark.slow
@pytest.mark.parametrize("part", ["jpeg", "part of a jpeg", "png", "resample"])
def test_another_thread_runs_python_while_an_image_is_decoded(part):
    if part == "part of a jpeg" and exact_library() is None:
        pytest.skip("no libturbojpeg of version 3.0 or newer")
    large = photo(2400, 2000)
    pixels, out = np.asarray(large), np.empty((1200, 1500, 3), np.uint8)
    data = encode(large, "JPEG") if "jpeg" in part else encode(large, "PNG", compress_level=1)
    work = {
        "part of a jpeg": lambda: decode_region(data, 2000, 2400, Region(200, 200, 1500, 2000)),
        "jpeg": lambda: images._decode_jpeg(data, 2000, 2400, 1),
        "png": lambda: images._decode_other(data),
        "resample": lambda: images._resample(pixels, out),
    }[part]
    assert another_runs_meanwhile(work, within_s=120)


def test_no_other_thread_runs_python_while_one_keeps_the_gil():
    """So that the test above would fail."""
    assert not another_runs_meanwhile(lambda: ctypes.PyDLL(None).usleep(10_000), within_s=0.1)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_an_image_that_is_cut_short_is_an_error(kind):
    data = encode(photo(200, 150), kind)
    for kept in (0, 1, 2, 3, 20, len(data) // 2, int(0.95 * len(data))):
        for size in (None, 20):
            with pytest.raises(DecodeError):
                ImageDecoder(size=size)(data[:kept])


def test_bytes_of_something_else_are_named_in_the_error():
    with pytest.raises(DecodeError, match="<!DOCTYPE"):
        ImageDecoder()(b"<!DOCTYPE html><html></html>")


def test_random_bytes_after_a_magic_number_raise_nothing_but_decode_errors():
    rng = np.random.default_rng(0)
    jpeg, jfif = b"\xff\xd8", b"\xff\xd8\xff\xe0\x00\x10JFIF\x00"
    for magic in (jpeg, jfif, b"\x89PNG\r\n\x1a\n", b"RIFF\x00\x10\x00\x00WEBPVP8 "):
        for length in (0, 10, 100, 3000):
            with pytest.raises(DecodeError):
                ImageDecoder(size=8)(magic + rng.bytes(length))


def test_flipped_bits_raise_nothing_but_decode_errors():
    rng = np.random.default_rng(0)
    decoder = ImageDecoder(size=16)
    for kind in ("JPEG", "PNG", "WEBP"):
        intact = encode(photo(60, 40), kind)
        for _ in range(60):
            data = bytearray(intact)
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
            try:
                decoder(memoryview(bytes(data)))
            except DecodeError:
                continue


def test_bytes_after_the_end_or_between_segments_lose_no_pixel_and_are_no_error():
    data = encode(photo(60, 40))
    expected = ImageDecoder()(data)
    np.testing.assert_array_equal(ImageDecoder()(data + b"trailing"), expected)
    tables = data.index(b"\xff\xdb")
    padded = data[:tables] + b"\x00\x00\x00" + data[tables:]
    np.testing.assert_array_equal(ImageDecoder()(padded), expected)


def test_a_header_that_claims_too_many_pixels_is_not_believed():
    data = bytearray(encode(photo(60, 40)))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = b"\xff\x00\xff\x00"
    with pytest.raises(DecodeError, match="65280x65280"):
        ImageDecoder(size=8)(bytes(data))


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 0},
        {"size": (3,)},
        {"size": (4, -1)},
        {"size": 2.5},
        {"crop": "center"},
        {"crop": "middle", "size": 8},
        {"resize": 256, "size": 224},
        {"resize": 0, "size": 224, "crop": "center"},
        {"scale": (0.5, 1.0), "size": 8},
        {"scale": (0.5, 0.1), "size": 8, "crop": "random"},
        {"scale": (0.0, 1.0), "size": 8, "crop": "random"},
        {"ratio": (0.0, 1.0), "size": 8, "crop": "random"},
        {"ratio": (2.0, 1.0), "size": 8, "crop": "random"},
        {"flip": 1.5},
        {"flip": -0.1},
        {"layout": "nhwc"},
    ],
)
def test_an_argument_that_cannot_be_is_refused_and_named(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ImageDecoder(**wrong)


def test_a_decoder_is_frozen_and_equal_to_one_of_the_same_arguments():
    assert ImageDecoder(size=8, crop="center") == ImageDecoder(size=8, crop="center")
    with pytest.raises(AttributeError):
        ImageDecoder().size = 3


class Inverted(ImageDecoder):
    def decode_into(self, data, out, rng=None):
        super().decode_into(data, out, rng)
        np.subtract(255, out, out=out)


def test_a_loader_asks_a_subclass_that_decodes_in_its_own_way(tmp_path):
    data = encode(photo(90, 70))
    pack(({"jpg": data} for _ in range(4)), str(tmp_path), format="tar", progress=False)
    options = {"batch_size": 4, "shuffle": False, "rank": 0, "world_size": 1}
    for kind in (ImageDecoder, Inverted):
        decoder = kind(size=32, crop="random", flip=0.5, layout="hwc")
        with DistributedDataLoader(str(tmp_path), decode={"jpg": decoder}, with_ids=True, **options) as loader:
            batch = next(iter(loader))
        for row, sample_id in enumerate(batch["__id__"].tolist()):
            out = np.empty((32, 32, 3), np.uint8)
            decoder.decode_into(data, out, sample_rng(0, 0, sample_id, DECODING))
            np.testing.assert_array_equal(batch["jpg"][row].numpy(), out)
