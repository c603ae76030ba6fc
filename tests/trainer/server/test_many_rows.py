"""Rows of many buckets in one message: what they sum to, what is read ahead, and how many bytes travel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server_cluster import FAULTS, Cluster, adding, few_buckets

from penstock.trainer.errors import ServerError, ShardUnreachableError
from penstock.trainer.server.client import ClientConfig, ServerClient
from penstock.trainer.server.messages import Ask, Pulled, Push, Pushed, Reply, Request, count_bytes
from penstock.trainer.server.optimizers import AdamW, RowWiseAdagrad
from penstock.trainer.server.payloads import CodecConfig
from penstock.trainer.server.placement import bucket_of_piece, buckets_of_rows
from penstock.trainer.server.policies import AnyPolicy, Asp, Bsp, Quorum, Ssp
from penstock.trainer.server.rows import HeldRows, TableRows
from penstock.trainer.server.schema import Schema, TableSpec, TensorSpec

IDS = st.lists(st.integers(-3, 40), max_size=12)


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with few_buckets():
        yield


def rows_of(ids: list[int], value: float) -> tuple[np.ndarray[Any, Any], torch.Tensor]:
    return np.array(ids, np.int64), torch.full((len(ids), 2), value)


def listen(client: ServerClient) -> list[Request | Reply]:
    """Keep what a client sends and hears from now on."""
    heard: list[Request | Reply] = []
    call = client._call_once

    def keep(shard: str, request: Request) -> Reply:
        reply = call(shard, request)
        heard.extend((request, reply))
        return reply

    client._call_once = keep
    return heard


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.lists(IDS, min_size=2, max_size=2), IDS, IDS), min_size=1, max_size=6),
    st.sampled_from([Bsp(), Ssp(2), Asp()]),
    st.lists(st.sampled_from(FAULTS), max_size=40),
)
def test_rows_read_ahead_are_those_of_now(
    steps: list[tuple[list[list[int]], list[int], list[int]]], policy: AnyPolicy, faults: list[str]
) -> None:
    cluster = Cluster(adding(policy=policy))
    first, second = cluster.start(2)
    cluster.faults = iter(faults)
    expected: dict[int, float] = {}
    for step, (pushed, ahead, wanted) in enumerate(steps):
        first.pull_ahead({"t": np.array(ahead, np.int64)})
        for client, ids in zip((first, second), pushed, strict=True):
            client.push({}, {"t": rows_of(ids, float(step + 1))})
            client.advance()
            for one in ids:
                expected[one] = expected.get(one, 0.0) + step + 1
        ids, rows = first.pull_with_rows({"t": np.array(wanted, np.int64)})["t"]
        assert ids.tolist() == sorted(set(wanted))
        assert rows[:, 1].tolist() == [expected.get(one, 0.0) for one in ids.tolist()]


def test_only_rows_that_a_push_made_stale_travel_again() -> None:
    cluster = Cluster(adding(policy=Bsp()))
    first, second = cluster.start(2)
    ids = np.arange(30)
    first.pull_ahead({"t": ids})
    for client, pushed in ((first, [3, 4]), (second, [4, 17])):
        client.push({}, {"t": rows_of(pushed, 1.0)})
        client.advance()
    heard = listen(first)
    found, rows = first.pull_with_rows({"t": ids})["t"]
    sent = [one for reply in heard if isinstance(reply, Pulled) for one in reply.rows["t"][0].tolist()]
    assert sorted(sent) == [3, 4, 17]
    assert found.tolist() == ids.tolist()
    assert rows[:, 0].tolist() == [{3: 1.0, 4: 2.0, 17: 1.0}.get(one, 0.0) for one in range(30)]


def test_asking_what_cannot_be_lost_sends_no_gradients_but_those_that_are_lacking() -> None:
    cluster = Cluster(adding(policy=Asp()))
    (client,) = cluster.start(1)
    client.push({"b": torch.ones(2)}, {"t": rows_of([1, 2, 3], 1.0)})
    kept = client.kept
    heard = listen(client)
    client.ask_durable()
    assert {type(one) for one in heard[::2]} == {Ask}
    assert sum(count_bytes(one) for one in heard[::2]) == 8 * kept
    for name in list(cluster.shards):  # back to before the push
        cluster.kill(name)
    client.ask_durable()
    assert any(isinstance(one, Push) for one in heard)
    assert client.kept == kept
    assert cluster.rows("t", [1, 2, 3])[:, 0].tolist() == [1.0, 1.0, 1.0]
    assert cluster.tensors()["b"].tolist() == [1.0, 1.0]
    cluster.checkpoint()
    client.ask_durable()
    assert client.kept == 0


def test_that_nothing_can_be_lost_is_not_said_before_the_copy_is_made() -> None:
    cluster = Cluster(adding(policy=Asp()), is_replicated=True)
    (client,) = cluster.start(1)
    sent: list[tuple[str, Request]] = []

    def stop(shard: str, request: Request) -> Reply:
        sent.append((shard, request))
        raise ServerError("stopped")

    client._call_once = stop
    with pytest.raises(ServerError, match="stopped"):
        client.push({"b": torch.ones(2)})
    ((shard, request),) = sent
    assert isinstance(request, Push)
    ask = Ask(header=request.header, buckets=request.buckets)
    cluster.copy_faults = iter(["drop request", "drop request"])
    for one in (request, ask):
        with pytest.raises(ShardUnreachableError):
            cluster.handle(shard, one)
    reply = cluster.handle(shard, ask)
    assert isinstance(reply, Pushed)
    assert reply.durables.tolist() == [1]
    cluster.kill(shard)
    assert cluster.tensors()["b"].tolist() == [1.0, 1.0]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(IDS, st.integers(1, 5), st.booleans()), min_size=3, max_size=3),
    st.sampled_from(["sum", "mean"]),
)
def test_a_mean_of_rows_is_that_of_each_bucket_for_itself(
    pushed: list[tuple[list[int], int, bool]], reduction: str
) -> None:
    """The reference: of each bucket the workers that pushed to it, and those who did not with their zeros."""
    cluster = Cluster(adding(policy=Bsp(), reduction=reduction))
    workers = cluster.start(3)
    for worker, (ids, weight, has_piece) in zip(workers, pushed, strict=True):
        pieces = {"b": torch.full((2,), float(weight))} if has_piece else {}
        worker.push(pieces, {"t": rows_of(ids, 3.0 * weight)}, weight=float(weight))
        worker.advance()
    expected: dict[int, float] = {}
    of_piece = bucket_of_piece("b", 0)
    for one in sorted({one for ids, _, _ in pushed for one in ids}):
        number = int(buckets_of_rows("t", np.array([one]))[0])
        took_part = [
            (ids.count(one) * 3.0 * weight, weight)
            for ids, weight, has_piece in pushed
            if (has_piece and number == of_piece) or number in buckets_of_rows("t", np.array(ids, np.int64))
        ]
        if reduction == "sum":
            expected[one] = sum(value for value, _ in took_part)
        elif len({weight for _, weight in took_part}) == 1:
            expected[one] = sum(value for value, _ in took_part) / 3
        else:
            total = sum(weight for _, weight in took_part) * (1 + (3 - len(took_part)) / len(took_part))
            expected[one] = sum(value * weight / total for value, weight in took_part)
    found = cluster.rows("t", list(expected))[:, 0].tolist()
    assert found == pytest.approx(list(expected.values()), rel=1e-5)


def test_a_quorum_of_rows_closes_for_each_bucket_by_itself() -> None:
    cluster = Cluster(adding(policy=Quorum(least=2, grace=0.0)), shards=1)
    workers = cluster.start(3)
    for worker, ids in zip(workers, ([1, 2, 3], [2, 3, 4], [3, 9]), strict=True):
        worker.push({}, {"t": rows_of(ids, 1.0)})
    numbers = buckets_of_rows("t", np.array([1, 2, 3, 4, 9]))
    pushes = [set(buckets_of_rows("t", np.array(ids)).tolist()) for ids in ([1, 2, 3], [2, 3, 4], [3, 9])]
    sums = {1: [0], 2: [0, 1], 3: [0, 1, 2], 4: [1], 9: [2]}
    for one, number in zip((1, 2, 3, 4, 9), numbers.tolist(), strict=True):
        arrived = [place for place, touched in enumerate(pushes) if number in touched]
        counted = arrived[:2] if len(arrived) >= 2 else []  # the third opens the next round
        assert cluster.rows("t", [one])[0, 0] == len(set(sums[one]) & set(counted)), one


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_table_is_a_dict_of_rows(data: st.DataObject) -> None:
    """Rows that are made, stepped, moved away and brought back, against a dict by id."""
    spec = TableSpec(name="t", width=2, scale=0.3)
    table, twin = TableRows(spec, AdamW(rate=0.1, weight_decay=0.0)), dict[int, torch.Tensor]()
    away: dict[int, tuple[HeldRows, dict[int, torch.Tensor]]] = {}
    for version in range(1, data.draw(st.integers(1, 20)) + 1):
        action = data.draw(st.sampled_from(["push", "push", "push", "move", "return"]))
        if action == "push":
            ids = np.array(sorted(data.draw(st.sets(st.integers(0, 60), max_size=25))), np.int64)
            numbers = buckets_of_rows("t", ids)
            is_here = ~np.isin(numbers, [*away])
            ids, numbers = ids[is_here], numbers[is_here]
            places = table.make(ids, numbers)
            table.step(places, torch.ones(len(ids), 2), 0.1, np.full(len(ids), version))
            for one in ids.tolist():
                twin[one] = twin.get(one, spec.first_rows(np.array([one]))[0]) - 0.1
        elif action == "move":
            number = data.draw(st.integers(0, 15))
            if number not in away:
                held = table.rows_of(number)
                table.remove(number)
                away[number] = held, {one: twin.pop(one) for one in held.ids.tolist()}
        elif away:
            number = data.draw(st.sampled_from(sorted(away)))
            held, rows = away.pop(number)
            table.put(number, held)
            twin.update(rows)
        every = np.arange(61)
        places = table.places(every)
        assert set(every[places >= 0].tolist()) == set(twin)
        for one, place in zip(every.tolist(), places.tolist(), strict=True):
            if place >= 0:  # AdamW steps by its rate along equal gradients
                assert torch.allclose(table.values[place], twin[one], atol=1e-5)
        numbers = buckets_of_rows("t", np.array(sorted(twin), np.int64))
        assert table.counts.tolist() == np.bincount(numbers, minlength=16).tolist()


def test_a_table_of_many_rows_that_come_and_go_stays_as_large_as_what_is_in_it() -> None:
    table = TableRows(TableSpec(name="t", width=1), RowWiseAdagrad())
    ids = np.arange(4000)
    for _ in range(6):
        table.make(ids, buckets_of_rows("t", ids))
        for number in range(16):
            table.remove(number)
        assert (table.places(ids) == -1).all()
    assert len(table.values) <= 2 * len(ids) + 2048


def test_what_was_pulled_stays_as_it_was_while_others_push() -> None:
    cluster = Cluster(adding(policy=Asp()))
    first, second = cluster.start(2)
    heard = listen(first)
    first.pull()
    (reply,) = [one for one in heard if isinstance(one, Pulled) and ("b", 0) in one.pieces]
    before = reply.pieces["b", 0].data.tolist()
    for _ in range(3):
        second.push({"b": torch.ones(2)})
    assert reply.pieces["b", 0].data.tolist() == before
    assert first.pull()["b"].tolist() == [3.0, 3.0]


def test_chosen_buckets_alone_are_pushed_and_pulled() -> None:
    cluster = Cluster(adding(policy=Asp()))
    first, second = cluster.start(2)
    number = bucket_of_piece("w", 0)
    first.push({"w": torch.ones(3, 4)}, only={number})
    before = second.pull(only={bucket_of_piece("b", 0)})["w"].clone()
    assert before.abs().sum() == 0
    in_bucket = [index for index in range(3) if bucket_of_piece("w", index) == number]
    expected = [1.0 if place // 5 in in_bucket else 0.0 for place in range(12)]
    assert second.pull()["w"].flatten().tolist() == expected


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "topk"])
def test_the_bytes_on_the_wire_are_those_of_the_formula(codec: str) -> None:
    size, rows, width, density = 5000, 37, 2, 0.01
    schema = Schema([TensorSpec(name="w", shape=(size,), piece=2048)], [TableSpec(name="t", width=width)])
    cluster = Cluster(adding(schema=schema, policy=Asp()), shards=1)
    pull = codec if codec in ("fp32", "bf16", "int8") else "fp32"
    client = cluster.worker(
        "a",
        config=ClientConfig(push=CodecConfig(codec=codec, density=density), pull=CodecConfig(codec=pull), pause=0),
    )
    client.join()
    client.create({"w": torch.zeros(size)})
    heard = listen(client)
    ids = np.arange(rows)
    client.push({"w": torch.randn(size)}, {"t": (ids, torch.randn(rows, width))})
    pieces = [2048, 2048, 904]
    parts = len({*client._dense.tolist(), *buckets_of_rows("t", ids).tolist()})
    of_rows = {"fp32": 4 * width, "bf16": 2 * width}.get(codec, 4 * width) * rows
    values = {
        "fp32": 4 * size,
        "bf16": 2 * size,
        "int8": sum(piece + 4 * -(-piece // 2048) for piece in pieces),
        "topk": sum(8 * -(-piece // 100) for piece in pieces),
    }
    request, reply = heard
    assert count_bytes(request) == 24 * parts + values[codec] + 8 * rows + of_rows
    assert count_bytes(reply) == 33 * parts
    heard.clear()
    client.pull_with_rows({"t": ids})
    request, reply = heard
    blocks = -(-rows * width // 2048)
    read = {"fp32": 4 * rows * width, "bf16": 2 * rows * width, "int8": rows * width + 4 * blocks}[pull]
    assert count_bytes(request) == 16 * rows
    assert count_bytes(reply) == values[pull] + 16 * rows + read
    heard.clear()
    client.advance()
    assert count_bytes(heard[0]) == 16 * 16
