"""``pack`` writes the values that it is given, or refuses them by sample and field."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packed_samples import read_samples

from penstock import pack
from penstock.loader import DatasetError
from penstock.loader.formats.arrow.columns import describe_type
from penstock.tools.packing.values import time_texts

DAY, MOMENT = datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, 5)
ZONED = MOMENT.replace(tzinfo=datetime.UTC)


@pytest.mark.parametrize("earlier", [1, 300])
@pytest.mark.parametrize(("first", "last"), [(DAY, MOMENT), (MOMENT, ZONED), (ZONED, MOMENT)])
def test_days_moments_and_zones_are_not_mixed_in_a_column(first: Any, last: Any, earlier: int, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=rf"sample {earlier}, field 'm': does not fit .*datetime\.datetime"):
        pack([{"m": first}] * earlier + [{"m": last}], tmp_path / "out", format="parquet")


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (1, 1.5),
        (1, Decimal("2.5")),
        ([1], [1.5]),
        (np.arange(2), np.array([0.5, 1.0])),
        ({"a": 1}, {"a": 1, "b": 2}),
        ([{"a": 1}], [{"a": 1, "b": 2}]),
        ({"a": 1}, {1: 2}),
        ("a", b"b"),
        (b"a", "b"),
    ],
)
def test_a_later_sample_that_its_column_would_change_is_refused(first: Any, last: Any, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"sample 300, field 'm': does not fit the column .* would"):
        pack([{"m": first}] * 300 + [{"m": last}], tmp_path / "out", format="parquet")


@pytest.mark.parametrize(
    ("first", "last"), [(1.5, 2), ({"a": 1, "b": 2}, {"a": 1}), (Decimal("1.5"), 2), ([1], []), (1.5, float("nan"))]
)
def test_a_later_sample_of_another_type_that_loses_nothing_is_written(first: Any, last: Any, tmp_path: Path) -> None:
    pack([{"m": first}] * 300 + [{"m": last}] * 2, tmp_path / "out", format="parquet")
    written = pq.read_table(tmp_path / "out" / "shard-000000.parquet").column("m").to_pylist()[-1]
    assert {**written, **last} == written if isinstance(last, dict) else written == last or written != written


@pytest.mark.parametrize("values", [(b"a", "b"), ("b", b"a")])
def test_text_among_bytes_is_refused(values: tuple[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(
        DatasetError, match=rf"sample {values.index('b')}, field 'm': .*'b' is text, and would be bytes"
    ):
        pack([{"m": value} for value in values], tmp_path / "out", format="parquet")


def test_bytes_among_texts_in_a_list_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"samples 0 to 0, field 'm': do not fit one column, .*UTF8"):
        pack([{"m": [["a", b"\xff"]]}], tmp_path / "out", format="parquet")


def test_images_that_a_table_only_names_are_refused(tmp_path: Path) -> None:
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    table = pa.table({"image": pa.array([{"bytes": None, "path": "/data/b.jpg"}], kind), "n": [1]})
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DatasetError, match=r"column 'image' holds a path \('/data/b\.jpg'\) without bytes"):
        pack(tmp_path / "rows.parquet", tmp_path / "out")


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ([{"a": 1}], [{"a": 1, "b": 2}]),
        ([[{"a": 1}]], [[{"a": 1, "b": 2}]]),
        ([1], ["007"]),
        (["x"], [7]),
        ([True], [2]),
        ([DAY], [MOMENT]),
        ([MOMENT], [ZONED]),
        ([ZONED], [MOMENT]),
        (["a"], [b"b"]),
        (pa.array([0.5], pa.float32()), [0.1]),
        ([MOMENT], [5]),
    ],
)
def test_record_batches_of_types_that_would_change_values_are_refused(first: Any, last: Any, tmp_path: Path) -> None:
    batches = [pa.record_batch({"m": each}) for each in (first, last)]
    with pytest.raises(DatasetError, match=r"rows 1 to 1 have .* in column 'm', earlier ones"):
        pack(iter(batches), tmp_path / "out", format="parquet")


@pytest.mark.parametrize(
    ("first", "last"), [([1.5], [2]), ([{"a": 1, "b": 2}], [{"a": 1}]), (["a"], [None]), ([[1.5]], [[2]])]
)
def test_record_batches_whose_types_differ_without_a_loss_are_one_table(first: Any, last: Any, tmp_path: Path) -> None:
    pack(iter(pa.record_batch({"m": each}) for each in (first, last)), tmp_path / "out", format="parquet")
    written = pq.read_table(tmp_path / "out" / "shard-000000.parquet").column("m").to_pylist()
    assert written == [*first, *([{"a": 1, "b": None}] if isinstance(last[0], dict) else last)]


def test_fractions_that_a_map_makes_of_integers_are_kept(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"n": n, "o": {"a": n}}) + "\n" for n in range(10)))

    def change(sample: dict[str, Any]) -> dict[str, Any]:
        return {"n": sample["n"] / 4, "o": {**sample["o"], "b": 1}}

    pack(tmp_path / "rows.jsonl", tmp_path / "out", format="parquet", map=change)
    assert read_samples(str(tmp_path / "out")) == [{"n": n / 4, "o": {"a": n, "b": 1}} for n in range(10)]


def test_columns_that_a_map_drops_do_not_come_back(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"n": n, "text": "x", "late": None}) + "\n" for n in range(9))
    )
    pack(tmp_path / "rows.jsonl", tmp_path / "out", format="parquet", map=only_n)
    assert pq.read_schema(tmp_path / "out" / "shard-000000.parquet").names == ["n"]


def only_n(sample: dict[str, Any]) -> dict[str, Any]:
    return {"n": sample["n"]}


@pytest.mark.parametrize("format", ["tar", "jsonl"])
def test_nanoseconds_are_written_as_times(format: Any, tmp_path: Path) -> None:  # noqa: A002 - as pack calls it
    text = "2024-02-29T05:00:00.123456789"
    pack([{"t": np.datetime64(text)}, {"t": np.datetime64("2024-02-29T05")}], tmp_path / "out", format=format)
    first, second = (sample["t"] for sample in read_samples(str(tmp_path / "out")))
    assert [first, second] == (
        [text, MOMENT.isoformat()] if format == "jsonl" else [text.encode(), b"2024-02-29T05:00:00"]
    )


def test_times_that_python_lacks_are_written_as_text_or_refused_by_column(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    far = pa.array([0, 400_000_000_000_000], pa.timestamp("ms"))
    pq.write_table(pa.table({"t": far}), tmp_path / "in" / "a.parquet")
    pack(tmp_path / "in", tmp_path / "far", format="jsonl")
    assert [sample["t"][:10] for sample in read_samples(str(tmp_path / "far"))] == ["1970-01-01", "14645-06-3"]
    pq.write_table(pa.table({"t": pa.array([[1]], pa.list_(pa.timestamp("ns")))}), tmp_path / "in" / "a.parquet")
    with pytest.raises(DatasetError, match=r"column 't': Python has no form for a value of list<.*timestamp\[ns\]"):
        pack(tmp_path / "in", tmp_path / "fine", format="jsonl")


def test_texts_of_times_have_one_form_whether_python_can_hold_them_or_not(tmp_path: Path) -> None:
    stamps, durations = [1709182800 * 10**9, 1709182800 * 10**9 + 500_000, 1], [3_600 * 10**9, -1_500_000, 1500]
    table = {
        "t": pa.array(stamps, pa.timestamp("ns")),
        "z": pa.array(stamps, pa.timestamp("ns", "+05:30")),
        "d": pa.array(durations, pa.duration("ns")),
        "long": pa.array([10**15, 86_400, -1], pa.duration("s")),
    }
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table(table), tmp_path / "in" / "a.parquet")
    pack(tmp_path / "in", tmp_path / "out", format="jsonl")
    samples = read_samples(str(tmp_path / "out"))
    assert [sample["t"] for sample in samples] == [
        "2024-02-29T05:00:00",
        "2024-02-29T05:00:00.000500",
        "1970-01-01T00:00:00.000000001",
    ]
    assert [sample["z"][10:] for sample in samples] == [
        "T10:30:00+05:30",
        "T10:30:00.000500+05:30",
        "T05:30:00.000000001+05:30",
    ]
    assert [sample["d"] for sample in samples] == ["1:00:00", "-1 day, 23:59:59.998500", "0:00:00.000001500"]
    assert [sample["long"] for sample in samples] == [
        "11574074074 days, 1:46:40",
        "1 day, 0:00:00",
        "-1 day, 23:59:59",
    ]


@given(st.integers(-(2**45), 2**45), st.sampled_from(["s", "ms", "us"]))
def test_the_text_of_a_time_that_python_can_hold_is_pythons(value: int, unit: str) -> None:
    if unit == "s":
        value //= 1000
    for kind in (pa.timestamp(unit), pa.timestamp(unit, "UTC"), pa.timestamp(unit, "-03:30"), pa.duration(unit)):
        array = pa.array([value, None], kind)
        (time, _) = array.to_pylist()
        wanted = str(time) if isinstance(time, datetime.timedelta) else time.isoformat()
        assert time_texts(array) == [wanted, None]


def test_times_for_which_there_is_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with pa.ipc.new_file(str(tmp_path / "in" / "a.arrow"), pa.schema({"t": pa.timestamp("s")})) as file:
        file.write_table(pa.table({"t": pa.array([0, 10**13], pa.timestamp("s"))}))
    with pytest.raises(DatasetError, match="column 't': Python has no form"):
        pack(tmp_path / "in", tmp_path / "out", format="jsonl")


def test_times_that_become_other_numbers_in_parquet_are_told(tmp_path: Path) -> None:
    columns = {
        "s": pa.array([1], pa.timestamp("s", "UTC")),
        "t": pa.array([5], pa.time32("s")),
        "d": pa.array([86_400_000], pa.date64()),
        "v": pa.array([[1, 2]], pa.list_(pa.timestamp("s"), 2)),
        "fine": pa.array([1], pa.timestamp("ms")),
        "days": pa.array([1], pa.date32()),
    }
    (tmp_path / "in").mkdir()
    with pa.ipc.new_file(str(tmp_path / "in" / "a.arrow"), pa.table(columns).schema) as file:
        file.write_table(pa.table(columns))
    summary = pack(tmp_path / "in", tmp_path / "out", format="parquet")
    (shard,) = (tmp_path / "out").glob("*.parquet")
    stored = {field.name: describe_type(field.type) for field in pq.read_schema(shard)}
    assert all(
        f"{name!r} is converted to {stored[name]}," in note for name, note in zip("stdv", summary.notes, strict=True)
    )
    assert pack(tmp_path / "in", tmp_path / "arrow", format="arrow").notes == ()


def test_an_integer_beyond_int64_is_refused_by_mds_in_words(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=f"sample 1, field 'u': {2**63} does not fit into int64.*parquet"):
        pack([{"u": 1}, {"u": 2**63}], tmp_path / "out", format="mds")


def test_nanoseconds_stay_nanoseconds_in_tables(tmp_path: Path) -> None:
    time = np.datetime64("2024-02-29T05:00:00.123456789")
    pack([{"t": time}], tmp_path / "out", format="parquet")
    assert pq.read_table(tmp_path / "out" / "shard-000000.parquet").column("t").to_numpy().tolist() == [time.item()]


def test_what_parquet_cannot_hold_is_refused_by_sample(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"samples 0 to 1 cannot be written to \.parquet shards .*struct.*map="):
        pack([{"m": {}}, {"m": {}}], tmp_path / "out", format="parquet")


def test_members_that_are_not_what_their_names_say_are_refused_by_field(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.cls").write_text("cat")
    with pytest.raises(DatasetError, match=r"sample 0 \('a'\): field 'cls' is not what its name says: .*'cat'"):
        pack(tmp_path / "in", tmp_path / "out", format="parquet")


def test_folders_are_no_classes_where_files_hold_them(tmp_path: Path) -> None:
    for name, label in (("ants/1", "7"), ("bees/2", "9")):
        (tmp_path / "in" / name).parent.mkdir(parents=True)
        (tmp_path / "in" / f"{name}.cls").write_text(label)
        (tmp_path / "in" / f"{name}.txt").write_text(name)
    summary = pack(tmp_path / "in", tmp_path / "out")
    assert summary.classes == ()
    assert summary.notes == ("classes are those of the .cls files, not the folders",)
    assert [sample["cls"] for sample in read_samples(str(tmp_path / "out"))] == [b"7", b"9"]


def test_a_file_named_as_the_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.__key__").write_text("b")
    with pytest.raises(DatasetError, match=r"a\.__key__: the field '__key__' is the sample's key; rename the file"):
        pack(tmp_path, tmp_path.parent / "out")


class _Searched(int):
    """Stands for an ``IntEnum``, which a range of int64 would compare with each of its numbers for ever."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared with a number")


def test_numbers_of_enums_become_json_at_once(tmp_path: Path) -> None:
    pack([{"n": _Searched(7), "l": [_Searched(8)]}], tmp_path / "out", format="jsonl")
    assert list(read_samples(tmp_path / "out")) == [{"n": 7, "l": [8]}]


@pytest.mark.parametrize("target", ["parquet", "arrow"])
@pytest.mark.parametrize(("kind", "values"), [(pa.string_view(), ["a", "b" * 20]), (pa.binary_view(), [b"a", b""])])
def test_dictionaries_of_views_become_columns_of_their_values(
    kind: pa.DataType, values: list[Any], target: Any, tmp_path: Path
) -> None:
    words = pa.DictionaryArray.from_arrays(pa.array([1, 0, None, 1], pa.uint32()), pa.array(values, kind))
    (tmp_path / "in").mkdir()
    with pa.ipc.new_file(str(tmp_path / "in" / "a.arrow"), pa.schema([("x", words.type)])) as writer:
        writer.write_table(pa.table({"x": words}))
    pack(tmp_path / "in", tmp_path / "out", format=target)
    assert [sample["x"] for sample in read_samples(str(tmp_path / "out"))] == [values[1], values[0], None, values[1]]
