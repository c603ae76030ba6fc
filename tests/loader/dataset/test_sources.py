"""What a source may be: prefixes, shards, patterns and lists, and which are refused."""

from __future__ import annotations

import functools
import http.server
import json
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from counted_gets import PutShards, keys

from penstock import DistributedDataLoader, TokensFormat, audit, open_manifest, pack, verify
from penstock.loader import BadSampleWarning, ConfigError, DatasetError, FormatError
from penstock.loader.dataset.listing import expand_braces
from penstock.loader.dataset.source import select
from penstock.storage import MemoryStore, NotFoundError, PenstockError


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


def test_every_path_may_begin_at_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    pack([{"cls": number} for number in range(8)], "~/data")

    def fail_once(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] == 3:
            raise ValueError(sample["cls"])
        return sample

    options: dict[str, Any] = {"batch_size": 4, "on_error": "replace", "max_errors": 1}
    kept = {"audit_dir": "~/audit", "cache_dir": "~/cache", "quarantine": "~/bad"}
    with (
        pytest.warns(BadSampleWarning, match="sample 3"),
        DistributedDataLoader("~/data", transform=fail_once, **options, **kept) as loader,
    ):
        assert len(list(loader)) == 2
    assert audit("~/audit").epochs[0].epoch == 0
    with DistributedDataLoader("~/data", avoid="~/bad", **options) as loader:
        assert 3 not in [int(label) for batch in loader for label in batch["cls"]]
    assert not list(here.iterdir())
    assert {path.name for path in (tmp_path / "home").iterdir()} >= {"data", "audit", "bad"}


def test_a_name_that_begins_like_a_users_home_but_is_none_is_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pack([{"cls": number} for number in range(8)], "~no user")
    assert open_manifest("~no user").num_samples == 8
    assert open_manifest(tmp_path / "~no user").num_samples == 8


@pytest.mark.parametrize("name", ["a#1", "a%20b", "a?b", "a*", "a[0]", "a{1,2}", "a\tb"])
def test_a_url_of_files_that_exist_is_taken_literally(
    name: str, memory_store: MemoryStore, put_shards: PutShards, tmp_path: Path
) -> None:
    put_shards(memory_store, 1)
    for folder in ("a", "a b", "a0", "a1", "axb", name):  # what else the name might stand for
        (tmp_path / folder).mkdir()
    (tmp_path / name / "p.parquet").write_bytes(memory_store.get("part-000.parquet"))
    for url in (f"file://{tmp_path}/{name}", f"file://{tmp_path}/{name}/p.parquet"):
        manifest = open_manifest(url)
        assert manifest.num_samples == 25
        assert open_manifest(manifest.url).num_samples == 25


def test_a_url_of_files_that_is_percent_encoded_is_decoded(
    memory_store: MemoryStore, put_shards: PutShards, tmp_path: Path
) -> None:
    put_shards(memory_store, 1)
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "p.parquet").write_bytes(memory_store.get("part-000.parquet"))
    assert open_manifest(f"file://{tmp_path}/a%20b").num_samples == 25


def test_a_shard_whose_name_is_not_utf8_is_refused_and_other_files_are_not(
    memory_store: MemoryStore, put_shards: PutShards, tmp_path: Path
) -> None:
    put_shards(memory_store, 1)
    (tmp_path / "p.parquet").write_bytes(memory_store.get("part-000.parquet"))
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).touch()
    assert open_manifest(tmp_path).num_samples == 25
    (tmp_path / os.fsdecode(b"caf\xe9.parquet")).write_bytes(memory_store.get("part-000.parquet"))
    with pytest.raises(DatasetError, match=r"the name of the shard 'caf\\udce9\.parquet' is not UTF-8; rename it"):
        open_manifest(tmp_path)


@pytest.mark.slow
def test_a_name_in_utf8_is_not_blamed_where_the_locale_cannot_read_it(
    memory_store: MemoryStore, put_shards: PutShards, tmp_path: Path
) -> None:
    put_shards(memory_store, 1)
    (tmp_path / "grün.parquet").write_bytes(memory_store.get("part-000.parquet"))
    plain = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    program = f"from penstock import open_manifest; open_manifest({str(tmp_path)!r})"
    ended = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **plain}, capture_output=True, text=True, check=False
    )
    assert "'gr\\xfcn.parquet' is UTF-8, but this process takes names for ascii" in ended.stderr
    assert "PYTHONUTF8=1" in ended.stderr


def test_a_link_that_leads_nowhere_is_called_so(
    memory_store: MemoryStore, put_shards: PutShards, tmp_path: Path
) -> None:
    put_shards(memory_store, 1)
    (tmp_path / "a.parquet").write_bytes(memory_store.get("part-000.parquet"))
    (tmp_path / "b.parquet").symlink_to("/gone/b.parquet")
    for source in (tmp_path, f"{tmp_path}/*"):
        with pytest.raises(
            FormatError, match=r"b\.parquet: is listed, but nothing is there: a link that leads nowhere"
        ):
            open_manifest(source)
    with pytest.raises(NotFoundError, match=r"b\.parquet is a link to /gone/b\.parquet, which is not there"):
        open_manifest(tmp_path / "b.parquet")
    assert [flaw.shard for flaw in verify(tmp_path).flaws] == ["b.parquet"]


def test_a_name_without_its_ending_is_told_of_the_files_that_have_one(tmp_path: Path) -> None:
    """As Megatron names data."""
    for ending in ("bin", "idx"):
        (tmp_path / f"my_text_document.{ending}").write_bytes(b"12")
    with pytest.raises(
        NotFoundError, match=r"my_text_document, but my_text_document\.bin, my_text_document\.idx beside"
    ):
        open_manifest(tmp_path / "my_text_document", format=TokensFormat(seq_len=1))
    with pytest.raises(NotFoundError, match="there is no folder"):
        open_manifest(tmp_path / "other")


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


@pytest.mark.parametrize(
    "url", ["zip://in::file:///a.zip", "simplecache::memory://a/", "tar://*.txt::https://me:pass-word@host/a.tar"]
)
def test_a_chain_of_urls_is_refused_with_what_to_do(url: str) -> None:
    with pytest.raises(ConfigError, match=r"chains of fsspec's are not read; .*'fo'.*cache_dir") as caught:
        open_manifest(url)
    assert "pass-word" not in str(caught.value)


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


@pytest.mark.slow
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
