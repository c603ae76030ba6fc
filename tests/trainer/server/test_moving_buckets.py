"""Shards join and leave while workers push, whatever is lost, doubled or killed meanwhile: every push counts once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server_cluster import COPY_FAULTS, FAULTS, Cluster, adding, few_buckets

from penstock.trainer.server.bucket import Bucket
from penstock.trainer.server.client import ServerClient
from penstock.trainer.server.optimizers import AdamW, Sgd
from penstock.trainer.server.placement import Placement, moves
from penstock.trainer.server.policies import AnyPolicy, Asp, Bsp, Quorum, Ssp


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with few_buckets():
        yield


POLICIES = (Asp(), Ssp(1), Bsp(), Quorum(least=1, grace=3))
V = {"w": torch.arange(12.0).view(3, 4) - 5, "b": torch.tensor([3.0, -7.0])}
IDS = np.array([4, 90, 4, 17], np.int64)
ROWS = torch.tensor([[1.0, 2.0], [3.0, 5.0], [10.0, 20.0], [-4.0, 8.0]])
SUMS = torch.tensor([[11.0, 22.0], [3.0, 5.0], [-4.0, 8.0]])
SETS = [
    {"shard-0": 1.0},
    {"shard-0": 1.0, "shard-1": 1.0},
    {"shard-0": 1.0, "shard-1": 1.0, "shard-2": 1.0},
    {"shard-1": 1.0, "shard-2": 2.0, "shard-3": 1.0},
    {"shard-0": 9.0, "shard-1": 1.0},
    {"shard-4": 1.0, "shard-5": 1.0},
]
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["step", "step", "move", "move", "move", "checkpoint", "late"]), st.just(0)),
        st.tuples(st.sampled_from(["kill"]), st.integers(0, 5)),
        st.tuples(st.just("place"), st.integers(0, len(SETS) - 1)),
    ),
    max_size=40,
)


class Twin:
    """The naive twin: a server is the count of the pushes to it."""

    def __init__(self) -> None:
        self.pushes = 0

    def check(self, cluster: Cluster) -> None:
        for name, value in cluster.tensors().items():
            assert torch.equal(value, self.pushes * V[name])
        assert torch.equal(cluster.rows("t", [4, 90, 17]), self.pushes * SUMS)


def push(client: ServerClient, twin: Twin) -> None:
    client.pull()
    client.push(V, {"t": (IDS, ROWS)})
    twin.pushes += 1
    client.advance()


def finish(cluster: Cluster, clients: list[ServerClient]) -> None:
    """Bring all that was begun to its end, without faults."""
    cluster.faults = cluster.copy_faults = cluster.move_faults = iter(())
    cluster.deliver_late()
    while cluster.transition is not None:
        cluster.step_move()
    for client in clients:
        client.send_clock()
    cluster.now += 1000
    cluster.tick()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    ACTIONS,
    st.sampled_from(POLICIES),
    st.booleans(),
    st.integers(1, 3),
    st.lists(st.sampled_from(FAULTS), max_size=100),
    st.lists(st.sampled_from(COPY_FAULTS), max_size=60),
    st.lists(st.sampled_from(FAULTS), max_size=60),
)
def test_every_push_counts_once_however_shards_come_and_go(
    actions: list[tuple[str, int]],
    policy: AnyPolicy,
    is_replicated: bool,
    workers: int,
    faults: list[str],
    copy_faults: list[str],
    move_faults: list[str],
) -> None:
    cluster, twin = Cluster(adding(policy=policy), is_replicated=is_replicated), Twin()
    clients = cluster.start(workers)
    cluster.faults, cluster.copy_faults, cluster.move_faults = iter(faults), iter(copy_faults), iter(move_faults)
    for action, number in actions:
        if action == "step":
            for client in clients:
                push(client, twin)
        elif action == "move":
            cluster.step_move()
        elif action == "checkpoint":
            cluster.checkpoint()
        elif action == "late":
            cluster.deliver_late()
        elif action == "kill" and f"shard-{number}" in cluster.hosts:
            cluster.kill(f"shard-{number}")
        elif action == "place" and (len(SETS[number]) > 1 or not is_replicated):
            cluster.begin_move(SETS[number])
    finish(cluster, clients)
    twin.check(cluster)
    for client in clients:
        push(client, twin)
    finish(cluster, clients)
    twin.check(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("is_replicated", [False, True])
@pytest.mark.parametrize("fault", ["kill before", "kill after", "drop reply"])
def test_a_fault_at_every_call_of_a_move_loses_nothing(is_replicated: bool, fault: str) -> None:
    at, calls = 0, 1
    while at < calls:
        cluster, twin = Cluster(adding(), is_replicated=is_replicated), Twin()
        clients = cluster.start(1)
        cluster.move_faults = iter(["none"] * at + [fault])
        cluster.begin_move(SETS[3])
        before = cluster.now
        while cluster.transition is not None:
            for client in clients:
                push(client, twin)
            cluster.step_move()
        calls = int(cluster.now - before) if at == 0 else calls
        at += 1
        finish(cluster, clients)
        twin.check(cluster)


def contents(bucket: Bucket) -> Any:
    pieces = {
        key: (one.values.tolist(), {k: v.tolist() for k, v in one.state.items()}) for key, one in bucket.pieces.items()
    }
    tables = {
        name: (
            one.ids.tolist(),
            one.values.tolist(),
            one.versions.tolist(),
            {k: v.tolist() for k, v in one.state.items()},
        )
        for name, one in bucket.tables.items()
    }
    return bucket.version, bucket.sequences, bucket.clocks, bucket.settled, bucket.counted, pieces, tables


@pytest.mark.slow
@pytest.mark.parametrize("is_replicated", [False, True])
@pytest.mark.parametrize("policy", [Bsp(), Asp(), Ssp(2)], ids=str)
def test_versions_optimizer_state_and_sequences_move_with_a_bucket(policy: AnyPolicy, is_replicated: bool) -> None:
    def train(sets: Mapping[int, Mapping[str, float]]) -> dict[int, Any]:
        config = adding(policy=policy, dense=AdamW(rate=0.1), rows=Sgd(rate=0.1, momentum=0.9), reduction="mean")
        cluster = Cluster(config, is_replicated=is_replicated)
        clients = cluster.start(2)
        for step in range(6):
            if step in sets:
                cluster.begin_move(sets[step])
            for client in clients:
                client.pull()
            for index, client in enumerate(clients):
                client.unit = 2 * step + index
                client.push({name: tensor / (1 + step) for name, tensor in V.items()}, {"t": (IDS, ROWS)})
                client.advance()
                cluster.step_move()
        finish(cluster, clients)
        return {number: contents(one) for shard in cluster.shards.values() for number, one in shard.buckets.items()}

    plain = train({})
    assert train({1: SETS[2], 3: SETS[5], 4: SETS[4]}) == plain
    assert len(plain) == len(set(plain))


def test_a_shard_that_joins_takes_its_share_and_no_more() -> None:
    cluster = Cluster(adding(), shards=3)
    clients = cluster.start(1)
    weights = {f"shard-{index}": 1.0 for index in range(4)}
    expected = {move.bucket for move in moves(cluster.placement, Placement(weights))}
    before = {name: set(shard.buckets) for name, shard in cluster.shards.items()}
    cluster.begin_move(weights)
    finish(cluster, clients)
    for name, held in before.items():
        assert set(cluster.shards[name].buckets) == held - expected
    assert set(cluster.shards["shard-3"].buckets) == expected & set(cluster.config.schema.buckets().tolist())


def test_what_was_not_durable_before_a_move_is_not_after_it() -> None:
    cluster, twin = Cluster(adding()), Twin()
    (client,) = cluster.start(1)
    push(client, twin)
    cluster.begin_move({"shard-7": 1.0})
    finish(cluster, [client])
    push(client, twin)
    assert client.kept > 0
    cluster.kill("shard-7")  # back to the checkpoint of the beginning
    push(client, twin)
    finish(cluster, [client])
    twin.check(cluster)
