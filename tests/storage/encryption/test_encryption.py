"""What is encrypted can be read in ranges with its key, and in no other way; every change to it is refused."""

from __future__ import annotations

import base64
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.storage import (
    AccessDeniedError,
    ByteRange,
    CacheStore,
    DecryptionError,
    EncryptedStore,
    MemoryStore,
    ObjectInfo,
    StorageError,
    UnsupportedURLError,
    open_client,
    open_store,
)
from penstock.storage.encryption.layout import (
    FRAME_BYTES,
    HEADER_BYTES,
    TAG_BYTES,
    plain_size,
    sealed_range,
    sealed_size,
)

KEY = bytes(range(32))
OTHER = bytes(range(1, 33))
DATA = random.Random(0).randbytes(3 * FRAME_BYTES + 1000)


@pytest.fixture
def stored(memory_url: str) -> tuple[EncryptedStore, MemoryStore]:
    """An encrypted store with 'a.tar', and what lies below it."""
    below = MemoryStore(memory_url)
    store = EncryptedStore(below, KEY)
    store.put("a.tar", DATA)
    return store, below


def test_nothing_of_the_content_is_stored_and_no_two_objects_are_alike(
    stored: tuple[EncryptedStore, MemoryStore],
) -> None:
    store, below = stored
    store.put("zeros", bytes(4 * FRAME_BYTES))
    zeros = bytes(below.get("zeros.penc"))
    frames = [zeros[HEADER_BYTES + i * (FRAME_BYTES + TAG_BYTES) :][:FRAME_BYTES] for i in range(4)]
    store.put("zeros", bytes(4 * FRAME_BYTES))
    again = bytes(below.get("zeros.penc"))
    frames += [again[HEADER_BYTES + i * (FRAME_BYTES + TAG_BYTES) :][:FRAME_BYTES] for i in range(4)]
    assert len({frame[:64] for frame in frames}) == 8  # a nonce used twice would show
    assert bytes(64) not in zeros[HEADER_BYTES:]
    assert DATA[:64] not in bytes(below.get("a.tar.penc"))
    assert [info.key for info in below.list()] == ["a.tar.penc", "zeros.penc"]


@given(start=st.integers(0, len(DATA)), length=st.integers(0, 2 * FRAME_BYTES + 5))
def test_any_range_is_exactly_those_bytes(start: int, length: int) -> None:
    store = _SHARED
    stop = min(len(DATA), start + length)
    assert store.get("a.tar", ByteRange(start, stop)) == DATA[start:stop]


_SHARED = EncryptedStore(MemoryStore(), KEY)
_SHARED.put("a.tar", DATA)


@pytest.mark.parametrize("length", [0, 1, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 2 * FRAME_BYTES])
def test_lengths_around_a_frame_are_listed_and_read_right(memory_url: str, length: int) -> None:
    store = open_store(memory_url, storage_options={"encryption_key": KEY})
    put = store.put("x", DATA[:length])
    assert put == store.head("x") == next(store.list())
    assert (put.size, plain_size(sealed_size(length))) == (length, length)
    assert store.get("x") == DATA[:length]
    assert store.get("x", ByteRange(0, length), etag=put.etag) == DATA[:length]


def frame(number: int) -> slice:
    start = HEADER_BYTES + number * (FRAME_BYTES + TAG_BYTES)
    return slice(start, start + FRAME_BYTES + TAG_BYTES)


def exchange_frames(blob: bytearray) -> bytes:
    blob[frame(0)], blob[frame(1)] = blob[frame(1)], blob[frame(0)]
    return blob


def change(at: int) -> Callable[[bytearray], bytes]:
    def apply(blob: bytearray) -> bytes:
        blob[at] ^= 1
        return blob

    return apply


TAMPERED: dict[str, Callable[[bytearray], bytes | bytearray]] = {
    "a bit of a frame": change(HEADER_BYTES + 70_000),
    "a tag": change(frame(1).stop - 1),
    "frames exchanged": exchange_frames,
    "a frame repeated": lambda blob: blob[: frame(0).stop] + blob[frame(0)] + blob[frame(2).start :],
    "a frame left out": lambda blob: blob[: frame(1).start] + blob[frame(2).start :],
    "cut in a frame": lambda blob: blob[:-5],
    "cut at a frame": lambda blob: blob[: frame(2).stop],
    "cut to its header": lambda blob: blob[:HEADER_BYTES],
    "cut in its header": lambda blob: blob[:50],
    "empty": lambda blob: b"",
    "bytes appended": lambda blob: blob + bytes(20),
    "a frame appended": lambda blob: blob + blob[frame(0)],
    **{f"byte {at} of the header": change(at) for at in (0, 8, 10, 12, 16, 24, 56, 64, 80, 95)},
}


