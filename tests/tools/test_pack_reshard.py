"""``pack`` of data sets: every format that is read becomes every format that is written."""

from __future__ import annotations

import datetime
import io
import json
import os
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packed_samples import read_samples

from penstock import DistributedDataLoader, TokensFormat, open_manifest, pack, verify
from penstock.loader import ConfigError, DatasetError

DAY = datetime.date(2024, 2, 29)


def table(rows: int) -> pa.Table:
    return pa.table(
        {
            "n": pa.array(range(rows), pa.int32()),
            "day": pa.array([DAY + datetime.timedelta(n) for n in range(rows)]),
            "at": pa.array([datetime.datetime(2024, 1, 1, 12) for _ in range(rows)], pa.timestamp("ns")),
            "price": pa.array([Decimal(n) / 4 for n in range(rows)], pa.decimal128(12, 2)),
            "tags": pa.array([["a"] * (n % 3) for n in range(rows)]),
            "vector": pa.array([[n, n + 0.5] for n in range(rows)], pa.list_(pa.float32(), 2)),
            "late": pa.array([None if n < 300 else n % 100 for n in range(rows)], pa.int8()),
        }
    )


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    folder = tmp_path / "parquet"
    folder.mkdir()
    whole = table(500)
    for number in range(2):
        pq.write_table(whole.slice(250 * number, 250), folder / f"{number}.parquet", row_group_size=100)
    return folder


@pytest.mark.parametrize("target", ["parquet", "arrow"])
def test_tables_keep_their_types_and_values(parquet: Path, tmp_path: Path, target: Any) -> None:
    summary = pack(parquet, tmp_path / "out", format=target, shard_bytes=3_000)
    assert (summary.samples, verify(tmp_path / "out").ok) == (500, True)
    parts = sorted((tmp_path / "out").glob(f"shard-*.{target}"))
    assert len(parts) > 1
    read = pq.read_table if target == "parquet" else lambda path: pa.ipc.open_file(path).read_all()
    assert pa.concat_tables(read(part) for part in parts).equals(table(500))


@pytest.mark.slow
def test_dates_decimals_and_lists_become_tar_members_that_are_read_back(parquet: Path, tmp_path: Path) -> None:
    summary = pack(parquet, tmp_path / "out")
    sample = read_samples(str(tmp_path / "out"))[3]
    assert (sample["n"], sample["day"], sample["price"]) == (b"3", b"2024-03-03", b"0.75")
    assert sample["at"].startswith(b"2024-01-01T12:00:00")
    assert json.loads(sample["tags.json"]) == []
    vector = np.load(io.BytesIO(sample["vector.npy"]))
    assert (vector.tolist(), vector.dtype) == ([3.0, 3.5], np.float32)
    assert set(summary.notes) == {"field 'tags' is named 'tags.json'", "field 'vector' is named 'vector.npy'"}
    with DistributedDataLoader(tmp_path / "out", batch_size=500, shuffle=False, columns=["vector.npy"]) as loader:
        assert next(iter(loader))["vector.npy"].shape == (500, 2)


def test_jsonl_written_from_a_table_is_read_as_the_table(parquet: Path, tmp_path: Path) -> None:
    pack(parquet, tmp_path / "out", format="jsonl", shard_bytes=20_000)
    samples = read_samples(str(tmp_path / "out"))
    assert [sample["n"] for sample in samples] == list(range(500))
    assert samples[5] | {"at": ""} == {
        "n": 5, "day": "2024-03-05", "at": "", "price": "1.25", "tags": ["a", "a"], "vector": [5.0, 5.5], "late": 0,
        "late__null": True,
    }  # fmt: skip


def members() -> Iterator[dict[str, Any]]:
    for n in range(100):
        yield {"__key__": f"k{n:03d}", "txt": f"tëxt {n}", "cls": n % 7, "jpg": b"\xff\xd8\xff" + bytes([n]) * 50}


TARGETS = ("tar", "parquet", "arrow", "mds")


@pytest.mark.slow
@pytest.mark.parametrize("middle", TARGETS)
@pytest.mark.parametrize("target", TARGETS)
def test_samples_survive_two_changes_of_format(tmp_path: Path, middle: Any, target: Any) -> None:
    pack(members(), tmp_path / "tar", shard_bytes=40_000)
    pack(tmp_path / "tar", tmp_path / "middle", format=middle, shard_bytes=4_000)
    assert open_manifest(tmp_path / "middle", rebuild=True).num_samples == 100
    pack(tmp_path / "middle", tmp_path / "out", format=target, shard_bytes=6_000)
    with DistributedDataLoader(tmp_path / "out", batch_size=100, shuffle=False, decode={"jpg": bytes}) as loader:
        batch = next(iter(loader))
    expected = list(members())
    assert list(batch["__key__"]) == [sample["__key__"] for sample in expected]
    assert list(batch["txt"]) == [sample["txt"] for sample in expected]
    assert batch["cls"].tolist() == [sample["cls"] for sample in expected]
    assert list(batch["jpg"]) == [sample["jpg"] for sample in expected]


