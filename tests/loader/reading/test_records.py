"""Columns to records and back: every value of every dtype as it was."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.loader.columns import ArrayColumn, Block, pack_records, unpack_records
from penstock.loader.decoding.decode import FieldDecoders
from penstock.loader.decoding.gather import gather
from penstock.loader.order.spans import ChunkRows

DTYPES = ["?", "i1", "u1", "<i2", ">i2", "<u2", "<f2", "<i4", ">u4", "<f4", ">f4", "<i8", "<u8", "<f8", ">f8"]


def column_of(dtype: str, rows: int, seed: int, layout: str) -> np.ndarray:
    dtype_ = np.dtype(dtype)
    raw = np.random.default_rng(seed).bytes(2 * max(1, rows) * dtype_.itemsize)
    values = np.frombuffer(raw, dtype_) if dtype_.kind != "b" else np.frombuffer(raw, np.uint8) % 2 == 1
    if layout == "strided":
        return values[: 2 * rows : 2]
    if layout == "reversed":
        return values[:rows][::-1]
    if layout == "unaligned":
        shifted = np.frombuffer(b"\0" + values[:rows].tobytes(), np.uint8)[1:]
        return shifted.view(dtype_)
    return values[:rows]  # as frombuffer gives it: read-only


columns_of_blocks = st.lists(
    st.tuples(
        st.sampled_from(DTYPES),
        st.integers(0, 2**32),
        st.sampled_from(["plain", "strided", "reversed", "unaligned"]),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150)
@given(st.integers(0, 300), columns_of_blocks, st.data())
def test_records_give_back_every_bit_of_every_column(rows, specs, data):
    columns = {f"c{i}": column_of(dtype, rows, seed, layout) for i, (dtype, seed, layout) in enumerate(specs)}
    block = pack_records(Block(rows, 0, {name: ArrayColumn(values) for name, values in columns.items()}))
    inside = {name for records in block.records for name in records.names}
    assert inside | set(block.columns) == set(columns)
    assert not inside & set(block.columns)
    picked = np.array(data.draw(st.lists(st.integers(0, max(0, rows - 1)), max_size=20 if rows else 0)), np.int64)
    for records in block.records:
        assert len(records.names) >= 4
        for name, values in unpack_records(records, records.rows.take(picked)).items():
            assert values.dtype == columns[name].dtype
            assert values.tobytes() == columns[name][picked].tobytes()


def test_columns_that_no_integer_can_stand_for_stay_columns():
    odd = {
        "objects": np.array(["a", None], object),
        "text": np.array(["ab", "c"], "U5"),
        "bytes": np.array([b"abc", b"d"], "S3"),
        "complex": np.array([1j, 2], np.complex128),
        "matrix": np.zeros((2, 3)),
    }
    columns = {f"{name}{i}": ArrayColumn(values) for name, values in odd.items() for i in range(5)}
    block = pack_records(Block(2, 0, columns))
    assert block.records == ()
    assert block.columns == columns


def test_few_columns_are_not_worth_it():
    block = Block(5, 0, {f"c{i}": ArrayColumn(np.arange(5)) for i in range(3)})
    assert pack_records(block) is block


@pytest.mark.parametrize("decode", ["auto", None])
def test_gathered_records_and_columns_are_the_same_rows_in_order_of_delivery(decode):
    rng = np.random.default_rng(0)
    table = {f"c{i}": rng.integers(0, 100, 90).astype(dtype) for i, dtype in enumerate(DTYPES)}
    table["wide"] = rng.standard_normal((90, 300))
    table["pair"] = rng.integers(0, 100, (90, 2)).astype(np.uint16)
    blocks = [
        pack_records(Block(30, 0, {name: ArrayColumn(values[a : a + 30]) for name, values in table.items()}))
        for a in (0, 30, 60)
    ]
    wanted = rng.permutation(90)[:50]  # the sample of each target
    groups = []
    for chunk in (2, 0, 1):
        targets = np.flatnonzero(wanted // 30 == chunk)
        groups.append((ChunkRows(chunk, wanted[targets] % 30, targets), blocks[chunk]))
    rows = gather(groups, 50, np.array([0, 30, 60, 90]), FieldDecoders(decode))
    assert (rows.ids == wanted).all()
    for name, values in table.items():
        assert (rows.fields[name] == values[wanted]).all()
        widened = decode == "auto" and values.dtype.kind == "u" and values.dtype.itemsize in (2, 4)
        assert rows.fields[name].dtype == (np.int64 if widened else values.dtype)
