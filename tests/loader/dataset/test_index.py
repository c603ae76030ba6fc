from __future__ import annotations

import functools
import http.server
import json
import multiprocessing
import os
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import open_manifest, open_store
from penstock.loader import ConfigError, DatasetError, FormatError, StaleManifestWarning
from penstock.loader.dataset.cache import IndexCache
from penstock.loader.dataset.manifest import MANIFEST_NAME
from penstock.loader.dataset.patterns import expand_braces
from penstock.loader.dataset.source import select
from penstock.storage import MemoryStore, NotFoundError, PenstockError

PutShards = Callable[..., list[int]]


def gets(store: MemoryStore) -> int:
    return sum(call.verb == "get" for call in store.calls)


def shard_gets(store: MemoryStore) -> int:
    return sum(call.verb == "get" and not call.key.endswith(MANIFEST_NAME) for call in store.calls)


def keys(manifest: object) -> list[str]:
    return [shard.key for shard in manifest.shards]  # type: ignore[attr-defined]


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


def test_one_shard_a_pattern_and_a_list_are_sources(memory_store: MemoryStore, put_shards: PutShards) -> None:
    rows = put_shards(memory_store, 20, "a/x") + put_shards(memory_store, 20, "b/y")
    url = memory_store.url
    assert open_manifest(f"{url}/a/x-003.parquet").num_samples == rows[3]
    assert keys(open_manifest(f"{url}/{{b/y,a/x}}-{{002..001}}.parquet".replace("002..001", "001..002"))) == [
        "b/y-001.parquet",
        "b/y-002.parquet",
        "a/x-001.parquet",
        "a/x-002.parquet",
    ]
    assert open_manifest(f"{url}/a/x-{{000..019}}.parquet").num_samples == sum(rows[:20])
    backwards = [f"{url}/b/y-001.parquet", f"{url}/a/x-001.parquet", f"{url}/a/x-000.parquet"]
    manifest = open_manifest(backwards)
    assert manifest.url == f"{url}/"
    assert keys(manifest) == ["b/y-001.parquet", "a/x-001.parquet", "a/x-000.parquet"]
    assert open_manifest([f"{url}/b/", f"{url}/a/x-000.parquet"]).num_samples == sum(rows[20:]) + rows[0]


def test_local_paths_are_sources(memory_store: MemoryStore, put_shards: PutShards, tmp_path: Path) -> None:
    put_shards(memory_store, 2)
    for info in memory_store.list():
        (tmp_path / info.key).write_bytes(memory_store.get(info.key))
    for source in (tmp_path, str(tmp_path), f"{tmp_path}/", f"file://{tmp_path}"):
        assert open_manifest(source).num_samples == 51
    assert open_manifest(tmp_path / "part-001.parquet").num_samples == 26
    assert open_manifest(f"{tmp_path}/part-{{000..001}}.parquet").num_samples == 51


def test_braces_expand_as_a_shell_does() -> None:
    assert expand_braces("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert expand_braces("{x,y}/{1..2}") == ["x/1", "x/2", "y/1", "y/2"]
    assert expand_braces("plain") == ["plain"]


@pytest.mark.parametrize("pattern", ["a-{3..1}.tar", "a-{x}.tar", "a-{0..99999999999}.tar", "a-{}.tar"])
def test_patterns_without_sense_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigError):
        expand_braces(pattern)


def test_missing_shards_of_a_pattern_are_named(memory_store: MemoryStore, put_shards: PutShards) -> None:
    put_shards(memory_store, 20)
    named = ", ".join(f"part-{n:03d}.parquet" for n in range(20, 25))
    with pytest.raises(DatasetError, match=f"missing {named}, \\.\\.\\."):
        open_manifest(f"{memory_store.url}/part-{{000..040}}.parquet")
    with pytest.raises(DatasetError, match=r"missing part-020\.parquet,? which"):
        open_manifest([f"{memory_store.url}/part-000.parquet", f"{memory_store.url}/part-020.parquet"])


def test_bad_sources_are_refused(memory_store: MemoryStore, put_shards: PutShards) -> None:
    put_shards(memory_store, 2)
    url = memory_store.url
    with pytest.raises(DatasetError, match="nothing there"):
        open_manifest(f"{url}/empty")
    with pytest.raises(NotFoundError, match="no bucket"):
        open_manifest("mem://no-such-bucket/x")
    with pytest.raises(DatasetError, match="several stores"):
        open_manifest([f"{url}/part-000.parquet", "mem://elsewhere/part-000.parquet"])
    with pytest.raises(ConfigError, match="given twice"):
        open_manifest([f"{url}/part-000.parquet"] * 2)
    with pytest.raises(DatasetError, match="empty"):
        open_manifest([])
    with pytest.raises(ConfigError, match="not int"):
        open_manifest([3])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="threads=0"):
        open_manifest(url, threads=0)
    with pytest.raises(DatasetError, match="no arrow shards"):
        open_manifest(url, format="arrow")