@pytest.mark.slow
def test_mds_shards_are_read_by_their_own_library(tmp_path: Path) -> None:
    # Its ready-made data sets import torchvision, which may have been built for another torch.
    sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))
    streaming = pytest.importorskip("streaming.base.format.mds", reason="install penstock[test]")
    rows = [
        {"n": n, "x": n / 2, "s": f"é{n}", "b": bytes([n]), "a": np.arange(n + 1, dtype=np.int16), "j": {"k": [n]}}
        for n in range(50)
    ]
    pack(rows, tmp_path / "out", format="mds", shard_bytes=1_000)
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert len(index["shards"]) > 1
    found = []
    for entry in index["shards"]:
        reader = streaming.MDSReader.from_json(str(tmp_path / "out"), None, entry)
        found += [reader.get_item(row) for row in range(reader.samples)]
    for got, row in zip(found, rows, strict=True):
        assert got["a"].tolist() == row["a"].tolist()
        assert {name: got[name] for name in "nxsbj"} == {name: row[name] for name in "nxsbj"}


def test_compressed_jsonl_mds_and_tokens_become_parquet(tmp_path: Path) -> None:
    import gzip

    lines = "".join(json.dumps({"n": n, "late": None if n < 400 else "x"}) + "\n" for n in range(600))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pack(tmp_path / "a.jsonl.gz", tmp_path / "lines", format="parquet")
    assert (
        pq.read_table(tmp_path / "lines" / "shard-000000.parquet").column("late").to_pylist()
        == [None] * 400 + ["x"] * 200
    )
    pack([list(range(64))], tmp_path / "tokens", format="tokens", seq_len=8)
    pack(tmp_path / "tokens", tmp_path / "rows", format="parquet")
    assert np.array([sample["tokens"] for sample in read_samples(str(tmp_path / "rows"))]).ravel().tolist() == list(
        range(64)
    )
    pack(tmp_path / "rows", tmp_path / "again", format="tokens", seq_len=16)
    assert [list(sample["tokens"]) for sample in read_samples(str(tmp_path / "again"))][1] == list(range(16, 32))


