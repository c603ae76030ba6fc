"""Looking at single samples: as training gets them, as they are stored, by id and by key; nothing else changes."""

from __future__ import annotations

import gc
import io
import itertools
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from started_threads import started_threads
from tar_dataset import write_tars

from penstock import DistributedDataLoader, Manifest, open_manifest
from penstock.loader import ConfigError, DecodeError, LoaderClosedError, SampleNotFoundError
from penstock.storage import MemoryStore

SAMPLES = 100
_names = itertools.count()


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, [30, 45, 25])
    return str(folder)


@pytest.fixture
def table() -> Iterator[MemoryStore]:
    """200 rows in a parquet shard."""
    store = MemoryStore(f"mem://samples-{next(_names)}")
    numbers = np.arange(200)
    columns = {
        "n": pa.array(numbers * 10, pa.int32()),
        "half": numbers / 2,
        "even": numbers % 2 == 0,
        "word": [f"w{n}" for n in numbers],
        "data": [bytes([n, 255]) for n in numbers],
        "day": pa.array(numbers.astype(np.int32)).cast(pa.date32()),
        "cost": pa.array([None if n == 0 else str(n) for n in numbers]).cast(pa.decimal128(10, 2)),
        "pair": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(400)), 2),
    }
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, row_group_size=50)
    store.put("a.parquet", sink.getvalue())
    yield store
    store.drop()


def load(source: str | Manifest, **options: Any) -> DistributedDataLoader[Any]:
    return DistributedDataLoader(source, **{"batch_size": 10, "rank": 0, "world_size": 1, **options})


def draw(data: bytes, rng: np.random.Generator) -> list[int]:
    return [*data[:2], *rng.integers(0, 1000, 4).tolist()]


def add_noise(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "noise": rng.random(3).tolist()}


def keep(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return samples


@pytest.mark.slow
def test_a_sample_by_id_is_what_training_gets_in_that_epoch(tars: str) -> None:
    with load(tars, decode={"bin": draw}, transform=add_noise, collate=keep, with_ids=True) as loader:
        for epoch in range(2):
            for sample in itertools.chain.from_iterable(loader):
                sample_id = sample.pop("__id__")
                assert loader.dataset.sample(sample_id, epoch=epoch) == sample
                if epoch == 0:
                    assert loader.dataset[sample_id] == sample


def test_a_raw_sample_is_what_is_stored(tars: str) -> None:
    with load(tars, columns=["txt"], decode={"txt": int}) as loader:
        assert loader.dataset[41] == {"__key__": "00000041", "txt": 41}
        assert loader.dataset.raw(41) == {"__key__": "00000041", "txt": b"41"}


def test_indices_count_from_both_ends_and_slices_are_views(tars: str) -> None:
    with load(tars, columns=["txt"]) as loader:
        dataset = loader.dataset
        assert len(dataset) == SAMPLES
        assert dataset[-1] == dataset[SAMPLES - 1] == dataset[np.int64(-1)] == {"__key__": "00000099", "txt": "99"}
        part = dataset[90:10:-20]
        assert (len(part), [sample["txt"] for sample in part]) == (4, ["90", "70", "50", "30"])
        assert part[-1]["txt"] == part[1:][2]["txt"] == "30"
        assert [sample["txt"] for sample in dataset] == [str(n) for n in range(SAMPLES)]
        for index in (SAMPLES, -SAMPLES - 1):
            with pytest.raises(IndexError, match=f"sample {index} of 100: there are 0 to 99, or -1 to -100"):
                dataset[index]
        with pytest.raises(TypeError):
            dataset["0"]  # type: ignore[call-overload]
        with pytest.raises(ConfigError, match="epoch=-1"):
            dataset.sample(0, epoch=-1)


def test_a_sample_is_found_by_its_key(tars: str) -> None:
    with load(tars) as loader:
        assert loader.dataset.find("00000077") == 77
        assert loader.dataset[70:80].find("00000077") == 7
        assert loader.dataset.find("77", field="txt") == 77
        with pytest.raises(SampleNotFoundError, match="none of 10 samples has __key__ '00000077'"):
            loader.dataset[10:20].find("00000077")
        with pytest.raises(SampleNotFoundError):
            loader.dataset[:0].find("00000077")
        with pytest.raises(ConfigError, match="no field 'x'"):
            loader.dataset.find("1", field="x")
    assert not [thread for thread in started_threads() if thread.name == "penstock-look"]


def test_a_key_that_is_no_unicode_is_found_by_its_bytes_and_as_it_is_shown(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "odd.tar", "w") as archive:
        for name in ("one.txt", "\udcfftwo.txt"):
            archive.addfile(tarfile.TarInfo(name))
    with DistributedDataLoader(tmp_path, batch_size=1) as loader:
        assert loader.dataset[1]["__key__"] == "\\xfftwo"
        for key in ("\udcfftwo", "\\xfftwo", b"\xfftwo"):
            assert loader.dataset.find(key) == 1
        with pytest.raises(SampleNotFoundError):
            loader.dataset.find("\udcffone")
        with pytest.raises(ConfigError, match="is no text"):
            loader.dataset.find("\ud800two")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("n", 1500, 150),
        ("n", "1500", 150),
        ("half", 75.5, 151),
        ("half", "75.5", 151),
        ("even", "false", 1),
        ("even", True, 0),
        ("word", "w160", 160),
        ("data", b"\x0a\xff", 10),
        ("day", "120", 120),
        ("cost", "130.00", 130),
    ],
)
def test_a_row_is_found_by_a_field_of_any_scalar_type(
    table: MemoryStore, field: str, value: Any, expected: int
) -> None:
    with load(table.url, columns=["n"]) as loader:
        assert loader.dataset.find(value, field=field) == expected


