"""Mixtures of data sets in any two formats, with every kind of column: each source's samples are those of it alone."""

from __future__ import annotations

import datetime as dt
import io
import json
import tarfile
from collections.abc import Callable
from decimal import Decimal
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as pa_feather
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from penstock import DistributedDataLoader, Mixture, Source, TokenDocumentsFormat, TokensFormat, pack
from penstock.loader import ConfigError

ROWS = 12
MARK = "__null"


def make_png(number: int) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(sink, "PNG")
    return sink.getvalue()


KINDS: dict[str, Callable[[int], tuple[Any, pa.DataType]]] = {
    "n": lambda i: (i, pa.int64()),
    "cls": lambda i: (i % 3, pa.int64()),
    "tiny": lambda i: (i, pa.uint8()),
    "half": lambda i: (i / 2, pa.float64()),
    "small": lambda i: (i / 2, pa.float32()),
    "even": lambda i: (i % 2 == 0, pa.bool_()),
    "txt": lambda i: (f"text {i}", pa.string()),
    "raw": lambda i: (bytes([i] * i), pa.binary()),
    "ragged": lambda i: (list(range(i)), pa.list_(pa.int64())),
    "lists": lambda i: ([i, i + 1], pa.list_(pa.int64())),
    "pair": lambda i: ([i, i + 1], pa.list_(pa.int64(), 2)),
    "json": lambda i: ({"lang": "en", "n": i}, pa.struct({"lang": pa.string(), "n": pa.int64()})),
    "deep": lambda i: ([{"a": [i]}], pa.list_(pa.struct({"a": pa.list_(pa.int64())}))),
    "word": lambda i: ("ab"[i % 2], pa.dictionary(pa.int8(), pa.string())),
    "code": lambda i: (3 + i % 2, pa.dictionary(pa.int8(), pa.int64())),
    "price": lambda i: (Decimal(i) / 4, pa.decimal128(9, 2)),
    "day": lambda i: (dt.date(2024, 1, 1 + i), pa.date32()),
    "at": lambda i: (dt.datetime(2024, 1, 1, i), pa.timestamp("us")),
    "took": lambda i: (dt.timedelta(seconds=i), pa.duration("ms")),
    "png": lambda i: (make_png(i), pa.binary()),
}
IN_JSON = {"n", "cls", "tiny", "half", "even", "txt", "ragged", "lists", "pair", "json", "deep"}
IN_MDS = set(KINDS) - {"small", "took", "word", "code"}
IN_TAR = {"cls", "txt", "json", "png"}  # whose extensions say what they are
FORMATS = {"parquet": set(KINDS), "file": set(KINDS), "stream": set(KINDS), "jsonl": IN_JSON, "mds": IN_MDS}
FORMATS["tar"] = IN_TAR
KNOW_NULLS = ("parquet", "file", "jsonl")
PAIRS = [
    pair
    for pair in combinations_with_replacement(FORMATS, 2)
    if "stream" not in pair or pair in (("parquet", "stream"), ("stream", "stream"))
]


def value_of(name: str, row: int, *, nulls: bool) -> Any:
    return None if nulls and row % 4 == 1 else KINDS[name](row)[0]


