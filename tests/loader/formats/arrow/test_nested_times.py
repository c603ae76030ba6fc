"""Times of nanoseconds inside of lists, structs and maps: of which Python's own have no form."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pytest

from penstock import DistributedDataLoader

WHOLE, ODD = 1_704_067_200_000_001_000, 1_704_067_200_000_000_001
NOON = 12 * 3600 * 10**9
ODD_TIME, WHOLE_TIME = np.datetime64(ODD, "ns"), datetime.datetime(2024, 1, 1, 0, 0, 0, 1)
TIMES = pa.array([[WHOLE, ODD], None, [], [None, ODD]], pa.list_(pa.timestamp("ns")))

PAIRS = pa.struct([("p", pa.list_(pa.timestamp("ns"), 2))])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (TIMES, [[WHOLE_TIME, ODD_TIME], None, [], [None, ODD_TIME]]),
        (TIMES.cast(pa.large_list(pa.timestamp("ns"))), [[WHOLE_TIME, ODD_TIME], None, [], [None, ODD_TIME]]),
        (
            pa.array([[7_001], [7_000], None, []], pa.list_(pa.duration("ns"))),
            [[np.timedelta64(7_001, "ns")], [datetime.timedelta(microseconds=7)], None, []],
        ),
        (
            pa.array([[NOON + 1], [NOON], None, []], pa.list_(pa.time64("ns"))),
            [[np.timedelta64(NOON + 1, "ns")], [datetime.time(12)], None, []],
        ),
        (
            pa.array(
                [{"at": ODD, "n": 1}, None, {"at": None, "n": 2}, {"at": WHOLE, "n": None}],
                pa.struct([("at", pa.timestamp("ns")), ("n", pa.int32())]),
            ),
            [{"at": ODD_TIME, "n": 1}, None, {"at": None, "n": 2}, {"at": WHOLE_TIME, "n": None}],
        ),
        (
            pa.array([[("a", ODD)], None, [], [("b", WHOLE), ("c", None)]], pa.map_(pa.string(), pa.timestamp("ns"))),
            [[("a", ODD_TIME)], None, [], [("b", WHOLE_TIME), ("c", None)]],
        ),
        (
            pa.array([[{"at": [ODD]}], None, [None], [{"at": None}]], pa.list_(pa.struct([("at", TIMES.type)]))),
            [[{"at": [ODD_TIME]}], None, [None], [{"at": None}]],
        ),
        (
            pa.array([{"p": [ODD, WHOLE]}, None, {"p": None}, {"p": [None, 0]}], PAIRS),
            [{"p": [ODD_TIME, WHOLE_TIME]}, None, {"p": None}, {"p": [None, datetime.datetime(1970, 1, 1)]}],
        ),
    ],
    ids=["list", "large", "duration", "time", "struct", "map", "deep", "pairs"],
)
def test_nested_nanoseconds_come_as_numpys_times_and_whole_microseconds_as_pythons(
    tmp_path: Path, values: pa.Array, expected: list[Any]
) -> None:
    feather.write_feather(pa.table({"x": values}), tmp_path / "a.arrow", compression="uncompressed")
    with DistributedDataLoader(str(tmp_path), batch_size=4, shuffle=False) as loader:
        got = next(iter(loader))["x"]
        assert got == expected
        assert str(got) == str(expected)  # of the same types, too
        assert [loader.dataset[i]["x"] for i in range(4)] == expected
