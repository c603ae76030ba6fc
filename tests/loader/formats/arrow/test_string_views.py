"""A null's view that points outside ended the process: Arrow's full validation passes it, and its casts follow it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock import DistributedDataLoader
from penstock.loader import FormatError
from penstock.loader.formats.arrow.ipc import views_are_inside

LONG = "long enough for a buffer"


def with_null_view(length: int, buffer: int, offset: int) -> pa.Array:
    """LONG, a null whose view is as given, and an inline value."""
    whole = pa.array([LONG, None, "short"], pa.string_view())
    validity, views, data = whole.buffers()
    numbers = np.frombuffer(views, "<i4").copy()
    numbers[4:8] = length, 0, buffer, offset
    return pa.Array.from_buffers(whole.type, 3, [validity, pa.py_buffer(numbers), data])


INSIDE = [(0, 0, 0), (12, 99, 99), (len(LONG), 0, 0), (20, 0, 4)]
OUTSIDE = [(-65536, 32767, 0), (20, 1, 0), (20, -1, 0), (20, 0, 5), (20, 0, -1), (1 << 30, 0, 1 << 30)]


@pytest.mark.parametrize("view", INSIDE)
def test_a_nulls_view_may_be_anything_inside(tmp_path: Path, view: tuple[int, int, int]) -> None:
    assert read(tmp_path, with_null_view(*view)) == [LONG, None, "short"]


def read(folder: Path, array: pa.Array) -> Any:
    table = pa.table({"x": array})
    with pa.ipc.new_stream(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    with DistributedDataLoader(str(folder), batch_size=len(array), shuffle=False) as loader:
        return next(iter(loader))["x"]


@pytest.mark.parametrize("view", OUTSIDE)
def test_a_nulls_view_that_points_outside_is_found_in_any_array(view: tuple[int, int, int]) -> None:
    array = with_null_view(*view)
    array.validate(full=True)  # which is why it is looked for
    inside = pa.array([LONG, None, "short"], pa.string_view())
    nested = {
        "struct": lambda a: pa.StructArray.from_arrays([pa.array([1, 2, 3]), a], ["n", "v"]),
        "list": lambda a: pa.ListArray.from_arrays(pa.array([0, 1, 3], pa.int32()), a),
        "fixed": lambda a: pa.FixedSizeListArray.from_arrays(a, 3),
        "map": lambda a: pa.MapArray.from_arrays(pa.array([0, 3], pa.int32()), pa.array([1, 2, 3]), a),
        "sliced": lambda a: a[1:],
    }
    for make in nested.values():
        assert (views_are_inside(make(array)), views_are_inside(make(inside))) == (False, True)


def test_a_shard_with_such_a_view_is_refused(tmp_path: Path) -> None:
    """Written by hand into the file, as pyarrow's writer follows views too."""
    table = pa.table({"x": pa.array([LONG, None, "short"], pa.string_view())})
    path = tmp_path / "a.arrow"
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    data = path.read_bytes()
    first = np.array([len(LONG)], "<i4").tobytes() + LONG[:4].encode()
    at = data.index(first) + 16
    path.write_bytes(data[:at] + np.array([-65536, -1, 32767, 0], "<i4").tobytes() + data[at + 16 :])
    with (
        DistributedDataLoader(str(tmp_path), batch_size=3) as loader,
        pytest.raises(FormatError, match=r"a\.arrow at byte \d+: .*a view of a null in column 'x' points outside"),
    ):
        next(iter(loader))
