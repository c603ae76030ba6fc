"""A field whose name says nothing is decoded alike on every rank, whatever each reads first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from penstock import DistributedDataLoader
from penstock.loader import DecodeError, FormatError
from penstock.loader.formats.arrow.parquet import ParquetFormat

PNG = cv2.imencode(".png", np.full((4, 5, 3), 7, np.uint8))[1].tobytes()
ROWS, GROUPS = 8, 16


def write(folder: Path, value: Any) -> None:
    """Parquet of 16 row groups of 8 rows, each a chunk; ``value`` gives the column "data" by row."""
    rows = range(ROWS * GROUPS)
    table = pa.table({"data": pa.array([value(row) for row in rows], pa.binary()), "row": list(rows)})
    folder.mkdir()
    pq.write_table(table, folder / "x.parquet", row_group_size=ROWS)


def kinds(folder: Path, **options: Any) -> list[str]:
    """What each rank of four got as "data" in its first batch, in the order of the data set: rank 0 reads the start."""
    found = []
    for rank in range(4):
        with DistributedDataLoader(
            str(folder),
            format=ParquetFormat(chunk_bytes=1),
            batch_size=8,
            shuffle=False,
            lanes=4,
            rank=rank,
            world_size=4,
            columns=["data"],
            **options,
        ) as loader:
            found.append(type(next(iter(loader))["data"]).__name__)
    return found


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (lambda row: PNG if row >= 32 else b"raw", "list"),
        (lambda row: PNG if row else b"raw", "list"),
        (lambda row: PNG if row >= 24 else None, "Tensor"),
        (lambda row: PNG if row >= ROWS * 8 else None, "list"),
    ],
    ids=["images come later", "one value that is none at first", "missing at first", "missing for too long"],
)
def test_ranks_agree_on_what_a_field_is_whatever_they_read_first(tmp_path: Path, value: Any, expected: str) -> None:
    write(tmp_path / "data", value)
    assert kinds(tmp_path / "data")[1:] == [expected] * 3


def test_bytes_among_images_are_an_error_that_names_the_sample(tmp_path: Path) -> None:
    write(tmp_path / "data", lambda row: PNG if row < 100 else b"raw")
    with (
        DistributedDataLoader(str(tmp_path / "data"), batch_size=8, shuffle=False, lanes=1) as loader,
        pytest.raises(DecodeError, match=r"sample 100 .*field 'data'"),
    ):
        list(loader)


def test_one_sample_and_a_peek_are_decoded_as_a_pass_is(tmp_path: Path) -> None:
    write(tmp_path / "data", lambda row: b"raw" if row < 32 else PNG)
    with DistributedDataLoader(str(tmp_path / "data"), format=ParquetFormat(chunk_bytes=1), batch_size=8) as loader:
        assert loader.dataset[100]["data"] == PNG
        assert isinstance(loader.peek()["data"], list)


def test_a_bad_first_chunk_is_passed_over_and_reported_where_its_samples_are_due(tmp_path: Path) -> None:
    write(tmp_path / "data", lambda row: PNG)
    path = tmp_path / "data" / "x.parquet"
    raw = bytearray(path.read_bytes())
    raw[4:60] = bytes(56)
    path.write_bytes(raw)
    with DistributedDataLoader(
        str(tmp_path / "data"),
        format=ParquetFormat(chunk_bytes=1),
        batch_size=8,
        shuffle=False,
        lanes=4,
        rank=3,
        world_size=4,
    ) as loader:
        batch = next(iter(loader))
        assert isinstance(batch["data"], torch.Tensor)
    with (
        DistributedDataLoader(
            str(tmp_path / "data"), format=ParquetFormat(chunk_bytes=1), batch_size=8, shuffle=False, lanes=1
        ) as loader,
        pytest.raises(FormatError),
    ):
        list(loader)
