"""TarFormat: chunks of whole samples, selected columns, headers in every notation, and clear words on damage."""

from __future__ import annotations

import io
import os
import tarfile
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from folder_store import FolderStore, open_all, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from made_archives import END, GOOD, header, index, member, read

from penstock.loader.columns import BytesColumn
from penstock.loader.errors import ConfigError
from penstock.loader.formats.shard import ChunkRef, ShardTask, cut_samples
from penstock.loader.formats.tar.blocks import BLOCK, NotProvenError, jump_headers
from penstock.loader.formats.tar.census import take_census
from penstock.loader.formats.tar.format import TarFormat
from penstock.loader.formats.tar.headers import read_members
from penstock.loader.formats.windows import WINDOW_BYTES, ShardWindows
from penstock.storage import ObjectInfo


def test_chunks_hold_whole_samples_and_follow_each_other(tmp_path: Path) -> None:
    data = b"".join(member(f"{i:03}.{field}", bytes(900)) for i in range(50) for field in ("a", "b")) + END
    spans = index(tmp_path, data, form=TarFormat(chunk_bytes=10_000)).chunks
    assert [span.samples for span in spans] == [3] * 16 + [2]
    assert all(span.length <= 10_000 and span.memory == span.length for span in spans)
    assert all(one.offset + one.length <= two.offset for one, two in pairwise(spans))


def test_a_sample_longer_than_a_chunk_is_a_chunk_of_its_own() -> None:
    starts, stops = np.array([0, 10, 500, 510]), np.array([10, 500, 510, 520])
    assert [(c.offset, c.length, c.samples) for c in cut_samples(starts, stops, 100)] == [
        (0, 10, 1),
        (10, 490, 1),
        (500, 20, 2),
    ]