@pytest.mark.parametrize("how", TAMPERED)
def test_an_object_that_was_changed_is_refused(stored: tuple[EncryptedStore, MemoryStore], how: str) -> None:
    store, below = stored
    below.put("a.tar.penc", TAMPERED[how](bytearray(below.get("a.tar.penc"))))
    with pytest.raises(DecryptionError, match=r"a\.tar"):
        store.get("a.tar")
    if "appended" in how:  # no range reads what follows the content
        assert read_by_frames(store) == DATA
    else:
        with pytest.raises(StorageError, match=r"a\.tar"):
            read_by_frames(store)


def read_by_frames(store: EncryptedStore) -> bytes:
    ranges = [ByteRange(start, min(start + FRAME_BYTES, len(DATA))) for start in range(0, len(DATA), FRAME_BYTES)]
    return b"".join(store.get("a.tar", byte_range) for byte_range in ranges)


def test_frames_of_two_objects_can_not_be_mixed(stored: tuple[EncryptedStore, MemoryStore]) -> None:
    store, below = stored
    store.put("b.tar", DATA)
    one, other = bytearray(below.get("a.tar.penc")), bytes(below.get("b.tar.penc"))
    one[frame(1)] = other[frame(1)]
    below.put("a.tar.penc", one)
    with pytest.raises(DecryptionError, match="bytes 65,536 to 131,072 are not what was encrypted"):
        store.get("a.tar", ByteRange(FRAME_BYTES, FRAME_BYTES + 10))
    below.put("a.tar.penc", other)
    with pytest.raises(DecryptionError, match="written under another name"):
        store.get("a.tar")


def test_a_copy_of_the_folder_elsewhere_and_its_parent_read_the_same(memory_url: str) -> None:
    EncryptedStore(MemoryStore(memory_url + "/data"), KEY).put("train/a.tar", DATA)
    blob = MemoryStore(memory_url).get("data/train/a.tar.penc")
    MemoryStore(memory_url + "/copy").put("train/a.tar.penc", blob)
    MemoryStore(memory_url + "/copy").put("valid/a.tar.penc", blob)
    for url, key in [("", "data/train/a.tar"), ("/data/train", "a.tar"), ("/copy", "train/a.tar")]:
        assert EncryptedStore(MemoryStore(memory_url + url), KEY).get(key) == DATA
    with pytest.raises(DecryptionError, match="written under another name"):
        EncryptedStore(MemoryStore(memory_url + "/copy"), KEY).get("valid/a.tar")


@pytest.mark.slow
def test_another_key_is_an_error_that_says_so_and_shows_none(stored: tuple[EncryptedStore, MemoryStore]) -> None:
    store = EncryptedStore(stored[1], OTHER)
    with pytest.raises(DecryptionError, match=r"a\.tar: is encrypted with another key .* give the key") as error:
        store.get("a.tar")
    assert not any(secret in repr(error.getrepr()) for key in (KEY, OTHER) for secret in texts_of(key))


def texts_of(key: bytes) -> list[str]:
    return [key.hex(), base64.b64encode(key).decode(), base64.urlsafe_b64encode(key).decode(), repr(key)[2:-1]]


def test_what_is_not_encrypted_is_not_read(stored: tuple[EncryptedStore, MemoryStore]) -> None:
    store, below = stored
    below.put("plain.tar", DATA)
    below.put("forged.tar.penc", DATA)
    assert [info.key for info in store.list()] == ["a.tar", "forged.tar"]
    with pytest.raises(StorageError, match=r"no object .*plain\.tar"):
        store.get("plain.tar")
    with pytest.raises(DecryptionError, match="no encrypted object"):
        store.get("forged.tar")
    below.delete(["a.tar.penc", "forged.tar.penc"])
    with pytest.raises(DecryptionError, match=r"nothing there is encrypted \(plain\.tar is not\)"):
        store.list()


def test_the_cache_holds_what_is_encrypted_and_heals(memory_url: str, tmp_path: Path) -> None:
    options = {"encryption_key": KEY}
    store = open_store(memory_url, storage_options=options, cache_dir=tmp_path, cache_limit=1 << 24)
    assert repr(store).startswith("EncryptedStore(CacheStore(RetryStore(")
    etag = store.put("a.tar", DATA).etag
    assert store.get("a.tar", ByteRange(10, 80_000), etag=etag) == DATA[10:80_000]
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert len(kept) > 80_000
    assert DATA[1000:1064] not in kept
    assert isinstance(store, EncryptedStore)
    cache = store.inner
    assert isinstance(cache, CacheStore)
    wrong = ByteRange(HEADER_BYTES, HEADER_BYTES + 2 * (FRAME_BYTES + TAG_BYTES))
    cache._disk.write(cache._name("a.tar.penc", wrong, etag or ""), memoryview(bytes(len(wrong))))
    assert store.get("a.tar", ByteRange(10, 80_000), etag=etag) == DATA[10:80_000]
    store.close()


