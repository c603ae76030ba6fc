"""What a mixture's field is in a batch does not depend on which sources' rows happen to be in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from bad_images import write_images
from streams_ranks import ThreadRanks
from tar_dataset import write_tars

from penstock import DistributedDataLoader, ImageDecoder, Mixture, Source, open_manifest
from penstock.storage import PenstockError

ROWS = 40
FIELDS = {"n": torch.int64, "half": torch.float64, "even": torch.bool, "pair": torch.int64, "small": torch.float32}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("table")
    numbers = np.arange(ROWS)
    columns = {
        "n": numbers,
        "half": numbers / 2,
        "even": numbers % 2 == 0,
        "pair": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2 * ROWS)), 2),
        "small": (numbers / 2).astype(np.float32),
    }
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=7)
    return str(folder)


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, [ROWS])
    return str(folder)


def to_python(sample: dict[str, Any]) -> dict[str, Any]:
    return {
        "n": int(sample["n"]),
        "half": float(sample["half"]),
        "even": bool(sample["even"]),
        "pair": torch.from_numpy(sample["pair"].copy()),
        "small": torch.tensor(sample["small"]),
    }


def to_tensors(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.as_tensor(value) for name, value in sample.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("transform", [to_python, to_tensors])
@pytest.mark.parametrize("options", [{}, {"keep": lambda sample: True}], ids=["whole", "filtered"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_field_is_the_same_tensor_whichever_sources_a_batch_has(
    table: str, transform: Any, options: dict[str, Any], world_size: int
) -> None:
    mixture = Mixture(
        {"plain": Source(table, **options), "changed": Source(table, transform=transform)}, stop="all_exhausted"
    )

    def read(loader: DistributedDataLoader[Any]) -> list[set[int]]:
        sources = []
        for batch in loader:
            sources.append(set(batch["__source__"].tolist()))
            ids = batch["__id__"]
            assert {name: batch[name].dtype for name in FIELDS} == FIELDS
            assert batch["n"].equal(ids)
            assert batch["half"].equal(ids / 2)
            assert batch["even"].equal(ids % 2 == 0)
            assert batch["pair"].equal(torch.stack([2 * ids, 2 * ids + 1], dim=1))
        return sources

    found = ThreadRanks(world_size, mixture, global_batch_size=6, with_ids=True, threads=1).run(read)
    for sources in found:
        if isinstance(sources, Exception):
            raise sources
    assert {0, 1} in [of_batch for sources in found for of_batch in sources]


def test_numbers_that_decoders_of_several_sources_make_are_joined_as_those_of_one(tars: str) -> None:
    def halve(data: bytes) -> float:
        number = int(data)
        return number // 2 if number % 4 == 0 else number / 2

    def halve_too(data: bytes) -> float:
        return halve(data)

    mixture = Mixture(
        {name: Source(tars, columns=["txt"], decode={"txt": of}) for name, of in {"a": halve, "b": halve_too}.items()},
        stop="all_exhausted",
    )
    with DistributedDataLoader(mixture, batch_size=4, with_ids=True) as loader:
        for batch in loader:
            kinds = {type(halve(b"%d" % i)) for i in batch["__id__"].tolist()}
            assert batch["txt"].dtype == (torch.float64 if float in kinds else torch.int64)
            assert batch["txt"].tolist() == [i / 2 for i in batch["__id__"].tolist()]


def test_arrays_of_several_shapes_are_a_list_of_tensors_whatever_they_are_made_by(table: str) -> None:
    def lengthen(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "pair": torch.arange(int(sample["n"]) % 3 + 1)}

    mixture = Mixture({"a": Source(table), "b": Source(table, transform=lengthen)}, stop="all_exhausted")
    with DistributedDataLoader(mixture, batch_size=8) as loader:
        for batch in loader:
            assert all(isinstance(value, torch.Tensor) for value in batch["pair"])


@pytest.mark.slow
def test_images_of_sources_with_decoders_of_their_own_stay_in_channels_last_memory(tmp_path: Path) -> None:
    write_images(tmp_path, set())
    decoders = {"sized": ImageDecoder(size=8), "whole": ImageDecoder()}
    mixture = Mixture({name: Source(tmp_path, decode={"jpg": decoder}) for name, decoder in decoders.items()})
    with DistributedDataLoader(mixture, batch_size=8) as loader:
        for batch in loader:
            assert batch["jpg"].shape == (8, 3, 8, 8)
            assert batch["jpg"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("transform", [None, to_python], ids=["alike", "of its own"])
def test_a_rank_whose_share_rounds_to_nothing_gets_empty_tensors_of_all_fields(table: str, transform: Any) -> None:
    mixture = Mixture({"a": Source(table), "b": Source(table, transform=transform)}, stop="all_exhausted")
    with DistributedDataLoader(mixture, batch_size=4, rank=1, world_size=2, with_ids=True) as loader:
        batches = iter(loader)
        first = next(batches)
        loader.set_shares([1.0, 0.0001])
        rest = list(batches)
        assert len(rest) == 2 * ROWS // 8 - 1
        for batch in rest:
            assert batch.keys() == first.keys()
            assert all(batch[name].shape == (0, *first[name].shape[1:]) for name in first)
            assert {name: batch[name].dtype for name in FIELDS} == FIELDS
    with DistributedDataLoader(mixture, batch_size=4, rank=1, world_size=2, collate=len) as loader:
        loader.set_shares([1.0, 0.0001])
        assert list(loader) == [0] * (2 * ROWS // 8)


def test_what_such_a_batch_shows_its_fields_by_is_its_own(table: str) -> None:
    def count(sample: dict[str, Any]) -> dict[str, Any]:
        sample["pair"] += 1000
        assert sample["pair"].max() < 2000
        return sample

    mixture = Mixture({"a": Source(table, transform=count), "b": Source(table, transform=count)}, stop="all_exhausted")
    with DistributedDataLoader(mixture, batch_size=4, rank=1, world_size=2) as loader:
        loader.set_shares([1.0, 0.0001])
        assert all(batch["pair"].shape == (0, 2) for batch in loader)


def test_a_chunk_that_nothing_but_the_fields_is_wanted_of_is_named_where_it_is_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    pq.write_table(pa.table({"n": np.arange(ROWS)}), folder / "a.parquet")
    manifest = open_manifest(folder)
    mixture = Mixture({"a": Source(manifest), "b": Source(manifest)})
    with DistributedDataLoader(mixture, batch_size=4, rank=1, world_size=2) as loader:
        loader.set_shares([1.0, 0.0001])
        (folder / "a.parquet").unlink()
        with pytest.raises(PenstockError, match=r"a\.parquet"):
            list(loader)


@pytest.mark.parametrize("columns", [None, ["v"]])
@pytest.mark.parametrize("options", [{}, {"transform": dict}, {"keep": lambda sample: True}], ids=["", "own", "kept"])
def test_nulls_that_one_source_has_are_marked_by_all(tmp_path: Path, columns: Any, options: dict[str, Any]) -> None:
    values = {"none": [1, 2, 0, 3] * 5, "some": [1, None, 0, 3] * 5}
    for name, of_source in values.items():
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"v": pa.array(of_source, pa.int32())}), tmp_path / name / "a.parquet")
    mixture = Mixture(
        {"none": Source(tmp_path / "none", **options), "some": Source(tmp_path / "some")}, stop="all_exhausted"
    )
    manifests = {name: open_manifest(tmp_path / name) for name in values}
    assert [manifests[name].schema["columns"]["v"]["nulls"] for name in values] == [False, True]
    for size in (1, 4):
        with DistributedDataLoader(mixture, batch_size=size, columns=columns, with_ids=True) as loader:
            for batch in [loader.peek(), *loader]:
                assert set(batch) == {"v", "v__null", "__source__", "__id__"}
                rows = zip(batch["__source__"].tolist(), batch["__id__"].tolist(), strict=True)
                expected = [list(values.values())[source][i] for source, i in rows]
                assert batch["v"].tolist() == [value or 0 for value in expected]
                assert batch["v__null"].tolist() == [value is None for value in expected]


def test_marks_that_a_transform_makes_values_of_are_asked_of_no_other_source(tmp_path: Path) -> None:
    def fill(sample: dict[str, Any]) -> dict[str, Any]:
        return {"v": -1 if sample["v__null"] else int(sample["v"])}

    for name, of_source in {"none": [1, 2, 0], "some": [1, None, 0]}.items():
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"v": pa.array(of_source, pa.int64())}), tmp_path / name / "a.parquet")
    mixture = Mixture({"none": Source(tmp_path / "none"), "some": Source(tmp_path / "some", transform=fill)})
    with DistributedDataLoader(mixture, batch_size=2, with_ids=True) as loader:
        for batch in loader:
            assert set(batch) == {"v", "__source__", "__id__"}
            assert batch["v"].dtype == torch.int64
