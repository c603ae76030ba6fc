"""Files of other programs that look like shards: read by what they say of themselves, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import DistributedDataLoader, TokensFormat, open_manifest, pack
from penstock.loader import ConfigError, DecodeError, FormatError, TokenDocumentsFormat, verify


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
