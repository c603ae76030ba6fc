"""What ``decode="auto"`` makes of columns of bytes: a type outweighs a name, but for what only a name can tell."""

from __future__ import annotations

import io
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch

from penstock import DistributedDataLoader, Mixture, Source, pack
from penstock.loader import ConfigError, DecodeError

LABELS = ("cls", "cls2", "index", "inx", "id", "Id", "user.id")
CODES = [b"00123", b"0123", b"\xff\x00"]
every_format = pytest.mark.parametrize("form", ["parquet", "arrow", "mds"])


def write(root: Path, form: Any, **columns: list[Any]) -> str:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    pack(rows, str(root), format=form, progress=False)
    return str(root)


def first_batch(source: Any, **options: Any) -> dict[str, Any]:
    with DistributedDataLoader(source, batch_size=3, shuffle=False, **options) as loader:
        return next(iter(loader))


@every_format
def test_bytes_in_columns_called_like_labels_stay_bytes(tmp_path: Path, form: str) -> None:
    root = write(tmp_path, form, **dict.fromkeys(LABELS, CODES))
    batch = first_batch(root)
    assert {name: batch[name] for name in LABELS} == dict.fromkeys(LABELS, CODES)
    with DistributedDataLoader(root, batch_size=3) as loader:
        assert loader.dataset[0]["id"] == CODES[0]
    mixture = Mixture({"one": Source(root), "two": Source(root)})
    assert set(first_batch(mixture)["id"]) <= set(CODES)


@every_format
def test_a_decoder_that_is_named_makes_numbers_or_text_of_bytes(tmp_path: Path, form: str) -> None:
    root = write(tmp_path, form, id=[b"00123", b"7", b"8"])
    assert first_batch(root, decode={"id": int})["id"].tolist() == [123, 7, 8]
    assert first_batch(root, decode={"id": str})["id"] == ["00123", "7", "8"]


@every_format
def test_what_only_a_name_can_tell_of_bytes_is_still_decoded(tmp_path: Path, form: str) -> None:
    array = io.BytesIO()
    np.save(array, np.arange(3, dtype=np.float32))
    columns = {"txt": b"hello", "meta.json": json.dumps({"a": 1}).encode(), "x.npy": array.getvalue()}
    batch = first_batch(write(tmp_path, form, **{name: [value] * 3 for name, value in columns.items()}))
    assert batch["txt"] == ["hello"] * 3
    assert batch["meta.json"] == [{"a": 1}] * 3
    assert torch.equal(batch["x.npy"], torch.arange(3.0).repeat(3, 1))


@every_format
def test_images_in_columns_are_decoded_by_name_and_by_their_first_value(tmp_path: Path, form: str) -> None:
    cv2 = pytest.importorskip("cv2", reason="install penstock[images]")
    png = cv2.imencode(".png", np.zeros((4, 5, 3), np.uint8))[1].tobytes()
    batch = first_batch(write(tmp_path, form, png=[png] * 3, photo=[png] * 3, id=[png] * 3))
    assert {name: tuple(images.shape) for name, images in batch.items()} == dict.fromkeys(batch, (3, 3, 4, 5))


def test_labels_of_tar_members_are_numbers(tmp_path: Path) -> None:
    root = write(tmp_path, "tar", __key__=["a", "b", "c"], cls=[b"3", b"04", b"5"], id=[b"1", b"2", b"3"])
    batch = first_batch(root)
    assert (batch["cls"].tolist(), batch["id"].tolist()) == ([3, 4, 5], [1, 2, 3])


VALUES = pa.table(
    {
        "price": pa.array([Decimal("1.25"), Decimal("-0.50"), None], pa.decimal128(8, 2)),
        "pair": [[1, 2], [3, 4], [5, 6]],
        "ragged": [[1], [2, 3], []],
        "of": [{"a": 1}, {"a": 2}, {"a": 3}],
        "colour": pa.array(["red", None, "blue"]).dictionary_encode(),
    }
)


def sum_of(values: list[int]) -> int:
    return sum(values)


def get_a(value: dict[str, int]) -> int:
    return value["a"]


def write_values(root: Path, form: str) -> str:
    if form == "parquet":
        pq.write_table(VALUES, root / "a.parquet")
    elif form == "arrow":
        feather.write_feather(VALUES, root / "a.arrow", compression="uncompressed")
    elif form == "mds":
        rows = VALUES.select(["pair", "ragged", "of"]).to_pylist()
        pack(rows, str(root), format="mds", progress=False)
    else:
        rows = VALUES.drop_columns(["price"]).to_pylist()
        (root / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(root)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "processes"),
    [("parquet", 0), pytest.param("parquet", 1, marks=pytest.mark.slow), ("arrow", 0), ("jsonl", 0), ("mds", 0)],
)
def test_a_named_decoder_is_called_with_the_values_of_lists_objects_and_decimals(
    tmp_path: Path, form: str, processes: int
) -> None:
    root = write_values(tmp_path, form)
    decode = {"pair": np.array, "ragged": sum_of, "of": get_a}
    if form in ("parquet", "arrow"):
        decode["price"] = float
    batch = first_batch(root, decode=decode, processes=processes)
    assert batch["pair"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert batch["ragged"].tolist() == [1, 5, 0]
    assert batch["of"].tolist() == [1, 2, 3]
    if "price" in decode:
        assert batch["price"] == [1.25, -0.5, None]
    plain = first_batch(root)
    assert (plain["pair"], plain["of"]) == (VALUES["pair"].to_pylist(), VALUES["of"].to_pylist())
    with DistributedDataLoader(root, batch_size=3, decode=decode) as loader:
        assert loader.dataset[1]["ragged"] == 5


@pytest.mark.parametrize(
    ("form", "processes"),
    [("parquet", 0), ("arrow", 0), pytest.param("arrow", 1, marks=pytest.mark.slow), ("jsonl", 0)],
)
def test_a_list_of_categories_makes_codes_the_same_in_every_shard(tmp_path: Path, form: str, processes: int) -> None:
    root = write_values(tmp_path, form)
    batch = first_batch(root, decode={"colour": ["blue", "red"]}, processes=processes)
    assert (batch["colour"].dtype, batch["colour"].tolist()) == (torch.int64, [1, -1, 0])
    assert first_batch(root)["colour"] == ["red", None, "blue"]
    with (
        DistributedDataLoader(root, batch_size=3, decode={"colour": ["red"]}) as loader,
        pytest.raises(DecodeError, match="'colour': 'blue' is none of its 1 categories"),
    ):
        next(iter(loader))
    for wrong in (["red", "red"], ["red", 1]):
        with (
            pytest.raises(ConfigError, match="categories are texts that differ"),
            DistributedDataLoader(root, batch_size=3, decode={"colour": wrong}) as loader,
        ):
            next(iter(loader))
