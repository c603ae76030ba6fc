"""A push counts exactly once, through every fault of the way and of the shards."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server_cluster import COPY_FAULTS, FAULTS, Cluster, adding, few_buckets

from penstock.trainer.server import client as client_module
from penstock.trainer.server.policies import AnyPolicy, Asp, Bsp, Quorum, Ssp


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with few_buckets(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_module, "MESSAGE_BYTES", 24)
        yield


POLICIES = (Asp(), Ssp(1), Bsp(), Quorum(least=1, grace=3))
V = {"w": torch.arange(12.0).view(3, 4) - 5, "b": torch.tensor([3.0, -7.0])}
IDS = np.array([4, 90, 4, 17], np.int64)
ROWS = torch.tensor([[1.0, 2.0], [3.0, 5.0], [10.0, 20.0], [-4.0, 8.0]])


def train(cluster: Cluster, steps: int, workers: int) -> None:
    clients = cluster.start(workers)
    for _ in range(steps):
        for client in clients:
            client.pull()
        for client in clients:
            client.push(V, {"t": (IDS, ROWS)})
            client.advance()
    cluster.deliver_late()
    cluster.faults = iter(())
    for client in clients:
        client.send_clock()
    cluster.now += 1000
    cluster.tick()
    check_sum(cluster, steps * workers)


def check_sum(cluster: Cluster, count: int) -> None:
    for name, value in cluster.tensors().items():
        assert torch.equal(value, count * V[name])
    expected = count * torch.tensor([[11.0, 22.0], [3.0, 5.0], [-4.0, 8.0]])
    assert torch.equal(cluster.rows("t", [4, 90, 17]), expected)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(FAULTS), max_size=120),
    st.sampled_from(POLICIES),
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 4),
    st.lists(st.sampled_from(COPY_FAULTS), max_size=60),
    st.booleans(),
)
def test_k_pushes_of_v_sum_to_k_v_through_any_faults(
    faults: list[str],
    policy: AnyPolicy,
    is_replicated: bool,
    workers: int,
    steps: int,
    copy_faults: list[str],
    sends_at_once: bool,
) -> None:
    shards = 3 if steps == 4 else 2
    cluster = Cluster(adding(policy=policy), shards, is_replicated=is_replicated, sends_at_once=sends_at_once)
    cluster.copy_faults = iter(copy_faults)
    cluster.start = _with_faults(cluster, faults)  # type: ignore[method-assign]
    train(cluster, steps, workers)


def _with_faults(cluster: Cluster, faults: list[str]):
    start = type(cluster).start

    def begin(workers: int):
        clients = start(cluster, workers)
        cluster.faults = iter(faults)
        return clients

    return begin


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("is_replicated", [False, True])
@pytest.mark.parametrize("fault", ["kill before", "kill after", "drop reply", "late"])
def test_a_fault_at_every_single_call_loses_and_doubles_nothing(
    policy: AnyPolicy, is_replicated: bool, fault: str
) -> None:
    probe = Cluster(adding(policy=policy), is_replicated=is_replicated)
    train(probe, 2, 2)
    for at in range(int(probe.now) - 1000):
        cluster = Cluster(adding(policy=policy), is_replicated=is_replicated)
        cluster.start = _with_faults(cluster, ["none"] * at + [fault])  # type: ignore[method-assign]
        train(cluster, 2, 2)


def test_parts_are_kept_until_a_checkpoint_and_not_longer() -> None:
    cluster = Cluster(adding())
    (client,) = cluster.start(1)
    client.push(V)
    client.push(V)
    assert client.kept > 0
    cluster.checkpoint()
    client.push(V)
    assert client.kept == len(client._dense)  # one part a bucket: that of the last push
    for name in list(cluster.shards):
        cluster.kill(name)
    client.push(V)
    assert torch.equal(cluster.tensors()["w"], 4 * V["w"])


def test_with_a_replica_nothing_is_kept() -> None:
    cluster = Cluster(adding(), is_replicated=True)
    (client,) = cluster.start(1)
    client.push(V)
    assert client.kept == 0


def test_a_replica_is_equal_to_the_bit_after_faults() -> None:
    cluster = Cluster(adding(), is_replicated=True)
    clients = cluster.start(2)
    cluster.faults = iter(["drop reply", "none", "late", "none", "duplicate"])
    for client in clients:
        client.push({name: tensor / 3 for name, tensor in V.items()})
        client.advance()
    cluster.faults = iter(())
    for client in clients:
        client.push(V)
    for name, shard in cluster.shards.items():
        copies: dict[int, bytes] = {}
        for host in cluster.hosts.values():
            copies.update(host.copies_of(name))
        for number in shard.buckets:
            assert shard.snapshot(number) == copies[number]
