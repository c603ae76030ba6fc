"""``pack`` of CSV files: what is written there comes out, or is refused with the file's name."""

from __future__ import annotations

import csv
import gzip
import io
import re
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pyarrow.parquet as pq
import pytest

from penstock import open_manifest, pack
from penstock.cli import run
from penstock.loader import ConfigError, DatasetError, FormatError, PackSummary
from penstock.tools.packing import csv_types, delimited


def packed(folder: Path, **files: str | bytes) -> tuple[dict[str, list[object]], PackSummary]:
    """The columns of what ``pack`` makes of files, given by name without their ending."""
    (folder / "in").mkdir()
    for name, text in files.items():
        (folder / "in" / f"{name}.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    summary = pack(folder / "in", folder / "out", format="parquet")
    return pq.read_table(folder / "out" / "shard-000000.parquet").to_pydict(), summary


def small_blocks(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(csv_types, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(delimited, "HEAD_BYTES", 2 * block_bytes)


def test_line_feeds_in_quotes_are_read_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 1000)
    texts = [f'para {n}\n\nwith, "quotes"\n' + "x" * (n % 300) for n in range(200)]
    (tmp_path / "in").mkdir()
    with (tmp_path / "in" / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts)])
    pack(tmp_path / "in", tmp_path / "out", format="parquet")
    assert pq.read_table(tmp_path / "out" / "shard-000000.parquet").column("text").to_pylist() == texts


@pytest.mark.parametrize("value", ["00123", "0x1F", "18446744073709551615"])
def test_numbers_that_would_change_stay_text_and_the_summary_says_so(value: str, tmp_path: Path) -> None:
    columns, summary = packed(tmp_path, a=f"zip,n,x\n{value},7,1.5\n5,8,12345678901234567890\n")
    assert columns == {"zip": [value, "5"], "n": [7, 8], "x": [1.5, 12345678901234567890.0]}
    assert summary.notes == (f"column 'zip' is kept as text: a number would change {value!r}",)


def test_integers_keep_their_nulls_signs_and_spaces(tmp_path: Path) -> None:
    columns, summary = packed(tmp_path, a="n,m\n-5,1\n 7,\nNA,9223372036854775807\n0,-9223372036854775808\n")
    assert columns == {"n": [-5, 7, None, 0], "m": [1, None, (1 << 63) - 1, -(1 << 63)]}
    assert summary.notes == ()


def test_a_column_has_one_type_over_all_files(tmp_path: Path) -> None:
    columns, _ = packed(tmp_path, a="zip,v,w,day\nA01,1,,2020-01-01\n", b="zip,v,w,day\n00123,1.5,2,x\n")
    assert columns == {"zip": ["A01", "00123"], "v": [1.0, 1.5], "w": [None, 2], "day": ["2020-01-01", "x"]}


def test_times_of_files_with_and_without_fractions_are_one_column(tmp_path: Path) -> None:
    columns, _ = packed(tmp_path, a="t\n2020-01-01 10:00:00\n", b="t\n2020-01-01 10:00:00.5\n")
    assert [str(each) for each in columns["t"]] == ["2020-01-01 10:00:00", "2020-01-01 10:00:00.500000"]


def test_what_is_not_utf8_stays_bytes_and_the_summary_says_so(tmp_path: Path) -> None:
    columns, summary = packed(tmp_path, a="a\nx\n", b="a\né\n".encode("latin-1"))
    assert columns == {"a": [b"x", b"\xe9"]}
    assert summary.notes == ("column 'a' is not UTF-8, so its values are bytes",)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"a,b,a\n1,2,3\n", "two columns are named 'a'; rename one"),
        ("a,b\n1,2\n".encode("utf-16"), "it is UTF-16; write it as UTF-8"),
        (b"n\n" + b"1\n" * 9000 + b"007\n", "column 'n' is one of integers, but holds '007' in row 9001 below"),
        (b"n\n" + b"1\n" * 9000 + b"9" * 5000 + b"\n", "column 'n' is one of integers, but holds '9999"),
        (b"d\n" + b"1.5\n" * 9000 + b"x\n", r"column 'd'.*invalid value 'x'; .* move its row to the beginning"),
        (b'a\n"' + b"x,y\n" * 9000, "a quote in it is never closed"),
    ],
)
def test_a_table_that_cannot_be_read_is_named(
    data: bytes, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch, 6000)
    (tmp_path / "x.csv").write_bytes(data)
    with pytest.raises(FormatError, match=rf"x\.csv: cannot be read as a table: .*{words}"):
        pack(tmp_path, tmp_path.parent / "out")


@pytest.mark.parametrize("damage", [slice(0, -20), slice(0, 400)])
def test_a_damaged_gzip_file_is_named(damage: slice, tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(b"%d,text %d\n" % (n, n * 7919) for n in range(1000)))
    spoilt = whole[damage] if damage.stop < 0 else whole[:400] + bytes(50) + whole[450:]
    (tmp_path / "x.csv.gz").write_bytes(spoilt)
    with pytest.raises(FormatError, match=r"x\.csv\.gz: cannot be read as a table"):
        pack(tmp_path, tmp_path.parent / "out")


_TABLE = [["name", "count", "x y"], ["a, b; c|d", "1", "1.5"], ["e", "", "2.5"], ['"f"\tg', "3", "4.0"]]
_COLUMNS = {"name": ["a, b; c|d", "e", '"f"\tg'], "count": [1, None, 3], "x y": [1.5, 2.5, 4.0]}


