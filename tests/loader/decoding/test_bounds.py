"""Values that open to much more than their bytes, and headers that lie, are refused before memory is taken."""

from __future__ import annotations

import contextlib
import io
import struct
import time
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devtools.fuzz.seeds import lossless_jpeg
from penstock import ImageDecoder
from penstock.loader.decoding.decode import field_decoder
from penstock.loader.decoding.images.kind import image_size
from penstock.loader.errors import DecodeError, MemoryLimitError
from penstock.storage import PenstockError

cv2 = pytest.importorskip("cv2")

KINDS = [".png", ".webp", ".bmp", ".gif", ".tiff"]


def decode(field: str, data: bytes) -> object:
    decoder = field_decoder(field, "auto")
    assert decoder is not None
    return decoder(memoryview(data), None)


def encode(extension: str, height: int, width: int, *options: int) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)
    return cv2.imencode(extension, pixels, options)[1].tobytes()


def with_png_size(height: int, width: int) -> bytes:
    data = encode(".png", 4, 4)
    header = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


def with_webp_size(height: int, width: int) -> bytes:
    canvas = (
        b"VP8X" + struct.pack("<II", 10, 0) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    )
    return b"RIFF" + struct.pack("<I", 4 + len(canvas)) + b"WEBP" + canvas


def with_bmp_size(height: int, width: int) -> bytes:
    data = encode(".bmp", 4, 4)
    return data[:18] + struct.pack("<ii", width, height) + data[26:]


