"""NumPy's arrays in tables: of one shape they come back as tensors, and nothing is made to fit in silence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from penstock import DistributedDataLoader, pack
from penstock.loader import DatasetError

Table = Literal["parquet", "arrow"]
DTYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "float16", "float32", "float64")


def read_back(folder: Path) -> dict[str, Any]:
    with DistributedDataLoader(folder, batch_size=600, shuffle=False, last_batch="partial") as loader:
        (batch,) = loader
    return batch


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (2, 1, 2)])
def test_arrays_of_one_shape_are_tensors_of_their_dtype(
    tmp_path: Path, form: Table, dtype: str, shape: tuple[int, ...]
) -> None:
    arrays = [(np.random.default_rng(i).random(shape) * 100).astype(dtype) for i in range(300)]
    pack(({"x": array} for array in arrays), tmp_path, format=form, shard_bytes=10_000, progress=False)
    found = read_back(tmp_path)["x"]
    assert isinstance(found, torch.Tensor)
    assert found.numpy().dtype == ("int64" if dtype in ("uint16", "uint32") else dtype)  # as of single numbers
    assert np.array_equal(found.numpy(), np.stack(arrays))


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_other_arrays_and_lists_stay_lists_and_missing_ones_are_marked(tmp_path: Path, form: Table) -> None:
    def samples() -> Iterator[dict[str, Any]]:
        for i in range(300):
            missing = i in (7, 290)
            yield {
                "ragged": np.arange(i % 3 + 1),
                "listed": [i, i],
                "empty": np.empty(0, np.int64),
                "some": None if missing else np.full((2, 2), i, np.int32),
            }

    pack(samples(), tmp_path, format=form, progress=False)
    batch = read_back(tmp_path)
    assert batch["ragged"][:3] == [[0], [0, 1], [0, 1, 2]]
    assert batch["listed"][5] == [5, 5]
    assert batch["empty"][0] == []
    assert batch["some"][8].tolist() == [[8, 8], [8, 8]]
    assert batch["some__null"].all(dim=(1, 2)).nonzero().ravel().tolist() == [7, 290]


@pytest.mark.parametrize(
    "later", [np.zeros(4, np.float32), np.zeros((1, 3), np.float32), 1.0, "text", [0.0, 0.0]], ids=repr
)
def test_a_later_sample_of_another_shape_is_refused_by_its_number(tmp_path: Path, later: Any) -> None:
    samples = ({"x": later if i == 299 else np.zeros(3, np.float32)} for i in range(300))
    with pytest.raises(DatasetError, match=r"field 'x'.*fit"):
        pack(samples, tmp_path, format="parquet", progress=False)


@pytest.mark.parametrize("later", [np.full(3, 0.5), np.full(3, 1 << 40)], ids=["fractions", "large numbers"])
def test_a_later_array_that_the_type_cannot_hold_is_refused(tmp_path: Path, later: Any) -> None:
    samples = ({"x": later if i == 299 else np.zeros(3, np.int32)} for i in range(300))
    with pytest.raises(DatasetError, match=r"field 'x'.*fit"):
        pack(samples, tmp_path, format="parquet", progress=False)
