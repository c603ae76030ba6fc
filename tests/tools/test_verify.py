from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock import open_manifest, pack, verify
from penstock.loader import DatasetError, inspect_dataset
from penstock.loader.columns import ArrayColumn, Block, BytesColumn
from penstock.loader.dataset.manifest import MANIFEST_NAME
from penstock.loader.reading.checksum import sum_chunks
from penstock.storage import MemoryStore
from penstock.tools.inspect import describe_bytes, draw_bars, sample_sizes, size_histogram

PutShards = Callable[..., list[int]]


@pytest.fixture
def packed(memory_store: MemoryStore) -> MemoryStore:
    pack(({"txt": f"sample {number}", "cls": number} for number in range(100)), memory_store.url, shard_bytes=20_000)
    return memory_store


def damage(store: MemoryStore, key: str, offset: int) -> None:
    data = bytearray(store.get(key))
    data[offset] ^= 1
    store.put(key, data)


def test_a_whole_data_set_has_no_flaws(packed: MemoryStore) -> None:
    result = verify(packed.url)
    assert result.ok
    assert (result.samples, result.checksums) == (100, True)


def test_one_flipped_bit_is_found_by_checksum_and_named_by_shard_and_chunk(packed: MemoryStore) -> None:
    damage(packed, "shard-000002.tar", 512)
    result = verify(packed.url)
    assert not result.ok
    assert [(flaw.shard, flaw.offset, flaw.kind) for flaw in result.flaws] == [("shard-000002.tar", 0, "ChecksumError")]


def test_every_bad_shard_is_reported_not_only_the_first(packed: MemoryStore) -> None:
    damage(packed, "shard-000001.tar", 512)
    damage(packed, "shard-000003.tar", 600)
    packed.put("shard-000004.tar", b"")
    packed.put("zzz-new.tar", bytes(packed.get("shard-000000.tar")))
    packed.put("zzz-broken.tar", b"x" * 2048)
    result = verify(packed.url)
    assert result.bad_shards == (
        "shard-000001.tar",
        "shard-000003.tar",
        "shard-000004.tar",
        "zzz-broken.tar",
        "zzz-new.tar",
    )
    problems = {flaw.shard: flaw.problem for flaw in result.flaws}
    assert problems["shard-000004.tar"].startswith("has 0 bytes, the manifest says")
    assert "not in the manifest" in problems["zzz-new.tar"]


def test_a_shard_that_is_gone_is_a_flaw(packed: MemoryStore) -> None:
    other = MemoryStore("mem://lacking/data")
    for info in packed.list():
        if info.key != "shard-000001.tar":
            other.put(info.key, packed.get(info.key))
    assert [(flaw.shard, flaw.kind) for flaw in verify(other.url).flaws] == [("shard-000001.tar", "NotFoundError")]
    other.drop()


def test_a_data_set_without_a_manifest_is_checked_too(memory_store: MemoryStore, put_shards: PutShards) -> None:
    put_shards(memory_store, 5)
    assert verify(memory_store.url).samples == 25 + 26 + 27 + 28 + 29
    memory_store.put("part-001.parquet", b"")
    memory_store.put("part-003.parquet", bytes(memory_store.get("part-003.parquet"))[:-20])
    result = verify(memory_store.url)
    assert result.bad_shards == ("part-001.parquet", "part-003.parquet")
    assert result.samples == 25 + 27 + 29


def test_when_nothing_is_good_all_is_named(memory_store: MemoryStore) -> None:
    for number in range(3):
        memory_store.put(f"{number}.parquet", b"bad")
    result = verify(memory_store.url)
    assert (len(result.bad_shards), result.samples) == (3, 0)


def test_a_copy_is_proven_by_checksums_though_its_etags_differ(packed: MemoryStore, tmp_path: Path) -> None:
    for info in packed.list():
        (tmp_path / info.key).write_bytes(packed.get(info.key))
    assert verify(tmp_path).ok


def test_a_changed_etag_without_checksums_is_a_flaw(memory_store: MemoryStore, put_shards: PutShards) -> None:
    put_shards(memory_store, 2)
    memory_store.put(MANIFEST_NAME, open_manifest(memory_store.url).to_bytes())
    damage(memory_store, "part-000.parquet", 40)
    assert "ObjectChangedError" in [flaw.kind for flaw in verify(memory_store.url).flaws]


def test_checksums_can_be_added_later(memory_store: MemoryStore, put_shards: PutShards) -> None:
    put_shards(memory_store, 2)
    summed = sum_chunks(open_manifest(memory_store.url))
    memory_store.put(MANIFEST_NAME, summed.to_bytes())
    assert verify(memory_store.url).checksums
    damage(memory_store, "part-001.parquet", 40)
    assert [flaw.kind for flaw in verify(memory_store.url).flaws] == ["ChecksumError"]


def test_nothing_to_verify_is_an_error(memory_store: MemoryStore) -> None:
    with pytest.raises(DatasetError, match="nothing there"):
        verify(memory_store.url)


def test_inspect_counts_what_is_there(packed: MemoryStore) -> None:
    seen = inspect_dataset(packed.url)
    assert (seen.format, seen.samples, seen.checksums) == ("tar", 100, True)
    assert seen.schema["fields"] == ["cls", "txt"]
    assert seen.sizes_of == sum(seen.histogram) == 100
    assert [(field.name, field.value) for field in seen.fields] == [
        ("__key__", "000000000"),
        ("cls", "0"),
        ("txt", "sample 0"),
    ]


def test_sizes_of_samples_are_summed_over_columns() -> None:
    buffer = memoryview(b"aabbb")
    column = BytesColumn(buffer, np.array([0, 2, -1]), np.array([2, 5, -1]))
    block = Block(3, 0, {"b": column, "n": ArrayColumn(np.zeros((3, 2), np.float32))})
    assert sample_sizes(block).tolist() == [10, 11, 8]


def test_the_histogram_counts_every_size_once() -> None:
    sizes = np.array([1, 1, 10, 100, 1000, 1000, 0])
    counts, edges = size_histogram(sizes, bins=3)
    assert counts.tolist() == [3, 1, 3]
    assert np.allclose(edges, [1, 10, 100, 1000])
    assert draw_bars((0, 1, 100)) == " ▂█"
    assert size_histogram(np.array([5, 5]))[0].tolist() == [2]


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (b"hello\nworld", "text", "hello world"),
        (b"\x00\x01\xff", "bytes", "3 bytes: 00 01 ff"),
        (b"\x89PNG\r\n\x1a\n" + bytes(8) + b"\0\0\0\x07\0\0\0\x05", "PNG", "7 x 5 pixels, 24 bytes"),
        (b"", "text", ""),
    ],
)
def test_values_are_shown_for_people(data: bytes, kind: str, text: str) -> None:
    assert describe_bytes(data) == (kind, text)


def test_a_jpeg_is_shown_with_its_sides() -> None:
    import io

    from PIL import Image

    sink = io.BytesIO()
    Image.new("RGB", (31, 17)).save(sink, "JPEG")
    kind, text = describe_bytes(sink.getvalue())
    assert kind == "JPEG"
    assert text.startswith("31 x 17 pixels")
