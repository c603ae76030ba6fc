"""What a chunk takes once opened is known, or counted, before memory is taken; what is too large is refused by name."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from penstock import DistributedDataLoader
from penstock.loader import MemoryLimitError
from penstock.loader.formats.arrow.parquet_footer import read_dictionary_facts
from penstock.loader.reading import on_disk

TOO_LARGE = 68 << 20  # above the 64 MiB of one chunk that every limit allows
WORDS = ["a" * 4000, "", "b", None, "ü" * 2000]


def write_packed_tar(folder: Path) -> None:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        member = tarfile.TarInfo("0.bin")
        member.size = TOO_LARGE
        archive.addfile(member, io.BytesIO(bytes(TOO_LARGE)))
    (folder / "a.tar.zst").write_bytes(zstandard.compress(raw.getvalue()))


def write_lines_of_few_keys(folder: Path) -> None:
    wide = json.dumps({"x": 1} | {f"k{i}": 1 for i in range(255)})
    (folder / "a.jsonl").write_text(wide + "\n" + "{}\n" * (TOO_LARGE // 8 // 256))


def write_packed_mds(folder: Path) -> None:
    head = np.array([1, 12, 16 + TOO_LARGE, TOO_LARGE], "<u4").tobytes()
    data = zstandard.compress(head + bytes(TOO_LARGE))
    (folder / "s.mds.zstd").write_bytes(data)
    entry = {
        "format": "mds",
        "samples": 1,
        "raw_data": {"basename": "s.mds", "bytes": len(head) + TOO_LARGE},
        "zip_data": {"basename": "s.mds.zstd", "bytes": len(data)},
        "column_names": ["x"],
        "column_encodings": ["bytes"],
        "column_sizes": [None],
    }
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [entry]}))


def write_row_group(folder: Path) -> None:
    pq.write_table(pa.table({"x": np.zeros(TOO_LARGE // 8)}), folder / "a.parquet", row_group_size=TOO_LARGE)


def write_fetched_beside_opened(folder: Path) -> None:
    data = np.random.default_rng(0).bytes(TOO_LARGE // 2)
    pq.write_table(pa.table({"x": [data[: 1 << 24], data[1 << 24 :]]}), folder / "a.parquet", compression="none")


def write_lists(folder: Path) -> None:
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(TOO_LARGE // 8)), 1024).cast(pa.list_(pa.float64()))
    pq.write_table(pa.table({"x": lists}), folder / "a.parquet")


def write_fixed_binaries(folder: Path) -> None:
    values = pa.array([bytes(4096)] * (TOO_LARGE // 4096), pa.binary(4096))
    pq.write_table(pa.table({"x": values}), folder / "a.parquet")


def write_texts_in_structs(folder: Path) -> None:
    values = pa.array([{"bytes": bytes(4096), "path": ""}] * (TOO_LARGE // 4096))
    pq.write_table(pa.table({"x": values}), folder / "a.parquet")


def write_packed_batch(folder: Path) -> None:
    table = pa.table({"x": [bytes(1 << 20)] * (TOO_LARGE >> 20)})
    with pa.ipc.new_file(
        folder / "a.arrow", table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as writer:
        writer.write_table(table)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::penstock.loader.MemoryLimitWarning")
@pytest.mark.parametrize(
    "write",
    [
        write_packed_tar,
        write_lines_of_few_keys,
        write_packed_mds,
        write_texts_in_structs,  # whose footer does not tell how large they are
        write_packed_batch,
    ],
)
def test_a_chunk_that_cannot_fit_is_refused_by_name_with_the_limit_and_what_to_do(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    write(tmp_path)
    shard = next(path.name for path in tmp_path.iterdir() if path.suffix != ".json")
    stated = (
        rf"{shard} at byte \d+: .* takes (about|more than) [\d,]+ bytes of memory, and the limit is 67,108,864; raise"
    )
    with (
        DistributedDataLoader(str(tmp_path), batch_size=1, memory_limit="1MiB", max_bad_chunks=1) as loader,
        pytest.raises(MemoryLimitError, match=stated),
    ):
        next(iter(loader))
    with DistributedDataLoader(str(tmp_path), batch_size=1, memory_limit="1GiB", lanes=1) as loader:
        assert len(next(iter(loader))["x" if not shard.startswith("a.tar") else "bin"]) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::penstock.loader.MemoryLimitWarning")
@pytest.mark.parametrize("write", [write_row_group, write_fetched_beside_opened, write_lists, write_fixed_binaries])
def test_a_row_group_above_the_limit_is_opened_onto_the_disk(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    found = []
    for limit in ("1MiB", "1GiB"):
        with DistributedDataLoader(str(tmp_path), batch_size=1, memory_limit=limit, lanes=1, seed=1) as loader:
            found.append(next(iter(loader))["x"])
    assert list(found[0]) == list(found[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::penstock.loader.MemoryLimitWarning")
@pytest.mark.parametrize(
    "look",
    [
        lambda loader: loader.peek(),
        lambda loader: loader.dataset[0],
        lambda loader: loader.dataset.find(0.0, field="x"),
    ],
    ids=["peek", "sample", "find"],
)
def test_looking_beside_a_pass_keeps_to_the_limit(
    tmp_path: Path, look: Callable[[DistributedDataLoader], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_row_group(tmp_path)
    monkeypatch.setattr(on_disk, "_kind_of_disk", lambda _: "tmpfs")  # where nothing large can be opened
    with (
        DistributedDataLoader(str(tmp_path), batch_size=1, memory_limit="64MiB") as loader,
        pytest.raises(MemoryLimitError, match=r"a\.parquet at byte 4: .* the limit is 67,108,864"),
    ):
        look(loader)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::penstock.loader.MemoryLimitWarning")
def test_a_column_that_is_not_read_takes_nothing(tmp_path: Path) -> None:
    rows = TOO_LARGE // 8
    pq.write_table(pa.table({"x": np.zeros(rows), "y": np.zeros(rows, np.int8)}), tmp_path / "a.parquet")
    with DistributedDataLoader(str(tmp_path), batch_size=2, memory_limit="64MiB", columns=["y"], piece=0) as loader:
        assert next(iter(loader))["y"].tolist() == [0, 0]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int8(), pa.string())])
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_repeated_values_are_the_same_however_they_are_kept(tmp_path: Path, kind: pa.DataType, form: str) -> None:
    chosen = [WORDS[i % 5] if i < 300 else f"{i}" * 5 for i in range(400)]
    table = pa.table({"w": pa.array(chosen).dictionary_encode().cast(pa.dictionary(pa.int16(), pa.string()))})
    if not pa.types.is_dictionary(kind):
        table = pa.table({"w": pa.array(chosen, pa.string()).cast(kind)})
    if form == "parquet":
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=90, store_schema=pa.types.is_dictionary(kind))
    else:
        with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=90)
    options = {"batch_size": 80, "shuffle": False, "lanes": 1, "decode": None}
    with DistributedDataLoader(str(tmp_path), **options) as loader:
        found = [value for batch in loader for value in batch["w"]]
    if pa.types.is_binary(kind):
        found = [None if value is None else value.decode() for value in found]
    assert found == chosen


def test_a_dictionary_of_as_many_values_as_its_indices_reach_may_have_nulls(tmp_path: Path) -> None:
    words = [str(i) for i in range(128)]
    indices = pa.array([*range(128), None], pa.int8())
    table = pa.table({"w": pa.DictionaryArray.from_arrays(indices, pa.array(words))})
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    with DistributedDataLoader(str(tmp_path), batch_size=129, shuffle=False) as loader:
        assert next(iter(loader))["w"] == [*words, None]


def test_a_dictionary_pages_header_says_how_large_it_is_and_nothing_else_does(tmp_path: Path) -> None:
    pq.write_table(pa.table({"w": ["abcd"] * 10 + ["ef"] * 3}), tmp_path / "a.parquet", compression="none")
    column = pq.read_metadata(tmp_path / "a.parquet").row_group(0).column(0)
    data = (tmp_path / "a.parquet").read_bytes()
    dictionary = data[column.dictionary_page_offset :][:64]
    assert read_dictionary_facts(dictionary) == (4 + 4 + 4 + 2, 2)
    assert read_dictionary_facts(data[column.data_page_offset :][:64]) is None
    for end in range(8):
        assert read_dictionary_facts(dictionary[:end]) is None
    assert read_dictionary_facts(b"\xff" * 64) is None


MEASURE = """
import sys
from penstock import DistributedDataLoader
from penstock.storage.observability.process_usage import peak_resident_bytes as peak
def read(folder):
    with DistributedDataLoader(folder, batch_size=16, memory_limit="128MiB") as loader:
        for step, batch in zip(range(20), loader):
            assert set(map(len, batch["prompt"])) == {4096}
read(sys.argv[1])
before = peak()
read(sys.argv[2])
print((peak() - before) >> 20)
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_values_that_a_million_rows_share_are_held_once(tmp_path: Path, form: str) -> None:
    """1.6 GB of prompts in 1 MB of file: 3.1 GB of memory where each row has a copy of its prompt."""
    rng = np.random.default_rng(0)
    prompts = pa.array([rng.integers(97, 123, 4096, np.uint8).tobytes().decode() for _ in range(50)])
    for rows in (1000, 400_000):
        (tmp_path / str(rows)).mkdir()
        indices = pa.array(rng.integers(0, 50, rows, np.int32))
        table = pa.table({"prompt": pa.DictionaryArray.from_arrays(indices, prompts)})
        if form == "parquet":
            pq.write_table(table, tmp_path / str(rows) / "a.parquet", row_group_size=rows, store_schema=False)
        else:
            with pa.ipc.new_file(tmp_path / str(rows) / "a.arrow", table.schema) as writer:
                writer.write_table(table)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "1000"), str(tmp_path / "400000")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 256