def test_a_folder_of_csv_files_is_rows_not_files(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.csv").write_text(f"n,day\n{number},2024-01-0{number + 1}\n")
    pack(tmp_path, tmp_path.parent / "rows", format="parquet")
    (only,) = (tmp_path.parent / "rows").glob("*.parquet")
    assert pq.read_table(only).column("day").to_pylist() == [datetime.date(2024, 1, 1), datetime.date(2024, 1, 2)]
    pack(tmp_path, tmp_path.parent / "tar")
    assert read_samples(str(tmp_path.parent / "tar"))[1]["day"] == b"2024-01-02"


@pytest.mark.slow
def test_shards_among_other_files_are_asked_about(parquet: Path, tmp_path: Path) -> None:
    (parquet / "notes.pdf").write_bytes(b"x")
    with pytest.raises(DatasetError, match=r"parquet files .0\.parquet. and others .notes\.pdf.*source_format='files'"):
        pack(parquet, tmp_path / "out")
    assert pack(parquet, tmp_path / "rows", source_format="parquet").samples == 500
    assert pack(parquet, tmp_path / "files", source_format="files").samples == 3
    with pytest.raises(ConfigError, match="must be 'files', 'csv'"):
        pack(parquet, tmp_path / "out", source_format="zip")


def test_token_files_are_read_with_a_length_and_not_taken_for_fields(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    np.arange(32, dtype=np.uint32).tofile(tmp_path / "in" / "a.bin")
    with pytest.raises(DatasetError, match="--source-seq-len 2048"):
        pack(tmp_path / "in", tmp_path / "out", format="parquet")
    pack(tmp_path / "in", tmp_path / "out", format="parquet", source_format=TokensFormat(seq_len=8, dtype="uint32"))
    assert [sample["tokens"] for sample in read_samples(str(tmp_path / "out"))][3] == list(range(24, 32))


def test_texts_with_braces_are_texts_and_no_patterns(tmp_path: Path) -> None:
    texts = ["see {this}", "and s3://that", "/"]
    pack(texts, tmp_path / "out", format="tokens", seq_len=1, tokenizer=lambda text: list(text.encode()))
    assert open_manifest(tmp_path / "out").num_samples == sum(map(len, texts))


def test_a_folder_of_several_splits_is_packed_by_split(parquet: Path, tmp_path: Path) -> None:
    (parquet / "0.parquet").rename(parquet / "train-0.parquet")
    (parquet / "1.parquet").rename(parquet / "test-0.parquet")
    with pytest.raises(DatasetError, match="split"):
        pack(parquet, tmp_path / "out")
    pack(parquet, tmp_path / "out", split="test", format="parquet")
    assert [sample["n"] for sample in read_samples(str(tmp_path / "out"))] == list(range(250, 500))


def test_images_of_two_kinds_are_one_field(tmp_path: Path) -> None:
    from penstock.benchmarks.datasets import make_pictures

    cv2 = pytest.importorskip("cv2")
    (tmp_path / "in").mkdir()
    for number, picture in enumerate(make_pictures(6, 16, 24, quality=90)):
        (tmp_path / "in" / f"{number}.jpg").write_bytes(picture)
    pixels = np.zeros((16, 24, 3), np.uint8)
    for number in range(6, 8):
        (tmp_path / "in" / f"{number}.PNG").write_bytes(cv2.imencode(".png", pixels)[1].tobytes())
    summary = pack(tmp_path / "in", tmp_path / "out")
    assert summary.notes == ("images of several kinds (6 .jpg, 2 .png) are one field, 'jpg'",)
    with DistributedDataLoader(tmp_path / "out", batch_size=8, shuffle=False) as loader:
        assert len(next(iter(loader))["jpg"]) == 8
    (tmp_path / "in" / "0.png").write_bytes(b"a mask")  # now 'jpg' and 'png' are two things
    assert pack(tmp_path / "in", tmp_path / "two").notes[0].startswith("only some samples have the fields")


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "in" / "a.txt").write_text("a")
    (tmp_path / "in" / "again.txt").symlink_to(tmp_path / "in" / "a.txt")
    assert pack(tmp_path / "in", tmp_path / "inside").samples == 2
    (tmp_path / "in" / "b.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(DatasetError, match=r"b\.txt: a link leads out of the folder.*--follow-links"):
        pack(tmp_path / "in", tmp_path / "out")
    (tmp_path / "in" / "b.txt").unlink()
    (tmp_path / "in" / "up").symlink_to(tmp_path / "other")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "c.txt").write_text("c")
    with pytest.raises(DatasetError, match="leads out of the folder"):
        pack(tmp_path / "in", tmp_path / "out")
    assert pack(tmp_path / "in", tmp_path / "out", follow_links=True).samples == 3
    assert os.listdir(tmp_path / "out")  # noqa: PTH208


@pytest.mark.parametrize(
    ("rows", "target", "message"),
    [
        ([{"b": b"\xff"}], "jsonl", "JSON has no bytes"),
        ([{"x": float("inf")}], "jsonl", "no infinity"),
        ([{"n": 1}, {"n": "x"}], "mds", "is str in MDS's words, but int"),
        ([{"n": None}], "mds", "MDS has no nulls"),
        ([{"n": 1}, {"m": 1}], "mds", "the same fields in every sample"),
        ([{"v": [1]}, {"v": "x"}], "tar", "values of one type"),
        ([{"v": 1, "V": 2}], "tar", "two fields that tar calls 'v'"),
    ],
)
def test_values_that_a_format_cannot_hold_are_named(
    tmp_path: Path, rows: list[dict[str, Any]], target: Any, message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        pack(rows, tmp_path / "out", format=target)


def test_loose_files_of_several_splits_are_not_packed_as_one_data_set(tmp_path: Path) -> None:
    for split in ("train", "val2017"):
        for name in ("ants/0.txt", "bees/1-test.txt"):
            (tmp_path / "in" / split / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "in" / split / name).write_text(split)
    with pytest.raises(DatasetError, match=r"several splits: train \(2 files\), val \(2 files\).*split='train'"):
        pack(tmp_path / "in", tmp_path / "out")
    assert pack(tmp_path / "in", tmp_path / "one", split="val").classes == ("ants", "bees")
    assert pack(tmp_path / "in", tmp_path / "all", split="all").samples == 4
    assert pack(tmp_path / "in" / "train", tmp_path / "train").samples == 2  # one name with "test" makes no split


def test_tables_of_several_splits_are_not_packed_as_one_data_set(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for split in ("train", "test"):
        (tmp_path / "in" / f"{split}.csv").write_text("a\n1\n")
    with pytest.raises(DatasetError, match=r"several splits: test \(1 file\), train \(1 file\)"):
        pack(tmp_path / "in", tmp_path / "out", format="parquet")
    pack(tmp_path / "in", tmp_path / "out", format="parquet", split="test")
    named = [str(tmp_path / "in" / f"{split}.csv") for split in ("train", "test")]
    assert pack(named, tmp_path / "both", format="parquet").samples == 2
