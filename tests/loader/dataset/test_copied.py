"""A data set that is copied elsewhere with its manifest has other ETags; its checksums go on being compared."""

from __future__ import annotations

import shutil
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import DistributedDataLoader, open_manifest, open_store, pack
from penstock.cli import run
from penstock.loader import ChecksumError, StaleManifestWarning, verify
from penstock.loader.dataset.manifest import MANIFEST_NAME, Manifest
from penstock.storage import MemoryStore

_SAMPLES = 120


def write(url: str | Path, seed: int = 0, form: str = "tar") -> Manifest:
    """More than six shards; those of all seeds have the same names and sizes."""
    rng = np.random.default_rng(seed)
    samples = ({"__key__": f"{i:04d}", "x": rng.bytes(1000), "y": i} for i in range(_SAMPLES))
    pack(samples, url, format=form, shard_bytes=20_000, progress=False)
    return open_manifest(str(url))


def copy(source: str | Path, target: str, keys: Sequence[str] | None = None) -> MemoryStore:
    store, copied = open_store(str(source)), MemoryStore(target)
    for info in store.list():
        if keys is None or info.key in keys:
            copied.put(info.key, store.get(info.key))
    return copied


def flip_byte(store: MemoryStore, manifest: Manifest, index: int) -> str:
    """Damage a chunk; returns its shard's key."""
    chunk = manifest.chunk(index)
    data = bytearray(store.get(chunk.shard.key))
    data[chunk.offset + chunk.length // 2] ^= 1
    store.put(chunk.shard.key, data)
    return chunk.shard.key


def shard_gets(store: MemoryStore) -> int:
    return sum(call.verb == "get" and not call.key.endswith(MANIFEST_NAME) for call in store.calls)


def read(url: str | Path, **options: Any) -> list[bytes]:
    options = {"batch_size": 16, "shuffle": False, "last_batch": "partial", "decode": None} | options
    with DistributedDataLoader(str(url), **options) as loader:
        return [value for batch in loader for value in batch["x"]]


@pytest.fixture
def elsewhere() -> Iterator[str]:
    url = "mem://elsewhere/data"
    yield url
    MemoryStore(url).drop()


@pytest.mark.parametrize("form", ["tar", "parquet", "mds"])
def test_a_copy_goes_on_with_the_checksums_of_its_manifest(tmp_path: Path, elsewhere: str, form: str) -> None:
    packed = write(tmp_path, form=form)
    store = copy(tmp_path, elsewhere)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened = open_manifest(elsewhere)
    assert opened.fingerprint == packed.fingerprint
    assert opened.checks_all
    assert shard_gets(store) <= 4 < len(opened.shards)  # of mds its index.json, too
    assert {shard.etag for shard in opened.shards} < {info.etag for info in store.list()}
    assert read(elsewhere) == read(tmp_path)
    before = shard_gets(store)
    open_manifest(elsewhere)
    assert shard_gets(store) <= before + (form == "mds"), "the node's cache knows that it is a copy"


@pytest.mark.parametrize("form", ["tar", "parquet", "arrow", "mds"])
def test_a_copy_on_a_store_without_etags_is_read_and_compared(tmp_path: Path, form: str) -> None:
    manifest = write(tmp_path / "data", form=form)
    expected = read(tmp_path / "data")
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted((tmp_path / "data").iterdir()):
            file.write(path, f"inside/{path.name}")
    options = {"storage_options": {"fo": str(archive)}}
    copied = open_manifest("zip://inside/", **options)
    assert copied.fingerprint == manifest.fingerprint
    assert copied.checksums is not None
    assert read("zip://inside/", **options) == expected


def test_of_large_chunks_one_is_compared(tmp_path: Path, elsewhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.setattr("penstock.loader.dataset.index._MOST_BYTES", 30_000)
    store = copy(tmp_path, elsewhere)
    assert open_manifest(elsewhere).checks_all
    assert shard_gets(store) == 1


def test_a_chunk_that_was_damaged_on_its_way_is_told(tmp_path: Path, elsewhere: str) -> None:
    packed = write(tmp_path)
    store = copy(tmp_path, elsewhere)
    key = flip_byte(store, packed, packed.num_chunks // 3)
    with pytest.raises(ChecksumError, match=key):
        read(elsewhere)


def test_a_shuffled_run_goes_on_with_a_copy(tmp_path: Path, elsewhere: str) -> None:
    write(tmp_path)
    copy(tmp_path, elsewhere)
    with DistributedDataLoader(str(tmp_path), batch_size=16, seed=3) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        rest = [batch["__key__"] for batch in batches]
    with DistributedDataLoader(elsewhere, batch_size=16, seed=3) as other:
        other.load_state_dict(state)
        assert [batch["__key__"] for batch in other] == rest


@pytest.mark.parametrize("seed", [1, 2])
def test_what_was_written_anew_with_the_same_sizes_is_indexed_and_told_at_each_start(tmp_path: Path, seed: int) -> None:
    """So it was before, when a manifest was beside it; that nothing is compared is new to its user."""
    write(tmp_path / "old")
    count = len(write(tmp_path / "new", seed).shards)
    shutil.copy(tmp_path / "old" / MANIFEST_NAME, tmp_path / "new")
    for _ in range(2):
        with pytest.warns(
            StaleManifestWarning, match=rf"{count} new or changed shards.* compares no checksums; run `penstock in"
        ):
            opened = open_manifest(str(tmp_path / "new"))
        assert opened.checksums is None
    with pytest.warns(StaleManifestWarning):
        values = read(tmp_path / "new")
    assert values[0] == np.random.default_rng(seed).bytes(1000)


@pytest.mark.slow
def test_a_shard_that_only_looks_like_the_copy_is_an_error_until_it_is_indexed(
    tmp_path: Path, elsewhere: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither of the shards that are compared at the start."""
    packed = write(tmp_path / "old")
    write(tmp_path / "new", 1)
    store = copy(tmp_path / "old", elsewhere)
    key = packed.shards[2].key
    store.put(key, open_store(str(tmp_path / "new")).get(key))
    with pytest.raises(ChecksumError, match="`penstock index`"):
        read(elsewhere)
    assert run(["index", elsewhere]) == 0
    capsys.readouterr()
    assert len(read(elsewhere)) == _SAMPLES
    assert open_manifest(elsewhere).checks_all


def test_some_shards_of_a_copy_are_one_too(tmp_path: Path, elsewhere: str) -> None:
    packed = write(tmp_path)
    names = [shard.key for shard in packed.shards]
    copy(tmp_path, elsewhere)
    urls = [f"{elsewhere}/{name}" for name in names[3:5]]
    part = open_manifest(urls)
    assert ([shard.key for shard in part.shards], part.checks_all) == (names[3:5], True)
    assert (verify(urls, progress=False).checksums, verify(urls, progress=False).flaws) == (True, ())
    flip_byte(MemoryStore(elsewhere), part, 0)
    assert [(flaw.shard, flaw.kind) for flaw in verify(urls, progress=False).flaws] == [(names[3], "ChecksumError")]


def test_a_copy_with_other_shards_is_indexed(tmp_path: Path, elsewhere: str) -> None:
    packed = write(tmp_path)
    store = copy(tmp_path, elsewhere)
    store.put("shard-000099.tar", store.get(packed.shards[0].key))
    count = len(packed.shards) + 1
    with pytest.warns(StaleManifestWarning, match=f"{count} new or changed shards"):
        opened = open_manifest(elsewhere)
    assert (len(opened.shards), opened.checksums) == (count, None)


def test_a_manifest_that_lacks_checksums_says_nothing_of_copies(tmp_path: Path, elsewhere: str) -> None:
    packed = write(tmp_path, form="parquet")
    store = copy(tmp_path, elsewhere)
    for lacking in (replace(packed, parts=None), replace(packed, parts=None, checksums=None)):
        store.put(MANIFEST_NAME, lacking.to_bytes())
        with pytest.warns(StaleManifestWarning, match="new or changed shards; this run uses a corrected copy") as told:
            assert open_manifest(elsewhere).checksums is None
        assert ("compares no checksums" in str(told[0].message)) == (lacking.checksums is not None)
