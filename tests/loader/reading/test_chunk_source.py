"""Chunks that come wrong once are fetched again, past the cache; what they are made into keeps no chunk in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from penstock.loader.columns import Block, BytesColumn
from penstock.loader.counters import Counters
from penstock.loader.dataset.index import open_manifest
from penstock.loader.decoding.decode import FieldDecoders
from penstock.loader.decoding.gather import gather
from penstock.loader.errors import FormatError, MemoryLimitError
from penstock.loader.formats.detect import make_format
from penstock.loader.formats.shard import ChunkRef
from penstock.loader.order.spans import ChunkRows
from penstock.loader.reading.chunk_source import ChunkSource
from penstock.storage import ByteRange
from penstock.storage.caching.cache import CacheStore
from penstock.storage.memory_store import MemoryStore


class LyingStore(MemoryStore):
    """Gives zeros for the bytes of what it is asked first, ``lies`` times."""

    lies = 0

    def get(self, key: str, byte_range: ByteRange | None = None, *, etag: str | None = None) -> memoryview:
        data = super().get(key, byte_range, etag=etag)
        return self._perhaps(data)

    def get_ranges(self, key: str, ranges: Sequence[ByteRange], *, etag: str | None = None) -> list[memoryview]:
        return [self._perhaps(data) for data in super().get_ranges(key, ranges, etag=etag)]

    def _perhaps(self, data: memoryview) -> memoryview:
        if self.lies:
            self.lies -= 1
            return memoryview(bytes(len(data)))
        return data


class MeetingStore(MemoryStore):
    """Answers the first two requests once both are there."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.asked: list[ByteRange | None] = []
        self._both = threading.Barrier(2)

    def get(self, key: str, byte_range: ByteRange | None = None, *, etag: str | None = None) -> memoryview:
        self.asked.append(byte_range)
        if len(self.asked) <= 2:
            self._both.wait(20)
        return super().get(key, byte_range, etag=etag)


@pytest.fixture
def source(
    memory_store: MemoryStore, put_shards: Callable[..., list[int]], tmp_path: Path
) -> tuple[ChunkSource, LyingStore, Counters]:
    put_shards(memory_store, 1)
    manifest = open_manifest(memory_store.url, format=make_format("parquet", {"chunk_bytes": 1}))
    store = LyingStore(memory_store.url)
    counters = Counters()
    parquet = make_format(manifest.format, manifest.config)
    return ChunkSource(manifest, parquet, CacheStore(store, tmp_path / "disk"), ["n"], counters), store, counters


def test_a_chunk_that_came_wrong_is_fetched_again_past_the_cache(source):
    chunks, store, counters = source
    chunks.load(1)  # the footer is known
    store.lies = 1
    assert chunks.load(0).columns["n"].values.tolist() == list(range(10))
    assert counters.totals().refetched_chunks == 1
    assert chunks.load(0).samples == 10
    assert counters.totals().refetched_chunks == 1


def test_a_footer_that_came_wrong_is_fetched_again_when_its_chunk_is_opened(
    memory_store: MemoryStore, put_shards: Callable[..., list[int]]
) -> None:
    put_shards(memory_store, 1)
    parquet = make_format("parquet", {"chunk_bytes": 1})
    manifest = open_manifest(memory_store.url, format=parquet)
    store, counters = LyingStore(memory_store.url), Counters()
    chunks = ChunkSource(manifest, parquet, store, ["n"], counters)
    store.lies = 1
    assert chunks.fetch(0) is None
    assert chunks.open(0, None).columns["n"].values.tolist() == list(range(10))
    assert counters.totals().refetched_chunks == 1
    store.lies = 99
    with pytest.raises(FormatError):
        chunks.load(1)


def test_a_chunk_of_a_store_that_is_far_away_comes_together_with_its_shards_footer(
    memory_store: MemoryStore, put_shards: Callable[..., list[int]]
) -> None:
    put_shards(memory_store, 1)
    manifest = open_manifest(memory_store.url, format=make_format("parquet", {"chunk_bytes": 1}))
    parquet = make_format(manifest.format, manifest.config)
    near = ChunkSource(manifest, parquet, memory_store, ["n"], Counters())
    store = MeetingStore(memory_store.url)
    far = ChunkSource(manifest, parquet, store, None, Counters())
    values = [source.load(0).columns["n"] for source in (near, far)]
    assert np.array_equal(*(column.values for column in values))
    assert store.asked.count(manifest.chunk(0).byte_range) == 1
    far.load(1)
    assert store.asked[2:] == [manifest.chunk(1).byte_range]  # the footer is there


