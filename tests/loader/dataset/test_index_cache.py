"""Indexes that are kept on the node: bound to their names, in a folder that is the user's alone."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import DistributedDataLoader, open_manifest
from penstock.loader.dataset.cache import IndexCache, SealedFolder
from penstock.storage import AccessDeniedError, MemoryStore

PutShards = Callable[..., list[int]]


def test_cached_indexes_of_a_shared_folder_are_kept_apart_by_user(tmp_path: Path) -> None:
    folder = IndexCache(tmp_path).folder
    assert folder.name.endswith(str(os.geteuid()))


def test_a_link_in_place_of_the_cached_indexes_is_refused_and_what_it_names_stays(
    memory_store: MemoryStore, put_shards: PutShards, tmp_path: Path
) -> None:
    put_shards(memory_store, 2)
    (tmp_path / "own").mkdir(mode=0o700)
    for name in (*(f"{number}.arrow" for number in range(300)), "uv.lock"):
        (tmp_path / "own" / name).write_text("mine")
        os.utime(tmp_path / "own" / name, (0, 0))
    (tmp_path / "shared").mkdir(mode=0o777)
    (tmp_path / "shared" / f"manifests-{os.geteuid()}").symlink_to(tmp_path / "own")
    with pytest.raises(AccessDeniedError, match=r"manifests-\d+ is not.*a link to.*remove the link.*cache_dir="):
        open_manifest(memory_store.url, cache_dir=tmp_path / "shared")
    assert len(list((tmp_path / "own").iterdir())) == 301


def test_indexes_that_others_may_write_are_refused(
    memory_store: MemoryStore, put_shards: PutShards, tmp_path: Path
) -> None:
    put_shards(memory_store, 2)
    (tmp_path / f"manifests-{os.geteuid()}").mkdir()
    (tmp_path / f"manifests-{os.geteuid()}").chmod(0o770)
    with pytest.raises(AccessDeniedError, match=r"mode 770.*chmod 700"):
        open_manifest(memory_store.url, cache_dir=tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("part", ["manifests", "uid"])
def test_a_cache_folder_of_another_user_is_refused(
    memory_store: MemoryStore, put_shards: PutShards, tmp_path: Path, part: str
) -> None:
    put_shards(memory_store, 2)
    folder = tmp_path / f"{part}-{os.geteuid()}"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    with pytest.raises(AccessDeniedError, match=rf"{part}-\d+ is not .*owner 65534.*or give another cache_dir="):
        DistributedDataLoader(memory_store.url, batch_size=1, cache_dir=tmp_path)


def test_other_files_beside_the_cached_indexes_are_kept(
    memory_store: MemoryStore, put_shards: PutShards, tmp_path: Path
) -> None:
    put_shards(memory_store, 2)
    folder = IndexCache(tmp_path).folder
    folder.mkdir(mode=0o700)
    for name in ("own.arrow", "uv.lock", "notes.txt"):
        (folder / name).write_text("mine")
        os.utime(folder / name, (0, 0))
    left = folder / f"{'0' * 32}.lock"
    left.touch()
    os.utime(left, (0, 0))
    open_manifest(memory_store.url, cache_dir=tmp_path)
    names = {path.name for path in folder.iterdir()}
    assert names >= {"own.arrow", "uv.lock", "notes.txt"}
    assert left.name not in names


def test_a_cached_index_in_the_place_of_another_is_no_index(
    memory_store: MemoryStore, put_shards: PutShards, own_index_cache: Path
) -> None:
    put_shards(memory_store, 2)
    first = open_manifest(memory_store.url)
    (cached,) = own_index_cache.rglob("*.arrow")
    other = MemoryStore("mem://another/data")
    put_shards(other, 3)
    assert open_manifest(other.url).num_samples != first.num_samples
    (another,) = set(own_index_cache.rglob("*.arrow")) - {cached}
    shutil.copy(another, cached)
    assert open_manifest(memory_store.url).fingerprint == first.fingerprint
    other.drop()


def test_an_index_that_an_older_penstock_cached_is_built_anew(
    memory_store: MemoryStore, put_shards: PutShards, own_index_cache: Path
) -> None:
    put_shards(memory_store, 2)
    first = open_manifest(memory_store.url)
    (cached,) = own_index_cache.rglob("*.arrow")
    sealed = cached.read_bytes()
    cached.write_bytes(first.to_bytes())
    assert open_manifest(memory_store.url).fingerprint == first.fingerprint
    assert cached.read_bytes() == sealed


def test_the_files_that_were_used_last_stay(tmp_path: Path) -> None:
    folder = SealedFolder("kept", tmp_path, kept=2)
    used, unused, new = ("a" * 32, "b" * 32, "c" * 32)
    for key, age_s in ((used, 200), (unused, 100)):
        folder.save(key, key.encode())
        os.utime(folder.file(key), (time.time() - age_s,) * 2)
    assert folder.load(used) == used.encode()
    folder.save(new, b"")
    assert [folder.load(key) for key in (used, unused, new)] == [used.encode(), None, b""]


def test_reading_a_file_again_within_a_minute_writes_nothing(tmp_path: Path) -> None:
    folder, key = SealedFolder("kept", tmp_path, kept=2), "a" * 32
    folder.save(key, b"")
    at = time.time() - 30
    os.utime(folder.file(key), (at, at))
    before = folder.file(key).stat().st_mtime_ns
    assert folder.load(key) == b""
    assert folder.file(key).stat().st_mtime_ns == before
