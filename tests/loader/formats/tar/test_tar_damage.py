"""Damaged, compressed and odd tar archives: clear words, or the samples that tarfile sees too."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import threading
from functools import partial
from pathlib import Path

import pytest
import zstandard
from folder_store import FolderStore
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_archives import END, GOOD, header, index, member, read

from penstock.loader.errors import FormatError
from penstock.loader.formats.shard import ChunkRef, ShardTask
from penstock.loader.formats.tar.blocks import BLOCK
from penstock.loader.formats.tar.format import TarFormat
from penstock.loader.formats.windows import WINDOW_BYTES
from penstock.storage import ByteRange, ObjectInfo, StoreUnavailableError

ZSTD = zstandard.ZstdCompressor(write_checksum=True)
BAD = {
    "no bytes": (b"", 0, "no bytes"),
    "garbage": (os.urandom(5000), 0, "expected a tar header"),
    "less than a block of garbage": (b"garbage", 0, "ends inside a header"),
    "less than a block of zeros": (bytes(100), 0, "ends inside a header"),
    "text": (b"<html>" * 1000, 0, "expected a tar header"),
    "cut in data": (GOOD[:-600], 5 * BLOCK, "truncated"),
    "cut in padding": (GOOD[:-400], 5 * BLOCK, "truncated"),
    "cut in a header": (GOOD[: len(GOOD) - 3 * BLOCK + 100], len(GOOD) - 3 * BLOCK, "ends inside a header"),
    "size runs past the end": (header("a.x", 10**9) + GOOD, 0, "needs bytes up to 1000000512"),
    "size lands in data": (header("a.x", 100) + GOOD[BLOCK:], 2 * BLOCK, "the size of member 'a.x' before it"),
    "negative size": (header("a.x", b"\xff" * 12) + GOOD, 0, "no valid size"),
    "size of no digits": (header("a.x", b"abcdefghijkl") + GOOD, 0, "(invalid header)"),
    "size beyond int64": (header("a.x", b"\x80" + b"\xff" * 11) + GOOD, 0, "no valid size"),
    "bad checksum": (GOOD.replace(b"b.x", b"c.x"), len(GOOD) - 3 * BLOCK, "(bad checksum)"),
    "bad first checksum": (GOOD.replace(b"a.x", b"c.x"), 0, "(bad checksum)"),
    "only directories": (header("d/", 0, kind=b"5") + header("e/", 0, kind=b"5") + END, 0, "none of its 2 members"),
    "no names with dots": (member("README", b"x") + END, 0, "none of its 1 members belongs to a sample"),
    "a field twice": (GOOD + member("b.X", b"4"), len(GOOD), "field 'x' a second time"),
    "a reserved field": (GOOD + member("b.__key__", b"4"), len(GOOD), "a reserved name"),
    "joined archives": (GOOD + END + GOOD + END, len(GOOD) + 2 * BLOCK, "after the archive's end mark"),
    "a hole of zeros": (GOOD[:BLOCK] + b"1" * 600 + bytes(424) + bytes(BLOCK) + GOOD, 4 * BLOCK, "end mark"),
    "sparse": (GOOD + member("c.x", b"1", kind=b"S"), len(GOOD), "sparse"),
    "an extension of nothing": (GOOD + member("x", b"12 mtime=1.5\n", kind=b"x") + END, len(GOOD), "is missing"),
    "a broken PAX record": (member("x", b"99 path=a\n", kind=b"x") + GOOD, 0, "broken record"),
    "an extension cut off": (GOOD + member("L", b"n" * 3000, kind=b"L")[:-600], len(GOOD), "truncated"),
    "a monstrous extension": (GOOD + header("x", 1 << 30, kind=b"x"), len(GOOD), "extension of 1073741824 bytes"),
    "a monstrous name": (member("L", b"n" * 5000, kind=b"L") + member("a.x", b"1") + END, 1024 * 6 - 512, "5000 bytes"),
}


@pytest.mark.parametrize("case", BAD)
def test_damage_is_an_error_that_names_shard_and_offset(tmp_path: Path, case: str) -> None:
    data, offset, words = BAD[case]
    with pytest.raises(FormatError) as caught:
        index(tmp_path, data)
    assert words in str(caught.value)
    assert (caught.value.shard, caught.value.offset) == ("s.tar", offset)
    assert str(caught.value).startswith(f"s.tar at byte {offset}: ")


@pytest.mark.parametrize(
    "case",
    sorted(
        set(BAD) - {"no bytes", "joined archives", "a hole of zeros", "cut in padding", "less than a block of zeros"}
    ),
)
def test_damage_is_an_error_when_a_chunk_is_opened_too(case: str) -> None:
    data, _, _ = BAD[case]
    ref = ChunkRef(ObjectInfo("s.tar", len(data)), 1 << 20, len(data), 2, 0)
    with pytest.raises(FormatError, match=r"^s\.tar at byte 1\d{6}: "):
        TarFormat().open_chunk(ref, None, [memoryview(data)], None, {"fields": ["x", "y"]})


@pytest.mark.parametrize("name", ["s.tar.gz", "s.tar.zst"])
def test_damaged_compressed_shards_are_errors(tmp_path: Path, name: str) -> None:
    whole = GOOD.replace(b"1" * 600, os.urandom(600)) + END
    packed = gzip.compress(whole) if name.endswith("gz") else ZSTD.compress(whole)
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 0xFF
    for data in (b"", b"garbage of some length", packed[:-20], bytes(flipped)):
        with pytest.raises(FormatError, match=name):
            index(tmp_path, data, name)


def test_a_compressed_shard_may_be_several_streams_joined(tmp_path: Path) -> None:
    data = GOOD + END
    gz = gzip.compress(data[:700]) + gzip.compress(data[700:])
    zst = zstandard.compress(data[:700]) + zstandard.compress(data[700:])
    expected = read(tmp_path, data)
    (tmp_path / "s.tar").unlink()
    assert read(tmp_path, gz, "s.tar.gz") == expected
    (tmp_path / "s.tar.gz").unlink()
    assert read(tmp_path, zst, "s.tar.zst") == expected


@pytest.mark.parametrize("name", ["s.tar.gz", "s.tar.zst"])
def test_streams_that_do_not_say_how_long_they_are_are_read_whole(tmp_path: Path, name: str) -> None:
    data = b"".join(member(f"{i}.x", bytes([i]) * 50_000) for i in range(100)) + END
    if name.endswith("gz"):
        packed = gzip.compress(data) + gzip.compress(b"")  # the length at the end is that of the last stream
    else:
        stream = zstandard.ZstdCompressor().compressobj()
        packed = stream.compress(data) + stream.flush()
    rows = read(tmp_path, packed, name)
    assert [row["x"] for row in rows] == [bytes([i]) * 50_000 for i in range(100)]


def test_a_compressed_shard_is_one_chunk_with_the_memory_it_takes(tmp_path: Path) -> None:
    data = b"".join(member(f"{i}.x", bytes(5000)) for i in range(2000)) + END
    packed = gzip.compress(data, 1)
    [span] = index(tmp_path, packed, "s.tgz").chunks
    assert (span.offset, span.length, span.samples, span.memory) == (0, len(packed), 2000, len(data))


@pytest.mark.parametrize("name", ["s.tar", "s.tar.gz", "s.tar.zst"])
def test_errors_of_the_store_come_through_as_they_are_and_no_thread_stays(tmp_path: Path, name: str) -> None:
    class FailingStore(FolderStore):
        def get(self, key: str, byte_range: ByteRange | None = None, *, etag: str | None = None) -> memoryview:
            if byte_range is not None and byte_range.start > 2 * WINDOW_BYTES:
                raise StoreUnavailableError("no answer")
            return super().get(key, byte_range, etag=etag)

    data = b"".join(member(f"{i}.x", os.urandom(1 << 20)) for i in range(16)) + END
    stored = partial(gzip.compress, compresslevel=0)
    packed = {"tar": bytes, "gz": stored, "zst": zstandard.compress}[name.split(".")[-1]](data)
    (tmp_path / name).write_bytes(packed)
    store = FailingStore(tmp_path)
    before = threading.active_count()
    with pytest.raises(StoreUnavailableError, match="no answer"):
        TarFormat().index_shard(store, ShardTask(store.head(name)))
    assert threading.active_count() == before


def dialects() -> bytes:
    out = io.BytesIO()
    for dialect in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(fileobj=out, mode="w", format=dialect) as tar:
            for name in ("d/a.x", "d/a.y", "n" * 90 + "/" + "m" * 60 + ".x"):
                info = tarfile.TarInfo(f"{dialect}{name}")
                info.size, info.mtime = 700, 1.5 if dialect == tarfile.PAX_FORMAT else 1
                tar.addfile(info, io.BytesIO(b"v" * 700))
            out.truncate(tar.offset)
        out.seek(0, os.SEEK_END)
    return out.getvalue()


WHOLE = dialects()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=3),
    st.integers(0, len(WHOLE)) | st.just(len(WHOLE)),
)
def test_random_damage_gives_a_format_error_or_samples_that_tarfile_sees_too(
    tmp_path: Path, flips: list[tuple[int, int]], length: int
) -> None:
    damaged = bytearray(WHOLE)
    for at, value in flips:
        damaged[at] = value
    data = bytes(damaged[:length])
    try:
        rows = read(tmp_path, data)
    except FormatError:
        return
    values = set()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for info in tar:
            if info.isreg():
                values.add((tar.extractfile(info) or io.BytesIO()).read())
    assert {value for row in rows for name, value in row.items() if name != "__key__"} <= values