def test_a_chunk_and_its_footer_that_come_wrong_are_fetched_again(source):
    chunks, store, counters = source
    chunks.load(1)
    store.lies = 3  # the footer may be what is wrong, and is fetched anew each time, too
    assert chunks.load(0).columns["n"].values.tolist() == list(range(10))
    assert counters.totals().refetched_chunks == 2


@pytest.mark.parametrize("lies", [1, 2, 3])
def test_a_footer_that_came_wrong_is_fetched_again_past_the_cache(source, lies):
    chunks, store, _ = source
    store.lies = lies
    assert chunks.load(0).columns["n"].values.tolist() == list(range(10))


def test_a_footer_that_cannot_be_read_is_the_formats_error(source):
    chunks, store, _ = source
    store.lies = 10**6
    with pytest.raises(FormatError, match=r"part-000\.parquet"):
        chunks.load(0)


def test_two_chunks_of_a_shard_that_come_wrong_at_once_are_both_fetched_again(source):
    chunks, store, counters = source
    chunks.load(2)
    store.lies = 2
    both_failed = threading.Barrier(2, timeout=60)
    forget = chunks._forget

    def forget_together(chunk: ChunkRef) -> None:
        both_failed.wait()
        forget(chunk)

    chunks._forget = forget_together
    loaded: dict[int, Block] = {}
    threads = [threading.Thread(target=lambda i=i: loaded.update({i: chunks.load(i)})) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {i: block.columns["n"].values.tolist() for i, block in loaded.items()} == {
        0: list(range(10)),
        1: list(range(10, 20)),
    }
    assert counters.totals().refetched_chunks == 2


@pytest.mark.parametrize("decode", [None, "auto", {"x": len}])
def test_gathered_values_keep_no_chunk_in_memory(decode):
    buffer = bytearray(b"abcdefgh")
    starts = np.array([0, -1, 4])
    column = BytesColumn(memoryview(buffer), starts, starts + 4)
    group = ChunkRows(0, np.array([2, 0, 1]), np.array([0, 1, 2]))
    rows = gather([(group, Block(3, 8, {"x": column}))], 3, np.array([0, 3]), FieldDecoders(decode))
    assert [value and bytes(value) for value in rows.fields["x"]] == [b"efgh", b"abcd", None]
    column.buffer.release()  # raises BufferError while a view of it is left
    buffer.clear()


@pytest.mark.parametrize("wrapped", [True, False])
def test_an_allocation_that_fails_is_not_a_damaged_chunk(source, monkeypatch, wrapped):
    chunks, _, counters = source

    def fail(*_: object) -> Block:
        try:
            raise pa.ArrowMemoryError("malloc of size 1234 failed")
        except pa.ArrowException as exc:
            if wrapped:
                raise FormatError("a", "its pages are damaged") from exc
            raise

    monkeypatch.setattr(type(chunks._format), "open_chunk", fail)
    with pytest.raises(
        MemoryLimitError, match=r"parquet: memory ran out while it was opened \(malloc of size 1234 failed"
    ):
        chunks.load(0)
    assert counters.totals().refetched_chunks == 0


@pytest.mark.parametrize("raised", [RecursionError(), OverflowError("too large"), KeyError("type"), IndexError()])
def test_what_a_parser_stumbles_over_is_an_error_that_names_the_shard(source, monkeypatch, raised):
    chunks, _, _ = source

    def fail(*_: object) -> Block:
        raise raised

    monkeypatch.setattr(type(chunks._format), "open_chunk", fail)
    with pytest.raises(FormatError, match=rf"parquet at byte \d+: cannot be opened \({type(raised).__name__}"):
        chunks.load(0)


@pytest.mark.parametrize("columns", [None, ["n"]])
def test_chunks_take_on_average_what_each_of_them_is_said_to_take(
    memory_store: MemoryStore, put_shards: Callable[..., list[int]], columns: list[str] | None
) -> None:
    put_shards(memory_store, 1)
    opened = open_manifest(memory_store.url, format=make_format("parquet", {"chunk_bytes": 1}))
    parquet = make_format(opened.format, opened.config)
    for manifest in (opened, replace(opened, memory=opened.lengths)):  # the second is opened in place
        chunks = ChunkSource(manifest, parquet, memory_store, columns, Counters())
        sizes = [chunks.reserve(index) for index in range(manifest.num_chunks)]
        assert chunks.mean_reserve == sum(sizes) // len(sizes)
