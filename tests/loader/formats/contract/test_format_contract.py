"""What every format promises, on one data set written in each of them."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from contract.writers import CASES, SAMPLES, Case, Row, make_rows
from folder_store import FolderStore, index_all, open_all, rows_of

from penstock.loader.columns import ArrayColumn
from penstock.loader.errors import ConfigError, DatasetError, FormatError
from penstock.loader.formats.detect import detect_format, make_format
from penstock.loader.formats.shard import ChunkRef, ShardIndex, ShardTask

HALF = SAMPLES // 2
ANY_BYTES = ("tokens", "token_documents")  # formats that find samples in any bytes


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, case: Case) -> Path:
    """The data set as two shards, a and b."""
    folder = tmp_path_factory.mktemp("written")
    for name, rows in (("a", make_rows(0, HALF)), ("b", make_rows(HALF, SAMPLES))):
        case.write(folder, case.name.format(name), rows)
    return folder


@pytest.fixture
def store(written: Path) -> FolderStore:
    """The data set, to be read."""
    return FolderStore(written)


@pytest.fixture
def own_store(written: Path, tmp_path: Path) -> FolderStore:
    """A copy of the data set, to be changed."""
    return FolderStore(shutil.copytree(written, tmp_path, dirs_exist_ok=True))


def shard_path(store: FolderStore, case: Case) -> Path:
    return store.root / case.name.format("a")


def chunk_refs(found: Sequence[tuple[ShardTask, ShardIndex]]) -> Iterator[ChunkRef]:
    for task, index in found:
        first = 0
        for span in index.chunks:
            yield ChunkRef(task.info, span.offset, span.length, span.samples, first)
            first += span.samples


def open_ref(
    store: FolderStore, case: Case, schema: Any, ref: ChunkRef, columns: Sequence[str] | None = None
) -> list[Row]:
    header = case.form.open_shard(store, ref.shard)
    parts = store.get_ranges(ref.shard.key, case.form.chunk_ranges(ref, header, columns))
    return rows_of(case.form.open_chunk(ref, header, parts, columns, schema))


def expected(case: Case) -> list[Row]:
    return [case.read(row) for row in make_rows(0, SAMPLES)]


def test_the_index_finds_every_sample_once_and_chunks_do_not_overlap(store: FolderStore, case: Case) -> None:
    _, found = index_all(store, case.form)
    assert [task.info.key for task, _ in found] == [case.name.format(name) for name in "ab"]
    for task, index in found:
        assert sum(span.samples for span in index.chunks) == HALF
        assert all(span.samples > 0 and span.length > 0 and span.memory > 0 for span in index.chunks)
        assert all(span.offset >= 0 and span.offset + span.length <= task.info.size for span in index.chunks)
        assert all(one.offset + one.length <= two.offset for one, two in pairwise(index.chunks))
        assert len(index.chunks) == 1 if case.whole else len(index.chunks) > 2


def test_all_chunks_in_order_hold_the_data_in_order(store: FolderStore, case: Case) -> None:
    rows = [row for block in open_all(store, case.form) for row in rows_of(block)]
    assert rows == expected(case)


def test_every_chunk_has_the_same_columns_and_types(store: FolderStore, case: Case) -> None:
    kinds = {
        tuple(
            (name, type(column), column.values.dtype if isinstance(column, ArrayColumn) else None)
            for name, column in block.columns.items()
        )
        for block in open_all(store, case.form)
    }
    assert len(kinds) == 1


def test_some_columns_have_the_same_values_and_read_no_more_bytes(store: FolderStore, case: Case) -> None:
    rows = expected(case)
    names = [name for name in rows[0] if name != "data"]
    open_all(store, case.form)
    whole = sum(stop - start for _, start, stop in store.reads)
    store.reads.clear()
    got = [row for block in open_all(store, case.form, names) for row in rows_of(block)]
    assert got == [{name: row[name] for name in names} for row in rows]
    assert sum(stop - start for _, start, stop in store.reads) <= whole


def test_a_column_that_is_not_there_is_refused_with_those_that_are(store: FolderStore, case: Case) -> None:
    name = next(iter(expected(case)[0]))
    with pytest.raises(ConfigError, match=rf"no \['absent'\]; it has \[.*'{name}'"):
        open_all(store, case.form, ["absent"])


def test_chunks_open_alike_in_any_order(store: FolderStore, case: Case) -> None:
    schema, found = index_all(store, case.form)
    refs = list(chunk_refs(found))
    shuffled = random.Random(0).sample(refs, len(refs))
    got = {(ref.shard.key, ref.offset): open_ref(store, case, schema, ref) for ref in shuffled}
    assert [row for ref in refs for row in got[ref.shard.key, ref.offset]] == expected(case)


def test_chunks_open_alike_in_many_threads(store: FolderStore, case: Case) -> None:
    schema, found = index_all(store, case.form)
    refs = list(chunk_refs(found))
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            got = list(pool.map(lambda ref: open_ref(store, case, schema, ref), refs))
            assert [row for rows in got for row in rows] == expected(case)


def test_the_index_and_the_schema_do_not_depend_on_the_order_of_shards(store: FolderStore, case: Case) -> None:
    _, ((one, first), (other, second)) = index_all(store, case.form)
    forward = case.form.merge_schema(first.schema, second.schema, other.info.key)
    backward = case.form.merge_schema(second.schema, first.schema, one.info.key)
    assert {**forward, "seen_in": ""} == {**backward, "seen_in": ""}


def test_a_chunk_of_other_samples_than_the_index_says_is_refused(store: FolderStore, case: Case) -> None:
    schema, found = index_all(store, case.form)
    for ref, change in product(chunk_refs(found), (-1, 1, 10, 1 << 20)):
        wrong = replace(ref, samples=ref.samples + change)
        if wrong.samples > 0:
            with pytest.raises(FormatError, match=re.escape(ref.shard.key)):
                open_ref(store, case, schema, wrong)


def test_a_format_is_made_again_from_its_name_and_json_config(case: Case) -> None:
    config = json.loads(json.dumps(case.form.config()))
    again = make_format(case.form.name, config)
    assert again == case.form
    assert hash(again) == hash(case.form)


def test_a_schema_survives_the_manifest(store: FolderStore, case: Case) -> None:
    schema, found = index_all(store, case.form)
    restored = json.loads(json.dumps(schema))
    rows = [row for ref in chunk_refs(found) for row in open_ref(store, case, restored, ref)]
    assert rows == expected(case)


def test_detection_finds_the_format_by_its_suffixes(store: FolderStore, case: Case) -> None:
    if not case.form.suffixes or case.form.name == "tokens":
        with pytest.raises(ConfigError, match="seq_len"):
            detect_format(store, list(store.list()))
    else:
        assert detect_format(store, list(store.list())).name == case.form.name


def test_a_chunk_length_below_the_least_is_refused(case: Case) -> None:
    for chunk_bytes in (0, -1):
        with pytest.raises(ConfigError, match=f"chunk_bytes={chunk_bytes}: must be at least"):
            make_format(case.form.name, {**case.form.config(), "chunk_bytes": chunk_bytes})


def test_a_shard_of_no_bytes_is_refused_by_name(own_store: FolderStore, case: Case) -> None:
    path = shard_path(own_store, case)
    path.write_bytes(b"")
    with pytest.raises(FormatError, match=f"^{case.name.format('a')}") as caught:
        index_all(own_store, case.form)
    assert caught.value.shard == case.name.format("a")


def test_a_truncated_shard_is_refused_by_name_or_ends_at_a_sample(own_store: FolderStore, case: Case) -> None:
    path = shard_path(own_store, case)
    data = path.read_bytes()
    for keep in (0.05, 0.3, 0.5, 0.9, 0.99):
        path.write_bytes(data[: int(len(data) * keep) | 1])
        # A line, a token and a member may each end where the shard was cut.
        try:
            rows = [row for block in open_all(own_store, case.form) for row in rows_of(block)]
        except FormatError as exc:
            assert case.name.format("a") in str(exc)  # noqa: PT017 - either outcome is right
        else:
            assert case.form.name in ("jsonl", "tar")
            assert [row for row in expected(case) if row in rows] == rows


def test_a_shard_that_is_truncated_after_the_index_is_refused_by_name(store: FolderStore, case: Case) -> None:
    schema, found = index_all(store, case.form)
    for ref in chunk_refs(found):
        header = case.form.open_shard(store, ref.shard)
        parts = store.get_ranges(ref.shard.key, case.form.chunk_ranges(ref, header, None))
        for keep in (0, 1, len(parts[-1]) // 2, len(parts[-1]) - 1):
            cut = [*parts[:-1], parts[-1][:keep]]
            with pytest.raises(FormatError) as caught:
                case.form.open_chunk(ref, header, cut, None, schema)
            assert caught.value.shard == ref.shard.key


@pytest.mark.slow
def test_flipped_bits_are_refused_by_name_or_change_values_alone(own_store: FolderStore, case: Case) -> None:
    path = shard_path(own_store, case)
    data = path.read_bytes()
    rng = random.Random(0)
    refused = 0
    for _ in range(60):
        at, bit = rng.randrange(len(data)), rng.randrange(8)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        try:
            blocks = open_all(own_store, case.form)
            rows = [row for block in blocks for row in rows_of(block)]
        except FormatError as exc:
            refused += 1
            assert case.name.format("a") in str(exc)  # noqa: PT017 - either outcome is right
        except UnicodeDecodeError:
            continue  # a text's bytes are decoded when it is taken, where the loader names the sample
        else:
            assert len(rows) == SAMPLES or case.form.name in ("tar", "jsonl", "token_documents")
            assert not case.checked or rows == expected(case)
    assert refused or case.form.name in ANY_BYTES


def test_a_shard_of_other_bytes_is_refused_by_name(own_store: FolderStore, case: Case) -> None:
    if case.form.name in ANY_BYTES:
        pytest.skip("any bytes are tokens")
    path = shard_path(own_store, case)
    size = path.stat().st_size
    path.write_bytes(random.Random(0).randbytes(size))
    with pytest.raises(FormatError, match=case.name.format("a")):
        open_all(own_store, case.form)


def test_companions_and_hidden_objects_are_not_shards(own_store: FolderStore, case: Case) -> None:
    for name in ("_SUCCESS", ".a.crc", "README.md", "_temporary/" + case.name.format("c")):
        own_store.put(name, b"not a shard")
    keys = [task.info.key for task in case.form.shards(own_store, list(own_store.list()))]
    assert keys == [case.name.format(name) for name in "ab"]


def test_an_empty_data_set_has_no_shards(tmp_path: Path, case: Case) -> None:
    assert case.form.shards(FolderStore(tmp_path), []) == []
    with pytest.raises(DatasetError):
        detect_format(FolderStore(tmp_path), [])
