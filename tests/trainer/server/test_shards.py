"""Shards refuse what cannot be right, merge as they should, and come back from bytes as they were."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server_cluster import SCHEMA, Cluster, adding, few_buckets

from penstock.trainer.errors import NoQuorumError, NotJoinedError, ServerError, ServerRefusedError
from penstock.trainer.server import snapshots
from penstock.trainer.server.client import ClientConfig
from penstock.trainer.server.messages import Advance, Create, Header, Join, Leave, Outcome, Pull, Push, Pushed
from penstock.trainer.server.optimizers import AdamW, RowWiseAdagrad, Sgd
from penstock.trainer.server.payloads import CodecConfig, Payload, decode, encode
from penstock.trainer.server.placement import bucket_of_piece, buckets_of_rows
from penstock.trainer.server.policies import Bsp, Quorum, Ssp
from penstock.trainer.server.schema import Schema, TableSpec, TensorSpec
from penstock.trainer.server.shard import ServerConfig, Shard


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with few_buckets():
        yield


HEADER = Header(run="r", schema=SCHEMA.digest, worker="a")
with few_buckets():
    B, W = bucket_of_piece("b", 0), bucket_of_piece("w", 0)
ONES = torch.ones(2)
TWO_ROWS = encode(torch.ones(2, 2), CodecConfig())


def shard_of(config: ServerConfig | None = None, workers: str = "a") -> Shard:
    """One shard of all buckets, which these workers joined, with a tensor of zeros."""
    shard = Shard("shard-0", config or adding(), range(16))
    for worker in workers:
        shard.handle(Join(header=replace(HEADER, worker=worker), clock=0), 0.0)
    zeros = {("b", 0): encode(0 * ONES, CodecConfig())}
    shard.handle(Create(header=replace(HEADER, worker=workers[0]), pieces=zeros), 0.0)
    return shard


def push(sequence: int = 1, values: torch.Tensor = ONES, *, worker: str = "a", **changes: object) -> Push:
    request = Push(
        header=replace(HEADER, worker=worker),
        step=0,
        buckets=np.array([B]),
        sequences=np.array([sequence]),
        bases=np.array([0]),
        pieces={("b", 0): encode(values, CodecConfig())},
    )
    return replace(request, **changes)  # type: ignore[arg-type]


def with_piece(key: tuple[str, int], payload: Payload) -> Push:
    """A push that has one more piece than is right."""
    return push(pieces={**push().pieces, key: payload})


def held(shard: Shard) -> list[float]:
    return shard.buckets[B].pieces["b", 0].values[0].tolist()


BAD = {
    "another run": (replace(push(), header=replace(HEADER, run="x")), "run 'x'"),
    "another model": (replace(push(), header=replace(HEADER, schema="x")), "schema 'x'"),
    "another protocol": (replace(push(), header=replace(HEADER, protocol=99)), "protocol 99"),
    "a wrong token": (replace(push(), header=replace(HEADER, token="x")), "has not the token"),
    "nobody": (replace(push(), header=replace(HEADER, worker="z")), "has not joined"),
    "an old incarnation": (replace(push(), header=replace(HEADER, incarnation=7)), "incarnation 0 has joined"),
    "a shape": (push(values=torch.ones(3)), r"has shape \(2,\), and \(3,\) was pushed"),
    "a NaN": (push(values=torch.tensor([1.0, float("nan")])), "1 of 2 values"),
    "an infinity": (push(values=torch.tensor([float("inf"), 0.0])), "piece 0 of 'b'.*infinite"),
    "a weight": (push(weight=0.0), "weight 0.0"),
    "no such tensor": (with_piece(("x", 0), encode(ONES, CodecConfig())), "no tensor 'x'"),
    "no such piece": (with_piece(("b", 1), encode(ONES, CodecConfig())), "pieces 0 to 0"),
    "another bucket": (push(buckets=np.array([(B + 1) % 16])), f"no part for bucket {B}"),
    "a bucket that is none": (push(buckets=np.array([16])), "from 0 to 15"),
    "parts without sequences": (push(sequences=np.array([], np.int64)), "as many sequences"),
    "a bucket twice": (push(buckets=np.array([B, B]), sequences=np.array([1, 2]), bases=np.array([0, 0])), "distinct"),
    "a piece that was not created": (
        push(
            buckets=np.array(sorted((B, W))),
            sequences=np.array([1, 1]),
            bases=np.array([0, 0]),
            pieces={**push().pieces, ("w", 0): encode(torch.ones(5), CodecConfig())},
        ),
        "create it first",
    ),
    "ids out of order": (push(rows={"t": (np.array([5, 4]), TWO_ROWS)}), "ascending"),
    "ids of another bucket": (push(rows={"t": (np.arange(2), TWO_ROWS)}), "some of the 2 ids"),
    "short bytes": (
        push(pieces={("b", 0): Payload(codec="fp32", shape=(2,), data=np.zeros(7, np.uint8))}),
        "7 bytes, and not 8",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_push_is_refused_by_name_and_nothing_of_it_applied(name: str) -> None:
    request, message = BAD[name]
    shard = shard_of()
    before = {number: shard.snapshot(number) for number in shard.buckets}
    with pytest.raises(ServerRefusedError, match=message):
        shard.handle(request, 0.0)
    assert {number: shard.snapshot(number) for number in shard.buckets} == before
    shard.handle(push(), 0.0)
    assert held(shard) == [1, 1]


def test_a_token_is_never_shown() -> None:
    config = adding(token="geheim")
    assert "geheim" not in repr(config) + repr(replace(HEADER, token="geheim"))
    with pytest.raises(ServerRefusedError) as caught:
        shard_of(config)
    assert "geheim" not in str(caught.value)


def test_outcomes_say_what_a_shard_has() -> None:
    shard = shard_of()

    def outcome(request: Push) -> tuple[str, int]:
        reply = shard.handle(request, 0.0)
        assert isinstance(reply, Pushed)
        return Outcome(reply.outcomes[0]).name, int(reply.sequences[0])

    assert outcome(push(2)) == ("GAP", 0)
    assert outcome(push(1)) == ("APPLIED", 1)
    assert outcome(push(1)) == ("DUPLICATE", 1)
    assert outcome(push(3)) == ("GAP", 1)
    assert outcome(push(2)) == ("APPLIED", 2)
    assert held(shard) == [2, 2]
    shard.release(B)
    assert outcome(push(3)) == ("MOVED", 0)


def test_a_new_incarnation_counts_from_one_and_fences_the_old() -> None:
    shard = shard_of()
    shard.handle(push(1), 0.0)
    young = replace(HEADER, incarnation=1)
    shard.handle(Join(header=young, clock=0), 0.0)
    with pytest.raises(NotJoinedError):
        shard.handle(push(2), 0.0)
    with pytest.raises(ServerRefusedError, match="incarnation above 1"):
        shard.handle(Join(header=HEADER, clock=0), 0.0)
    shard.handle(replace(push(1), header=young), 0.0)
    assert held(shard) == [2, 2]


def test_a_forgotten_worker_is_not_waited_for_and_cannot_come_back_as_it_was() -> None:
    shard = shard_of(adding(policy=Bsp()), "ab")
    shard.handle(push(1), 0.0)
    shard.handle(Advance(header=HEADER, clock=1, buckets=np.array([B]), counts=np.array([1])), 0.0)
    pull = Pull(header=HEADER, clock=1, buckets={B: -1})
    assert shard.handle(pull, 0.0).waiting_for == ("b",)  # type: ignore[union-attr]
    shard.handle(Leave(header=HEADER, worker="b"), 0.0)
    assert shard.handle(pull, 0.0).waiting_for == ()  # type: ignore[union-attr]
    assert held(shard) == [1, 1]
    with pytest.raises(ServerRefusedError, match="was replaced or given up"):
        shard.handle(Join(header=replace(HEADER, worker="b"), clock=0), 0.0)


def test_a_forgotten_worker_stays_so_where_a_bucket_goes() -> None:
    shard = shard_of(workers="ab")
    shard.handle(Leave(header=HEADER, worker="b"), 0.0)
    fresh = Shard("fresh", shard.config)
    fresh.adopt(shard.snapshot(B))
    with pytest.raises(ServerRefusedError, match="was replaced or given up"):
        fresh.handle(Join(header=replace(HEADER, worker="b"), clock=0), 0.0)
    fresh.handle(Join(header=replace(HEADER, worker="b", incarnation=1), clock=0), 0.0)


def test_a_worker_that_joins_late_is_not_waited_for_in_steps_before() -> None:
    cluster = Cluster(adding(policy=Bsp()))
    first, second = cluster.start(2)
    for _ in range(3):
        for client in (first, second):
            client.push({"b": ONES})
            client.advance()
    third = cluster.worker("worker-2")
    third.join()
    assert third.clock == 3
    for client in (first, second, third):
        client.pull()


def test_a_quorum_closes_by_time_weighs_by_samples_and_leaves_the_rest_for_later() -> None:
    shard = shard_of(adding(policy=Quorum(least=2, grace=5.0, patience=20.0), reduction="mean"), "abc")
    shard.handle(push(1, ONES, worker="a", weight=1.0), 0.0)
    shard.handle(push(2, 10 * ONES, worker="a", weight=1.0), 1.0)
    shard.handle(push(1, 5 * ONES, worker="b", weight=3.0), 2.0)
    shard.tick(6.9)
    assert held(shard) == [0, 0]
    shard.tick(7.0)
    assert held(shard) == [4, 4]  # (1 x 1 + 3 x 5) / 4
    with pytest.raises(NoQuorumError, match="1 of the 2 workers"):
        shard.handle(Pull(header=HEADER, clock=0, buckets={B: -1}), 21.0)
    shard.handle(push(1, 20 * ONES, worker="c", weight=1.0), 21.0)
    shard.handle(push(2, 30 * ONES, worker="b", weight=1.0), 21.5)
    assert held(shard) == [24, 24]


def test_a_push_of_an_old_version_can_step_less() -> None:
    shard = shard_of(adding(scales_by_staleness=True))
    for sequence in (1, 2, 3, 4):
        shard.handle(push(sequence, 12 * ONES), 0.0)
    assert held(shard) == pytest.approx([12 * (1 + 1 / 2 + 1 / 3 + 1 / 4)] * 2)


@pytest.mark.parametrize("policy", [Bsp(), Ssp(0)])
@pytest.mark.parametrize("workers", [2, 4])
def test_synchronous_training_is_that_of_ddp_to_the_bit(policy: Bsp | Ssp, workers: int) -> None:
    config = adding(policy=policy, dense=AdamW(rate=0.01), reduction="mean")
    start = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))
    cluster = Cluster(config)
    clients = cluster.start(workers, w=start)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([parameter], lr=0.01, foreach=False)
    generator = torch.Generator().manual_seed(4)
    for step in range(10):
        gradients = [torch.randn(3, 4, generator=generator) for _ in clients]
        for index in torch.randperm(workers, generator=torch.Generator().manual_seed(step)).tolist():
            clients[index].push({"w": gradients[index]})
            clients[index].advance()
        mean = gradients[0] / workers  # DDP divides before it adds
        for gradient in gradients[1:]:
            mean = mean + gradient / workers
        parameter.grad = mean
        optimizer.step()
        for client in clients:
            assert torch.equal(client.pull()["w"], parameter)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_shard_behaves_as_its_naive_twin(data: st.DataObject) -> None:
    """The twin: a dict of numbers, and a set of the pushes that it has seen."""
    shard = shard_of(workers="abc")
    shard.handle(Create(header=HEADER, pieces={}), 0.0)
    value, rows, seen = 0.0, dict[int, float](), dict.fromkeys("abc", 0)
    kept: bytes | None = None
    kept_twin = (value, dict(rows), dict(seen))
    ids_here = np.flatnonzero(buckets_of_rows("t", np.arange(300)) == B)[:6]
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["push", "push", "push", "save", "restore", "refused"]))
        if action == "save":
            kept, kept_twin = shard.snapshot(B), (value, dict(rows), dict(seen))
        elif action == "restore" and kept is not None:
            shard.adopt(kept)
            value, rows, seen = kept_twin[0], dict(kept_twin[1]), dict(kept_twin[2])
        else:
            worker = data.draw(st.sampled_from("abc"))
            sequence = max(1, seen[worker] + data.draw(st.sampled_from([-1, 0, 1, 1, 1, 2])))
            amount = float(data.draw(st.integers(-9, 9)))
            ids = np.array(sorted(data.draw(st.sets(st.sampled_from(ids_here.tolist())))), np.int64)
            gradients = torch.full((len(ids), 2), amount)
            if action == "refused":
                gradients = torch.full((len(ids) + 1, 2), amount)
            is_new = sequence == seen[worker] + 1
            rows_of = {"t": (ids, encode(gradients, CodecConfig()))}
            request = push(sequence, amount * ONES, worker=worker, rows=rows_of)
            if action == "refused" and is_new:
                with pytest.raises(ServerRefusedError):
                    shard.handle(request, 0.0)
                continue
            shard.handle(request, 0.0)
            if is_new:
                seen[worker] = sequence
                value += amount
                for one in ids.tolist():
                    rows[one] = rows.get(one, 0.0) + amount
        assert held(shard) == [value, value]
        wanted = ids_here.astype(np.int64)
        reply = shard.handle(Pull(header=HEADER, clock=0, rows={"t": (wanted, np.full(len(wanted), -1))}), 0.0)
        values = decode(reply.rows["t"][2])  # type: ignore[union-attr]
        assert values[:, 0].tolist() == [rows.get(one, 0.0) for one in wanted.tolist()]


def busy_shard() -> Shard:
    """A shard with rows, an optimizer's state and gradients that wait to be merged."""
    schema = Schema([TensorSpec(name="b", shape=(2,), piece=5)], [TableSpec(name="t", width=2, scale=0.1)])
    config = adding(policy=Bsp(), dense=AdamW(), rows=RowWiseAdagrad(), schema=schema)
    cluster = Cluster(config, shards=1)
    first, second = (cluster.worker(name) for name in "ab")
    first.join()
    second.join()
    first.create({"b": ONES})
    ids = np.arange(20)
    for client in (first, second):
        client.push({"b": ONES / 3}, {"t": (ids, torch.ones(20, 2) / 7)})
        client.advance()
    first.push({"b": ONES / 5}, {"t": (ids, torch.ones(20, 2))}, weight=3.0, rate=0.5)
    return cluster.shards["shard-0"]


