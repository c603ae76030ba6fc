from __future__ import annotations

import gzip
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packed_samples import read_samples

from penstock import Manifest, open_manifest, pack, verify
from penstock.loader import ConfigError, DatasetError, FormatError, UnfinishedDatasetError, pack_once
from penstock.loader.dataset.manifest import MANIFEST_NAME
from penstock.loader.dataset.source import is_unfinished
from penstock.storage import AccessDeniedError, Fault, MemoryStore
from penstock.tools.packing import target


def test_an_iterable_becomes_tar_shards_that_webdataset_reads_alike(tmp_path: Path) -> None:
    from webdataset.tariterators import group_by_keys, tar_file_iterator

    given = [
        {"__key__": f"s{n}", "txt": f"text {n}", "cls": n, "json": {"n": [n]}, "npy": np.arange(n), "seg.png": b"\x01"}
        for n in range(40)
    ]
    summary = pack(iter(given), tmp_path / "out", shard_bytes=50_000)
    assert (summary.samples, summary.format) == (40, "tar")
    assert summary.shards > 1
    ours = read_samples(str(tmp_path / "out"))
    shards = sorted((tmp_path / "out").glob("*.tar"))
    assert [path.name for path in shards] == [f"shard-{n:06d}.tar" for n in range(summary.shards)]
    theirs: list[dict[str, Any]] = []
    for path in shards:
        with path.open("rb") as file:
            theirs += group_by_keys(member | {"__url__": path.name} for member in tar_file_iterator(file))
    assert [sample["__key__"] for sample in ours] == [sample["__key__"] for sample in given]
    for our, their, sample in zip(ours, theirs, given, strict=True):
        fields = sample.keys() - {"__key__"}
        assert {name: our[name] for name in fields} == {name: their[name] for name in fields}
        assert np.load(io.BytesIO(our["npy"])).tolist() == sample["npy"].tolist()
        assert json.loads(our["json"]) == sample["json"]


def test_a_folder_of_classes_gets_cls(tmp_path: Path) -> None:
    for name in ("dog", "cat"):
        (tmp_path / "in" / name).mkdir(parents=True)
        for number in range(3):
            (tmp_path / "in" / name / f"{number}.txt").write_text(f"{name}{number}")
    summary = pack(tmp_path / "in", tmp_path / "out")
    assert summary.classes == ("cat", "dog")
    samples = read_samples(str(tmp_path / "out"))
    assert [(s["__key__"], s["cls"], s["txt"]) for s in samples[2:4]] == [
        ("cat/2", b"0", b"cat2"),
        ("dog/0", b"1", b"dog0"),
    ]


