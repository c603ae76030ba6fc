"""What ``inspect`` says of batches is what a loader delivers, in every format."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import DistributedDataLoader, TokensFormat, pack
from penstock.tools.inspect import inspect_dataset

COUNT = 6


def type_of(values: Any) -> str:
    """The naive answer: a look at a batch."""
    if isinstance(values, torch.Tensor):
        shape = ", ".join(["B", *map(str, values.shape[1:])])
        return f"{str(values.dtype).removeprefix('torch.')} ({shape})"
    if all(isinstance(value, torch.Tensor) for value in values):
        return "list of tensors"
    if all(isinstance(value, np.ndarray) for value in values):
        return "list of arrays"
    names = sorted({"None" if value is None else type(value).__name__ for value in values})
    return f"list of {' and '.join(names)}"


def check(source: Path, **arguments: Any) -> dict[str, str]:
    told = {field.name: field.in_batch for field in inspect_dataset(source, progress=False, **arguments).fields}
    with DistributedDataLoader(
        source, batch_size=COUNT, shuffle=False, last_batch="partial", world_size=1, rank=0, **arguments
    ) as loader:
        batch = next(iter(loader))
    assert told == {name: type_of(batch[name]) for name in told}
    return told


def picture(side: int) -> bytes:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("RGB", (side, 10)).save(file, "png")
    return file.getvalue()


def array(*shape: int) -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(shape, np.float32))
    return file.getvalue()


def test_of_files_in_tars(tmp_path: Path) -> None:
    samples = [
        {"txt": "a", "cls": n, "json": {"n": n}, "bin": b"x", "same.npy": array(2, 3), "other.npy": array(n + 1),
         "png": picture(8), "sizes.png": picture(8 + n), "unnamed": picture(8)}
        for n in range(COUNT)
    ]  # fmt: skip
    pack(samples, tmp_path, progress=False)
    told = check(tmp_path)
    assert (told["cls"], told["same.npy"], told["png"]) == ("int64 (B)", "float32 (B, 2, 3)", "uint8 (B, 3, 10, 8)")
    assert (told["sizes.png"], told["txt"], told["bin"]) == ("list of tensors", "list of str", "list of bytes")


@pytest.mark.parametrize("kind", ["parquet", "arrow", "mds", "jsonl"])
def test_of_columns(tmp_path: Path, kind: Any) -> None:
    samples: list[dict[str, Any]] = [
        {"whole": n, "part": n / 2, "flag": n % 2 == 0, "word": "a", "few": [1, 2, 3][: n % 3]} for n in range(COUNT)
    ]
    if kind == "mds":
        samples = [{name: value for name, value in sample.items() if name != "flag"} for sample in samples]
    if kind in ("parquet", "arrow"):
        samples = [sample | {"small": np.uint16(n), "row": np.zeros(4, np.float32)} for n, sample in enumerate(samples)]
    pack(samples, tmp_path, format=kind, progress=False)
    told = check(tmp_path)
    assert (told["whole"], told["part"], told["word"]) == ("int64 (B)", "float64 (B)", "list of str")
    if "small" in told:
        assert told["small"] == "int64 (B)"


def test_of_tokens(tmp_path: Path) -> None:
    np.arange(64, dtype=np.uint16).tofile(tmp_path / "a.bin")
    assert check(tmp_path / "a.bin", format=TokensFormat(seq_len=8)) == {"tokens": "int64 (B, 8)"}
