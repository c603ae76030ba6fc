"""Places of ranks in a mesh, and the groups that they make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch_ranks import run_ranks

from penstock.trainer import Mesh, ParallelConfig, TrainerConfigError, World, open_mesh
from penstock.trainer.data.fit import check_peers, check_share
from penstock.trainer.ranks.mesh import MeshSizes


def test_dp_is_what_the_other_dimensions_leave() -> None:
    assert MeshSizes.fill(12, pp=2, tp=3) == MeshSizes(pp=2, dp=2, tp=3)
    assert MeshSizes.fill(3) == MeshSizes(dp=3)


@pytest.mark.parametrize(
    ("ranks", "sizes", "message"),
    [
        (6, {"tp": 4}, r"tp=4 needs 4 ranks .* 6 ranks are not a multiple of that; start 8 ranks"),
        (1, {"pp": 2, "tp": 2}, r"pp=2, tp=2 needs 4 ranks .* 1 rank is not a multiple of that; start 4 ranks"),
        (4, {"tp": 2, "ep": 4}, r"ep=4 spreads the experts over replicas, and there are 2 of them"),
    ],
)
def test_sizes_that_do_not_divide_the_ranks_are_refused(ranks: int, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(TrainerConfigError, match=message):
        MeshSizes.fill(ranks, **sizes)


def test_a_rank_is_named_by_its_place_where_replicas_lie_on_several() -> None:
    assert MeshSizes(pp=2, dp=1, tp=2).describe(3) == "rank 3 (pp 1, tp 1)"
    assert MeshSizes(dp=4).describe(3) == "rank 3"
    assert MeshSizes(dp=2, tp=2).to_dict() == {"dp": 2, "tp": 2}
    assert MeshSizes(dp=4).to_dict() == {}


def test_a_world_of_replicas_has_no_groups_of_its_own(world: World) -> None:
    mesh = Mesh(world)
    assert mesh.device_mesh is mesh.gradient_group is mesh.stage_group is mesh.pipeline_group is None
    assert (mesh.replica, mesh.replicas, mesh.counts, mesh.leads_stage) == (0, 1, True, True)


class Loader:
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


def look(world: World) -> dict[str, Any]:
    """What one of four ranks has of meshes of two dimensions, and what it refuses."""
    found: dict[str, Any] = {}
    for sizes in ({"tp": 2}, {"pp": 2}, {"cp": 2}):
        mesh = open_mesh(ParallelConfig(**sizes), world)
        groups = [mesh.gradient_group, mesh.stage_group, mesh.pipeline_group]
        found[next(iter(sizes))] = {
            "groups": [dist.get_process_group_ranks(group) for group in groups],
            "replica": (mesh.replica, mesh.replicas),
            "counts": (mesh.counts, mesh.counts_rows),
        }
    tensor = open_mesh(ParallelConfig(tp=2), world)
    check_share(Loader(tensor.replica, tensor.replicas), tensor)
    check_share(Loader(world.rank, world.world_size), Mesh(world))
    try:
        check_share(Loader(world.rank, world.world_size), tensor)
    except TrainerConfigError as exc:
        found["share"] = str(exc)
    check_peers({"x": torch.tensor([tensor.replica])}, tensor)
    try:
        check_peers({"x": torch.tensor([world.rank])}, tensor)
    except TrainerConfigError as exc:
        found["peers"] = str(exc)
    return found


def test_ranks_find_their_groups_and_refuse_a_loader_of_another_share() -> None:
    everyones = run_ranks(look, 4)
    by_dim = {dim: [one[dim] for one in everyones] for dim in ("tp", "pp", "cp")}
    assert [one["groups"] for one in by_dim["tp"]] == [
        [[0, 2], [0, 1, 2, 3], [0]],
        [[1, 3], [0, 1, 2, 3], [1]],
        [[0, 2], [0, 1, 2, 3], [2]],
        [[1, 3], [0, 1, 2, 3], [3]],
    ]
    assert [one["groups"] for one in by_dim["pp"]] == [
        [[0, 1], [0, 1], [0, 2]],
        [[0, 1], [0, 1], [1, 3]],
        [[2, 3], [2, 3], [0, 2]],
        [[2, 3], [2, 3], [1, 3]],
    ]
    assert [one["groups"][0] for one in by_dim["cp"]] == [[0, 1, 2, 3]] * 4
    assert [one["replica"] for one in by_dim["tp"]] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [one["replica"] for one in by_dim["pp"]] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [one["counts"] for one in by_dim["tp"]] == [(True, True), (False, False)] * 2
    assert [one["counts"] for one in by_dim["pp"]] == [(False, False)] * 2 + [(True, True)] * 2
    assert [one["counts"] for one in by_dim["cp"]] == [(True, True), (True, False)] * 2
    assert "has rank=1, world_size=4, and rank 1 (dp 0, tp 1) is of replica 0 of 2" in everyones[1]["share"]
    for one in everyones:
        assert "rank 0 (dp 0, tp 0) and rank 1 (dp 0, tp 1) got different first batches" in one["peers"]
