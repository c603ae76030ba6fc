"""Files of other programs that look like shards: read by what they say of themselves, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packed_samples import read_samples

from penstock import DistributedDataLoader, TokensFormat, open_manifest, pack
from penstock.loader import ConfigError, DecodeError, FormatError, MemoryLimitError, TokenDocumentsFormat, verify


def write_arrow(folder: Path, name: str, values: list[int]) -> None:
    folder.mkdir(exist_ok=True)
    batch = pa.record_batch({"x": values})
    with pa.ipc.new_stream(str(folder / name), batch.schema) as stream:
        stream.write_batch(batch)


def write_state(folder: Path, *names: str) -> None:
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


def values_of(source: Path) -> list[int]:
    with DistributedDataLoader(source, batch_size=1, shuffle=False) as loader:
        return [int(batch["x"]) for batch in loader]


def test_of_a_saved_data_set_the_files_that_its_state_lists_are_read_in_that_order(tmp_path: Path) -> None:
    for name, values in (("data-0-of-2.arrow", [1, 2]), ("data-1-of-2.arrow", [3]), ("data-0-of-1.arrow", [9])):
        write_arrow(tmp_path, name, values)
    write_arrow(tmp_path, "cache-123.arrow", [7])
    write_state(tmp_path, "data-0-of-1.arrow")
    assert values_of(tmp_path) == [9]
    write_state(tmp_path, "data-1-of-2.arrow", "data-0-of-2.arrow")
    assert values_of(tmp_path) == [3, 1, 2]


def test_a_file_that_a_saved_data_set_lacks_is_named(tmp_path: Path) -> None:
    write_arrow(tmp_path, "data-0-of-2.arrow", [1, 2])
    write_state(tmp_path, "data-0-of-2.arrow", "data-1-of-2.arrow")
    with pytest.raises(FormatError, match=r"state\.json.*data-1-of-2\.arrow, which is not there"):
        open_manifest(tmp_path)


@pytest.mark.parametrize("state", ["no json", "[]", '{"step": 3}', '{"_data_files": [7]}', '{"_data_files": []}'])
def test_a_state_of_another_program_changes_nothing_but_for_results_of_map(tmp_path: Path, state: str) -> None:
    write_arrow(tmp_path, "b.arrow", [2])
    write_arrow(tmp_path, "a.arrow", [1])
    write_arrow(tmp_path, "cache-1.arrow", [9])
    (tmp_path / "state.json").write_text(state)
    assert values_of(tmp_path) == [1, 2]


def test_results_of_map_in_the_cache_of_datasets_are_left_out(tmp_path: Path) -> None:
    write_arrow(tmp_path, "imdb-train.arrow", [1])
    write_arrow(tmp_path, "cache-1.arrow", [9])
    assert values_of(tmp_path) == [9, 1]
    (tmp_path / "dataset_info.json").write_text("{}")
    assert values_of(tmp_path) == [1]


@pytest.mark.parametrize("magic", [20240520, 20240801])
def test_token_files_with_a_header_are_refused_by_it(tmp_path: Path, magic: int) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, 1024
    (tmp_path / "a.bin").write_bytes(header.tobytes() + np.arange(1024, dtype="<u2").tobytes())
    for form in (TokensFormat(seq_len=512), TokenDocumentsFormat(eos=0)):
        loader = DistributedDataLoader(tmp_path, batch_size=1, shuffle=False, format=form)
        with loader, pytest.raises(FormatError, match=rf"a\.bin.*header of llm\.c's \({magic}, version 1\)"):
            next(iter(loader))


def test_chunks_of_litdata_are_not_taken_for_tokens(tmp_path: Path) -> None:
    (tmp_path / "chunk-0-0.bin").write_bytes(bytes(4096))
    assert open_manifest(tmp_path, format=TokensFormat(seq_len=8)).num_samples == 256
    (tmp_path / "index.json").write_text('{"chunks": [], "config": {}}')
    with pytest.raises(FormatError, match=r"chunk-0-0\.bin.*litdata.*pack\(\)"):
        open_manifest(tmp_path, format=TokensFormat(seq_len=8))


@pytest.mark.parametrize("is_nullable", [True, False])
def test_nulls_inside_of_lists_of_one_length_are_marked(tmp_path: Path, is_nullable: bool) -> None:
    kind = pa.list_(pa.int32(), 2)
    schema = pa.schema([pa.field("v", kind, nullable=is_nullable)])
    table = pa.table([pa.array([[1, None], [3, 4]], kind)], schema=schema)
    pq.write_table(table, tmp_path / "p.parquet")
    with DistributedDataLoader(tmp_path, batch_size=2, shuffle=False) as loader:
        batch = next(iter(loader))
    assert batch["v"].tolist() == [[1, 0], [3, 4]]
    assert batch["v__null"].tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize(
    "values",
    [
        pa.array([[10**16]], pa.list_(pa.timestamp("ms"))),
        pa.array([{"day": 10**7}], pa.struct([("day", pa.date32())])),
        pa.array([[0]], pa.list_(pa.timestamp("us", "Mars/Phobos"))),
    ],
    ids=["year", "day", "zone"],
)
def test_times_inside_of_values_that_python_lacks_are_an_error_that_names_the_field(
    tmp_path: Path, values: pa.Array
) -> None:
    pq.write_table(pa.table({"v": values, "n": [1]}), tmp_path / "p.parquet")
    with DistributedDataLoader(tmp_path, batch_size=1) as loader:
        with pytest.raises(DecodeError, match=r"field 'v' of chunk 0: .*leave it out with columns="):
            next(iter(loader))
        with pytest.raises(DecodeError, match="field 'v'"):
            loader.dataset[0]
    with DistributedDataLoader(tmp_path, batch_size=1, columns=["n"]) as loader:
        assert next(iter(loader))["n"].tolist() == [1]


def test_values_that_are_kept_encoded_are_searched_and_verified_as_values(tmp_path: Path) -> None:
    mixed, arrays = tmp_path / "mixed", tmp_path / "arrays"
    mixed.mkdir()
    (mixed / "m.jsonl").write_text('{"m": [1, 2]}\n{"m": "abc"}\n{"m": 5}\n{"m": null}\n')
    with DistributedDataLoader(mixed, batch_size=1) as loader:
        assert loader.dataset.find("abc", field="m") == 1
        assert loader.dataset.find(5, field="m") == loader.dataset.find("5", field="m") == 2
    pack([{"a": np.arange(n), "j": {"n": n}} for n in (1, 2)], arrays, format="mds")
    with DistributedDataLoader(arrays, batch_size=1) as loader, pytest.raises(ConfigError, match="holds arrays"):
        loader.dataset.find("1", field="a")
    assert verify(arrays, progress=False).ok
    (shard,) = arrays.glob("*.mds")
    data = shard.read_bytes()
    shard.write_bytes(data.replace(b'{"n": 2}', b'{"n": 2['))
    (arrays / "penstock-manifest.arrow").unlink()
    flaws = verify(arrays, progress=False).flaws
    assert [flaw.kind for flaw in flaws] == ["FormatError"]
    assert "'j'" in flaws[0].problem


UNTYPED = {
    "n": [None, None],
    "t": [None, None],
    "b": [None, None],
    "f": [None, None],
    "when": [None, None],
    "v": [None, None],
    "tags": [[], None],
    "who": [None, None],
}


def typed_columns() -> dict[str, pa.Array]:
    return {
        "n": pa.array([1, 2]),
        "t": pa.array(["a", "b"]),
        "b": pa.array([b"a", b"b"]),
        "f": pa.array([0.5, 1.5], pa.float32()),
        "when": pa.array([1, 2], pa.timestamp("ms", "UTC")),
        "v": pa.array([[1, 2], [3, 4]], pa.list_(pa.int16(), 2)),
        "tags": pa.array([["x"], []], pa.list_(pa.string())),
        "who": pa.array([{"name": "a"}, {"name": "b"}]),
    }


def write_table(path: Path, table: pa.Table) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("typed_first", [True, False])
def test_columns_without_a_value_in_a_shard_have_the_types_of_the_others(
    tmp_path: Path, suffix: str, typed_first: bool
) -> None:
    typed, untyped = pa.table(typed_columns()), pa.table(UNTYPED)
    source = tmp_path / "source"
    source.mkdir()
    for name, table in zip("ab", [typed, untyped] if typed_first else [untyped, typed], strict=True):
        write_table(source / f"{name}{suffix}", table)
    with DistributedDataLoader(source, batch_size=4, shuffle=False, decode=None) as loader:
        (batch,) = loader
    order = [0, 1, 2, 3] if typed_first else [2, 3, 0, 1]
    assert [batch["n"].tolist()[row] for row in order] == [1, 2, 0, 0]
    assert [batch["n__null"].tolist()[row] for row in order] == [False, False, True, True]
    assert [batch["t"][row] for row in order] == ["a", "b", None, None]
    assert [batch["b"][row] for row in order] == [b"a", b"b", None, None]
    assert np.isnan(batch["f"].numpy()[order]).tolist() == [False, False, True, True]
    assert [batch["when__null"].tolist()[row] for row in order] == [False, False, True, True]
    assert [batch["v"].tolist()[row] for row in order] == [[1, 2], [3, 4], [0, 0], [0, 0]]
    assert [batch["tags"][row] for row in order] == [["x"], [], [], None]
    assert [batch["who"][row] for row in order] == [{"name": "a"}, {"name": "b"}, None, None]


def test_parts_of_structs_without_a_value_in_a_shard_have_the_types_of_the_others(tmp_path: Path) -> None:
    for name, of in (("a", None), ("b", "x")):
        talk = [{"role": name, "of": of, "more": {"tags": [of] if of else [], "n": 1}}]
        pq.write_table(pa.table({"talk": pa.array([talk]), "one": pa.array(talk)}), tmp_path / f"{name}.parquet")
    with DistributedDataLoader(tmp_path, batch_size=2, shuffle=False) as loader:
        batch = next(iter(loader))
    assert batch["one"] == [
        {"role": "a", "of": None, "more": {"tags": [], "n": 1}},
        {"role": "b", "of": "x", "more": {"tags": ["x"], "n": 1}},
    ]
    assert batch["talk"] == [[row] for row in batch["one"]]
    pq.write_table(pa.table({"talk": [[{"role": "c"}]], "one": [{"role": "c"}]}), tmp_path / "c.parquet")
    with pytest.raises(
        FormatError, match=r"c\.parquet: column 'talk' is list<struct<role: string>>, but .* in b\.parquet"
    ):
        open_manifest(tmp_path)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_images_of_tables_are_bytes_whether_or_not_any_has_a_path(tmp_path: Path, suffix: str) -> None:
    for name, path in (("a", None), ("b", "b.bin")):
        table = pa.table({"x": pa.array([{"bytes": name.encode(), "path": path}])})
        assert pa.types.is_null(table.schema.field("x").type.field("path").type) == (path is None)
        write_table(tmp_path / f"{name}{suffix}", table)
    for source in (tmp_path / f"a{suffix}", tmp_path):
        with DistributedDataLoader(source, batch_size=1, shuffle=False) as loader:
            assert [batch["x"] for batch in loader] == [[b"a"], [b"b"]][: len(loader)]
    pack(tmp_path, tmp_path / "_packed", format="parquet")
    (shard,) = (tmp_path / "_packed").glob("*.parquet")
    assert pq.read_table(shard).to_pylist() == [
        {"x": {"bytes": b"a", "path": None}},
        {"x": {"bytes": b"b", "path": "b.bin"}},
    ]
    pack(tmp_path / f"a{suffix}", tmp_path / "_tar", format="tar")
    assert read_samples(str(tmp_path / "_tar"))[0]["x"] == b"a"


def test_types_that_differ_beside_columns_without_values_are_refused_by_the_shards_that_have_them(
    tmp_path: Path,
) -> None:
    for name, values in (("a", [None]), ("b", ["x"]), ("c", [1])):
        pq.write_table(pa.table({"x": pa.array([values]), "y": pa.array(values)}), tmp_path / f"{name}.parquet")
    with pytest.raises(FormatError, match=r"c\.parquet: column 'x' is list<int64>, but list<string> in b\.parquet"):
        open_manifest(tmp_path)


def test_columns_without_a_value_in_a_shard_are_packed_with_the_types_of_the_others(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    typed = pa.table({**typed_columns(), "talk": pa.array([[{"role": "x", "of": "y"}], []])})
    untyped = pa.table({**UNTYPED, "talk": pa.array([[{"role": "x", "of": None}], None])})
    pq.write_table(untyped, source / "a.parquet")
    pq.write_table(typed, source / "b.parquet")
    pack(source, target, format="parquet")
    (shard,) = target.glob("*.parquet")
    packed = pq.read_table(shard)
    assert packed.schema.types == typed.schema.types
    assert packed.slice(2).to_pylist() == typed.to_pylist()
    assert packed.slice(0, 2).to_pylist() == untyped.to_pylist()


def test_nulls_of_a_wide_type_are_refused_beyond_the_limit_of_memory(tmp_path: Path) -> None:
    write_table(tmp_path / "a.arrow", pa.table({"x": pa.nulls(300_000)}))
    wide = pa.array([[0.0] * 4096], pa.list_(pa.float64(), 4096))
    write_table(tmp_path / "b.arrow", pa.table({"x": wide}))
    with (
        DistributedDataLoader(tmp_path, batch_size=1, shuffle=False, memory_limit="256MiB") as loader,
        pytest.raises(MemoryLimitError, match=r"a\.arrow"),
    ):
        next(iter(loader))
