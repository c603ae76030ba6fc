"""The outer optimizer on servers: fragments of buckets, turns, rates, and who goes on from what."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch

from penstock.trainer.asynchronous.leading import Consumption, Trained
from penstock.trainer.asynchronous.outer_exchange import Change, CountingCall, OuterExchange
from penstock.trainer.diloco.served import (
    cut_schema,
    due_after,
    make_outer,
    pushes_weights,
    rate_of_push,
)
from penstock.trainer.errors import TrainerConfigError
from penstock.trainer.parallel.diloco_config import DilocoConfig
from penstock.trainer.server.client import ServerClient
from penstock.trainer.server.config import ParameterServerConfig
from penstock.trainer.server.leases import Lease
from penstock.trainer.server.messages import Header, Reply, Request
from penstock.trainer.server.optimizers import Sgd
from penstock.trainer.server.placement import Placement, bucket_of_piece
from penstock.trainer.server.policies import Quorum, parse_policy
from penstock.trainer.server.schema import Schema, TensorSpec
from penstock.trainer.server.shard import ServerConfig, Shard

SCHEMA = Schema([TensorSpec(name=f"layer {n}", shape=(3, 5 + n), piece=4) for n in range(9)])
AVERAGE = DilocoConfig(over="server", rate=1.0, momentum=0.0)


@pytest.mark.parametrize("fragments", [1, 2, 7])
def test_fragments_are_ranges_of_buckets_that_share_out_every_value(fragments: int) -> None:
    found = cut_schema(SCHEMA, fragments)
    assert len(found) == fragments
    edges = [(min(one.buckets), max(one.buckets)) for one in found]
    assert all(last < first for (_, last), (first, _) in pairwise(edges))
    for spec in SCHEMA.tensors:
        seen = torch.zeros(spec.size)
        for one in found:
            for start, stop in one.parts.get(spec.name, ()):
                assert bucket_of_piece(spec.name, start // spec.piece) in one.buckets
                assert stop - start <= spec.piece
                seen[start:stop] += 1
        assert seen.eq(1).all()
    sizes = [one.size for one in found]
    assert sum(sizes) == sum(spec.size for spec in SCHEMA.tensors)
    assert max(sizes) <= 2 * sum(sizes) / fragments


def test_more_fragments_than_buckets_are_refused() -> None:
    with pytest.raises(TrainerConfigError, match="use fewer fragments"):
        cut_schema(Schema([TensorSpec(name="a", shape=(3,))]), 2)


@pytest.mark.parametrize(("every", "fragments"), [(1, 1), (7, 1), (7, 3), (8, 8), (100, 7)])
def test_each_fragment_has_one_turn_in_a_lease_however_short(every: int, fragments: int) -> None:
    for length in (1, every // 2 or 1, every):
        turns = [p for done in range(1, length + 1) for p in due_after(done, length, every=every, fragments=fragments)]
        assert turns == list(range(fragments))
    assert due_after(every, every, every=every, fragments=fragments)[-1] == fragments - 1


def test_weights_are_pushed_only_where_their_mean_is_exact_and_all_are_merged() -> None:
    assert pushes_weights(AVERAGE, ParameterServerConfig(policy="bsp"))
    assert pushes_weights(AVERAGE, ParameterServerConfig(policy="ssp(0)"))
    for policy in ("ssp(1)", "asp", "quorum(2, 1)"):
        assert not pushes_weights(AVERAGE, ParameterServerConfig(policy=policy))
    assert not pushes_weights(AVERAGE, ParameterServerConfig(policy="bsp", push="bf16"))
    assert not pushes_weights(DilocoConfig(over="server"), ParameterServerConfig(policy="bsp"))
    fragments = DilocoConfig(over="server", rate=1.0, momentum=0.0, fragments=2)
    assert not pushes_weights(fragments, ParameterServerConfig(policy="bsp"))


def test_pushes_that_are_steps_of_their_own_share_the_outer_rate() -> None:
    config = DilocoConfig(over="server", rate=0.6)
    rates = {policy: rate_of_push(config, ParameterServerConfig(policy=policy), 3) for policy in ("bsp", "asp")}
    assert rates == {"bsp": 0.6, "asp": pytest.approx(0.2)}
    assert make_outer(config, ParameterServerConfig(policy="asp")) == Sgd(rate=0.6, momentum=0.9, nesterov=True)
    assert make_outer(AVERAGE, ParameterServerConfig(policy="asp")) == Sgd(rate=1.0)


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_lease_is_consumed_when_all_that_was_learnt_from_it_is_safe(fragments: int) -> None:
    told: list[tuple[int, int]] = []

    def consume(number: int, upto: int) -> int:
        told.append((number, upto))
        return upto

    counted = Consumption(consume, fragments=fragments)
    for number in range(3):
        counted.expect(Trained(lease=lease_of(number), upto=10 * number + 10, unit=10 * number))
        counted.settle(fragments * (number + 1), {10 * number})  # its own pushes could be lost still
    # With fragments the end of a lease is in pushes of the one that follows.
    assert [number for number, _ in told] == ([0, 1] if fragments == 1 else [0])
    assert counted.settle(3 * fragments, {29}, is_flushed=True) is None
    assert counted.settle(3 * fragments, set(), is_flushed=True) == 30
    assert counted.num_open == 0


def lease_of(number: int) -> Lease:
    start = 10 * number
    return Lease(number=number, worker="a", epoch=0, start=start, stop=start + 10, done=start, expires=0.0)


def open_clients(policy: str, schema: Schema, names: list[str]) -> tuple[Shard, list[ServerClient], list[CountingCall]]:
    config = ServerConfig(run="r", schema=schema, policy=parse_policy(policy), dense=Sgd(rate=1.0), rows=Sgd(rate=1.0))
    placement = Placement({"shard": 1.0})
    shard = Shard("shard", config, placement.buckets_of("shard"), is_replicated=True)

    def call(name: str, request: Request) -> Reply:
        return shard.handle(request, time.time())

    calls = [CountingCall(call) for _ in names]
    clients = [
        ServerClient(
            Header(run="r", schema=schema.digest, worker=name),
            schema,
            call=counting,
            placement=lambda: placement,
            wait=lambda seconds: time.sleep(0.001),
        )
        for name, counting in zip(names, calls, strict=True)
    ]
    for client in clients:
        client.join()
        client.create({spec.name: torch.zeros(spec.shape) for spec in schema.tensors})
    return shard, clients, calls


def test_under_a_quorum_who_pushed_into_an_open_round_goes_on_from_its_own_weights() -> None:
    schema = Schema([TensorSpec(name="w", shape=(2, 2))])
    _, clients, calls = open_clients("quorum(2, 0)", schema, ["a", "b"])
    (whole,) = cut_schema(schema, 1)

    def exchange(number: int, value: float, unit: int) -> list[float]:
        options: dict[str, Any] = {"rate": 1.0, "pushes_weights": False, "keeps_own": True}
        with OuterExchange(clients[number], schema, calls[number], **options) as one:
            one.start(Change(fragment=whole, weights={"w": torch.full((4,), value)}, weight=1.0, unit=unit))
            found: list[float] = one.wait()["w"].tolist()
            return found

    clients[0].pull()
    clients[1].pull()
    assert exchange(0, 4.0, 0) == [4.0] * 4  # nobody else has pushed
    assert exchange(0, 6.0, 1) == [6.0] * 4  # and what follows is compared with what was pushed
    assert exchange(1, 8.0, 2) == [6.0] * 4  # the mean of 4 and 8; the 2 is of the next round
    assert exchange(1, 7.0, 3) == [7.5] * 4  # and the mean of 2 and 1 on top


def test_a_round_that_is_open_closes_when_its_last_learner_leaves() -> None:
    rule = Quorum(least=2, grace=5.0)
    assert rule.verdict({"a": 0.0}, {"a", "b"}, 1.0) == "open"
    assert rule.verdict({"a": 0.0}, {"a"}, 100.0) == "open"
    assert rule.verdict({"a": 0.0}, (), 1.0) == "close"


def test_bytes_that_are_counted_are_those_of_changes_and_weights() -> None:
    schema = Schema([TensorSpec(name="w", shape=(100,))])
    _, (client,), (calls,) = open_clients("asp", schema, ["a"])
    client.pull()
    calls.take_bytes()
    (whole,) = cut_schema(schema, 1)
    with OuterExchange(client, schema, calls, rate=1.0, pushes_weights=False, keeps_own=False) as one:
        one.start(Change(fragment=whole, weights={"w": torch.ones(100)}, weight=1.0, unit=0))
        assert one.wait()["w"].tolist() == [1.0] * 100
        assert one.norm == 10.0
    numbers = 24 + 33 + 16  # of a part in its push, in the reply, and of the clock of its bucket
    assert calls.take_bytes() == 2 * 400 + len(schema.buckets()) * numbers
