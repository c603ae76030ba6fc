"""Which decoder a field gets, what it makes of the bytes, and what it says of bytes that it cannot read."""

import io
import json
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import webdataset
from PIL import Image

from penstock.loader.decoding.decode import DecodeChoice, FieldDecoder, check_choice, field_decoder
from penstock.loader.decoding.images.images import ImageDecoder
from penstock.loader.errors import ConfigError, DecodeError
from penstock.loader.order.permutation import sample_rng


def npy(array: np.ndarray, **options: Any) -> bytes:
    sink = io.BytesIO()
    np.save(sink, array, **options)
    return sink.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    sink = io.BytesIO()
    np.savez(sink, **arrays)
    return sink.getvalue()


def png(width: int = 12, height: int = 8) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)).save(sink, "PNG")
    return sink.getvalue()


def decode(field: str, data: bytes, choice: DecodeChoice = "auto") -> Any:
    decoder = field_decoder(field, choice)
    assert decoder is not None
    return decoder(memoryview(data), None)


AUTO = {
    "cls": b"17",
    "cls2": b" 3\n",
    "index": b"-4",
    "inx": b"0",
    "id": b"12345678901",
    "json": json.dumps({"a": [1, 2.5, None, "é"]}).encode(),
    "jsn": b"[1, 2]",
    "txt": "grüß Gott\n".encode(),
    "text": b"",
    "transcript": "日本".encode(),
}


@pytest.mark.parametrize("field", AUTO)
def test_auto_gives_what_webdataset_gives(field):
    expected = webdataset.autodecode.basichandlers(field, AUTO[field])
    value = decode(field, AUTO[field])
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize("array", [np.ones((2, 3), "<f4"), np.array(5), np.zeros((0, 2)), np.eye(2) > 0])
def test_auto_reads_npy_as_webdataset_does(array):
    value = decode("emb.npy", npy(array))
    np.testing.assert_array_equal(value, webdataset.autodecode.basichandlers("emb.npy", npy(array)))
    assert value.dtype == array.dtype


def test_auto_reads_npz_as_a_dict_of_arrays():
    value = decode("npz", npz(a=np.arange(3), b=np.ones((2, 2))))
    assert list(value) == ["a", "b"]
    np.testing.assert_array_equal(value["a"], np.arange(3))


@pytest.mark.parametrize("field", ["jpg", "jpeg", "png", "webp", "seg.png", "PNG"])
def test_auto_decodes_images_to_uint8_rgb(field):
    decoder = field_decoder(field, "auto")
    assert decoder is not None
    assert decoder.is_image
    assert decoder.slot is None
    assert not decoder.takes_rng
    value = decoder(memoryview(png()), None)
    assert (value.shape, value.dtype) == ((8, 12, 3), np.uint8)


@pytest.mark.parametrize("field", ["pyd", "pkl", "pickle", "pth", "bin", "mp4", "unknown", "jpg.raw"])
def test_auto_leaves_what_it_does_not_know_as_bytes(field):
    assert field_decoder(field, "auto") is None