def with_gif_size(height: int, width: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + bytes(20)


def with_tiff_size(height: int, width: int) -> bytes:
    entries = struct.pack("<HHIIHHII", 256, 4, 1, width, 257, 4, 1, height)
    return b"II*\0" + struct.pack("<IH", 8, 2) + entries + bytes(4)


@pytest.mark.parametrize("extension", KINDS)
@pytest.mark.parametrize(("height", "width"), [(1, 1), (7, 300), (301, 5)])
def test_an_images_size_is_read_from_its_header(extension: str, height: int, width: int) -> None:
    assert image_size(memoryview(encode(extension, height, width))) == (height, width)


def test_the_size_of_every_form_of_webp_is_read() -> None:
    for quality in (20, 101):  # lossy, lossless
        assert image_size(encode(".webp", 9, 21, cv2.IMWRITE_WEBP_QUALITY, quality)) == (9, 21)
    assert image_size(with_webp_size(9, 70_000)) == (9, 70_000)


@pytest.mark.parametrize(
    "make",
    [with_png_size, with_webp_size, with_bmp_size, with_gif_size, with_tiff_size],
    ids=lambda make: make.__name__,
)
def test_an_image_of_any_kind_that_claims_too_many_pixels_is_refused_undecoded(make) -> None:
    with pytest.raises(DecodeError, match="claims to be 32000x31000; no more than 268435456 pixels"):
        decode("x.png", make(31_000, 32_000))


def test_a_jpeg_that_claims_more_pixels_than_its_bytes_can_hold_is_refused_undecoded() -> None:
    """libjpeg makes room for all of a progressive image before it reads on: 9 bytes a pixel."""
    small = bytearray(encode(".jpg", 8, 8))
    at = small.index(b"\xff\xc0") + 5
    small[at : at + 4] = struct.pack(">HH", 16_000, 16_000)
    with pytest.raises(DecodeError, match=r"claims to be 16000x16000, which \d+ bytes cannot hold"):
        decode("x.jpg", bytes(small))


@pytest.mark.slow
def test_a_large_jpeg_of_one_colour_is_decoded() -> None:
    black = encode(".jpg", 4100, 4100, cv2.IMWRITE_JPEG_QUALITY, 1, cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
    assert decode("x.jpg", black).shape == (4100, 4100, 3)


COMMENT = b"\xff\xfe\0\6\xff\xc0.."
BEFORE_FRAMES = [b"", COMMENT, COMMENT + b"junk\xff\0", COMMENT + bytes(5000), b"\xff\xe0\0\1", b"\xff\xff\1\xff\xd0"]


@pytest.mark.parametrize("before", BEFORE_FRAMES)
def test_a_lossless_jpeg_is_never_decoded_at_a_part_of_its_size(before: bytes) -> None:
    # A decoder that reduces by DCT writes all of a lossless one into room for the part.
    data = lossless_jpeg(400, 300, before)
    for size in (16, 40, 64, 100, 150, 300):
        for decoder in (ImageDecoder(size=size), ImageDecoder(size=size, crop="center")):
            pixels = decoder(data)
            assert pixels.shape == (size, size, 3)
            assert (pixels == 128).all()


@given(st.sampled_from(KINDS), st.data())
def test_a_damaged_image_is_an_image_or_an_error_of_ours(extension: str, data: st.DataObject) -> None:
    whole = bytearray(encode(extension, 5, 6))
    for at in data.draw(st.lists(st.integers(0, min(len(whole), 80) - 1), max_size=3)):
        whole[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(PenstockError):
        decode("x.png", bytes(whole[: data.draw(st.integers(0, len(whole)))]))


def npy(header: str, data: bytes = b"", version: bytes = b"\1\0") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + version + struct.pack("<H" if version == b"\1\0" else "<I", len(text)) + text + data


def stated(descr: str, shape: str) -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"


LYING = [
    stated("'|V0'", "(1000000000000,)"),
    stated("'<U0'", "(1000000000000,)"),
    stated("[]", "(1000000000000,)"),
    stated("'<f8'", "(1000000000000,)"),
    stated("'<f8'", "(1000000000000, 0, 1000000000000)"),
    stated("'<f8'", "(-1,)"),
    stated("'<f8'", "(3,)"),
    stated("'<f8'", "(" * 3000 + "1,)"),
    stated("'<f8'", "(1000000000000000000000000000000000,)"),
    "[" * 9000,
    "{}",
]


@pytest.mark.parametrize(
    ("version", "header"),
    [
        *((b"\1\0", header) for header in LYING),
        (b"\2\0", LYING[3]),
        (b"\2\0", "{}"),
        (b"\3\0", LYING[3]),
        (b"\3\0", "{}"),
    ],
)
def test_an_npy_whose_header_lies_is_refused_at_once(header: str, version: bytes) -> None:
    started = time.monotonic()
    tracemalloc.start()
    try:
        decode("npy", npy(header, bytes(16), version))
    except PenstockError as exc:
        assert "field 'npy'" in str(exc)  # noqa: PT017
    else:
        assert " 0, " in header  # no values at all
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("version", [b"\1\0", b"\2\0", b"\3\0"])
def test_honest_arrays_are_read_as_ever(version: bytes) -> None:
    values = np.arange(6, dtype="<i4")
    got = decode("npy", npy(stated("'<i4'", "(2, 3)"), values.tobytes(), version))
    np.testing.assert_array_equal(got, values.reshape(2, 3))
    packed = io.BytesIO()
    np.savez_compressed(packed, a=values, b=np.array("text"))
    with zipfile.ZipFile(packed, "a") as archive:
        archive.writestr("note", b"free text")
    found = decode("npz", packed.getvalue())
    np.testing.assert_array_equal(found["a"], values)
    assert (found["b"].item(), found["note"]) == ("text", b"free text")


def npz_of(count: int, member: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(count):
            archive.writestr(f"{number}.npy", member)
    return packed.getvalue()


@pytest.mark.slow
def test_an_npz_that_opens_to_too_much_is_refused_unopened() -> None:
    bomb = bytearray(npz_of(1, npy(stated("'|u1'", "(3300000000,)"))))
    at = bomb.rindex(b"PK\1\2")
    bomb[at + 24 : at + 28] = struct.pack("<I", 3_300_000_100)
    with pytest.raises(
        DecodeError, match=r"field 'npz': an .npz of .* opens to 1 arrays of 3,300,000,100 bytes; no more"
    ):
        decode("npz", bytes(bomb))
    with pytest.raises(DecodeError, match=r"opens to 10,001 arrays of .*; no more than 10,000 arrays"):
        decode("npz", npz_of(10_001, npy("{}")))
    with pytest.raises(DecodeError, match=r"header says \(1000000000000,\) values"):
        decode("npz", npz_of(3, npy(stated("'<f8'", "(1000000000000,)"))))


def test_memory_that_runs_out_in_a_decoder_is_no_bad_value() -> None:
    def fail(_: bytes) -> None:
        raise MemoryError("Unable to allocate 3 TiB")

    decoder = field_decoder("x", {"x": fail})
    assert decoder is not None
    with pytest.raises(MemoryLimitError, match=r"field 'x': memory ran out while its 4 bytes were decoded \(Unable"):
        decoder(memoryview(b"abcd"), None)


@given(st.sampled_from(["npy", "npz", "json", "cls", "txt"]), st.data())
def test_any_bytes_are_a_value_or_an_error_of_ours(field: str, data: st.DataObject) -> None:
    array = npy(stated("'<i4'", "(2,)"), bytes(8))
    whole = bytearray({"npy": array, "npz": npz_of(2, array), "json": b'{"a": [1, {"b": null}]}'}.get(field, b"123456"))
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=4)):
        whole[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(PenstockError):
        decode(field, bytes(whole[: data.draw(st.integers(0, len(whole)))]))


def test_json_that_nests_deeply_is_an_error_of_ours() -> None:
    with pytest.raises(DecodeError, match="field 'json': RecursionError"):
        decode("json", b"[" * 200_000)


@pytest.mark.parametrize("kind", ["'<U2000000000'", "[('a', '<U2000000000'), ('b', '<i4')]", "'|S2147483647'"])
@pytest.mark.parametrize("shape", ["()", "(0,)", "(2,)"])
def test_an_npy_of_texts_longer_than_numpy_counts_is_refused(kind: str, shape: str) -> None:
    with pytest.raises(DecodeError, match="field 'npy'"):
        decode("npy", npy(stated(kind, shape)))