def test_a_bucket_comes_back_from_bytes_as_it_was() -> None:
    shard = busy_shard()
    fresh = Shard("fresh", shard.config)
    for number in shard.buckets:
        data = shard.snapshot(number)
        fresh.adopt(data)
        assert fresh.snapshot(number) == data
    assert fresh.members.keys() == shard.members.keys()


def test_a_flipped_byte_anywhere_in_a_snapshot_is_found() -> None:
    shard = busy_shard()
    data = shard.snapshot(B)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        with pytest.raises(ServerRefusedError, match="bucket 7 of x is damaged"):
            snapshots.restore(bytes(flipped), run="r", schema=shard.config.schema.digest, place="bucket 7 of x")
    for length in (0, 10, 30, len(data) - 1):
        with pytest.raises(ServerRefusedError, match="is damaged"):
            snapshots.restore(data[:length], run="r", schema=shard.config.schema.digest)


def test_a_snapshot_of_another_run_or_model_is_refused() -> None:
    data = shard_of().snapshot(B)
    with pytest.raises(ServerRefusedError, match="of run 'r', and this server of 'q'"):
        Shard("s", adding(run="q")).adopt(data)
    with pytest.raises(ServerRefusedError, match="of schema"):
        Shard("s", adding(schema=Schema())).adopt(data)