def write(folder: Path, form: str, *, nulls: bool = False) -> Path:
    """All columns that the format holds; with ``nulls`` each lacks every fourth value."""
    folder.mkdir(parents=True)
    names = [name for name in KINDS if name in FORMATS[form]]
    if form == "tar":
        with tarfile.open(folder / "a.tar", "w") as tar:
            for row in range(ROWS):
                for name in names:
                    value = KINDS[name](row)[0]
                    data = value if isinstance(value, bytes) else str(value).encode()
                    info = tarfile.TarInfo(f"{row:03d}.{name}")
                    data = json.dumps(value).encode() if name == "json" else data
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        return folder
    if form == "jsonl":
        rows = [{name: value_of(name, row, nulls=nulls) for name in names} for row in range(ROWS)]
        (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder
    table = pa.table(
        {name: pa.array([value_of(name, row, nulls=nulls) for row in range(ROWS)], KINDS[name](0)[1]) for name in names}
    )
    if form == "parquet":
        pq.write_table(table, folder / "a.parquet", row_group_size=5)
    elif form == "mds":
        pq.write_table(table, folder.with_suffix(".parquet"))
        pack(str(folder.with_suffix(".parquet")), str(folder), format="mds")
    else:
        make = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
        with make(str(folder / f"a.{'arrow' if form == 'file' else 'arrows'}"), table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    root = tmp_path_factory.mktemp("formats")
    made = {(form, False): write(root / form, form) for form in FORMATS}
    return made | {(form, True): write(root / f"{form} with nulls", form, nulls=True) for form in KNOW_NULLS}


def listed(values: Any) -> list[Any]:
    return list(values.tolist() if isinstance(values, torch.Tensor) else values)


def read_alone(folder: Path, **options: Any) -> dict[str, Any]:
    """The naive reference: the whole data set as one batch."""
    with DistributedDataLoader(folder, batch_size=ROWS, shuffle=False, **options) as loader:
        return dict(next(iter(loader)))


def kind_of(values: Any) -> Any:
    """What decides whether the values of two data sets can be one field."""
    if isinstance(values, torch.Tensor):
        return values.dtype, tuple(values.shape[1:])
    return type(next(value for value in values if value is not None))


def check_mixture(one: Path, other: Path, names: list[str], **options: Any) -> None:
    """Each sample of a mixture has the values that it has where its data set is read alone, and marks of its nulls."""
    alone = [read_alone(folder, columns=names, **options) for folder in (one, other)]
    marks = [name for name in {**alone[0], **alone[1]} if name.endswith(MARK)]
    sources = {"one": Source(one), "other": Source(other)}
    found = 0
    mixture = Mixture(sources, stop="all_exhausted")
    with DistributedDataLoader(mixture, batch_size=4, columns=names, with_ids=True, **options) as loader:
        for batch in loader:
            rows = list(zip(batch["__source__"].tolist(), batch["__id__"].tolist(), strict=True))
            found += len(rows)
            for name in [*names, *marks]:
                for value, (source, row) in zip(listed(batch[name]), rows, strict=True):
                    known = alone[source].get(name)
                    if known is None:  # no value of this data set is missing
                        assert not np.any(value), (name, source, row)
                        continue
                    expected = listed(known)[row]
                    assert value == expected or (value != value and expected != expected), (name, source, row)
    assert found >= 2 * ROWS


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_sources_of_two_formats_give_the_samples_that_each_gives_alone(
    folders: dict[tuple[str, bool], Path], one: str, other: str
) -> None:
    first, second = folders[one, False], folders[other, False]
    common = [name for name in KINDS if name in FORMATS[one] & FORMATS[other]]
    of_one, of_other = (read_alone(folder, columns=common) for folder in (first, second))
    alike = [name for name in common if kind_of(of_one[name]) == kind_of(of_other[name])]
    assert set(alike) >= ({"cls", "txt"} if "tar" in (one, other) else {"n", "cls", "half", "even", "txt", "lists"})
    assert one != other or alike == common
    check_mixture(first, second, alike)
    for name in set(common) - set(alike):
        with (
            pytest.raises(ConfigError, match=f"the field '{name}' is"),
            DistributedDataLoader(
                Mixture({"a": Source(first), "b": Source(second)}), batch_size=4, columns=[name]
            ) as loader,
        ):
            next(iter(loader))


@pytest.mark.slow
@pytest.mark.parametrize("with_nulls", KNOW_NULLS)
@pytest.mark.parametrize("other", ["parquet", "file", "jsonl", "mds", "tar"])
def test_a_source_without_nulls_marks_all_as_valid_beside_one_that_has_them(
    folders: dict[tuple[str, bool], Path], with_nulls: str, other: str
) -> None:
    first, second = folders[with_nulls, True], folders[other, False]
    common = [name for name in KINDS if name in FORMATS[with_nulls] & FORMATS[other]]
    of_one, of_other = (read_alone(folder, columns=common, decode={}) for folder in (first, second))
    alike = [name for name in common if kind_of(of_one[name]) == kind_of(of_other[name])]
    if other == "tar":
        check_mixture(first, second, ["cls", "txt"])
        return
    assert set(alike) >= {"n", "even", "half"}
    check_mixture(first, second, alike, decode={})
    for keep in (lambda sample: True, lambda sample: sample["n"] >= 0):
        check_mixture(first, second, ["n", "even"], keep=keep)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["tar"])
def test_worker_processes_give_samples_of_two_formats_alike(folders: dict[tuple[str, bool], Path], other: str) -> None:
    check_mixture(folders["parquet", False], folders[other, False], ["cls", "txt", "json", "png"], processes=2)


@pytest.mark.slow
@pytest.mark.parametrize("write_table", [pq.write_table, pa_feather.write_feather], ids=["parquet", "arrow"])
def test_sources_with_their_columns_in_another_order_keep_them_apart(tmp_path: Path, write_table: Any) -> None:
    names = [f"c{number}" for number in range(6)]
    columns = {name: pa.array(np.arange(ROWS) + 1000 * number) for number, name in enumerate(names)}
    for folder, order in (
        ("one", names),
        ("other", names[::-1]),
        ("third", sorted(names, key=lambda n: int(n[1]) % 3)),
    ):
        (tmp_path / folder).mkdir()
        suffix = "parquet" if write_table is pq.write_table else "feather"
        write_table(pa.table({name: columns[name] for name in order}), tmp_path / folder / f"a.{suffix}")
    sources = {name: Source(tmp_path / name) for name in ("one", "other", "third")}
    for options in ({}, {"columns": names}, {"keep": lambda sample: True}):
        mixture = Mixture(sources, stop="all_exhausted")
        with DistributedDataLoader(mixture, batch_size=6, with_ids=True, **options) as loader:
            for batch in [loader.peek(), *loader]:
                for number, name in enumerate(names):
                    assert batch[name].equal(batch["__id__"] + 1000 * number)


@pytest.mark.parametrize("form", ["file", "jsonl", "mds"])
def test_columns_that_a_mixture_leaves_out_play_no_part(folders: dict[tuple[str, bool], Path], form: str) -> None:
    mixture = Mixture({"a": Source(folders["parquet", True]), "b": Source(folders[form, False])})
    with DistributedDataLoader(mixture, batch_size=4, columns=["txt", "n"]) as loader:
        assert set(next(iter(loader))) == {"txt", "n", "n__null"}
    with DistributedDataLoader(mixture, batch_size=4, columns=["txt"]) as loader:
        assert set(next(iter(loader))) == {"txt"}


@pytest.mark.parametrize("form", [TokensFormat(seq_len=4), TokenDocumentsFormat(eos=0)], ids=["tokens", "documents"])
def test_token_files_are_mixed_with_token_files_and_with_tables_of_tokens(tmp_path: Path, form: Any) -> None:
    tokens = np.tile(np.array([3, 1, 2, 0], "<u2"), ROWS)
    (tmp_path / "tokens").mkdir()
    tokens.tofile(tmp_path / "tokens" / "a.bin")
    is_fixed = isinstance(form, TokensFormat)
    kind = pa.list_(pa.int64(), 4) if is_fixed else pa.list_(pa.int64())
    (tmp_path / "table").mkdir()
    pq.write_table(pa.table({"tokens": pa.array([[3, 1, 2, 0]] * ROWS, kind)}), tmp_path / "table" / "a.parquet")
    of_tokens = Source(str(tmp_path / "tokens"), format=form)
    for other in (of_tokens, Source(str(tmp_path / "table"))):
        mixture = Mixture({"a": of_tokens, "b": other}, stop="all_exhausted")
        with DistributedDataLoader(mixture, batch_size=4) as loader:
            batches = list(loader)
        assert [listed(row) for batch in batches for row in batch["tokens"]] == [[3, 1, 2, 0]] * (4 * len(batches))
        assert len(batches) >= 2 * ROWS // 4