def test_only_chosen_columns_come_and_the_key_always(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(member("k.jpg", b"j") + member("k.cls", b"7") + END)
    [block] = open_all(FolderStore(tmp_path), TarFormat(), ["cls"])
    assert rows_of(block) == [{"__key__": "k", "cls": b"7"}]


def test_an_unknown_column_is_refused_with_the_ones_there_are(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(member("k.jpg", b"j") + member("k.cls", b"7") + END)
    with pytest.raises(ConfigError, match=r"no \['png'\]; it has \['__key__', 'cls', 'jpg'\]"):
        open_all(FolderStore(tmp_path), TarFormat(), ["png"])


def test_a_field_that_a_sample_or_a_whole_shard_lacks_is_missing_there(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(member("1.x", b"x") + member("1.y", b"") + member("2.x", b"z") + END)
    (tmp_path / "b.tar").write_bytes(member("3.z", b"z") + END)
    first, second = open_all(FolderStore(tmp_path), TarFormat())
    assert set(first.columns) == set(second.columns) == {"__key__", "x", "y", "z"}
    assert rows_of(first) == [{"__key__": "1", "x": b"x", "y": b""}, {"__key__": "2", "x": b"z"}]
    column = second.columns["x"]
    assert isinstance(column, BytesColumn)
    assert column.starts.tolist() == [-1]


def test_large_values_are_views_of_the_chunk_and_small_ones_lie_side_by_side(tmp_path: Path) -> None:
    large = bytes(range(256)) * 4
    chunk = memoryview(
        member("1.x", large)
        + member("1.y", b"1")
        + member("2.x", b"")
        + member("3.x", large)
        + member("3.y", b"34")
        + END
    )
    ref = ChunkRef(ObjectInfo("s.tar", len(chunk)), 0, len(chunk), 3, 0)
    block = TarFormat().open_chunk(ref, None, [chunk], None, {"fields": ["x", "y"]})
    x, y = block.columns["x"], block.columns["y"]
    assert isinstance(x, BytesColumn)
    assert isinstance(y, BytesColumn)
    assert x.buffer is chunk
    assert bytes(y.buffer) == b"134"
    rows = np.array([2, 0, 1])
    assert x.take(rows) == [large, large, b""]
    assert y.take(rows) == [b"34", b"1", None]
    assert [None if view is None else bytes(view) for view in y.copies(rows)] == [b"34", b"1", None]


@pytest.mark.parametrize(
    "size",
    [b"00000000003\0", b"00000000003 ", b"         3 \0", b"3\0\0\0\0\0\0\0\0\0\0\0", b"\x80" + bytes(10) + b"\x03"],
)
@pytest.mark.parametrize("magic", [b"ustar\x0000", b"ustar  \0", b""])
def test_sizes_in_every_notation_and_headers_without_magic_are_read(tmp_path: Path, size: bytes, magic: bytes) -> None:
    data = header("a.x", size, magic=magic) + b"abc".ljust(BLOCK, b"\0") + member("b.x", b"d", magic=magic) + END
    assert [row["x"] for row in read(tmp_path, data)] == [b"abc", b"d"]


@pytest.mark.parametrize("notation", [b"%06o\0 ", b"%07o\0"])
def test_the_usual_headers_are_read_all_at_once(notation: bytes) -> None:
    def rewritten(block: bytes) -> bytes:
        blank = block[:148] + b" " * 8 + block[156:]
        return block[:148] + notation % sum(blank) + block[156:]

    run = b"".join(rewritten(header(f"{i}.x", 600)) + b"x" * 1024 for i in range(5))
    assert jump_headers(memoryview(run)).sizes.tolist() == [600] * 5
    with pytest.raises(NotProvenError):
        jump_headers(memoryview(run.replace(b"3.x", b"4.x")))


def test_archives_inside_the_archive_are_data(tmp_path: Path) -> None:
    inner = member("in.x", b"1") + member("in.y", b"2") + END
    data = member("a.tar", inner) + member("b.tar", inner) + END
    assert [row["tar"] for row in read(tmp_path, data)] == [inner, inner]


def test_a_pax_size_beats_the_header_and_reaches_beyond_8_gib() -> None:
    def pax(record: bytes) -> bytes:
        return member("x", b"%d %s\n" % (len(record) + 4, record), kind=b"x")

    huge = 9 << 30
    run = pax(b"size=%d" % huge) + header("a.x", 0)
    table = read_members(memoryview(run), "s", 0, whole=False)
    assert (table.sizes.tolist(), table.resume) == ([huge], 3 * BLOCK + huge)
    base256 = header("a.x", b"\x80" + huge.to_bytes(11, "big"))
    assert read_members(memoryview(base256), "s", 0, whole=False).sizes.tolist() == [huge]


def test_leftovers_after_the_name_are_no_part_of_it(tmp_path: Path) -> None:
    block = bytearray(header("a.x", 1))
    block[10:20] = b"leftovers!"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    assert read(tmp_path, bytes(block) + b"1".ljust(BLOCK, b"\0") + END) == [{"__key__": "a", "x": b"1"}]


def test_a_name_that_is_no_utf8_has_its_bytes_spelled_out(tmp_path: Path) -> None:
    block = member("a.x", b"1").replace(b"a.x", b"\xe9.x", 1)
    fixed = bytearray(block)
    fixed[148:156] = b" " * 8
    fixed[148:156] = b"%06o\0 " % sum(fixed[:BLOCK])
    assert read(tmp_path, bytes(fixed) + END)[0]["__key__"] == "\\xe9"


def test_an_archive_without_end_mark_is_read_to_its_last_member(tmp_path: Path) -> None:
    padded = member("a.x", b"1") + member("b.x", b"22")
    assert [row["x"] for row in read(tmp_path, padded)] == [b"1", b"22"]


def test_an_archive_of_nothing_but_an_end_mark_has_no_chunks(tmp_path: Path) -> None:
    assert index(tmp_path, END).chunks == []


def write_large(folder: Path, sizes: list[int]) -> FolderStore:
    with (folder / "big.tar").open("wb") as file:
        for i, size in enumerate(sizes):
            file.write(header(f"{i:04}.bin", size))
            file.seek(size + -size % BLOCK, os.SEEK_CUR)
            file.write(member(f"{i:04}.json", b"{}"))
        file.write(END)
    return FolderStore(folder)


def test_large_members_are_hopped_over(tmp_path: Path) -> None:
    store = write_large(tmp_path, [200 << 20] * 5)
    spans = TarFormat().index_shard(store, ShardTask(store.head("big.tar"))).chunks
    assert [span.samples for span in spans] == [1] * 5
    assert sum(stop - start for _, start, stop in store.reads) < 4 * WINDOW_BYTES + 2 * WINDOW_BYTES


def test_a_shard_of_many_windows_is_cut_as_one_window_would_cut_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    store = write_large(tmp_path, rng.integers(0, 200_000, 300).tolist())
    info = store.head("big.tar")
    assert info.size > 6 * WINDOW_BYTES
    spans = TarFormat().index_shard(store, ShardTask(info)).chunks
    assert sum(stop - start for _, start, stop in store.reads) == info.size
    table = read_members(store.get("big.tar"), "big.tar", 0, whole=True)
    expected = cut_samples(table.records[::2], (table.starts + table.sizes)[1::2], 4 << 20)
    assert list(spans) == expected


@pytest.mark.parametrize("window_bytes", [1024, 1536, 4096])
def test_records_that_windows_cut_are_read_whole(tmp_path: Path, window_bytes: int) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for i in range(40):
            info = tarfile.TarInfo(f"{'é' * 60}/{i:03}.bin")
            info.size, info.mtime = 37 * i, 0.5
            tar.addfile(info, io.BytesIO(bytes(info.size)))
    (tmp_path / "s.tar").write_bytes(out.getvalue())
    store = FolderStore(tmp_path)
    with ShardWindows(store, store.head("s.tar"), window_bytes) as windows:
        small = take_census(windows, "s.tar")
    with ShardWindows(store, store.head("s.tar")) as windows:
        large = take_census(windows, "s.tar")
    assert small.starts.tolist() == large.starts.tolist()
    assert small.stops.tolist() == large.stops.tolist()
    assert len(small.starts) == 40


def test_closing_windows_in_the_middle_leaves_no_thread(tmp_path: Path) -> None:
    store = write_large(tmp_path, [1 << 20] * 40)
    before = threading.active_count()
    with ShardWindows(store, store.head("big.tar")) as windows:
        windows.read(0)
        windows.read(WINDOW_BYTES)
        assert threading.active_count() > before
    assert threading.active_count() == before


def test_small_shards_are_indexed_with_one_request(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(GOOD + END)
    store = FolderStore(tmp_path)
    TarFormat().index_shard(store, ShardTask(store.head("s.tar")))
    assert store.reads == [("s.tar", 0, len(GOOD + END))]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.text("ab.é/", min_size=1, max_size=130), st.integers(0, 1500)), min_size=1, max_size=10),
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_headers_read_as_tarfile_reads_them(members: list[tuple[str, int]], dialect: int) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=dialect) as tar:
        for name, size in members:
            info = tarfile.TarInfo(name)
            info.size = size
            try:
                tar.addfile(info, io.BytesIO(bytes(size)))
            except ValueError:  # a name that USTAR cannot hold
                continue
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as tar:
        expected = [(info.name, info.offset, info.offset_data, info.size) for info in tar if info.isreg()]
    table = read_members(memoryview(out.getvalue()), "s.tar", 0, whole=True)
    names = [row.tobytes().split(b"\0")[0].decode() for row in table.names]
    assert (
        list(zip(names, table.records.tolist(), table.starts.tolist(), table.sizes.tolist(), strict=True)) == expected
    )
