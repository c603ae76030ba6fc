"""Decoding the part of a JPEG that a crop needs: the same pixels, and the same errors but for damage below the part."""

import ctypes
import gc
import threading
from importlib.util import find_spec
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pil_images import encode, photo

from penstock.loader.decoding.images import images, jpeg_region, turbojpeg
from penstock.loader.decoding.images.images import ImageDecoder, ImagePlan
from penstock.loader.decoding.images.jpeg_region import decode_region
from penstock.loader.decoding.images.regions import Region
from penstock.loader.errors import ConfigError, DecodeError
from penstock.loader.order.permutation import sample_rng

FACTORS = ("444", "422", "440", "420", "411")


@pytest.fixture(scope="module", autouse=True)
def library():
    if turbojpeg.find_turbojpeg() is None:
        assert find_spec("turbojpeg") is None, "the package is installed, and its library is not found"
        pytest.skip("no libturbojpeg of version 3.0 or newer; where there is a wheel: pip install turbojpeg")
    found = jpeg_region.exact_library()
    assert found is not None, "the library that was found decodes other pixels than simplejpeg"
    return found


def decode_without_library(decode, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jpeg_region, "exact_library", lambda: None)
        return decode(*arguments)


def encode_by_opencv(pixels: np.ndarray, factor: str, restart: int = 0, quality: int = 90) -> bytes:
    sampling = getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{factor}")
    options = {
        cv2.IMWRITE_JPEG_QUALITY: quality,
        cv2.IMWRITE_JPEG_RST_INTERVAL: restart,
        cv2.IMWRITE_JPEG_SAMPLING_FACTOR: sampling,
    }
    return cv2.imencode(".jpg", pixels, [number for pair in options.items() for number in pair])[1].tobytes()


@st.composite
def jpegs(draw: st.DrawFn) -> bytes:
    height, width = draw(st.integers(90, 400)), draw(st.integers(90, 400))
    pixels = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, (height, width, 3), np.uint8)
    pixels = cv2.GaussianBlur(pixels, (0, 0), draw(st.sampled_from([0.1, 1, 4])))
    quality = draw(st.integers(5, 100))
    kind = draw(st.sampled_from([*FACTORS, *FACTORS, "progressive", "L", "RGB", "CMYK"]))
    if kind in FACTORS:
        return encode_by_opencv(pixels, kind, draw(st.sampled_from([0, 1, 7, 40])), quality)
    if kind == "progressive":
        return encode(Image.fromarray(pixels), progressive=True, quality=quality)
    return encode(Image.fromarray(pixels).convert(kind), keep_rgb=kind == "RGB", quality=quality)


@settings(max_examples=250, deadline=None)
@given(
    data=jpegs(),
    side=st.sampled_from([20, 64, 150, 224]),
    crop=st.sampled_from(["random", "random", "center"]),
    seed=st.integers(0, 2**30),
)
def test_images_are_the_same_with_and_without_the_library(data, side, crop, seed):
    decoder = ImageDecoder(size=side, crop=crop, flip=0.5)
    found = decoder(data, sample_rng(seed, 0, 0))
    expected = decode_without_library(decoder, data, sample_rng(seed, 0, 0))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("factor", ["444", "422", "440", "420"])
def test_every_edge_of_a_part_is_as_in_the_whole_image(factor):
    pixels = np.random.default_rng(0).integers(0, 256, (150, 190, 3), np.uint8)
    data = encode_by_opencv(pixels, factor)
    whole = images._decode_jpeg(data, 150, 190, 1)
    for at in range(5, 40):
        part = decode_region(data, 150, 190, Region(at, at, 150 - 2 * at, 189 - 2 * at))
        assert part is not None, "the image would be decoded whole"
        np.testing.assert_array_equal(part, whole[at : 150 - at, at : 189 - at])


