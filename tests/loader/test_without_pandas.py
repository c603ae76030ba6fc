"""Reading imports no pandas, installed or not: that would take longer than all else before the first batch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.loader.arrow_arrays import find_nulls, view_numbers, wrap_lists, wrap_numbers, wrap_texts

READ = """
import json, sys

class Pandas:
    asked_by = None

    def find_spec(self, name, path=None, target=None):
        if name == "pandas" and self.asked_by is None:
            self.asked_by = reading

sys.meta_path.insert(0, finder := Pandas())
reading = "nothing"
from penstock import DistributedDataLoader, TokensFormat
for reading in sys.argv[1:]:
    options = {"format": TokensFormat(seq_len=8)} if reading.endswith("tokens") else {}
    with DistributedDataLoader(reading, batch_size=4, last_batch="partial", **options) as loader:
        assert sum(1 for _ in loader) == 4
print(json.dumps(finder.asked_by))
"""


def write(folder: Path) -> list[Path]:
    from penstock.loader import pack

    numbers = np.arange(16)
    folders = [folder / kind for kind in ("tar", "tokens", "parquet", "json")]
    for each in folders[1:]:
        each.mkdir(parents=True)
    pack(({"__key__": f"{n:04d}", "bin": bytes([n])} for n in range(16)), folders[0], format="tar", progress=False)
    np.arange(128, dtype=np.uint16).tofile(folders[1] / "tokens.bin")
    table = pa.table(
        {
            "number": numbers,
            "null": pa.array([None, *range(15)]),
            "text": [str(n) for n in range(16)],
            "code": pa.array([str(n % 3) for n in range(16)]).dictionary_encode(),
            "list": [[n] * n for n in range(16)],
        }
    )
    pq.write_table(table, folders[2] / "rows.parquet")
    lines = ({"n": n, "f": n / 2 if n % 2 else None, "b": n % 3 == 0 or None, "text": str(n)} for n in range(16))
    (folders[3] / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folders


@pytest.mark.slow
def test_a_data_set_with_an_index_is_read_without_importing_pandas(tmp_path: Path) -> None:
    folders = write(tmp_path / "data")
    for _ in range(2):  # the first process makes the indexes, by whatever means
        command = [sys.executable, "-c", READ, *map(str, folders)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) is None


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint16(), pa.int64(), pa.float16(), pa.float32(), pa.float64()])
def test_numbers_are_those_that_arrow_gives(kind: pa.DataType) -> None:
    whole = pa.array(np.arange(20), kind) if kind != pa.float16() else pa.array(np.arange(20, dtype=np.float16))
    for array in (
        whole,
        whole.slice(3, 7),
        whole.slice(20),
        pa.chunked_array([whole, whole]),
        pa.chunked_array([], kind),
    ):
        found, expected = view_numbers(array), array.to_numpy()
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    wrapped = wrap_numbers(whole.to_numpy()[::-2])
    assert wrapped.type == kind
    assert wrapped.to_pylist() == whole.to_pylist()[::-2]


def test_bools_and_nulls_are_those_that_arrow_gives() -> None:
    bools = pa.array([True, None, False] * 7)
    for array in (bools, bools.slice(5, 9), bools.slice(21)):
        np.testing.assert_array_equal(find_nulls(array), array.is_null().to_numpy(zero_copy_only=False))
        held = np.flatnonzero(~find_nulls(array))
        assert view_numbers(array)[held].tolist() == [array[int(n)].as_py() for n in held]
    assert view_numbers(pa.chunked_array([pa.array([True]), pa.array([False, True])])).tolist() == [True, False, True]


def test_lists_texts_and_bools_are_those_that_were_wrapped() -> None:
    lists = [np.arange(n) for n in (3, 0, 2)]
    for given in (lists, []):
        wrapped = wrap_lists(given, np.dtype(np.int32))
        wrapped.validate(full=True)
        assert wrapped.type.value_type == pa.int32()
        assert wrapped.to_pylist() == [each.tolist() for each in given]
    for texts in (["a", "", "öß"], []):
        wrapped = wrap_texts(texts)
        wrapped.validate(full=True)
        assert wrapped.to_pylist() == texts
    for bools in ([True, False, True] * 5, []):
        assert wrap_numbers(np.array(bools, np.bool_)).to_pylist() == bools


def test_values_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="values of type string are no numbers"):
        view_numbers(pa.array(["a"]))