class Bomb:
    """Unpickling it ends the test."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("something was unpickled",)


def test_nothing_is_ever_unpickled():
    objects = np.array([Bomb()], dtype=object)
    for field, data in {"npy": npy(objects, allow_pickle=True), "npz": npz(a=objects)}.items():
        with pytest.raises(DecodeError, match="allow_pickle"):
            decode(field, data)
    bomb = pickle.dumps(Bomb())
    for field in ("npy", "npz", "json"):
        with pytest.raises(DecodeError):
            decode(field, bomb)


def test_none_leaves_every_field_raw():
    assert all(field_decoder(field, None) is None for field in ("jpg", "cls", "json", "npy"))


def test_a_mapping_rules_its_fields_and_auto_the_others():
    choice = {"jpg": None, "cls": float, "txt": str, "x.bin": len}
    assert field_decoder("jpg", choice) is None
    assert decode("cls", b"7", choice) == 7.0
    assert isinstance(decode("cls", b"7", choice), float)
    assert decode("txt", "é".encode(), choice) == "é"
    assert decode("x.bin", b"abcd", choice) == 4
    assert decode("json", b"{}", choice) == {}


def test_the_longest_extension_that_fits_counts_in_any_case_of_letters():
    choice = {"png": lambda data: "png", "seg.png": lambda data: "seg", "a.seg.png": lambda data: "exact"}
    assert decode("left.png", b"", choice) == "png"
    assert decode("left.seg.png", b"", choice) == "seg"
    assert decode("a.seg.png", b"", choice) == "exact"
    assert decode("LEFT.SEG.PNG", b"", choice) == "seg"
    assert field_decoder("segpng", choice) is None


def test_a_callable_gets_bytes_and_the_samples_generator_if_it_has_a_parameter_for_it():
    plain = field_decoder("x", {"x": type})
    assert plain is not None
    assert not plain.takes_rng
    assert decode("x", b"1", {"x": type}) is bytes

    def noisy(data: bytes, *, rng: np.random.Generator) -> tuple[bytes, float]:
        return data, rng.random()

    decoder = field_decoder("x", {"x": noisy})
    assert decoder is not None
    assert decoder.takes_rng
    assert decoder(memoryview(b"1"), sample_rng(1, 2, 3)) == (b"1", sample_rng(1, 2, 3).random())


def test_an_image_decoder_has_a_slot_that_can_be_filled():
    decoder = field_decoder("png", {"png": ImageDecoder(size=(6, 4), crop="random")})
    assert decoder is not None
    assert isinstance(decoder, FieldDecoder)
    assert decoder.slot == ((6, 4, 3), np.uint8)
    assert decoder.takes_rng
    assert decoder.is_image
    batch = np.zeros((2, 6, 4, 3), np.uint8)
    decoder.decode_into(memoryview(png()), batch[1], sample_rng(0, 0, 0))
    np.testing.assert_array_equal(batch[1], decoder(memoryview(png()), sample_rng(0, 0, 0)))
    assert not batch[0].any()


def test_a_field_decoder_of_the_users_own_is_taken_as_it_is():
    class Fixed:
        takes_rng = False
        slot = ((2,), np.dtype(np.uint8))
        is_image = False

        def __call__(self, data: memoryview, rng: np.random.Generator | None) -> np.ndarray:
            return np.frombuffer(data, np.uint8, 2)

        def decode_into(self, data: memoryview, out: np.ndarray, rng: np.random.Generator | None) -> None:
            out[:] = self(data, rng)

    decoder = field_decoder("x", {"x": Fixed()})
    assert decoder is not None
    assert decoder.slot == ((2,), np.uint8)
    batch = np.zeros((1, 2), np.uint8)
    decoder.decode_into(memoryview(b"ab"), batch[0], None)
    assert batch.tolist() == [[97, 98]]
    with pytest.raises(DecodeError, match="field 'x'"):
        decoder.decode_into(memoryview(b"a"), batch[0], None)


@pytest.mark.parametrize(
    ("field", "data", "cause"),
    [
        ("cls", b"cat", "b'cat'"),
        ("id", b"\xa5\x13", r"\(2 bytes\); decode=\{'id': None\} leaves the field as bytes"),
        ("a.txt", b"\xff", r"\(1 bytes\); decode=\{'a.txt': None\} leaves the field as bytes"),
        ("cls", b"", "ValueError"),
        ("json", b"{", "JSONDecodeError"),
        ("json", b"\xff\xfe\xff", "UnicodeDecodeError"),
        ("txt", b"\xff", "UnicodeDecodeError"),
        ("npy", b"", "EOF"),
        ("npy", npy(np.arange(9))[:-8], "header says"),
        ("npz", b"PK nothing", "not an .npz archive"),
        ("npz", npz(a=np.arange(9))[:-9], "not an .npz archive"),
        ("jpg", b"\xff\xd8\xff", "damaged JPEG"),
        ("png", b"", "empty"),
    ],
)
def test_what_cannot_be_decoded_is_an_error_that_names_field_and_cause(field, data, cause):
    with pytest.raises(DecodeError, match=f"field '{field}'.*{cause}") as caught:
        decode(field, data)
    assert caught.value.__cause__ is not None


def test_whatever_a_users_function_raises_names_the_field():
    def fails(data: bytes) -> None:
        raise KeyError("nothing here")

    with pytest.raises(DecodeError, match=r"field 'x': KeyError: 'nothing here' \(3 bytes\)"):
        decode("x", b"abc", {"x": fails})


def test_a_choice_that_means_nothing_is_refused():
    with pytest.raises(ConfigError, match="'pil'"):
        field_decoder("jpg", "pil")
    with pytest.raises(ConfigError, match="jpg"):
        field_decoder("jpg", {"jpg": 3})


def test_a_key_that_fits_no_field_is_refused_with_the_fields_there_are():
    check_choice({"jpg": None, "png": len}, ["jpg", "seg.png", "bin"])
    with pytest.raises(ConfigError, match=r"\['jpgg'\].*\['cls', 'jpg'\]"):
        check_choice({"jpgg": len}, ["jpg", "cls"])


@pytest.mark.slow
def test_without_the_extra_only_images_are_refused_and_the_error_names_it():
    program = """
import sys
sys.modules["cv2"] = None
from penstock.loader.decoding.decode import field_decoder
from penstock.loader.errors import ConfigError
assert field_decoder("cls", "auto")(memoryview(b"3"), None) == 3
try:
    field_decoder("jpg", "auto")
except ConfigError as exc:
    print(exc)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "penstock[images]" in done.stdout


@pytest.mark.parametrize(
    "array", [np.arange(6.0).reshape(2, 3), np.array(3), np.zeros((0, 2)), np.asfortranarray(np.eye(3))]
)
def test_arrays_are_read_where_python_takes_a_thread_for_another(array, monkeypatch):
    """``ast``, by which NumPy reads headers, raises that now and then where several threads use it."""
    read, calls = np.lib.format.read_array_header_1_0, []

    def fail_at_first(stream):
        calls.append(stream)
        if len(calls) == 1:
            raise SystemError("AST constructor recursion depth mismatch (before=48, after=45)")
        return read(stream)

    monkeypatch.setattr(np.lib.format, "read_array_header_1_0", fail_at_first)
    value = decode("emb.npy", npy(array))
    np.testing.assert_array_equal(value, array)
    assert value.dtype == array.dtype
    assert value.flags.writeable
    calls.clear()
    np.testing.assert_array_equal(decode("embs.npz", npz(a=array))["a"], array)


@pytest.mark.parametrize("kind", ["|b1", "<f4", ">i2", "<u2", "|u1"])
@pytest.mark.parametrize("shape", [(), (5,), (1, 2), (2, 1, 3)])
def test_the_usual_arrays_are_read_without_a_python_parser(kind, shape, monkeypatch):
    array = np.ones(shape, kind)
    monkeypatch.setattr("ast.literal_eval", None)
    value = decode("emb.npy", npy(array))
    np.testing.assert_array_equal(value, array)
    assert value.dtype == array.dtype
