from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_manifest import make_manifest

from penstock import Manifest
from penstock.loader import DatasetError

shard_sizes = st.lists(st.lists(st.integers(1, 9), max_size=5), min_size=1, max_size=9).filter(any)


def same(one: Manifest, other: Manifest) -> bool:
    arrays = ("shard_index", "offsets", "lengths", "samples", "memory")
    sums = (one.checksums is None) == (other.checksums is None)
    if sums and one.checksums is not None:
        sums = bool(np.array_equal(one.checksums, other.checksums))
    plain = all(getattr(one, name) == getattr(other, name) for name in ("format", "config", "schema", "shards"))
    return sums and plain and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)


@given(shard_sizes, st.booleans())
def test_a_manifest_survives_being_written(sizes: list[list[int]], checksums: bool) -> None:
    manifest = make_manifest(sizes, checksums=checksums)
    read = Manifest.from_bytes(manifest.to_bytes(), "mem://elsewhere")
    assert same(read, manifest)
    assert read.fingerprint == manifest.fingerprint
    assert read.url == "mem://elsewhere"


@given(shard_sizes)
def test_every_sample_is_found_in_its_shard(sizes: list[list[int]]) -> None:
    manifest = make_manifest(sizes)
    sample = 0
    for number, chunks in enumerate(sizes):
        for row in range(sum(chunks)):
            assert manifest.shard_of(sample) == (f"é/shard {number}.tar", row)
            sample += 1
    assert sample == manifest.num_samples
    refs = [manifest.chunk(i) for i in range(manifest.num_chunks)]
    assert [ref.samples for ref in refs] == [samples for chunks in sizes for samples in chunks]
    for ref in refs:
        assert ref.first_row == sum(
            other.samples for other in refs if other.shard == ref.shard and other.offset < ref.offset
        )


def test_the_fingerprint_is_of_what_decides_the_sample_ids_alone() -> None:
    manifest = make_manifest([[3, 4], [5]])
    moved = tuple(replace(shard, etag="other") for shard in manifest.shards)
    for alike in (
        replace(manifest, url="s3://elsewhere"),
        replace(manifest, checksums=None),
        replace(manifest, shards=moved),
        replace(manifest, memory=manifest.memory + 1),
        replace(manifest, schema={}),
    ):
        assert alike.fingerprint == manifest.fingerprint
    grown = (replace(manifest.shards[0], size=1), *manifest.shards[1:])
    renamed = (replace(manifest.shards[0], key="b"), *manifest.shards[1:])
    for other in (
        replace(manifest, format="jsonl"),
        replace(manifest, config={}),
        replace(manifest, shards=grown),
        replace(manifest, shards=renamed),
        replace(manifest, shards=manifest.shards[::-1]),
        replace(manifest, samples=manifest.samples[::-1]),
        replace(manifest, offsets=manifest.offsets + 1),
        replace(manifest, lengths=manifest.lengths + 1),
    ):
        assert other.fingerprint != manifest.fingerprint


WRONG = {
    "samples": ([0, 4, 5], "chunk 0 has samples 0"),
    "lengths": ([1, 1, 1 << 62], "chunk 2 has length"),
    "offsets": ([-1, 1, 0], "chunk 0 has offset -1"),
    "memory": ([1, -1, 1], "chunk 1 has memory -1"),
    "shard_index": ([0, 0, 2], "not those of its 2 shards"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_manifest_with_numbers_that_cannot_be_is_refused_though_its_checksums_fit(name: str) -> None:
    values, words = WRONG[name]
    made = make_manifest([[3, 4], [5]])
    wrong = replace(made, **{name: np.array(values, np.int64)})
    with pytest.raises(DatasetError, match=words):
        Manifest.from_bytes(wrong.to_bytes(), "mem://x")


def test_chunks_outside_of_their_shard_or_out_of_order_are_refused() -> None:
    made = make_manifest([[3, 4], [5]])
    with pytest.raises(DatasetError, match=r"ends at byte \d+ of é/shard 1.tar, which has"):
        Manifest.from_bytes(replace(made, offsets=made.offsets + np.array([0, 0, 10**6])).to_bytes(), "mem://x")
    with pytest.raises(DatasetError, match="chunk 1 lies before"):
        Manifest.from_bytes(replace(made, offsets=made.offsets[[1, 0, 2]], lengths=made.lengths // 2).to_bytes(), "m")


def test_the_fingerprint_of_a_manifest_never_changes() -> None:
    assert make_manifest([[3, 4], [5]]).fingerprint == "2c46abd8ac4c04110a44ce4ca2893c60"


@settings(max_examples=300)
@given(st.data())
def test_any_damage_is_told_as_such_or_does_not_matter(data: st.DataObject) -> None:
    manifest = make_manifest([[3, 4], [], [5]])
    written = bytearray(manifest.to_bytes())
    at = data.draw(st.integers(0, len(written) - 1))
    if data.draw(st.booleans()):
        written[at] ^= data.draw(st.integers(1, 255))
    else:
        del written[at:]
    try:
        read = Manifest.from_bytes(bytes(written), manifest.url, "s3://b/the-manifest")
    except DatasetError as exc:
        assert "s3://b/the-manifest" in str(exc)  # noqa: PT017 - which of the two happens is drawn
        assert "penstock index" in str(exc)  # noqa: PT017
    else:
        assert same(read, manifest)


def test_a_data_set_without_a_sample_is_refused() -> None:
    with pytest.raises(DatasetError, match="none of its 2 tar shards holds a sample"):
        make_manifest([[], []])


def test_a_manifest_of_many_shards_shows_as_one_line() -> None:
    shown = repr(make_manifest([[3, 4], [5]] * 500))
    assert shown.startswith("Manifest(")
    assert shown.endswith(", 6000 samples in 1500 chunks of 1000 shards)")
    assert len(shown) < 120