@pytest.mark.parametrize(("field", "value"), [("n", 1.5), ("n", 1 << 40), ("word", "w"), ("day", 999)])
def test_what_no_row_holds_is_said_not_to_be_there(table: MemoryStore, field: str, value: Any) -> None:
    with load(table.url) as loader, pytest.raises(SampleNotFoundError):
        loader.dataset.find(value, field=field)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        (None, "1", "no key; say which to search"),
        ("n", "one", "holds int32, and 'one' is none"),
        ("pair", "1", r"holds arrays \[2\]"),
    ],
)
def test_what_cannot_be_searched_is_refused(table: MemoryStore, field: str | None, value: Any, said: str) -> None:
    with load(table.url) as loader, pytest.raises(ConfigError, match=said):
        loader.dataset.find(value, field=field)


def test_a_sample_costs_one_chunk_and_its_neighbours_none(table: MemoryStore) -> None:
    for number in range(1, 9):
        table.put(f"b{number}.parquet", table.get("a.parquet"))
    with load(open_manifest(table.url), columns=["n"]) as loader:
        before = len(table.calls)
        assert [loader.dataset[place]["n"] for place in (260, 210, 399)] == [600, 100, 1990]
        read = table.calls[before:]
        assert {call.key for call in read} == {"b1.parquet"}
        assert len(read) == 2  # the shard's footer and its chunk


@pytest.mark.slow
def test_looking_changes_neither_position_nor_metrics_nor_the_order(tars: str) -> None:
    with load(tars, with_ids=True) as loader:
        expected = [batch["__id__"].tolist() for batch in loader]
    with load(tars, with_ids=True) as loader:
        seen = []
        for step, batch in enumerate(loader):
            seen.append(batch["__id__"].tolist())
            state = loader.state_dict()
            loader.dataset[step], loader.dataset.find(f"{step:08d}")
            assert loader.state_dict() == state
        assert seen == expected
        assert (loader.metrics().batches, loader.metrics().samples) == (10, SAMPLES)
        assert loader.metrics().fetched_chunks <= 2 * 3 + 15  # chunks on the cuts of 16 lanes are read twice


def test_errors_name_the_sample_and_a_view_lives_as_long_as_its_loader(tars: str) -> None:
    view = load(tars, decode={"txt": lambda data: 1 // (int(data) % 7)}).dataset
    gc.collect()  # the view keeps its loader open
    assert view[8]["txt"] == 1
    with pytest.raises(DecodeError, match=r"sample 7 \(number 7 of shard-00000.tar, key '00000007'\): field 'txt'"):
        view[7]
    with load(tars) as loader:
        view = loader.dataset
    with pytest.raises(LoaderClosedError):
        view[0]
    assert len(view) == SAMPLES
