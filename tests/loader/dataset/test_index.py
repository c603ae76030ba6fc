from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from counted_gets import PutShards, keys

from penstock import open_manifest, open_store, pack
from penstock.loader import (
    ConfigError,
    FormatError,
    ShardFormat,
    StaleManifestWarning,
    TokenDocumentsFormat,
    TokensFormat,
)
from penstock.loader.dataset.cache import IndexCache
from penstock.loader.dataset.manifest import MANIFEST_NAME
from penstock.loader.formats.shard import ShardTask
from penstock.storage import MemoryStore


def gets(store: MemoryStore) -> int:
    return sum(call.verb == "get" for call in store.calls)


def shard_gets(store: MemoryStore) -> int:
    return sum(call.verb == "get" and not call.key.endswith(MANIFEST_NAME) for call in store.calls)


def test_a_data_set_without_an_index_just_works(memory_store: MemoryStore, put_shards: PutShards) -> None:
    rows = put_shards(memory_store, 5)
    manifest = open_manifest(memory_store.url)
    assert manifest.num_samples == sum(rows)
    assert keys(manifest) == [f"part-{n:03d}.parquet" for n in range(5)]
    assert manifest.url == memory_store.url + "/"
    assert open_manifest(manifest) is manifest


def test_a_prefix_is_opened_within_one_round_trip(
    memory_store: MemoryStore, put_shards: PutShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is an object, what it holds, and its manifest: each is asked for before any of them is answered."""
    put_shards(memory_store, 2)
    memory_store.put(MANIFEST_NAME, open_manifest(memory_store.url).to_bytes())
    asked = threading.Barrier(3, timeout=60)

    def late(ask: Callable[..., object]) -> Callable[..., object]:
        def wait(*args: object, **kwargs: object) -> object:
            asked.wait()
            return ask(*args, **kwargs)

        return wait

    for verb in ("head", "list", "get"):
        monkeypatch.setattr(MemoryStore, verb, late(getattr(MemoryStore, verb)))
    assert open_manifest(memory_store.url.rstrip("/")).num_samples == 51


def test_the_second_use_reads_no_shard(memory_store: MemoryStore, put_shards: PutShards) -> None:
    put_shards(memory_store, 5)
    first = open_manifest(memory_store.url)
    before = shard_gets(memory_store)
    assert open_manifest(memory_store.url).fingerprint == first.fingerprint
    assert shard_gets(memory_store) == before


def test_a_changed_shard_is_seen_though_its_name_and_size_are_the_same(
    memory_store: MemoryStore, put_shards: PutShards
) -> None:
    put_shards(memory_store, 2)
    open_manifest(memory_store.url)
    data = bytearray(memory_store.get("part-000.parquet"))
    data[40] ^= 1
    memory_store.put("part-000.parquet", data)
    before = gets(memory_store)
    open_manifest(memory_store.url)
    assert gets(memory_store) > before


def test_a_damaged_cached_index_is_built_anew(
    memory_store: MemoryStore, put_shards: PutShards, own_index_cache: Path
) -> None:
    put_shards(memory_store, 2)
    first = open_manifest(memory_store.url)
    (cached,) = own_index_cache.rglob("*.arrow")
    good = cached.read_bytes()
    for damaged in (b"", good[: len(good) // 2], bytes(len(good))):
        cached.write_bytes(damaged)
        assert open_manifest(memory_store.url).fingerprint == first.fingerprint
        assert cached.read_bytes() == good


def test_a_cache_that_cannot_be_written_is_done_without(
    memory_store: MemoryStore, put_shards: PutShards, tmp_path: Path
) -> None:
    put_shards(memory_store, 2)
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    assert open_manifest(memory_store.url, cache_dir=blocked).num_samples == 51


def test_the_manifest_beside_the_data_is_used(memory_store: MemoryStore, put_shards: PutShards) -> None:
    put_shards(memory_store, 30)
    saved = open_manifest(memory_store.url)
    memory_store.put(MANIFEST_NAME, saved.to_bytes())
    before = gets(memory_store)
    assert open_manifest(memory_store.url).fingerprint == saved.fingerprint
    assert open_manifest(f"{memory_store.url}/{MANIFEST_NAME}").fingerprint == saved.fingerprint
    some = open_manifest(f"{memory_store.url}/part-{{003..022}}.parquet")
    assert (len(some.shards), gets(memory_store)) == (20, before + 3)
    assert some.fingerprint == open_manifest(some.url + "part-{003..022}.parquet", rebuild=True).fingerprint


@pytest.mark.parametrize("form", ["tar", TokensFormat(8), TokensFormat(4, dtype="uint32"), TokenDocumentsFormat(eos=0)])
def test_another_format_of_a_manifest_is_refused_and_its_own_is_not(tmp_path: Path, form: ShardFormat | str) -> None:
    pack([[1, 2, 3, 4]] * 4, tmp_path, format="tokens", seq_len=4, progress=False)
    manifest = open_manifest(tmp_path)
    for source in (manifest, f"{tmp_path}/{MANIFEST_NAME}"):
        for own in ("tokens", TokensFormat(4)):
            assert open_manifest(source, format=own).num_samples == 4
        with pytest.raises(ConfigError, match=r"of a manifest of format 'tokens' with .*'seq_len': 4.*: leave it out"):
            open_manifest(source, format=form)


def test_a_stale_manifest_is_mended_by_reading_only_what_changed(
    memory_store: MemoryStore, put_shards: PutShards
) -> None:
    put_shards(memory_store, 30)
    memory_store.put(MANIFEST_NAME, open_manifest(memory_store.url).to_bytes())
    memory_store.put("part-007.parquet", bytes(memory_store.get("part-000.parquet")))
    memory_store.put("part-999.parquet", bytes(memory_store.get("part-001.parquet")))
    read = len(memory_store.calls)
    with pytest.warns(StaleManifestWarning, match="2 new or changed shards"):
        mended = open_manifest(memory_store.url)
    read_keys = {call.key.rpartition("/")[2] for call in memory_store.calls[read:] if call.verb == "get"}
    assert read_keys == {MANIFEST_NAME, "part-007.parquet", "part-999.parquet"}
    assert mended.fingerprint == open_manifest(memory_store.url, rebuild=True).fingerprint


def test_a_manifest_that_names_shards_that_are_gone_is_stale(memory_store: MemoryStore, put_shards: PutShards) -> None:
    put_shards(memory_store, 3)
    full = open_manifest(memory_store.url)
    other = MemoryStore("mem://fewer/data")
    for key in keys(full)[:2]:
        other.put(key, memory_store.get(key))
    other.put(MANIFEST_NAME, full.to_bytes())
    with pytest.warns(StaleManifestWarning, match="1 gone"):
        assert keys(open_manifest(other.url)) == keys(full)[:2]
    other.drop()


def test_a_damaged_manifest_beside_the_data_is_told_and_done_without(
    memory_store: MemoryStore, put_shards: PutShards
) -> None:
    put_shards(memory_store, 2)
    memory_store.put(MANIFEST_NAME, b"garbage")
    with pytest.warns(StaleManifestWarning, match="not used"):
        assert open_manifest(memory_store.url).num_samples == 51


def _count_builds(folder: str, cache: str, started: object, results: object) -> None:
    os.environ["PENSTOCK_CACHE"] = cache
    from penstock import ParquetFormat

    built = 0
    read = ParquetFormat.index_shard

    def counted(self: ParquetFormat, store: object, task: object) -> object:
        nonlocal built
        built += 1
        return read(self, store, task)  # type: ignore[arg-type]

    ParquetFormat.index_shard = counted  # type: ignore[method-assign,assignment]
    started.wait()  # type: ignore[attr-defined]
    open_manifest(folder)
    results.put(built)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_processes_of_a_node_build_an_index_once(
    memory_store: MemoryStore, put_shards: PutShards, tmp_path: Path, own_index_cache: Path
) -> None:
    put_shards(memory_store, 20)
    for info in memory_store.list():
        (tmp_path / info.key).write_bytes(memory_store.get(info.key))
    context = multiprocessing.get_context("spawn")
    started, results = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=_count_builds, args=(str(tmp_path), str(own_index_cache), started, results))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    built = sorted(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert built == [0, 0, 20]


@pytest.mark.slow
def test_indexing_needs_no_torch(memory_store: MemoryStore, put_shards: PutShards, tmp_path: Path) -> None:
    put_shards(memory_store, 1)
    (tmp_path / "a.parquet").write_bytes(memory_store.get("part-000.parquet"))
    code = f"import sys; from penstock.loader.dataset.index import open_manifest as o; o({str(tmp_path)!r}); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_store_without_etags_is_not_cached(memory_store: MemoryStore, put_shards: PutShards) -> None:
    from penstock import ParquetFormat
    from penstock.storage import ObjectInfo

    tasks = [ShardTask(ObjectInfo("a", 1, "e")), ShardTask(ObjectInfo("b", 1))]
    assert IndexCache().key("u", tasks, ParquetFormat()) is None
    assert IndexCache().key("u", [ShardTask(tasks[0].info, ObjectInfo("a.idx", 1))], ParquetFormat()) is None


def test_an_empty_shard_beside_a_saved_manifest_is_no_staleness(
    memory_store: MemoryStore, put_shards: PutShards
) -> None:
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    put_shards(memory_store, 2)
    table = pq.read_table(pa.BufferReader(memory_store.get("part-000.parquet"))).slice(0, 0)
    sink = io.BytesIO()
    pq.write_table(table, sink)
    memory_store.put("part-900.parquet", sink.getvalue())
    saved = open_manifest(memory_store.url)
    memory_store.put(MANIFEST_NAME, saved.to_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_manifest(memory_store.url, cache_dir="/dev/null").fingerprint == saved.fingerprint


def test_the_store_is_closed_after_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 this is no footer")
    with pytest.raises(FormatError, match=r"a\.parquet"):
        open_manifest(tmp_path)
    open_store(str(tmp_path)).close()
