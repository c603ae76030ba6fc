"""The gradients of a batch count once in each bucket, whoever pushes them, and whatever is lost in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server_cluster import FAULTS, SCHEMA, Cluster, adding, few_buckets

from penstock.trainer.errors import NotJoinedError
from penstock.trainer.server.messages import READER, Header, Join, Leave, Pull
from penstock.trainer.server.policies import Asp, Bsp


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with few_buckets():
        yield


ONES = {"w": torch.ones(3, 4), "b": torch.ones(2)}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=40), st.lists(st.sampled_from(FAULTS)))
def test_batches_that_several_workers_push_count_once(pushes: list[tuple[int, int]], faults: list[str]) -> None:
    cluster = Cluster(adding(policy=Asp()), shards=2)
    workers = cluster.start(3)
    cluster.faults = iter(faults)
    for who, unit in pushes:
        workers[who].unit = unit
        workers[who].push(ONES)
        if unit % 3 == 0:
            workers[who].advance()
    cluster.faults = iter(())
    for one in workers:
        one.ask_durable()
        one.send_clock()
    assert cluster.tensors()["b"].tolist() == [len({unit for _, unit in pushes})] * 2


def test_what_is_settled_counts_no_more_and_takes_no_room() -> None:
    cluster = Cluster(adding(policy=Asp()), shards=1)
    first, second = cluster.start(2)
    for unit in range(5):
        first.unit = unit
        first.push(ONES)
    second.unit, second.settled = 5, 4
    second.push(ONES)
    first.unit = 2
    first.push(ONES)
    assert cluster.tensors()["b"].tolist() == [6, 6]
    [shard] = cluster.shards.values()
    assert {frozenset(bucket.counted) for bucket in shard.buckets.values() if bucket.pieces} == {frozenset({4, 5})}


def test_what_counts_moves_with_its_bucket() -> None:
    cluster = Cluster(adding(policy=Asp()), shards=2)
    first, second = cluster.start(2)
    first.unit = 7
    first.push(ONES)
    for name in list(cluster.shards):
        cluster.checkpoint()
        cluster.kill(name)
    second.unit = 7
    second.push(ONES)
    assert cluster.tensors()["w"].tolist() == [[1] * 4] * 3


def test_what_could_be_lost_is_known_until_a_checkpoint_holds_it() -> None:
    cluster = Cluster(adding(policy=Asp()), shards=1)
    [worker] = cluster.start(1)
    worker.unit = 3
    worker.push(ONES)
    assert worker.kept_units == {3}
    worker.ask_durable()
    assert worker.kept_units == {3}
    cluster.checkpoint()
    worker.ask_durable()
    assert worker.kept_units == set()


def test_a_reader_waits_for_nobody_and_a_late_goodbye_does_not_remove_a_successor() -> None:
    cluster = Cluster(adding(policy=Bsp()), shards=1)
    cluster.start(2)
    [shard] = cluster.shards.values()
    reader = Header(run="r", schema=SCHEMA.digest, worker="reader", incarnation=READER)
    known = dict.fromkeys(shard.buckets, -1)
    assert shard.handle(Pull(header=reader, clock=0, buckets=known), 0.0).pieces  # type: ignore[union-attr]
    old = Header(run="r", schema=SCHEMA.digest, worker="worker-0", incarnation=0)
    shard.handle(Join(header=replace(old, incarnation=1), clock=0), 0.0)
    shard.handle(Leave(header=old, worker="worker-0"), 0.0)
    assert shard.members["worker-0"][0] == 1
    with pytest.raises(NotJoinedError, match="above 1"):
        shard.handle(Join(header=old, clock=0), 0.0)
    shard.handle(Leave(header=replace(old, worker="absent", incarnation=4), worker="absent"), 0.0)
    with pytest.raises(NotJoinedError, match="above 4"):
        shard.handle(Join(header=replace(old, worker="absent", incarnation=4), clock=0), 0.0)


def test_workers_without_a_row_count_in_its_mean() -> None:
    config = adding(policy=Bsp(), reduction="mean")
    cluster = Cluster(config, shards=1)
    workers = cluster.start(2)
    ids = torch.tensor([5]).numpy()
    workers[0].push({}, {"t": (ids, torch.ones(1, 2))})
    workers[1].push({})
    for one in workers:
        one.advance()
    assert cluster.rows("t", [5]).tolist() == [[0.5, 0.5]]
