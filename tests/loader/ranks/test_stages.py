"""The stages of a pipeline get the same samples, and each reads only its own fields of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from made_mesh import mesh_of
from tar_dataset import write_tars

from penstock import DistributedDataLoader, Mixture, Source, Subset
from penstock.loader import ConfigError, Keep

BY_STAGE = {"tokens": "first", "labels": "last"}
WIDTH = 1024


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """80 rows of 'tokens' and 'labels', vectors of noise, and 'n', in row groups of 20."""
    noise = np.random.default_rng(0).random((2, 80, WIDTH))
    arrays = [pa.FixedSizeListArray.from_arrays(pa.array(one.ravel()), WIDTH) for one in noise]
    table = pa.table({"tokens": arrays[0], "n": np.arange(80), "labels": arrays[1]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=20)
    return str(tmp_path)


def make(source: Any, stage: int, stages: int = 3, dp: int = 0, **options: Any) -> DistributedDataLoader:
    mesh = mesh_of(("pp", "dp", "tp"), (stages, 2, 2), (stage, dp, 1))
    return DistributedDataLoader(
        source, **{"batch_size": 8, "mesh": mesh, "with_ids": True, "fields_by_stage": BY_STAGE} | options
    )


@pytest.mark.slow
def test_stages_get_the_same_samples_and_each_its_own_fields(rows):
    for dp in (0, 1):
        with DistributedDataLoader(rows, batch_size=8, rank=dp, world_size=2, with_ids=True) as plain:
            whole = list(plain)
        for stage, fields in enumerate((["tokens", "n"], ["n"], ["n", "labels"])):
            with make(rows, stage, dp=dp) as loader:
                batches = list(loader)
            assert len(batches) == len(whole) == 5
            for batch, all_fields in zip(batches, whole, strict=True):
                assert set(batch) == {*fields, "__id__"}
                assert all(torch.equal(batch[name], all_fields[name]) for name in batch)


@pytest.mark.slow
def test_stages_get_the_same_samples_of_a_mixture_and_each_its_own_fields(rows):
    mixture = Mixture({"all": Source(rows, weight=2), "some": Source(rows, subset=Subset.share(0, 0.5))})
    for dp in (0, 1):
        with DistributedDataLoader(mixture, batch_size=8, rank=dp, world_size=2, with_ids=True) as plain:
            whole = list(plain)
        for stage, fields in enumerate((["tokens", "n"], ["n"], ["n", "labels"])):
            with make(mixture, stage, dp=dp) as loader:
                batches = list(loader)
            assert len(batches) == len(whole) > 3
            for batch, all_fields in zip(batches, whole, strict=True):
                assert set(batch) == {*fields, "__id__", "__source__"}
                assert all(torch.equal(batch[name], all_fields[name]) for name in batch)


def test_sources_that_drop_by_what_a_stage_reads_are_refused(rows):
    mixture = Mixture({"all": Source(rows), "some": Source(rows, transform=dict, may_drop=True)})
    with pytest.raises(ConfigError, match="different fields on different stages"):
        make(mixture, 0)


def bytes_per_chunk(loader: DistributedDataLoader) -> float:
    metrics = loader.metrics()
    return metrics.fetched_bytes / max(1, metrics.fetched_chunks)


@pytest.mark.slow
def test_a_stage_fetches_only_its_own_fields_and_nothing_where_it_has_none(rows):
    by_stage = BY_STAGE | {"n": [0, -1]}
    for stage, columns in enumerate((["tokens", "n"], None, ["n", "labels"])):
        with make(rows, stage, fields_by_stage=by_stage) as loader:
            assert [len(batch["__id__"]) for batch in loader] == [8] * 5
            assert set(loader.peek()) == {*(columns or ()), "__id__"}
            fetched = bytes_per_chunk(loader)
        if columns is None:
            assert fetched == 0
            continue
        with DistributedDataLoader(rows, batch_size=8, rank=0, world_size=2, columns=columns) as named:
            assert len(list(named)) == 5
            assert fetched == pytest.approx(bytes_per_chunk(named), rel=0.02)
        with DistributedDataLoader(rows, batch_size=8, rank=0, world_size=2) as whole:
            assert len(list(whole)) == 5
            assert fetched < 0.6 * bytes_per_chunk(whole)


def test_a_state_of_one_stage_is_that_of_all_and_goes_on_without_stages(rows):
    states, seen = [], []
    for stage in range(3):
        with make(rows, stage) as loader:
            batches = iter(loader)
            seen = [next(batches)["__id__"].tolist() for _ in range(2)]
            states.append(loader.state_dict())
    assert states[0] == states[1] == states[2]
    with DistributedDataLoader(rows, batch_size=8, rank=0, world_size=2, with_ids=True) as plain:
        whole = [batch["__id__"].tolist() for batch in plain]
        plain.load_state_dict(states[1])
        assert seen + [batch["__id__"].tolist() for batch in plain] == whole


def test_fields_of_other_stages_are_not_decoded_and_keys_stay(tmp_path):
    write_tars(tmp_path, [30])

    def refuse(data: bytes) -> bytes:
        raise AssertionError("decoded on a stage that does not read it")

    with make(str(tmp_path), 0, stages=2, fields_by_stage={"bin": "last"}, decode={"bin": refuse}) as loader:
        assert {frozenset(batch) for batch in loader} == {frozenset({"__key__", "txt", "__id__"})}
    with pytest.raises(ConfigError, match=r"names \['__key__'\]"):
        make(str(tmp_path), 0, fields_by_stage={"__key__": "last"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields_by_stage": {"mask": "first"}}, r"names \['mask'\], which the data set's fields"),
        ({"columns": ["n", "tokens"]}, r"names \['labels'\], which columns="),
        ({"fields_by_stage": {"n": 3}}, r"\['n'\]=3: the mesh has 3 stages, 0 to 2"),
        ({"fields_by_stage": {"n": [0, -4]}}, "the mesh has 3 stages"),
        ({"fields_by_stage": {"n": "middle"}}, "'first', 'last' or whole numbers"),
        ({"fields_by_stage": {"n": True}}, "'first', 'last' or whole numbers"),
        ({"fields_by_stage": {"n": []}}, "no stage reads it"),
        ({"fields_by_stage": {}}, "must be a mapping"),
        ({"fields_by_stage": ["n"]}, "must be a mapping"),
        ({"max_bad_chunks": 1}, "train on different samples"),
        ({"mesh": None}, "without a mesh.*pp or pipe"),
        ({"mesh": mesh_of(("dp", "tp"), (2, 2), (0, 0))}, "dimensions dp, tp: none is pp or pipe"),
        ({"data_dims": ["dp", "pp"]}, "'pp', along which samples differ"),
    ],
)
def test_stages_that_cannot_be_told_are_refused_by_name(rows, options, message):
    with pytest.raises(ConfigError, match=message):
        make(rows, 0, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": lambda sample: sample["n"] % 2}, r"drop different samples.*Keep\(\[columns\], predicate\)"),
        ({"transform": dict, "may_drop": True}, "could drop different samples"),
    ],
)
def test_stages_that_could_drop_different_samples_are_refused(rows, options, message):
    with pytest.raises(ConfigError, match=message):
        make(rows, 0, **options)


def test_stages_keep_the_same_samples_by_a_field_that_one_of_them_reads(rows):
    seen = []
    keep = Keep(["n", "labels"], lambda fields: (fields["n"] % 3 > 0) & (fields["labels"][:, 0] < 0.7))
    for stage in range(3):
        mesh = mesh_of(("pp", "dp"), (3, 1), (stage, 0))
        with make(rows, stage, mesh=mesh, keep=keep, fields_by_stage=BY_STAGE | {"n": [0, -1]}) as loader:
            batches = list(loader)
        assert set(batches[0]) == [{"tokens", "n", "__id__"}, {"__id__"}, {"n", "labels", "__id__"}][stage]
        seen.append([batch["__id__"].tolist() for batch in batches])
    assert seen[0] == seen[1] == seen[2]
    assert 2 <= len(seen[0]) < 7
