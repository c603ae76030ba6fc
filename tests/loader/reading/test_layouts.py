"""The headers of a tar are walked once for each chunk, however often it is read; other bytes are walked anew."""

from __future__ import annotations

import io
import tarfile
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from penstock.loader import DistributedDataLoader, TarFormat, open_manifest
from penstock.loader.columns import Block, BytesColumn
from penstock.loader.counters import Counters
from penstock.loader.errors import FormatError
from penstock.loader.formats.tar import format as tar_format
from penstock.loader.pipeline.tuning import MemoryLimitWarning
from penstock.loader.reading.chunk_source import ChunkSource
from penstock.storage import ByteRange
from penstock.storage.memory_store import MemoryStore

FIELDS = ("__id__", "__key__", "bin", "cls")
SMALL = TarFormat(chunk_bytes=32 << 10)


def tar_of(sizes: list[int], seed: int) -> bytes:
    """A tar of samples with a blob of each size and a label."""
    rng, sink = np.random.default_rng(seed), io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for number, size in enumerate(sizes):
            for field, data in (("bin", rng.bytes(size)), ("cls", b"%d" % (number % 10))):
                member = tarfile.TarInfo(f"{number:04d}.{field}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return sink.getvalue()


class OneVersionStore(MemoryStore):
    """Gives what was written last, whatever version of it is asked for."""

    def get(self, key: str, byte_range: ByteRange | None = None, *, etag: str | None = None) -> memoryview:
        return super().get(key, byte_range)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets of the chunks whose headers are walked."""
    found: list[int] = []
    read_members = tar_format.read_members

    def count(run, shard, base, *, whole):
        found.append(base)
        return read_members(run, shard, base, whole=whole)

    monkeypatch.setattr(tar_format, "read_members", count)
    return found


def open_source(store: MemoryStore) -> ChunkSource:
    manifest = open_manifest(store.url, format=SMALL)
    return ChunkSource(manifest, SMALL, OneVersionStore(store.url), None, Counters())


def values_of(block: Block) -> dict[str, list[object]]:
    rows = np.arange(block.samples)
    return {name: column.take(rows) for name, column in block.columns.items() if isinstance(column, BytesColumn)}


@pytest.mark.slow
def test_a_second_epoch_walks_no_headers(tmp_path: Path, walks: list[int]):
    (tmp_path / "a.tar").write_bytes(tar_of([6000] * 40, seed=0))
    (tmp_path / "b.tar").write_bytes(tar_of([1, 0, 700, 5000] * 20, seed=1))
    manifest = open_manifest(tmp_path, format=SMALL)
    options = {"batch_size": 4, "format": SMALL, "decode": None, "piece": 0, "lanes": 2, "memory_limit": 400_000}
    with warnings.catch_warnings(), DistributedDataLoader(tmp_path, with_ids=True, **options) as loader:
        warnings.simplefilter("ignore", MemoryLimitWarning)
        epochs = [
            {int(i): (k, b, c) for e in loader for i, k, b, c in zip(*map(e.get, FIELDS), strict=True)}
            for _ in range(3)
        ]
        assert loader.metrics().fetched_chunks > manifest.num_chunks  # they were read again
    assert epochs[0] == epochs[1] == epochs[2]
    assert len(epochs[0]) == 120
    assert len(walks) == manifest.num_chunks


@pytest.mark.parametrize(
    ("sizes", "walked"), [([3000, 1000, 3000, 1000], 2), ([1000, 3000, 1000, 3000], 4)], ids=["same layout", "other"]
)
def test_headers_that_changed_where_they_lie_are_walked_anew(
    memory_store: MemoryStore, walks: list[int], sizes: list[int], walked: int
):
    memory_store.put("a.tar", tar_of([3000, 1000, 3000, 1000], seed=0))
    source = open_source(memory_store)
    source.load(0)
    source.load(0)
    assert walks == [0]
    memory_store.put("a.tar", tar_of(sizes, seed=9))
    fresh = open_source(memory_store)
    assert values_of(source.load(0)) == values_of(fresh.load(0))
    assert [len(value) for value in values_of(source.load(0))["bin"]] == sizes
    assert len(walks) == walked  # also for the first contents' layout, which is not kept twice


def test_labels_that_changed_where_they_lie_are_read(memory_store: MemoryStore, walks: list[int]):
    """They are copied out of the chunk, and so part of what is kept of it."""
    whole = tar_of([3000, 1000], seed=0)
    memory_store.put("a.tar", whole)
    source = open_source(memory_store)
    assert values_of(source.load(0))["cls"] == [b"0", b"1"]
    at = whole.index(b"1" + bytes(511))
    memory_store.put("a.tar", whole[:at] + b"7" + whole[at + 1 :])
    assert values_of(source.load(0))["cls"] == [b"0", b"7"]


@pytest.mark.parametrize("flipped", [0, 100, 257, 511], ids=["name", "mode", "magic", "padding"])
def test_any_byte_outside_of_values_is_compared(memory_store: MemoryStore, walks: list[int], flipped: int):
    whole = bytearray(tar_of([3000, 1000], seed=0))
    memory_store.put("a.tar", bytes(whole))
    source = open_source(memory_store)
    source.load(0)
    whole[flipped] ^= 1
    memory_store.put("a.tar", bytes(whole))
    with suppress(FormatError):
        source.load(0)
    assert len(walks) > 1


def test_layouts_take_no_more_than_their_budget(memory_store: MemoryStore, walks: list[int]):
    memory_store.put("a.tar", tar_of([100] * 400, seed=0))
    source = open_source(memory_store)
    chunks = range(source.manifest.num_chunks)
    source.limit_headers(10_000)
    first = [values_of(source.load(chunk)) for chunk in chunks]
    assert 0 < source.header_bytes <= 10_000
    assert [values_of(source.load(chunk)) for chunk in chunks] == first
    assert len(chunks) < len(walks) < 2 * len(chunks)  # some are kept, others not
