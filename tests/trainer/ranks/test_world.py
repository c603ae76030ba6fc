from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from penstock.trainer import World, WorldError, close_world, open_world
from penstock.trainer.ranks.rendezvous import agree_on_start


def make(**changes: object) -> World:
    values = {
        "rank": 0,
        "world_size": 4,
        "local_rank": 0,
        "local_world_size": 2,
        "node_rank": 0,
        "num_nodes": 2,
        "device": torch.device("cpu"),
        "backend": "gloo",
    }
    return World(**{**values, **changes})  # type: ignore[arg-type]


def test_a_process_alone_is_a_world_of_one_and_leaves_nothing_open() -> None:
    for _ in range(2):
        world = open_world(device="cpu")
        assert (world.rank, world.world_size, world.num_nodes, world.is_first) == (0, 1, 1, True)
        assert dist.is_initialized()
        close_world()
        close_world()
        assert not dist.is_initialized()


def test_a_process_group_that_was_there_is_used_and_left_open() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert open_world(device="cpu").world_size == 1
        close_world()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_every_start_over_one_store_gets_a_name_of_its_own() -> None:
    store = dist.HashStore()
    names = []
    for size in (3, 3, 2, 4):
        with ThreadPoolExecutor(size) as ranks:
            # The others come first, and see what the starts before have left.
            found = [ranks.submit(agree_on_start, store, rank, size, timeout_s=20.0) for rank in reversed(range(size))]
            agreed = {one.result() for one in found}
        assert len(agreed) == 1
        names += agreed
    assert len(set(names)) == 4


def test_a_rank_that_waits_in_vain_says_for_whom() -> None:
    for rank in (0, 1):
        with pytest.raises(WorldError, match=f"rank {rank} of 2 waited 0 s for the others"):
            agree_on_start(dist.HashStore(), rank, 2, timeout_s=0.05)


@pytest.mark.slow
def test_the_first_rank_names_those_that_did_not_come() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as ranks:
        there = ranks.submit(agree_on_start, store, 2, 4, timeout_s=4.0)
        with pytest.raises(
            WorldError, match=r"for the others to start \(not there: rank 1, 3\); are all nodes up and con"
        ):
            agree_on_start(store, 0, 4, timeout_s=2.0)
        assert isinstance(there.exception(), WorldError)


@pytest.mark.parametrize("changes", [{"rank": 4}, {"rank": -1}, {"local_rank": 2}, {"node_rank": 2}])
def test_a_place_outside_the_world_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(WorldError, match="is not in"):
        make(**changes)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE='many', which is not a number"),
        ({"WORLD_SIZE": "4"}, "start the ranks with torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "rank=2 is not in"),
    ],
)
def test_an_environment_of_no_possible_world_is_explained(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError) as caught:
        open_world(device="cpu")
    assert message in str(caught.value)
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there; this machine has it")
def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(WorldError, match="local rank 0 has no CUDA device: 0 found"):
        open_world(device="cuda")
    with pytest.raises(WorldError, match="device='tpu': must be"):
        open_world(device="tpu")
