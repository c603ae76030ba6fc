"""Processes that hold parts of one model get the same samples, and the groups of a mesh share out the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mesh_worker
import pytest
from launch_ranks import run_ranks
from made_mesh import mesh_of
from tar_dataset import write_tars

from penstock import DistributedDataLoader, audit
from penstock.loader import ConfigError, DatasetError


def test_groups_of_a_mesh_share_out_the_data_and_another_mesh_goes_on_exactly(tmp_path: Path) -> None:
    samples = write_tars(tmp_path / "data", [30, 50, 20, 47])
    reports = run_ranks(mesh_worker.main, 4, str(tmp_path / "data"), str(tmp_path), timeout_s=150.0)
    places = [[phase["place"] for phase in report["delivered"]] for report in reports]
    assert [place[0] for place in places] == [[0, 2], [0, 2], [1, 2], [1, 2]]  # dp, tp
    assert [place[1] for place in places] == [[0, 4], [1, 4], [2, 4], [3, 4]]  # dp_replicate, dp_shard
    assert [place[2] for place in places] == [[0, 2], [1, 2], [0, 2], [1, 2]]  # pp, dp
    seen: list[int] = []
    for phase in range(3):
        found = [report["delivered"][phase] for report in reports]
        assert len({json.dumps(one["state"]) for one in found}) == 1
        groups: dict[int, Any] = {}
        for one in found:
            assert groups.setdefault(one["place"][0], one["batches"]) == one["batches"]
        assert len({len(batches) for batches in groups.values()}) == 1
        seen += [x for batches in groups.values() for batch in batches for x in batch]
    assert sorted(seen) == list(range(samples))
    report = audit(tmp_path / "audit")
    assert report.is_exact
    assert [world_size for world_size, _, _ in report.attempts] == [2, 4, 2]
    assert [(account.delivered, account.replayed) for account in report.epochs] == [(samples, 0)]
    for rank, one in enumerate(reports):
        assert "dimensions dp, x" in one["refused"]
        assert "data_dims=['dp']" in one["refused"]
        assert (one["named"], one["sliced"]) == ([rank % 2, 2], [rank // 2, 2])


@pytest.fixture
def tars(tmp_path: Path) -> str:
    write_tars(tmp_path, [30, 30])
    return str(tmp_path)


@pytest.mark.parametrize(
    ("mesh", "data_dims", "place"),
    [
        (mesh_of(("pp", "dp_replicate", "dp_shard", "cp", "tp"), (2, 3, 4, 2, 2), (1, 2, 1, 0, 1)), None, (9, 12)),
        (mesh_of(("pp", "dp"), (2, 3), (1, 2)), ("dp", "pp"), (5, 6)),
        (mesh_of(("dp", "sequence_parallel"), (2, 2), (1, 1)), None, (1, 2)),
        (mesh_of(None, (4,), (3,)), None, (3, 4)),
        (mesh_of(("ep", "tp"), (2, 2), (1, 0)), "ep", (1, 2)),
    ],
)
def test_a_rank_counts_the_places_along_the_data_dimensions(tars, mesh, data_dims, place):
    with DistributedDataLoader(tars, batch_size=1, mesh=mesh, data_dims=data_dims) as loader:
        assert (loader.rank, loader.world_size) == place


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": mesh_of(("dp", "ep"), (2, 2), (0, 0))}, r"samples differ along \['ep'\] is not known.*data_dims="),
        ({"mesh": mesh_of(("tp",), (2,), (0,))}, r"none shares out data.*rank=0, world_size=1"),
        ({"mesh": mesh_of(None, (2, 2), (0, 0))}, "mesh_dim_names"),
        ({"mesh": mesh_of(("dp",), (2,), None)}, "not in it"),
        ({"mesh": mesh_of(("dp",), (2,), (0,)), "data_dims": ["fsdp"]}, r"\['fsdp'\] is not among"),
        ({"mesh": mesh_of(("dp",), (2,), (0,)), "data_dims": []}, "nothing is not among"),
        ({"mesh": mesh_of(("dp",), (2,), (0,)), "rank": 0, "world_size": 2}, "the one or the other"),
        ({"data_dims": ["dp"]}, "without a mesh"),
    ],
)
def test_a_mesh_whose_groups_are_not_clear_is_refused(tars, options, message):
    with pytest.raises(ConfigError, match=message):
        DistributedDataLoader(tars, batch_size=1, **options)


def test_an_audit_refuses_peers_that_got_different_samples(tars, tmp_path, monkeypatch):
    for process, seed in ((0, 0), (1, 1)):
        monkeypatch.setenv("RANK", str(process))
        monkeypatch.setenv("WORLD_SIZE", "2")
        with DistributedDataLoader(
            tars, batch_size=4, rank=0, world_size=1, seed=seed, audit_dir=tmp_path / "a"
        ) as loader:
            next(iter(loader))
    with pytest.raises(DatasetError, match=r"processes 1 and 0 are both rank 0 of 1.*different samples at position 0"):
        audit(tmp_path / "a")