def test_every_range_of_several_heals_not_the_first_alone(memory_url: str, tmp_path: Path) -> None:
    options = {"encryption_key": KEY}
    store = open_store(memory_url, storage_options=options, cache_dir=tmp_path, cache_limit=1 << 24)
    etag = store.put("a.tar", DATA).etag
    ranges = [ByteRange(10, 20), ByteRange(80_000, 80_010)]
    expected = [DATA[10:20], DATA[80_000:80_010]]
    assert [bytes(view) for view in store.get_ranges("a.tar", ranges, etag=etag)] == expected
    assert isinstance(store, EncryptedStore)
    cache = store.inner
    assert isinstance(cache, CacheStore)
    for byte_range in ranges:
        wrong = sealed_range(byte_range, len(DATA))[0]
        cache._disk.write(cache._name("a.tar.penc", wrong, etag or ""), memoryview(bytes(len(wrong))))
    assert [bytes(view) for view in store.get_ranges("a.tar", ranges, etag=etag)] == expected
    store.close()


def test_one_more_request_a_shard_and_none_a_range(stored: tuple[EncryptedStore, MemoryStore]) -> None:
    store, below = stored
    etag = store.head("a.tar").etag
    before = len(below.calls)
    for start in range(0, 200_000, 20_000):
        store.get("a.tar", ByteRange(start, start + 10), etag=etag)
    assert len(below.calls) - before == 11


def _write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return f"file:{path}"


@pytest.mark.parametrize("form", ["hex", "base64", "urlsafe", "line end", "file of bytes", "file of text", "function"])
def test_a_key_is_found_wherever_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str) -> None:
    key = b"\xfb\xef\xbe" * 10 + b"\xff\xff"
    text = {"hex": key.hex(), "urlsafe": texts_of(key)[2], "line end": texts_of(key)[1] + "\n"}.get(
        form, texts_of(key)[1]
    )
    monkeypatch.setenv("PENSTOCK_ENCRYPTION_KEY", text)
    monkeypatch.setenv("ANOTHER", key.hex())
    source: Any = {
        "file of bytes": _write(tmp_path / "key", key),
        "file of text": _write(tmp_path / "text", text.encode() + b"\n"),
        "function": lambda: key,
    }.get(form, "env")
    below = MemoryStore()
    EncryptedStore(below, source).put("x", b"data")
    assert EncryptedStore(below, key).get("x") == b"data"
    assert EncryptedStore(below, "env:ANOTHER").get("x") == b"data"


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3I=", UnsupportedURLError, "no text of an option"),
        (b"too-short-a-secret", UnsupportedURLError, "needs 32 bytes"),
        (lambda: "too-short-a-secret", UnsupportedURLError, "what the function"),
        (7, UnsupportedURLError, "encryption_key is none"),
        ("env:MISSING", AccessDeniedError, "no MISSING"),
        ("env:SHORT", UnsupportedURLError, "environment's SHORT is no key"),
        ("file:/nowhere/key", AccessDeniedError, "No such file"),
        ("file:", UnsupportedURLError, "encryption_key is none"),
    ],
)
def test_what_is_no_key_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, source: Any, error: type[Exception], said: str
) -> None:
    monkeypatch.setenv("SHORT", "too-short-a-secret")
    with pytest.raises(error, match=said) as raised:
        open_store("mem://bucket", storage_options={"encryption_key": source})
    assert "secret-" not in str(raised.value)
    assert "c2Vj" not in str(raised.value)


def test_a_bare_client_refuses_a_key_that_it_would_not_use() -> None:
    with pytest.raises(UnsupportedURLError, match="encryption_key is an option of open_store"):
        open_client("mem://bucket", {"encryption_key": KEY})


def test_reprs_show_no_key_and_a_pickle_opens_the_same(stored: tuple[EncryptedStore, MemoryStore]) -> None:
    store = stored[0]
    copy = pickle.loads(pickle.dumps(store))
    assert copy.get("a.tar") == DATA
    shown = repr(store) + repr(vars(store)) + repr(store._open("a.tar", None))
    assert not [secret for secret in texts_of(KEY) if secret in shown.replace(repr(store._source), "")]


def test_a_store_over_the_environments_key_pickles_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ENCRYPTION_KEY", OTHER.hex())
    data = pickle.dumps(EncryptedStore(MemoryStore(), "env"))
    assert OTHER not in data
    assert OTHER.hex().encode() not in data


def test_conditional_writes_are_encrypted_too(stored: tuple[EncryptedStore, MemoryStore]) -> None:
    store, below = stored
    info = store.put_if("new", DATA, etag=None)
    assert isinstance(info, ObjectInfo)
    assert info.size == len(DATA)
    assert store.get("new") == DATA
    assert DATA[:64] not in bytes(below.get("new.penc"))