def _text(delimiter: str, table: list[list[str]] = _TABLE, *, decimal_point: str = ".") -> str:
    sink = io.StringIO()
    csv.writer(sink, delimiter=delimiter).writerows(
        [[re.sub(r"^(\d)\.(\d)$", rf"\1{decimal_point}\2", value) for value in row] for row in table]
    )
    return sink.getvalue()


def _read(folder: Path, name: str, data: str | bytes, **options: Any) -> tuple[dict[str, list[object]], PackSummary]:
    (folder / "in").mkdir(exist_ok=True)
    (folder / "in" / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    summary = pack(folder / "in" / name, folder / f"out-{name}", format="parquet", **options)
    return pq.read_table(folder / f"out-{name}" / "shard-000000.parquet").to_pydict(), summary


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_the_header_tells_what_separates_values(delimiter: str, start: str, tmp_path: Path) -> None:
    assert _read(tmp_path, "a.csv", start + _text(delimiter)) == (_COLUMNS, ANY)
    compressed = gzip.compress((start + _text(delimiter)).encode())
    assert _read(tmp_path, "b.csv.gz", compressed) == (_COLUMNS, ANY)


def test_tsv_files_have_tabs(tmp_path: Path) -> None:
    assert _read(tmp_path, "a.tsv", _text("\t")) == (_COLUMNS, ANY)
    assert _read(tmp_path, "b.tsv.gz", gzip.compress(_text("\t").encode())) == (_COLUMNS, ANY)
    assert _read(tmp_path, "c.tsv", "n\n1\n2\n") == ({"n": [1, 2]}, ANY)
    with pytest.raises(DatasetError, match=r"penstock pack .*tables of text|tables of text.*penstock pack"):
        open_manifest(tmp_path / "in", format=None)


def test_a_folder_may_hold_tables_of_several_delimiters(tmp_path: Path) -> None:
    for name, delimiter in (("a.csv", ","), ("b.csv", ";"), ("c.tsv", "\t")):
        _read(tmp_path, name, _text(delimiter))
    pack(tmp_path / "in", tmp_path / "all", format="parquet")
    table = pq.read_table(tmp_path / "all" / "shard-000000.parquet").to_pydict()
    assert table == {name: values * 3 for name, values in _COLUMNS.items()}


def test_what_separates_values_may_be_given(tmp_path: Path) -> None:
    assert _read(tmp_path, "a.csv", "a;b,c;d\n1;2,3;4\n", delimiter=";")[0] == {"a": [1], "b,c": ["2,3"], "d": [4]}
    assert _read(tmp_path, "b.csv", "a,b\tc\n1,2\t3\n", delimiter="tab")[0] == {"a,b": ["1,2"], "c": [3]}
    assert _read(tmp_path, "c.csv", "a:b\n1:2\n", delimiter=":")[0] == {"a": [1], "b": [2]}
    assert _read(tmp_path, "d.csv", "sep=:\r\na:b\r\n1:2\r\n")[0] == {"a": [1], "b": [2]}
    assert _read(tmp_path, "e.csv", '"a;b",c\n1,2\n')[0] == {"a;b": [1], "c": [2]}
    given = ["--format", "parquet", "--delimiter", "tab", "--decimal-point", ","]
    (tmp_path / "f.csv").write_text("a\tx\n1\t2,5\n")
    assert run(["pack", str(tmp_path / "f.csv"), str(tmp_path / "f"), *given]) == 0
    assert pq.read_table(tmp_path / "f" / "shard-000000.parquet").to_pydict() == {"a": [1], "x": [2.5]}


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.csv", "id;name;street, number;city\n1;x;y, 2;z\n"), ("b.csv", "a;b|c\n1;2|3\n"), ("c.tsv", "a,b\n1,2\n")],
)
def test_a_header_that_does_not_tell_is_refused_with_what_to_say(name: str, data: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"its header has .*: say which separate values, with delimiter="):
        _read(tmp_path, name, data)
    assert len(_read(tmp_path, name, data, delimiter="," if name == "c.tsv" else ";")[0]) >= 2


@pytest.mark.parametrize("delimiter", [",", ";"])
def test_decimal_commas_are_told_and_read_where_that_is_said(delimiter: str, tmp_path: Path) -> None:
    text = _text(delimiter, decimal_point=",")
    columns, summary = _read(tmp_path, "a.csv", text)
    assert columns == {**_COLUMNS, "x y": ["1,5", "2,5", "4,0"]}
    (note,) = summary.notes
    assert note.startswith(
        "column 'x y' is kept as text, with values like '1,5'; if the comma is a decimal point, give "
    )
    assert note.endswith("decimal_point=',' (--decimal-point ,)")
    columns, summary = _read(tmp_path, "b.csv", text, decimal_point=",")
    assert (columns, summary.notes) == (_COLUMNS, ())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"delimiter": ";;"}, "give one character"),
        ({"delimiter": '"'}, "give one character"),
        ({"decimal_point": ";"}, "must be"),
        ({"delimiter": ";", "source_format": "files"}, "apply to CSV files"),
        ({"decimal_point": ",", "source_format": "parquet"}, "apply to CSV files"),
    ],
)
def test_what_cannot_separate_values_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n")
    with pytest.raises(ConfigError, match=words):
        pack(tmp_path / "a.csv", tmp_path / "out", **options)
    with pytest.raises(ConfigError, match="not to an iterable"):
        pack([{"a": 1}], tmp_path / "out", delimiter=";")


def test_a_tsv_beside_other_files_is_a_field(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "a.tsv", "b.txt", "b.tsv"):
        (tmp_path / "in" / name).write_text(name)
    assert pack(tmp_path / "in", tmp_path / "out").samples == 2