def test_a_shard_without_bytes_is_named(memory_store: MemoryStore, put_shards: PutShards) -> None:
    put_shards(memory_store, 3)
    memory_store.put("part-001.parquet", b"")
    with pytest.raises(FormatError, match=r"part-001\.parquet: the shard is empty"):
        open_manifest(memory_store.url)


def test_a_data_set_of_empty_shards_is_refused(memory_store: MemoryStore) -> None:
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.table({"n": pa.array([], pa.int64())}), sink)
    memory_store.put("a.parquet", sink.getvalue())
    with pytest.raises(DatasetError, match="none of its 1 parquet shards holds a sample"):
        open_manifest(memory_store.url)


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

    assert IndexCache().key("u", [ObjectInfo("a", 1, "e"), ObjectInfo("b", 1, None)], ParquetFormat()) is None


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


def test_one_mds_shard_of_a_folder_is_a_source(tmp_path: Path) -> None:
    shards = []
    for number, count in enumerate((30, 40, 50)):
        offsets = [4 * (count + 2) + 8 * row for row in range(count + 1)]
        data = struct.pack(f"<I{count + 1}I{count}q", count, *offsets, *range(count))
        name = f"shard.{number:05d}.mds"
        (tmp_path / name).write_bytes(data)
        file = {"basename": name, "bytes": len(data), "hashes": {}}
        columns = {"column_names": ["n"], "column_encodings": ["int"], "column_sizes": [8]}
        shard = {"version": 2, "format": "mds", "samples": count, "size_limit": 400, "hashes": [], "compression": None}
        shards.append(shard | columns | {"raw_data": file, "zip_data": None})
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    assert open_manifest(tmp_path).num_samples == 120
    one = open_manifest(tmp_path / "shard.00001.mds")
    assert (one.num_samples, keys(one)) == (40, ["shard.00001.mds"])


def test_one_megatron_file_is_found_with_its_index(tmp_path: Path) -> None:
    from penstock import TokensFormat

    (tmp_path / "a.bin").write_bytes(bytes(400))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 1, 2) + struct.pack("<iqqq", 100, 0, 0, 1)
    (tmp_path / "a.idx").write_bytes(index)
    for source in (tmp_path, tmp_path / "a.bin"):
        manifest = open_manifest(source, format=TokensFormat(seq_len=10))
        assert (manifest.num_samples, manifest.schema["columns"]["tokens"]["type"]) == (10, "int32")


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_a_folder_on_a_web_server_is_no_object_though_the_server_answers_for_its_name(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("a.tar", "b.tar"):
        (tmp_path / "data" / name).write_bytes(b"x")
    handler = functools.partial(_QuietHandler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/data"
        for source, chosen in ((url, None), (f"{url}/a.tar", ("a.tar",)), (f"{url}/{{b,a}}.tar", ("b.tar", "a.tar"))):
            store, selection = select(source)
            store.close()
            assert selection.chosen == chosen
        assert [info.key for info in select(url)[1].listing] == ["a.tar", "b.tar"]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("pattern", ["{0..9999}{0..9999}", "{0..9000000}", "{1.." + "9" * 5000 + "}", "{a,b}" * 40])
def test_a_pattern_that_names_millions_of_shards_is_refused_before_they_are_named(pattern: str) -> None:
    with pytest.raises(ConfigError, match="names more than 2,000,000 shards with"):
        expand_braces(pattern)


def test_a_pattern_of_a_thousand_braces_is_expanded() -> None:
    assert expand_braces("{0..0}" * 2000 + "{a,b}") == ["0" * 2000 + "a", "0" * 2000 + "b"]


@pytest.mark.parametrize("name", ["p" + "[a]" * 100 + ".parquet", "{" + "pa," * 100 + "pb}.parquet"])
def test_a_pattern_longer_than_the_name_of_a_file_may_be_is_an_error_of_ours(tmp_path: Path, name: str) -> None:
    with pytest.raises(PenstockError, match=r"p\[a\]|pa"):
        open_manifest(f"{tmp_path}/{name}", progress=False)
