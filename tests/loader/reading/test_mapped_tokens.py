"""Token files on a local disk are mapped: the same rows, and of a file that changes an error before a wrong one."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.loader import DistributedDataLoader, Mixture, Source, TokensFormat, open_manifest
from penstock.loader.counters import Counters
from penstock.loader.decoding.batch_memory import BatchMemory
from penstock.loader.decoding.decode import FieldDecoders
from penstock.loader.decoding.gather import gather
from penstock.loader.decoding.rows import Rows, RowsOfSpan, WideRows
from penstock.loader.formats.detect import make_format
from penstock.loader.order.spans import ChunkRows
from penstock.loader.reading import mapped as mapped_chunks
from penstock.loader.reading.chunk_source import ChunkSource
from penstock.storage import LocalStore, NotFoundError, ObjectChangedError
from penstock.storage.memory import libc, mapped

LENGTH, PER_FILE, FILES, BATCH = 512, 60, 3, 8
FORMAT = TokensFormat(seq_len=LENGTH, chunk_bytes=16 << 10)
pytestmark = pytest.mark.usefixtures("small_chunks_too")
Harm = Callable[[Path], object]


def write_file(path: Path, number: int) -> None:
    """Sequences of one number each: that of the sequence."""
    first = number * PER_FILE
    np.repeat(np.arange(first, first + PER_FILE, dtype=np.uint16), LENGTH).tofile(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if not mapped.can_map(tmp_path.stat().st_dev):
        pytest.skip(f"nothing is mapped of {mapped.kind_of_disk(tmp_path.stat().st_dev) or 'this file system'}")
    data = tmp_path / "data"
    data.mkdir()
    for number in range(FILES):
        write_file(data / f"{number}.bin", number)
    return data


def load(url: Any, **options: Any) -> DistributedDataLoader:
    settings: dict[str, Any] = {"batch_size": BATCH, "format": FORMAT, "seed": 3, "with_ids": True}
    return DistributedDataLoader(url, **{**settings, "rank": 0, "world_size": 1, **options})


def rows_of(batches: Any) -> list[tuple[int, bytes]]:
    """Sample ids and rows."""
    return [(int(i), row.tobytes()) for b in batches for i, row in zip(b["__id__"], b["tokens"].numpy(), strict=True)]


def is_right(batch: dict[str, Any]) -> bool:
    return bool((batch["tokens"] == batch["__id__"][:, None]).all())


@pytest.mark.parametrize("decode", ["auto", None])
@pytest.mark.parametrize(("dtype", "overlap"), [("uint16", 0), ("uint16", 1), ("int64", 1), ("uint8", 511)])
def test_rows_are_those_that_are_read_into_memory(
    folder: Path, maps: list[str], dtype: str, overlap: int, decode: str | None
) -> None:
    length = 1025 if dtype == "uint8" else LENGTH  # chunks that begin within a page, rows at any byte
    shape = TokensFormat(seq_len=length, dtype=dtype, overlap=overlap, chunk_bytes=9000)
    options: dict[str, Any] = {"format": shape, "decode": decode}
    with load(folder, **options) as loader:
        found = rows_of(loader) + rows_of(loader)
    assert set(maps) == {"0.bin", "1.bin", "2.bin"}
    maps.clear()
    with load(folder, **options, storage_options={"mapped_reads": False}) as loader:
        assert found == rows_of(loader) + rows_of(loader)
    assert not maps


def test_ranks_resumes_and_mixtures_read_the_same(folder: Path, maps: list[str]) -> None:
    rows: list[tuple[int, bytes]] = []
    for rank in range(2):
        loader = load(folder, rank=rank, world_size=2)
        batches = iter(loader)
        rows += rows_of([next(batches), next(batches)])
        state = loader.state_dict()
        loader.close()
        with load(folder, rank=rank, world_size=2) as resumed:
            resumed.load_state_dict(state)
            rows += rows_of(resumed)
    assert len({i for i, _ in rows}) == len(rows) == FILES * PER_FILE // (2 * BATCH) * 2 * BATCH
    assert all(row == np.full(LENGTH, i).tobytes() for i, row in rows)
    assert maps
    maps.clear()
    with load(Mixture({"a": Source(folder)}), with_ids=False) as mixture:
        for batch in mixture:
            assert (batch["tokens"] == batch["tokens"][:, :1]).all()
    assert maps


@pytest.mark.parametrize("options", [{"max_bad_chunks": 2}, {"on_error": "skip"}, {"on_error": "replace"}])
def test_nothing_is_mapped_that_may_be_left_out(folder: Path, maps: list[str], options: dict[str, Any]) -> None:
    with load(folder, **options) as loader:
        assert all(map(is_right, loader))
    assert not maps


def test_narrow_rows_are_read(folder: Path, maps: list[str]) -> None:
    with load(folder, format=TokensFormat(seq_len=LENGTH // 2, chunk_bytes=16 << 10)) as loader:
        assert len(list(loader)) == 2 * FILES * PER_FILE // BATCH
    assert len(maps) <= 8  # by the threads that had begun when the first one was opened


@pytest.fixture
def source(folder: Path) -> ChunkSource:
    manifest = open_manifest(folder, format=FORMAT, progress=False)
    shard_format = make_format(manifest.format, manifest.config)
    return ChunkSource(manifest, shard_format, LocalStore(folder), None, Counters(), maps_files=True)


@pytest.fixture
def gathered(source: ChunkSource, maps: list[str]) -> Rows:
    """Rows of all files, not yet copied."""
    manifest = source.manifest
    picked = [(number, np.array([0, 2])) for number in range(manifest.num_chunks)]
    groups = [
        (ChunkRows(number, rows, np.arange(2 * number, 2 * number + 2)), source.load(number)) for number, rows in picked
    ]
    decoders, memory = FieldDecoders("auto"), BatchMemory(1 << 20)
    rows = gather(groups, 2 * len(groups), manifest.first_ids, decoders, memory=memory)
    assert set(maps) == {"0.bin", "1.bin", "2.bin"}
    return rows


@pytest.mark.parametrize(("least_bytes", "is_mapped"), [(1, True), (64 << 10, False)])
def test_files_of_which_little_is_copied_at_once_are_read_after_some_time(
    source: ChunkSource,
    gathered: Rows,
    maps: list[str],
    monkeypatch: pytest.MonkeyPatch,
    least_bytes: int,
    is_mapped: bool,
) -> None:
    monkeypatch.setattr("penstock.loader.decoding.rows._LEAST_LOOK_BYTES", least_bytes)
    for _ in range(mapped_chunks._TRIALS):
        gathered.complete()
    maps.clear()
    assert source.load(0).samples
    assert bool(maps) == is_mapped


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1024)
        file.write(b"other")
    os.utime(path, ns=(1, 1))


def replace(path: Path) -> None:
    other = path.parent.with_name("other")
    write_file(other, 7)
    other.replace(path)


HARMS: list[tuple[Harm, type[Exception]]] = [
    (rewrite, ObjectChangedError),
    (lambda path: os.truncate(path, 10), ObjectChangedError),
    (replace, ObjectChangedError),
    (Path.unlink, NotFoundError),
]


@pytest.mark.parametrize(("harm", "error"), HARMS)
def test_a_file_that_changes_before_its_rows_are_copied_is_an_error(
    folder: Path, gathered: Rows, harm: Harm, error: type[Exception]
) -> None:
    in_others = np.flatnonzero(gathered.ids >= PER_FILE).tolist()
    tokens: Any = gathered.complete().fields["tokens"]
    assert tokens.tolist() == np.repeat(gathered.ids[:, None], LENGTH, axis=1).tolist()
    harm(folder / "0.bin")
    with pytest.raises(error, match=r"0\.bin"):
        gathered.complete()
    assert len(gathered.pick(in_others).complete().ids) == len(in_others)  # nobody asks for a file without rows in it


def test_what_is_written_while_rows_are_copied_is_found(
    folder: Path, gathered: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = WideRows.make

    def write_and_make(self: WideRows, memory: BatchMemory | None) -> Any:
        rewrite(folder / "1.bin")
        return make(self, memory)

    monkeypatch.setattr(WideRows, "make", write_and_make)
    with pytest.raises(ObjectChangedError, match=r"1\.bin has changed"):
        gathered.complete()


def test_a_run_whose_files_are_rewritten_ends_with_an_error_and_no_wrong_row(folder: Path) -> None:
    with load(folder) as loader:
        assert is_right(next(iter(loader)))
        for number in range(FILES):
            rewrite(folder / f"{number}.bin")
        with pytest.raises(ObjectChangedError, match=r"\.bin has changed"):  # noqa: PT012
            for _ in range(50):  # epochs: some batches were made before
                assert all(map(is_right, loader))


def test_batches_before_the_one_that_needs_the_changed_file_are_delivered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = LocalStore.check_unchanged

    def check_all_but_the_last(self: LocalStore, key: str, etag: str) -> None:
        if key == "2.bin":
            raise ObjectChangedError("2.bin has changed")
        check(self, key, etag)

    monkeypatch.setattr(LocalStore, "check_unchanged", check_all_but_the_last)
    seen: list[int] = []
    loader = load(folder, shuffle=False, batch_size=4)
    with loader, pytest.raises(ObjectChangedError, match=r"2\.bin"):  # noqa: PT012
        for batch in loader:
            assert is_right(batch)
            seen += batch["__id__"].tolist()
    assert seen == list(range(2 * PER_FILE))


def test_batches_that_are_kept_outlive_the_mappings_and_the_files(folder: Path) -> None:
    with load(folder) as loader:
        kept = list(loader)
        assert str(folder) in Path("/proc/self/maps").read_text()
    del loader
    gc.collect()
    assert str(folder) not in Path("/proc/self/maps").read_text()
    for number in range(FILES):
        os.truncate(folder / f"{number}.bin", 0)
    assert all(map(is_right, kept))


def test_nothing_between_chunks_is_read() -> None:
    if not libc.HAS_PAGE_CALLS:
        pytest.skip("no C library whose calls are known")
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 5 * page)
    values = np.frombuffer(memory, np.uint16)
    values[:] = np.arange(len(values))
    chunks = [values[start : start + page // 2].reshape(2, -1) for start in (0, page, 2 * page)]  # pages 0, 2 and 4
    of_span = RowsOfSpan(chunks[0], 6)
    for number in (2, 0, 1):
        of_span.add(chunks[number], ChunkRows(number, np.array([1, 0]), np.array([2 * number, 2 * number + 1])))
    expected = [chunk[row].tolist() for chunk in chunks for row in (1, 0)]
    gaps = [values.__array_interface__["data"][0] + number * page for number in (1, 3)]
    assert [protect(gap, page, 0) for gap in gaps] == [0, 0]  # whoever reads there now ends with a signal
    made = WideRows("tokens", of_span.finish(), np.dtype(np.int64)).make(None)["tokens"]
    assert [protect(gap, page, mmap.PROT_READ | mmap.PROT_WRITE) for gap in gaps] == [0, 0]
    assert made.tolist() == expected
