"""Parts of files are mapped where that is safe: they are what a read gives, and errors are told in words."""

from __future__ import annotations

import gc
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.storage import (
    ByteRange,
    LocalStore,
    NotFoundError,
    ObjectChangedError,
    StoreUnavailableError,
    UnsupportedURLError,
    open_store,
)
from penstock.storage.memory import libc, mapped
from penstock.storage.memory.file_maps import FileMaps
from penstock.storage.options import MappedReads

SIZE = 3 * 4096 + 100
DATA = bytes(number % 251 for number in range(SIZE))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mapped")
    (path / "x.tar").write_bytes(DATA)
    if not mapped.can_map(path.stat().st_dev):
        pytest.skip(f"nothing is mapped of {mapped.kind_of_disk(path.stat().st_dev) or 'this file system'}")
    return path


def etag_of(store: LocalStore, key: str = "x.tar") -> str:
    found = store.head(key).etag
    assert found is not None
    return found


def mappings_of(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


@given(bounds=st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE)).filter(lambda bounds: bounds[0] < bounds[1]))
def test_any_range_is_that_of_a_read(folder: Path, bounds: tuple[int, int]) -> None:
    store = LocalStore(folder)
    found = store.map("x.tar", ByteRange(*bounds), etag=etag_of(store))
    assert found == DATA[slice(*bounds)]
    assert found is not None
    assert found.readonly
    assert found.format == "B"


def test_it_is_mapped_while_the_finalizer_of_a_cycle_looks_at_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unmapped: list[tuple[int, int]] = []
    seen: list[tuple[int, bytes]] = []
    unmap = libc.unmap_pages
    monkeypatch.setattr(libc, "unmap_pages", lambda *pages: unmapped.append(pages))

    class Cycle:
        def __init__(self) -> None:
            store = LocalStore(folder)
            self.view, self.itself = store.map("x.tar", ByteRange(0, SIZE), etag=etag_of(store)), self

        def __del__(self) -> None:
            seen.append((len(unmapped), bytes(self.view[:9])))

    Cycle()
    gc.collect()
    assert (seen, len(unmapped)) == ([(0, DATA[:9])], 1)
    unmap(*unmapped[0])


@pytest.mark.parametrize("maps", [True, "views"])
def test_it_is_unmapped_when_the_last_view_of_it_is_gone(folder: Path, maps: MappedReads) -> None:
    store = LocalStore(folder, maps=maps)
    path = folder / "x.tar"
    before = mappings_of(path)
    whole = store.map("x.tar", ByteRange(10, SIZE), etag=etag_of(store))
    assert whole is not None
    kept = whole[5000:5010]
    del whole
    gc.collect()
    store.close()  # else parts of files are kept for whoever asks for them again
    assert mappings_of(path) == before + 1
    assert kept == DATA[5010:5020]
    del kept
    gc.collect()
    assert mappings_of(path) == before


def test_a_file_that_changed_is_neither_mapped_nor_taken_for_the_same(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(DATA)
    store = LocalStore(tmp_path)
    etag = etag_of(store)
    store.check_unchanged("x.tar", etag)
    assert store.map("x.tar", ByteRange(0, SIZE), etag=etag) == DATA
    os.truncate(path, 100)
    for look in (lambda: store.check_unchanged("x.tar", etag), lambda: store.map("x.tar", ByteRange(0, 9), etag=etag)):
        with pytest.raises(ObjectChangedError, match=r"x\.tar has changed"):
            look()
    path.unlink()
    with pytest.raises(NotFoundError, match=r"x\.tar"):
        store.check_unchanged("x.tar", etag)


def test_pages_behind_a_file_s_end_are_an_error_and_no_signal(folder: Path) -> None:
    with (folder / "x.tar").open("rb") as file, pytest.raises(OSError, match="Bad address"):
        mapped.map_range(file.fileno(), 0, SIZE + 3 * 4096)


def test_a_disk_that_fails_is_told_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(folder)
    more = SIZE + 9 * 4096
    map_part = FileMaps.map
    monkeypatch.setattr(FileMaps, "map", lambda maps, fd, identity, *_: map_part(maps, fd, identity, more, 0, more))
    with pytest.raises(StoreUnavailableError, match=r"x\.tar: the disk or network file system failed"):
        store.map("x.tar", ByteRange(0, SIZE), etag=etag_of(store))


def test_nothing_is_mapped_where_that_is_unsafe_or_unwanted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(folder)

    def is_mapped(store: LocalStore) -> bool:
        return store.map("x.tar", ByteRange(0, SIZE), etag=etag_of(store)) is not None

    assert is_mapped(store)
    unwanted = open_store(folder, storage_options={"mapped_reads": False})
    assert isinstance(unwanted, LocalStore)
    assert not is_mapped(unwanted)
    assert not is_mapped(pickle.loads(pickle.dumps(unwanted)))
    assert is_mapped(pickle.loads(pickle.dumps(store)))
    with monkeypatch.context() as patched:  # a kernel before 5.14
        patched.setattr(libc, "_POPULATE_READ", 9999)
        assert not is_mapped(store)
    for kind in ("nfs4", "fuse.s3fs", ""):
        monkeypatch.setattr(mapped, "_kinds", dict.fromkeys([folder.stat().st_dev], kind))
        assert not is_mapped(store)


@pytest.mark.parametrize(
    ("url", "options", "problem"),
    [
        ("/data", {"mapped_reads": "no"}, "must be True, False or 'views'"),
        ("/data", {"mapped_reads": True, "region": "eu"}, r"takes 'mapped_reads' alone, got \['region'\]"),
        ("mem://a/b", {"mapped_reads": True}, r"takes no storage_options, got \['mapped_reads'\]"),
    ],
)
def test_options_that_do_not_fit_are_refused(url: str, options: dict[str, object], problem: str) -> None:
    with pytest.raises(UnsupportedURLError, match=problem):
        open_store(url, storage_options=options)
