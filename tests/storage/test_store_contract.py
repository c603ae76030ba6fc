"""Every store keeps one contract: the same tests on all of them, alone and under retry and cache."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from penstock.storage import (
    ByteRange,
    CacheStore,
    EncryptedStore,
    NotFoundError,
    ObjectChangedError,
    ObjectInfo,
    RetryConfig,
    RetryStore,
    ShortReadError,
    StorageError,
    Store,
    open_client,
)

DATA = bytes(range(256)) * 40
PATIENCE = RetryConfig(deadline_s=2, first_delay_s=0.01)


def _open_local(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return (request.getfixturevalue("tmp_path") / "root").as_uri(), {}


def _open_memory(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.getfixturevalue("memory_url") + "/some/prefix", {}


def _open_fsspec(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return f"memory://{uuid4().hex}/prefix", {}


def _open_nginx(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return f"{request.getfixturevalue('nginx_url')}/{uuid4().hex}", {}


def _open_python(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return f"{request.getfixturevalue('python_url')}/{uuid4().hex}", {}


def _open_with_headers(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return _open_nginx(request)[0], {"default_headers": {"x-api-key": "secret-of-the-tests"}}


def _open_s3(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    url, options = request.getfixturevalue("s3_url")
    return url + "/pre fix", options


def _open_s3_by_obstore(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    url, options = _open_s3(request)
    return url, {**options, "direct_reads": False}


ROOTS: dict[str, Callable[[pytest.FixtureRequest], tuple[str, dict[str, Any]]]] = {
    "local": _open_local,
    "memory": _open_memory,
    "fsspec": _open_fsspec,
    "http (nginx)": _open_nginx,
    "http (python)": _open_python,
    "http (headers)": _open_with_headers,
    "s3": _open_s3,
    "s3 (obstore)": _open_s3_by_obstore,
}


# Each request to a server costs milliseconds, so these are not run in every wrapping.
IN_PROCESS = {"local", "memory", "fsspec"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "store" in metafunc.fixturenames:
        kinds = [
            (root, wrap)
            for root in ROOTS
            for wrap in ("bare", "retry", "cache", "cache over retry", "encryption", "encryption over cache")
            if root in IN_PROCESS
            or wrap == "bare"
            or (wrap == "cache over retry" and root not in {"http (headers)", "s3 (obstore)"})
            or (wrap == "encryption over cache" and root == "s3")
        ]
        metafunc.parametrize(
            "kind",
            [pytest.param(kind, marks=[pytest.mark.s3] if kind[0].startswith("s3") else []) for kind in kinds],
            ids=[" ".join(kind) for kind in kinds],
        )


@pytest.fixture
def store(kind: tuple[str, str], request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    root, wrap = kind
    url, options = ROOTS[root](request)
    built: Store = open_client(url, options)
    if "retry" in wrap:
        built = RetryStore(built, PATIENCE)
    if "cache" in wrap:
        built = CacheStore(built, tmp_path / "cache", 10_000_000)
    if "encryption" in wrap:
        built = EncryptedStore(built, bytes(range(32)))
    yield built
    built.close()


def test_an_object_put_is_read_back_whole_and_described_the_same_everywhere(store: Store) -> None:
    put = store.put("train/a.tar", DATA)
    assert put == store.head("train/a.tar") == next(store.list())
    assert (put.key, put.size) == ("train/a.tar", len(DATA))
    assert put.etag
    assert store.get("train/a.tar") == DATA


def view_of_doubles(data: bytes) -> memoryview:
    return memoryview(data).cast("d")


def test_put_takes_any_kind_of_bytes(store: Store) -> None:
    for number, wrap in enumerate((bytes, bytearray, memoryview, view_of_doubles)):
        data = DATA[: len(DATA) // 8 * 8]
        assert store.put(f"x{number}", wrap(data)).size == len(data)
        assert store.get(f"x{number}") == data


def test_reads_are_read_only_contiguous_bytes(store: Store) -> None:
    store.put("x", DATA)
    views = [
        store.get("x"),
        store.get("x", ByteRange(3, 9)),
        *store.get_ranges("x", [ByteRange(1, 5), ByteRange(2, 3)]),
    ]
    for view in views:
        assert isinstance(view, memoryview)
        assert (view.format, view.ndim, view.readonly, view.contiguous) == ("B", 1, True, True)


def test_a_range_is_exactly_those_bytes(store: Store) -> None:
    etag = store.put("x", DATA).etag
    for start, stop in ((0, 1), (0, 10240), (100, 101), (10239, 10240), (77, 5000)):
        assert store.get("x", ByteRange(start, stop)) == DATA[start:stop]
        assert store.get("x", ByteRange(start, stop), etag=etag) == DATA[start:stop]


def test_an_empty_range_is_empty_but_the_object_must_be_there(store: Store) -> None:
    store.put("x", DATA)
    assert store.get("x", ByteRange(7, 7)) == b""
    assert store.get("x", ByteRange(len(DATA), len(DATA))) == b""
    with pytest.raises(NotFoundError):
        store.get("y", ByteRange(7, 7))


def test_an_empty_object_is_an_object(store: Store) -> None:
    assert store.put("empty", b"").size == 0
    assert store.get("empty") == b""
    assert store.head("empty").size == 0
    assert [info.size for info in store.list()] == [0]


def test_several_ranges_come_in_the_order_asked_for(store: Store) -> None:
    etag = store.put("x", DATA).etag
    ranges = [ByteRange(5000, 5100), ByteRange(0, 10), ByteRange(5, 5), ByteRange(5, 20), ByteRange(0, 10)]
    for _ in range(2):
        assert store.get_ranges("x", ranges, etag=etag) == [DATA[r.start : r.stop] for r in ranges]
    assert store.get_ranges("x", []) == []


@pytest.mark.parametrize("byte_range", [ByteRange(10000, 10241), ByteRange(20000, 20001)])
def test_a_range_past_the_end_is_a_lasting_error_that_names_it(store: Store, byte_range: ByteRange) -> None:
    store.put("x", DATA)
    with pytest.raises(ShortReadError, match=rf"x\[{byte_range.start}:{byte_range.stop}\]") as caught:
        store.get("x", byte_range)
    assert not caught.value.transient
    with pytest.raises(ShortReadError):
        store.get_ranges("x", [ByteRange(0, 1), byte_range])


def test_no_such_key_is_an_error_that_names_store_and_key(store: Store) -> None:
    store.put("x", DATA)
    for ask in (store.get, store.head):
        with pytest.raises(NotFoundError) as caught:
            ask("train/none.tar")
        assert store.url in str(caught.value)
        assert "train/none.tar" in str(caught.value)


def test_a_folder_is_no_object(store: Store) -> None:
    if store.url.startswith("http"):
        pytest.skip("a web server answers for a folder as it likes, most with a page")
    store.put("folder/x", DATA)
    with pytest.raises(StorageError):
        store.head("folder")


def test_another_version_is_refused_under_the_old_etag(store: Store) -> None:
    old = store.put("x", DATA)
    assert store.get("x", ByteRange(0, 9), etag=old.etag) == DATA[:9]
    new = store.put("x", DATA[::-1] + b"more")
    assert new.etag != old.etag
    # A cache below encryption has the frame around the bytes that were read.
    cached = isinstance(store, EncryptedStore) and isinstance(store.inner, CacheStore)
    for byte_range in (None, ByteRange(3, 3)) if cached else (None, ByteRange(0, 8), ByteRange(3, 3)):
        with pytest.raises(ObjectChangedError, match="x"):
            store.get("x", byte_range, etag=old.etag)
    if not cached:
        with pytest.raises(ObjectChangedError):
            store.get_ranges("x", [ByteRange(0, 8)], etag=old.etag)
    assert store.get("x", ByteRange(0, 8), etag=new.etag) == DATA[::-1][:8]
    assert store.get("x") == DATA[::-1] + b"more"


def test_a_listing_is_every_key_with_the_prefix_at_any_depth_in_order_of_code_points(store: Store) -> None:
    keys = ["a-b", "a/b", "a/b/c.tar", "a0", "b", "a/ü", "a/Z", "a/b2/x/y/z"]
    for key in [key for key in keys if key != "a/b"]:
        store.put(key, key.encode())
    expected = sorted(key for key in keys if key != "a/b")
    assert [info.key for info in store.list()] == expected
    for prefix in ("a", "a/", "a/b", "a/b/", "a/b2/x/y", "zzz", "a/zzz", "none/at/all"):
        assert [info.key for info in store.list(prefix)] == [key for key in expected if key.startswith(prefix)], prefix
    for info in store.list("a/"):
        assert info == store.head(info.key) == ObjectInfo(info.key, len(info.key.encode()), info.etag)


def test_a_key_may_have_any_character(store: Store) -> None:
    keys = {"sp ace", "ünï/cødé", "a+b=c&d", "per%41cent", "hash#mark", "q?x=1", "~t!*'()", "日本"}
    for key in keys:
        store.put(key, key.encode())
    for key in keys:
        assert store.get(key) == key.encode()
    assert {info.key for info in store.list()} == keys


def test_a_key_can_not_leave_the_root(store: Store) -> None:
    for key in ("", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", "a/./b", "..", "nul\0"):
        for ask in (
            store.get,
            store.head,
            lambda key: store.put(key, b"x"),
            lambda key: store.delete([key]),
            lambda key: store.get_ranges(key, [ByteRange(0, 1)]),
        ):
            with pytest.raises(StorageError, match="is no key below"):
                ask(key)


def test_a_conditional_write_succeeds_only_on_what_its_writer_saw(store: Store) -> None:
    if store.url.startswith("http"):
        with pytest.raises(StorageError, match="no conditional writes"):
            store.put_if("lock", b"mine", etag=None)
        return
    first = store.put_if("lock", b"mine", etag=None)
    assert first == store.head("lock")
    for etag in (None, "another", "0" * 32):
        with pytest.raises(ObjectChangedError, match="lock"):
            store.put_if("lock", b"theirs", etag=etag)
    assert store.get("lock") == b"mine"
    second = store.put_if("lock", b"mine still", etag=first.etag)
    with pytest.raises(ObjectChangedError, match="lock"):
        store.put_if("lock", b"theirs", etag=first.etag)
    assert store.get("lock", etag=second.etag) == b"mine still"
    store.delete(["lock"])
    with pytest.raises(ObjectChangedError, match="lock"):
        store.put_if("lock", b"theirs", etag=second.etag)
    assert list(store.list()) == []


def test_of_many_conditional_writers_one_succeeds(store: Store) -> None:
    if store.url.startswith(("http", "memory://")):
        pytest.skip("no conditional writes, or a check and then a write")
    start, won = threading.Barrier(6), []

    def write(number: int) -> None:
        start.wait()
        try:
            store.put_if("lock", str(number).encode(), etag=None)
        except ObjectChangedError:
            return
        won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(number).encode() for number in won] == [bytes(store.get("lock"))]


def test_deleted_objects_are_gone_and_deleting_what_is_not_there_is_no_error(store: Store) -> None:
    for key in ("a/x", "a/ü y", "b"):
        store.put(key, DATA)
    store.delete(["a/x", "none", "a/ü y"])
    store.delete(["a/x"])
    store.delete([])
    assert [info.key for info in store.list()] == ["b"]
    with pytest.raises(NotFoundError):
        store.head("a/x")


def test_many_threads_read_one_store_at_once(store: Store) -> None:
    etag = store.put("x", DATA).etag
    wrong: list[BaseException] = []

    def read(offset: int) -> None:
        try:
            for start in range(offset, 3000, 517):
                assert store.get("x", ByteRange(start, start + 1000), etag=etag) == DATA[start : start + 1000]
        except BaseException as exc:  # noqa: BLE001 - reported below
            wrong.append(exc)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_store_survives_pickling_for_a_worker(store: Store) -> None:
    store.put("x", DATA)
    if "mem://anonymous" in store.url:
        pytest.skip("nobody else sees an anonymous bucket")
    copy = pickle.loads(pickle.dumps(store))
    try:
        assert type(copy) is type(store)
        assert copy.url == store.url
        assert copy.get("x") == DATA
    finally:
        copy.close()


def test_closing_twice_is_allowed(store: Store) -> None:
    store.put("x", DATA)
    store.get("x")
    store.close()
    store.close()


def test_every_store_is_a_store(store: Store) -> None:
    assert isinstance(store, Store)