def test_files_of_one_stem_are_one_sample(tmp_path: Path) -> None:
    for name in ("a.jpg", "a.seg.png", "a.json", "b.jpg", "sub/a.jpg", ".hidden/x.jpg"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(name.encode())
    pack(tmp_path / "in", tmp_path / "out")
    found = {
        s["__key__"]: sorted(n for n, v in s.items() if v is not None and n != "__key__")
        for s in read_samples(str(tmp_path / "out"))
    }
    assert found == {"a": ["jpg", "json", "seg.png"], "b": ["jpg"], "sub/a": ["jpg"]}


def test_nothing_but_compressed_json_files_is_packed_only_where_it_is_said_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in "ab":
        (tmp_path / "in" / f"{name}.json.gz").write_bytes(gzip.compress(b'{"x": 1}\n{"x": 2}\n'))
    with pytest.raises(DatasetError, match=r"nothing but a\.json\.gz.*source_format='jsonl'.*source_format='files'"):
        pack(tmp_path / "in", tmp_path / "out")
    assert pack(tmp_path / "in", tmp_path / "lines", source_format="jsonl", format="parquet").samples == 4
    assert pack(tmp_path / "in", tmp_path / "files", source_format="files").samples == 2


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "csv", "parquet"])
def test_a_table_becomes_parquet_shards_with_the_same_rows(tmp_path: Path, kind: str) -> None:
    rows = [{"n": n, "word": f"w{n}", "x": n / 2} for n in range(5000)]
    table = tmp_path / f"in.{kind}"
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if kind == "jsonl":
        table.write_text(lines)
    elif kind == "jsonl.gz":
        table.write_bytes(gzip.compress(lines.encode()))
    elif kind == "csv":
        table.write_text("n,word,x\n" + "".join(f"{row['n']},{row['word']},{row['x']}\n" for row in rows))
    else:
        import pyarrow as pa

        pq.write_table(pa.Table.from_pylist(rows), table)
    summary = pack(table, tmp_path / "out", format="parquet", shard_bytes=20_000)
    assert read_samples(str(tmp_path / "out")) == rows
    shards = sorted((tmp_path / "out").glob("*.parquet"))
    assert summary.shards == len(shards) > 1
    assert [row for shard in shards for row in pq.read_table(shard).to_pylist()] == rows


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_text_becomes_token_shards_that_need_no_length_to_be_told_again(tmp_path: Path) -> None:
    texts = [{"text": f"document {n} "} for n in range(300)]
    summary = pack(
        texts, tmp_path / "out", format="tokens", seq_len=16, tokenizer=encode, shard_bytes=1000, dtype="uint32"
    )
    stream = "".join(row["text"] for row in texts).encode()
    samples = [sample["tokens"] for sample in read_samples(str(tmp_path / "out"))]
    assert b"".join(bytes(sample) for sample in samples) == stream[: len(stream) // 16 * 16]
    assert summary.samples == len(stream) // 16
    assert summary.dropped == f"the last {len(stream) % 16} tokens, which do not fill a sequence of 16"
    assert open_manifest(tmp_path / "out").config["seq_len"] == 16


def test_integer_lists_and_arrays_become_tokens(tmp_path: Path) -> None:
    pack([[1, 2, 3], np.array([4, 5]), []], tmp_path / "out", format="tokens", seq_len=2)
    assert [sample["tokens"] for sample in read_samples(str(tmp_path / "out"))] == [[1, 2], [3, 4]]


def test_packing_goes_to_any_store_and_puts_the_manifest_last(memory_store: MemoryStore) -> None:
    pack([{"txt": "a"}, {"txt": "b"}], memory_store.url)
    puts = [call.key.rpartition("/")[2] for call in memory_store.calls if call.verb == "put"]
    assert puts == [MANIFEST_NAME, "shard-000000.tar", MANIFEST_NAME]
    assert verify(memory_store.url).ok


def test_an_interrupted_pack_is_seen_as_such_and_can_be_run_again(memory_store: MemoryStore) -> None:
    def interrupted() -> Iterator[dict[str, Any]]:
        for number in range(20):
            yield {"txt": f"{number}"}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(interrupted(), memory_store.url, shard_bytes=4000)
    assert [info.key for info in memory_store.list()][1:]
    with pytest.raises(UnfinishedDatasetError, match="interrupted"):
        open_manifest(memory_store.url)
    pack(({"txt": f"{number}"} for number in range(40)), memory_store.url, shard_bytes=4000)
    assert open_manifest(memory_store.url).num_samples == 40


def test_packing_once_keeps_what_is_there_reads_nothing_and_goes_on_after_an_interrupt(
    memory_store: MemoryStore,
) -> None:
    def samples(stop_at: int) -> Iterator[dict[str, Any]]:
        for number in range(40):
            if number == stop_at:
                raise KeyboardInterrupt
            yield {"txt": f"{number}"}

    with pytest.raises(KeyboardInterrupt):
        pack_once(samples(20), memory_store.url, shard_bytes=4000)
    summary = pack_once(samples(-1), memory_store.url, shard_bytes=4000)
    assert summary is not None
    assert "40 samples" in str(summary)
    assert pack_once(samples(0), memory_store.url) is None
    assert open_manifest(memory_store.url).num_samples == 40


def test_packing_once_leaves_shards_of_others_alone(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"n": 1}\n')
    assert pack_once([{"txt": "a"}], tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_packing_once_refuses_what_is_no_option_of_pack(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shard_byte: unknown options of pack"):
        pack_once([{"txt": "a"}], tmp_path / "out", shard_byte=4000)
    assert not (tmp_path / "out").exists()


def test_record_batches_become_parquet_without_rows_in_between(tmp_path: Path) -> None:
    batches = (pa.record_batch({"n": pa.array(range(start, start + 100), pa.int16())}) for start in (0, 100, 200))
    summary = pack(batches, tmp_path / "out", format="parquet")
    assert summary.samples == 300
    assert [sample["n"] for sample in read_samples(str(tmp_path / "out"))] == list(range(300))


@pytest.mark.slow
def test_a_failing_store_leaves_an_unfinished_data_set(memory_store: MemoryStore) -> None:
    memory_store.inject(Fault(), verb="put")
    memory_store.inject(Fault(error=AccessDeniedError), times=3, verb="put")
    with pytest.raises(AccessDeniedError):
        pack([{"txt": "a"}], memory_store.url)
    assert [info.key for info in memory_store.list()] == [MANIFEST_NAME]


@pytest.mark.parametrize("at", [0, 3, 37])
@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_packs_into_one_folder_at_once_one_fails_and_the_other_is_whole(
    memory_store: MemoryStore, at: int, overwrite: bool
) -> None:
    url = memory_store.url

    def rows(text: str, *, interrupted: bool = False) -> Iterator[dict[str, Any]]:
        for number in range(40):
            if interrupted and number == at:
                pack(rows("b"), url, shard_bytes=2_000, overwrite=overwrite, progress=False)
            yield {"__key__": f"{number:03d}", "txt": text * 500}

    with pytest.raises(DatasetError, match="another pack wrote here at the same time"):
        pack(rows("a", interrupted=True), url, shard_bytes=2_000, overwrite=overwrite, progress=False)
    assert verify(url).ok
    assert {bytes(sample["txt"]) for sample in read_samples(url)} == {b"b" * 500}


def test_a_pack_does_not_take_its_own_newer_note_for_that_of_another(
    memory_store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"n": {number}, "txt": "{"a" * 500}"}}\n' for number in range(60)))
    put = MemoryStore.put

    def answer_late(store: MemoryStore, key: str, data: Any) -> Any:
        info = put(store, key, data)
        time.sleep(0.02 if key == MANIFEST_NAME else 0.005)
        return info

    monkeypatch.setattr(MemoryStore, "put", answer_late)
    monkeypatch.setattr(target, "_SAVE_EVERY_S", 0.0)
    assert pack(str(tmp_path), memory_store.url, shard_bytes=2_000, progress=False).samples == 60


def test_a_pack_whose_shards_another_replaces_at_the_very_end_is_left_unfinished(memory_store: MemoryStore) -> None:
    pack([{"txt": "a"}], memory_store.url, progress=False)
    put = MemoryStore.put

    def put_and_be_overtaken(store: MemoryStore, key: str, data: Any) -> Any:
        info = put(store, key, data)
        if key == MANIFEST_NAME and not is_unfinished(bytes(data)):
            put(store, "shard-000000.tar", b"of another")
        return info

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryStore, "put", put_and_be_overtaken)
        with pytest.raises(DatasetError, match="another pack wrote here"):
            pack([{"txt": "b"}], memory_store.url, overwrite=True, progress=False)
    with pytest.raises(UnfinishedDatasetError):
        open_manifest(memory_store.url)


def test_a_target_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    pack([{"txt": "a"}], tmp_path)
    with pytest.raises(DatasetError, match=r"not empty .*overwrite=True"):
        pack([{"txt": "b"}], tmp_path)
    pack([{"txt": "b"}], tmp_path, overwrite=True)
    assert read_samples(str(tmp_path))[0]["txt"] == b"b"


@pytest.mark.parametrize("source", ["{}", "{}/", "file://{}", "{}/shard-000001.tar", "{}/shard-*.tar", "{}/../data"])
def test_a_source_is_not_overwritten_while_it_is_read(tmp_path: Path, source: str) -> None:
    data = tmp_path / "data"
    pack(({"txt": f"{number}"} for number in range(40)), data, shard_bytes=4000)
    before = {path: path.read_bytes() for path in data.iterdir()}
    with pytest.raises(ConfigError, match=r"would replace shard-00000\d\.tar of the source before all of it is read"):
        pack(source.format(data), data, overwrite=True, shard_bytes=2000)
    assert {path: path.read_bytes() for path in data.iterdir()} == before
    pack(source.format(data), tmp_path / "other", overwrite=True)


def test_shards_of_before_that_would_be_read_along_are_told(memory_store: MemoryStore) -> None:
    pack(({"txt": f"{number}"} for number in range(40)), memory_store.url, shard_bytes=4000)
    with pytest.raises(DatasetError, match=r"still there \(shard-0000"):
        pack([{"txt": "b"}], memory_store.url, overwrite=True)
    with pytest.raises(UnfinishedDatasetError):
        open_manifest(memory_store.url)


@pytest.mark.parametrize(
    ("samples", "arguments", "message"),
    [
        ([], {}, "has no samples"),
        ([3], {}, "sample 0 is a int"),
        ([{"__key__": "a.b", "txt": ""}], {}, "must not have a dot"),
        ([{"__key__": "a", "txt": ""}] * 2, {}, "keys must be unique"),
        ([{"__key__": "a"}], {}, "no fields"),
        ([{}, {"a": 1}], {"format": "mds"}, "sample 0 has no fields"),
        ([{"txt": object()}], {}, "cannot write a object"),
        ([{"npy": [object()]}], {}, "Python objects"),
        ([{"n": 1}, {"n": "x"}], {"format": "parquet"}, "do not fit"),
        ([{"n": None}], {"format": "parquet"}, "no value"),
        ([[70_000]], {"format": "tokens", "seq_len": 1}, "use dtype='uint32'"),
        ([[-1]], {"format": "tokens", "seq_len": 1}, "token -1"),
        ([[1.5]], {"format": "tokens", "seq_len": 1}, "list of integers"),
        ([[1], None], {"format": "tokens", "seq_len": 1}, "sample 1: no text, or the tokenizer gave None"),
        ([{"a": 1}], {"format": "tokens", "seq_len": 1, "field": "b"}, "sample 0: no field 'b'; it has"),
        ([[1]], {"format": "tokens", "seq_len": 2}, "has no samples"),
    ],
)
def test_samples_that_cannot_be_written_are_named(
    memory_store: MemoryStore, samples: list[Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        pack(samples, memory_store.url, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "zip"}, "tar, parquet, tokens, mds, jsonl or arrow"),
        ({"shard_bytes": 0}, "shard_bytes=0"),
        ({"format": "tokens"}, "needs a sequence length: give seq_len="),
        ({"seq_len": 3}, "seq_len= applies to format='tokens'"),
        ({"format": "tokens", "seq_len": 2, "dtype": "float32"}, "uint16 or uint32"),
        ({"format": "tokens", "seq_len": 2}, "give tokenizer="),
        ({"format": "tokens", "seq_len": 2, "field": "body"}, "no field 'body'"),
        ({"follow_links": True}, "not to an iterable"),
        ({"source_storage_options": {"anonymous": True}}, "not to an iterable"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    memory_store: MemoryStore, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, DatasetError), match=message):
        pack([{"text": "a"}], memory_store.url, **arguments)


def test_bad_tables_are_named_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(FormatError, match=r"a\.jsonl.*: line 2"):
        pack(tmp_path / "a.jsonl", tmp_path / "out")
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(FormatError, match=r"b\.parquet.*too few"):
        pack(tmp_path / "b.parquet", tmp_path / "out")


def test_parquet_rows_of_late_fields_are_refused_not_dropped(memory_store: MemoryStore) -> None:
    rows: list[dict[str, Any]] = [{"a": "x"}] * 300 + [{"a": "x", "b": 1}]
    with pytest.raises(DatasetError, match=r"fields \['b'\]"):
        pack(rows, memory_store.url, format="parquet", shard_bytes=1000)


def test_the_manifest_that_pack_writes_is_the_one_that_indexing_finds(memory_store: MemoryStore) -> None:
    pack(({"txt": f"{number}"} for number in range(40)), memory_store.url, shard_bytes=4000)
    saved = Manifest.from_bytes(memory_store.get(MANIFEST_NAME), "mem://x/")
    assert open_manifest(memory_store.url, rebuild=True).fingerprint == saved.fingerprint


def test_fields_that_only_some_of_the_first_rows_have_are_kept(memory_store: MemoryStore) -> None:
    pack([{"a": 1}, {"b": 2}, {"a": 3, "b": 4}], memory_store.url, format="parquet")
    shard = pq.read_table(io.BytesIO(memory_store.get("shard-000000.parquet"))).to_pylist()
    assert shard == [{"a": 1, "b": None}, {"a": None, "b": 2}, {"a": 3, "b": 4}]


def test_fat_rows_are_cut_into_row_groups_and_shards_of_the_size_asked_for(memory_store: MemoryStore) -> None:
    noise = np.random.default_rng(0)
    rows = [{"image": noise.bytes(100_000)} for _ in range(40)]
    pack(rows, memory_store.url, format="parquet", shard_bytes=1 << 20)
    sizes = [info.size for info in memory_store.list() if info.key.endswith(".parquet")]
    assert len(sizes) == 4
    assert max(sizes) < 1.3 * (1 << 20)
    assert read_samples(memory_store.url) == rows


def test_one_long_document_fills_several_token_shards(tmp_path: Path) -> None:
    summary = pack([np.arange(1000)], tmp_path, format="tokens", seq_len=10, shard_bytes=600)
    assert (summary.shards, summary.samples, summary.dropped) == (4, 100, None)
    assert sum((sample["tokens"] for sample in read_samples(str(tmp_path))), []) == list(range(1000))  # noqa: RUF017