def test_rows_begin_as_a_function_of_seed_and_id_and_reading_keeps_none() -> None:
    spec = TableSpec(name="t", width=3, seed=5, scale=0.5)
    ids = np.array([7, -1, 2**62, 7])
    rows = spec.first_rows(ids)
    assert torch.equal(rows[0], rows[3])
    assert not torch.equal(rows[0], rows[1])
    assert not torch.equal(rows, TableSpec(name="t", width=3, seed=6, scale=0.5).first_rows(ids))
    many = spec.first_rows(np.arange(20_000))
    assert float(many.min()) >= -0.5
    assert float(many.max()) < 0.5
    assert abs(float(many.mean())) < 0.01
    cluster = Cluster(adding(schema=Schema((), [spec])))
    (client,) = cluster.start(1)
    assert torch.equal(client.pull_rows("t", ids), rows)
    assert all(not bucket.tables for shard in cluster.shards.values() for bucket in shard.buckets.values())
    client.push({}, {"t": (ids[:1], torch.full((1, 3), 2.0))})
    assert torch.equal(client.pull_rows("t", ids)[0], rows[0] + 2)


@pytest.mark.parametrize(("codec", "share"), [("fp32", 1.0), ("bf16", 0.5), ("int8", 0.252), ("topk", 0.02)])
def test_payloads_are_as_short_as_their_codec_says(codec: str, share: float) -> None:
    values = torch.randn(8192, generator=torch.Generator().manual_seed(1))
    payload = encode(values, CodecConfig(codec=codec, density=0.01))  # type: ignore[arg-type]
    assert payload.data.size / values.nbytes == pytest.approx(share, rel=0.01)
    error = (decode(payload) - values).abs().max()
    assert float(error) <= {"fp32": 0, "bf16": 0.02, "int8": 0.02, "topk": 3.0}[codec]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_what_a_codec_loses_is_sent_later(codec: str) -> None:
    cluster = Cluster(adding())
    client = cluster.worker("a", config=ClientConfig(push=CodecConfig(codec=codec, density=0.2), pause=0))  # type: ignore[arg-type]
    client.join()
    client.create({name: torch.zeros(shape) for name, shape in (("w", (3, 4)), ("b", (2,)))})
    gradient = torch.linspace(-1, 2, 12).view(3, 4)
    for _ in range(200):
        client.push({"w": gradient})
    total = client.pull()["w"] / 200
    assert torch.allclose(total, gradient, atol=0.05)
    assert set(client.feedback.state_dict()) == {"0 w", "1 w", "2 w"}