@pytest.mark.parametrize("kind", ["411", "progressive", "grey", "cut short", "trailing", "between segments"])
def test_what_is_not_of_the_usual_kind_is_decoded_whole(kind):
    picture = photo(300, 200)
    data = encode(picture)
    if kind == "411":
        data = encode_by_opencv(np.asarray(picture), "411")
    elif kind == "progressive":
        data = encode(picture, progressive=True)
    elif kind == "grey":
        data = encode(picture.convert("L"))
    elif kind == "cut short":
        data = data[:-2]
    elif kind == "trailing":
        data += b"trailing"
    else:
        tables = data.index(b"\xff\xdb")
        data = data[:tables] + bytes(3) + data[tables:]
    region = Region(50, 50, 60, 60)
    assert decode_region(encode(picture), 200, 300, region) is not None
    assert decode_region(data, 200, 300, region) is None


def test_a_jpeg_that_is_cut_short_is_an_error_whatever_part_is_taken():
    data = encode(photo(300, 240))
    for kept in (len(data) // 2, len(data) - 2, len(data) - 1):
        for top in (0, 160):
            plan = ImagePlan(240, 300, Region(top, 0, 80, 300), flip=False)
            with pytest.raises(DecodeError, match="damaged JPEG"):
                ImageDecoder(size=80).decode_planned(data[:kept], plan, np.empty((80, 80, 3), np.uint8))


def test_damage_above_or_in_the_part_is_an_error_and_below_it_changes_no_pixel():
    good, decoder = encode(photo(300, 240)), ImageDecoder(size=(80, 100))
    middle = len(good) // 2
    damaged = good[:middle] + b"\xff\xd9" + good[middle + 2 :]  # an end before the end: no pixel after it
    out, expected = np.empty((2, 80, 100, 3), np.uint8)
    before = ImagePlan(240, 300, Region(0, 100, 80, 100), flip=False)
    decoder.decode_planned(good, before, expected)
    decoder.decode_planned(damaged, before, out)
    np.testing.assert_array_equal(out, expected)
    for top in (100, 160):
        with pytest.raises(DecodeError, match="damaged JPEG of 300x240"):
            decoder.decode_planned(damaged, ImagePlan(240, 300, Region(top, 100, 80, 100), flip=False), out)
    with pytest.raises(DecodeError, match="damaged JPEG of 300x240"):
        decode_without_library(decoder.decode_planned, damaged, before, out)


def without_segments(data: bytes, marker: int) -> bytes:
    kept, at = data[:2], 2
    while data[at + 1] != 0xDA:
        stop = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        kept, at = kept + (b"" if data[at + 1] == marker else data[at:stop]), stop
    return kept + data[at:]


def test_a_jpeg_without_tables_is_not_decoded_by_those_of_the_one_before():
    before, data = encode(photo(300, 240), quality=30, optimize=True), encode(photo(300, 240), quality=90)
    plan, decoder = ImagePlan(240, 300, Region(20, 20, 90, 100), flip=False), ImageDecoder(size=(90, 100))
    out, expected = np.empty((2, 90, 100, 3), np.uint8)
    decoder.decode_planned(data, plan, expected)
    decoder.decode_planned(before, plan, out)
    decoder.decode_planned(without_segments(data, 0xC4), plan, out)  # the standard's are meant, as in Motion JPEG
    np.testing.assert_array_equal(out, expected)
    for number in (b"\0", b"\1"):
        at = data.index(b"\xff\xdb\0\x43" + number) + 1
        damaged = data[:at] + b"\xef" + data[at + 1 :]
        decoder.decode_planned(before, plan, out)
        with pytest.raises(DecodeError, match="damaged JPEG"):
            decoder.decode_planned(damaged, plan, out)


@pytest.mark.parametrize("marker", [b"\xff\xc4", b"\xff\xdb"])
def test_a_header_that_the_library_refuses_is_an_error_with_and_without_it(marker):
    good, decoder = encode(photo(300, 240)), ImageDecoder(size=80, crop="random", scale=(0.3, 0.5))
    at = good.index(marker) + 4
    damaged = good[:at] + bytes([good[at] | 15]) + b"\xff" * 16 + good[at + 17 :]  # a table of no such number
    assert decoder(good, sample_rng(0, 0, 0)).shape == (80, 80, 3)
    for decode in (decoder, lambda *given: decode_without_library(decoder, *given)):
        with pytest.raises(DecodeError, match="damaged JPEG"):
            decode(damaged, sample_rng(0, 0, 0))


@pytest.mark.parametrize("top", [0, 150])
def test_warnings_that_cost_no_pixel_change_none(top):
    good = encode(photo(300, 240))
    plan = ImagePlan(240, 300, Region(top, 20, 90, 100), flip=False)
    out, expected = np.empty((2, 90, 100, 3), np.uint8)
    decoder = ImageDecoder(size=(90, 100))
    decoder.decode_planned(good, plan, expected)
    for data in (good[:-2] + bytes(9) + good[-2:], good[:20] + b"\0" + good[20:], good + b"trailing"):
        decoder.decode_planned(data, plan, out)
        np.testing.assert_array_equal(out, expected)


def test_a_header_of_another_size_than_the_plan_is_not_decoded_in_part(library):
    data = encode(photo(300, 200))
    assert library.decode(data, 200, 300, Region(0, 0, 40, 48)) is not None
    assert decode_region(data, 200, 310, Region(0, 0, 40, 40)) is None
    for height, width, region in [
        (200, 310, Region(0, 0, 40, 48)),
        (201, 300, Region(0, 0, 40, 48)),
        (200, 300, Region(0, 8, 40, 48)),  # MCUs are 16 pixels wide
        (200, 300, Region(0, 0, 201, 48)),
        (200, 300, Region(0, 272, 40, 48)),
        (200, 300, Region(-1, 0, 40, 48)),
        (200, 300, Region(0, 0, 0, 48)),
    ]:
        assert library.decode(data, height, width, region) is None
    assert library.decode(b"", 200, 300, Region(0, 0, 40, 48)) is None


def test_a_threads_decompressor_goes_with_the_thread(library):
    data, freed = encode(photo(300, 200)), []
    expected = library.decode(data, 200, 300, Region(16, 32, 40, 50))
    own = turbojpeg.TurboJpeg(library.path)
    destroy = own._quick.tj3Destroy
    own._quick.tj3Destroy = lambda handle: (destroy(handle), freed.append(handle))
    found = []

    def decode() -> None:
        found.extend(own.decode(data, 200, 300, Region(16, 32, 40, 50)) for _ in range(20))

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert len(freed) == 4
    assert len(found) == 80
    assert all(np.array_equal(pixels, expected) for pixels in found)


def test_the_environment_names_the_library_or_none(library, monkeypatch):
    monkeypatch.setenv("PENSTOCK_TURBOJPEG", "")
    assert turbojpeg.find_turbojpeg() is None
    monkeypatch.setenv("PENSTOCK_TURBOJPEG", library.path)
    assert turbojpeg.find_turbojpeg().is_named
    for wrong, why in [("/nowhere/libturbojpeg.so", "nowhere"), (ctypes.CDLL(None)._name or "libc.so.6", "tj3Init")]:
        monkeypatch.setenv("PENSTOCK_TURBOJPEG", wrong)
        with pytest.raises(ConfigError, match=f"PENSTOCK_TURBOJPEG={wrong}.*{why}"):
            turbojpeg.find_turbojpeg()


@pytest.mark.parametrize("is_named", [False, True])
def test_a_library_that_decodes_other_pixels_is_not_used(is_named, library, monkeypatch):
    def decode(data, height, width, region):
        pixels = library.decode(data, height, width, region)
        pixels[-3, -3, 0] ^= 1
        return pixels

    other = SimpleNamespace(decode=decode, is_named=is_named, path="other.so")
    monkeypatch.setattr(jpeg_region, "find_turbojpeg", lambda: other)
    look = jpeg_region.exact_library.__wrapped__
    if is_named:
        with pytest.raises(ConfigError, match=r"PENSTOCK_TURBOJPEG=other\.so decodes other pixels"):
            look()
    else:
        assert look() is None
