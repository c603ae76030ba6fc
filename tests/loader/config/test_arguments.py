"""Fields that are asked for and cannot be had are refused when the loader is made, not at its first batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_manifest import make_manifest
from tar_dataset import write_tars

from penstock import DistributedDataLoader, PenstockError, TokenBudget, TokensFormat
from penstock.loader import Keep
from penstock.loader.config.checks import check_names
from penstock.loader.dataset.manifest import Manifest
from penstock.loader.errors import ConfigError

ROWS = 6


def load(source: object, **options: Any) -> DistributedDataLoader:
    return DistributedDataLoader(str(source), **{"batch_size": 2, "rank": 0, "world_size": 1} | options)


def never_called(value: Any) -> Any:
    raise AssertionError(f"called with {value!r}")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    columns = {
        "n": pa.array(range(ROWS), pa.int32()),
        "flag": pa.array([True] * ROWS),
        "price.usd": pa.array([1.5] * ROWS, pa.float32()),
        "vector": pa.array([[1.0, 2.0]] * ROWS, pa.list_(pa.float32(), 2)),
        "at": pa.array(range(ROWS), pa.timestamp("us", tz="UTC")),
        "word": pa.array(["w"] * ROWS),
        "raw": pa.array([b"r"] * ROWS),
        "word.usd": pa.array(["dollar"] * ROWS),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    return tmp_path


@pytest.mark.parametrize("columns", [["__key__"], ["__key__", "n"]])
def test_keys_of_a_data_set_without_keys_are_refused(table: Path, columns: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"only samples of tar shards have a '__key__'.*parquet.*with_ids=True"):
        load(table, columns=columns)


def test_keys_of_tar_shards_can_be_read_alone(tmp_path: Path) -> None:
    write_tars(tmp_path, [ROWS])
    with load(tmp_path, columns=["__key__"], shuffle=False) as loader:
        batch = next(iter(loader))
    assert batch == {"__key__": ["00000000", "00000001"]}


def test_a_column_that_is_called_as_keys_are_is_a_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"__key__": ["a", "b"]}), tmp_path / "t.parquet")
    with load(tmp_path, columns=["__key__"], shuffle=False, decode={"__key__": str.upper}) as loader:
        assert next(iter(loader)) == {"__key__": ["A", "B"]}


@pytest.mark.parametrize("name", ["n", "flag", "price.usd", "vector", "at"])
def test_a_decoder_of_a_column_of_numbers_is_refused(table: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"decode= names \['{name}'\].*never decoded.*transform="):
        load(table, decode={name: never_called})


def test_a_decoder_that_fits_a_column_of_text_or_bytes_too_is_not_refused(table: Path) -> None:
    with load(table, decode={"usd": str.upper, "raw": len, "word": str, "n": None}) as loader:
        batch = next(iter(loader))
    assert batch["word.usd"] == ["DOLLAR"] * 2
    assert batch["raw"].tolist() == [1, 1]
    assert batch["price.usd"].tolist() == [1.5, 1.5]


def test_none_by_a_trailing_extension_keeps_the_bytes_of_an_image(tmp_path: Path) -> None:
    png = b"\x89PNG\r\n\x1a\n and more"
    pq.write_table(pa.table({"left.picture": [png] * 2}), tmp_path / "t.parquet")
    with load(tmp_path, decode={"picture": None}) as loader:
        assert next(iter(loader)) == {"left.picture": [png] * 2}


def test_a_decoder_of_tokens_is_refused(tmp_path: Path) -> None:
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "t.bin")
    with pytest.raises(ConfigError, match=r"decode= names \['tokens'\]"):
        load(tmp_path, format=TokensFormat(seq_len=8), decode={"tokens": never_called})


def test_a_decoder_of_json_numbers_is_refused_and_of_other_json_values_called(tmp_path: Path) -> None:
    lines = [json.dumps({"n": n, "text": "t", "tags": ["a"] * n}) for n in range(ROWS)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"decode= names \['n'\].*never decoded"):
        load(tmp_path, decode={"n": never_called})
    with load(tmp_path, decode={"text": str.upper, "tags": len}, shuffle=False) as loader:
        batch = next(iter(loader))
    assert (batch["text"], batch["tags"].tolist()) == (["T", "T"], [0, 1])


@pytest.mark.parametrize(
    ("kind", "is_number"),
    [
        *((kind, True) for kind in ("int", "uint16", "float64", "bool", "ndarray:int32:2,3", "float32[2, 3]")),
        *((kind, True) for kind in ("timestamp[ns]", "date32[day]", "time64[us]", "duration[ms]", "timestamp[s][4]")),
        *((kind, False) for kind in ("str", "string", "bytes", "binary", "jpeg", "png", "pil", "list[jpeg]")),
        *((kind, False) for kind in ("struct<bytes: binary, path: string>", "fixed_size_binary[16]", "string[2]")),
    ],
)
def test_what_is_a_number_is_told_by_the_type_that_a_format_writes(kind: str, is_number: bool) -> None:
    made = make_manifest([[4]])
    schema = {"columns": {"x": {"type": kind, "nulls": False}}}
    manifest = Manifest(**{**vars(made), "format": "mds", "schema": schema})
    if is_number:
        with pytest.raises(ConfigError, match="never decoded"):
            check_names(manifest, None, {"x": never_called})
    else:
        check_names(manifest, None, {"x": never_called})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda url: load(url, columns=3), r"columns=3: give a list of names, of \['at', 'flag'"),
        (lambda url: load(url, columns="n"), "columns='n': give a list of names"),
        (lambda url: load(url, format=TokensFormat), "format=.*give a format's name, or a format such as"),
        (lambda url: load(url, storage_options="region"), "storage_options of type str: give a dict"),
        (lambda url: load(url, keep=Keep(0, len)), r"Keep\(columns=0\): give a list"),
        (lambda url: load(url, keep=Keep([1], len)), r"Keep\(columns=\[1\]\): give a list"),
        (lambda url: load(url).set_shares(1.5), r"shares=1.5: needs 1 positive numbers"),
        (lambda url: load(url).set_shares(["x"]), r"shares=\('x',\): needs 1 positive numbers"),
        (lambda url: TokenBudget(tokens=9, whole="no"), r"TokenBudget\(whole='no'\): must be True or False"),
        (lambda url: TokenBudget(tokens=9, padded=None), r"TokenBudget\(padded=None\): must be True or False"),
    ],
)
def test_values_of_another_type_are_refused_by_the_name_of_their_argument(table: Path, make: Any, message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        make(table)


def test_whole_numbers_may_be_those_of_numpy(table: Path) -> None:
    two = np.int32(2)
    with load(table, batch_size=two, threads=two, fetch_threads=two, max_bad_chunks=two, with_ids=True) as loader:
        with load(table, batch_size=2, with_ids=True) as usual:
            usual.seek(2, 1)
            expected = next(iter(usual))["__id__"].tolist()
        assert (len(loader), type(loader.batch_size)) == (ROWS // 2, int)
        loader.seek(two, np.uint8(1))
        assert next(iter(loader))["__id__"].tolist() == expected
        loader.set_epoch(two)
        loader.skip_batches(np.int64(1))
        assert json.dumps(loader.state_dict()).count('"consumed": 2')
        assert next(iter(loader))["__id__"].tolist() == expected
        loader.set_batch_size(np.int64(1))
        assert len(loader) == ROWS
        for value in (np.array([1, 2]), np.float64(2.0), np.True_, np.int64(0)):
            with pytest.raises(ConfigError, match="must be a whole number of at least 1"):
                loader.set_batch_size(value)


def test_a_source_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a source is a URL, a path or a list of them, not int \(3\)"):
        DistributedDataLoader(3, batch_size=2)  # type: ignore[arg-type]


def test_a_command_as_a_source_is_answered_with_urls() -> None:
    with pytest.raises(ConfigError, match=r"pipe:aws s3 cp s3://b/x.tar -: commands are not run; give the URL"):
        DistributedDataLoader("pipe:aws s3 cp s3://b/x.tar -", batch_size=2)


def test_samples_as_a_source_are_answered_with_pack_in_few_words() -> None:
    samples = ({"jpg": bytes(1 << 20)} for _ in range(3))
    with pytest.raises(ConfigError, match=r"not dict .*pack\(samples") as caught:
        DistributedDataLoader(samples, batch_size=2)  # type: ignore[call-overload]
    assert len(str(caught.value)) < 400


def test_a_batch_size_without_its_name_is_answered(table: Path) -> None:
    with pytest.raises(ConfigError, match=r"64: only source is positional.*batch_size="):
        DistributedDataLoader(table, 64)  # type: ignore[call-overload]