def test_topk_places_that_cannot_be_are_refused() -> None:
    payload = encode(torch.arange(8.0), CodecConfig(codec="topk", density=0.5))
    data = payload.data.copy()
    data[16:20] = 255
    with pytest.raises(ServerRefusedError, match="places of a topk payload"):
        decode(replace(payload, data=data))


def test_a_pull_returns_what_is_new_only() -> None:
    cluster = Cluster(adding())
    (client,) = cluster.start(1)
    client.pull()
    client.push({"b": ONES})
    seen: list[int] = []
    call = client._call_once

    def count(shard: str, request):
        reply = call(shard, request)
        seen.append(len(reply.pieces))
        return reply

    client._call_once = count
    assert client.pull()["b"].tolist() == [1, 1]
    assert sum(seen) == sum(number == B for number in client._bucket_of.values())


def test_a_client_sends_nothing_that_is_not_finite_or_of_another_shape() -> None:
    cluster = Cluster(adding())
    (client,) = cluster.start(1)
    with pytest.raises(ServerRefusedError, match="gradients of 'b' are NaN"):
        client.push({"w": torch.ones(3, 4), "b": torch.tensor([float("nan"), 0])})
    with pytest.raises(ServerRefusedError, match=r"'w' has shape \(3, 4\) on the server, and here \(4, 3\)"):
        client.push({"b": ONES, "w": torch.ones(4, 3)})
    client.push({"b": ONES})
    assert cluster.tensors()["b"].tolist() == [1, 1]
    assert cluster.tensors()["w"].abs().sum() == 0


def test_servers_restored_beyond_what_a_worker_keeps_are_an_error() -> None:
    cluster = Cluster(adding())
    (client,) = cluster.start(1)
    old = dict(cluster.saved)
    client.push({"b": ONES})
    cluster.checkpoint()
    client.push({"b": ONES})
    cluster.saved = old
    for name in list(cluster.shards):
        cluster.kill(name)
    with pytest.raises(ServerError, match=r"was restored to push 0 .* which keeps those from 2 on"):
        client.push({"b": ONES})


def test_an_outer_step_of_one_learner_is_plain_training() -> None:
    cluster = Cluster(adding(policy=Quorum(least=1, grace=0.0), dense=Sgd(rate=1.0), reduction="mean"))
    (client,) = cluster.start(1, b=ONES)
    before = client.pull()["b"].clone()
    after = before - 0.25
    client.push({"b": before - after})
    assert torch.equal(client.pull()["b"], after)
