"""Files that somebody tampered with, their checksums made right again, end in an error of ours, and at once."""

from __future__ import annotations

import contextlib
import json
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import DistributedDataLoader
from penstock.loader import DatasetError, FormatError, Manifest, MemoryLimitError, audit, open_manifest
from penstock.loader.errors import StateMismatchError
from penstock.loader.pipeline.delivery_log import MAGIC, SUFFIX
from penstock.storage import PenstockError

pytestmark = pytest.mark.filterwarnings("ignore::penstock.loader.MemoryLimitWarning")

LONG_S = 30  # what used to hang took minutes, or for ever

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["type", "int64"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["columns", "fields", "type", "nulls", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < LONG_S


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("table")
    pq.write_table(pa.table({"x": np.arange(8), "s": ["a"] * 8}), folder / "a.parquet", row_group_size=4)
    return open_manifest(str(folder), format="parquet", progress=False)


def read_all(found: Manifest) -> None:
    with DistributedDataLoader(found, batch_size=2, threads=1) as loader:
        for _ in loader:
            pass


@given(st.sampled_from(["schema", "config", "format"]), ANY_JSON)
def test_a_manifest_whose_schema_or_settings_are_anything_is_read_or_refused(
    manifest: Manifest, part: str, value: Any
) -> None:
    value = str(value) if part == "format" else value
    strange = replace(manifest, **{part: value} if part == "format" else {part: {"columns": value} if value else {}})
    with quickly(), contextlib.suppress(PenstockError):
        read_all(Manifest.from_bytes(strange.to_bytes(), manifest.url))


def test_the_schemas_of_json_lines_have_types_that_nest(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": [[1]], "b": {"c": [{"d": null}]}, "e": [], "f": 1}\n{"f": "x"}\n')
    built = open_manifest(str(tmp_path), progress=False)
    assert Manifest.from_bytes(built.to_bytes(), built.url).schema == built.schema
    read_all(Manifest.from_bytes(built.to_bytes(), built.url))


@pytest.mark.parametrize("part", ["schema", "config", "shards"])
@pytest.mark.parametrize("text", ["[" * 200_000, "null", "[1]", '{"keys": 1}', '{"columns": [1]}', "1e999"])
def test_a_manifest_whose_metadata_is_strange_is_refused(manifest: Manifest, part: str, text: str) -> None:
    table = pa.ipc.open_stream(manifest.to_bytes()).read_all()
    metadata = {**table.schema.metadata, part.encode(): text.encode()}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema.with_metadata(metadata)) as writer:
        writer.write_table(table)
    with quickly(), pytest.raises(DatasetError, match="the-place: not a readable manifest"):
        Manifest.from_bytes(sink.getvalue(), manifest.url, "the-place")


def test_a_manifest_of_a_chunk_of_endless_samples_is_refused_before_it_is_planned(manifest: Manifest) -> None:
    samples = manifest.samples.copy()
    samples[0] = 10**12
    with (
        quickly(),
        pytest.raises(MemoryLimitError, match=r"a\.parquet at byte 4: a chunk of 1,000,000,000,000 samples"),
    ):
        read_all(replace(manifest, samples=samples))


def write_mds(folder: Path, **changes: Any) -> None:
    values = [struct.pack("<q", i) for i in range(3)]
    head = np.array([3, *(20 + 8 * i for i in range(4))], "<u4").tobytes()
    (folder / "s.mds").write_bytes(head + b"".join(values))
    entry: dict[str, Any] = {
        "format": "mds",
        "samples": 3,
        "raw_data": {"basename": "s.mds", "bytes": len(head) + 24},
        "zip_data": None,
        "column_names": ["x"],
        "column_encodings": ["int64"],
        "column_sizes": [8],
    }
    index = {"version": 2, "shards": [{**entry, **changes}]}
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("samples", [10**9, 10**30, -1, 4, float("inf")])
def test_an_mds_index_of_samples_that_have_no_room_is_refused(tmp_path: Path, samples: float) -> None:
    write_mds(tmp_path, samples=samples)
    with quickly(), pytest.raises(FormatError, match=r"s\.mds.*samples|index\.json.*damaged"):
        read_all(open_manifest(str(tmp_path), progress=False))


@pytest.mark.parametrize("shape", ["1000000000000", "-1", "0,-5", "9" * 40, "1,1,99999999999999999999"])
def test_an_mds_array_of_an_impossible_shape_is_refused(tmp_path: Path, shape: str) -> None:
    write_mds(tmp_path, column_encodings=[f"ndarray:int8:{shape}"], column_sizes=[None])
    with quickly(), pytest.raises(FormatError):
        read_all(open_manifest(str(tmp_path), progress=False))


def test_an_mds_index_that_nests_deeply_is_refused(tmp_path: Path) -> None:
    write_mds(tmp_path)
    (tmp_path / "index.json").write_text("[" * 200_000)
    with quickly(), pytest.raises(FormatError, match=r"index\.json: is not an MDS index"):
        open_manifest(str(tmp_path), progress=False)


@given(
    st.sampled_from(
        ["format", "samples", "raw_data", "zip_data", "column_names", "column_encodings", "column_sizes", "bytes"]
    ),
    ANY_JSON,
)
def test_an_mds_index_of_anything_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, part: str, value: Any
) -> None:
    folder = tmp_path_factory.mktemp("mds")
    write_mds(folder, **({"raw_data": {"basename": "s.mds", "bytes": value}} if part == "bytes" else {part: value}))
    with quickly(), contextlib.suppress(PenstockError):
        read_all(open_manifest(str(folder), progress=False))


@pytest.mark.parametrize(
    "changes",
    [
        {"lanes": 1 << 30},
        {"lanes": 3},
        {"window": 10**30},
        {"window": 0},
        {"epoch": 1 << 63},
        {"seed": -1},
        {"piece": 10**30, "version": 2},
    ],
)
def test_a_state_of_an_impossible_order_is_refused(manifest: Manifest, changes: dict[str, int]) -> None:
    with DistributedDataLoader(manifest, batch_size=2) as loader:
        state = loader.state_dict()
        with quickly(), pytest.raises(StateMismatchError, match=next(iter(changes))):
            loader.load_state_dict({**state, **changes})
        assert len(list(loader)) == 4


HEADER = {"fingerprint": "f", "num_samples": 8, "rank": 0, "world_size": 1, "started_ns": 1, "launch": "l"}


def write_log(folder: Path, header: str, *records: list[int]) -> None:
    body = b"".join(np.array([MAGIC, *record], "<i8").tobytes() for record in records)
    (folder / f"rank-0{SUFFIX}").write_bytes(header.encode() + b"\n" + body)


@pytest.mark.parametrize(
    "header",
    [
        "[" * 200_000,
        "[]",
        "1",
        "null",
        "{}",
        *(json.dumps({**HEADER, "num_samples": count}) for count in (0, -1, 1 << 62)),
        json.dumps({**HEADER, "rank": 1}),
    ],
)
def test_an_audit_of_logs_with_strange_headers_is_refused(tmp_path: Path, header: str) -> None:
    write_log(tmp_path, header, [0, 0, 2, 2, 0, 1])
    with quickly(), pytest.raises(DatasetError, match="not a readable delivery log"):
        audit(tmp_path)


def test_an_audit_takes_no_memory_for_samples_that_nobody_delivered(tmp_path: Path) -> None:
    write_log(tmp_path, json.dumps({**HEADER, "num_samples": 1 << 50}), [0, 0, 2, 2, 1 << 49, 1])
    with quickly():
        (account,) = audit(tmp_path).epochs
    assert (account.delivered, account.missing, account.duplicated) == (2, 0, 0)


def test_an_audit_does_not_count_through_epochs_that_nobody_began(tmp_path: Path) -> None:
    write_log(tmp_path, json.dumps(HEADER), [0, 0, 2, 2, 0, 1], [1 << 60, 0, 2, 2, 0, 1])
    with quickly(), pytest.raises(DatasetError, match=r"epochs 0 to 1152921504606846976, of which .* are absent"):
        audit(tmp_path)
