"""Mixtures by costs: ranks' parts that cost the same, buckets of each source, and draws by weights."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mixed_rows import deliver, write_rows
from stream_reference import counts_of

from penstock import Bucket, Cost, DistributedDataLoader, Manifest, Mixture, Source, audit, open_manifest
from penstock.loader import ConfigError, CostExpression, DatasetError, StateMismatchError, index_costs, write_costs
from penstock.loader.dataset.cost_index import open_costs
from penstock.loader.order.costs.buckets import BucketedOrder, plan_epoch
from penstock.loader.order.costs.cuts import cut_by_cost
from penstock.loader.order.forecast import batch_ids
from penstock.loader.order.plan import EpochPlan, Order
from penstock.loader.order.selecting import Selection, Weights

SIZES = [61, 150, 40]
WEIGHTS = [1.0, 2.0, 0.5]
ORDER: dict[str, Any] = {"lanes": 8, "window": 2, "piece": 0}


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """Rows with an index of their tokens, of which a few have many."""
    folder = tmp_path_factory.mktemp("rows")
    rng = np.random.default_rng(5)
    found = []
    for name, size in zip("abc", SIZES, strict=True):
        write_rows(folder / name, [size // 2, size - size // 2], tokens=lambda count: 1 + rng.geometric(0.02, count))
        manifest = open_manifest(folder / name)
        expression = CostExpression.parse("tokens")
        write_costs(manifest, expression, index_costs(manifest, expression, progress=False))
        found.append(manifest)
    return found


def mix(manifests: list[Manifest], **options: Any) -> Mixture:
    sources = zip("abc", manifests, WEIGHTS, strict=True)
    return Mixture({name: Source(manifest, weight=weight) for name, manifest, weight in sources}, **options)


def rows_of_ranks(mixture: Mixture, world_size: int, steps: int, **options: Any) -> list[list[list[tuple[int, int]]]]:
    """Each rank's rows of each step, in order."""
    found = []
    for rank in range(world_size):
        given = {"global_batch_size": 12, "with_ids": True, "threads": 1, **ORDER, **options}
        state = given.pop("state", None)
        with DistributedDataLoader(mixture, rank=rank, world_size=world_size, **given) as loader:
            if state is not None:
                loader.load_state_dict(state)
            rows: list[list[tuple[int, int]]] = []
            while len(rows) < steps:
                rows += [
                    list(zip(batch["__source__"].tolist(), batch["__id__"].tolist(), strict=True))
                    for batch in itertools.islice(loader, steps - len(rows))
                ]
            found.append(rows)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["first_exhausted", "never"])
@pytest.mark.parametrize("model", ["linear", "quadratic"])
def test_global_batches_stay_and_are_cut_by_the_costs_of_all_sources(
    manifests: list[Manifest], stop: Any, model: Any
) -> None:
    mixture, steps = mix(manifests, stop=stop), 30
    cost = Cost(model=model, hidden_size=8 if model == "quadratic" else None)
    costs = [open_costs(manifest, cost, storage_options=None, cache_dir=None) for manifest in manifests]
    [plain] = rows_of_ranks(mixture, 1, steps)
    for world_size in (1, 2, 3):
        ranks = rows_of_ranks(mixture, world_size, steps, cost=cost)
        for step, rows in enumerate(plain):
            assert list(itertools.chain(*(rank[step] for rank in ranks))) == rows
            own = np.concatenate([costs[k].of(np.array([i])) for k, i in rows])
            assert np.diff(cut_by_cost(own, world_size)).tolist() == [len(rank[step]) for rank in ranks]


@pytest.mark.slow
def test_costs_are_no_part_of_a_state(manifests: list[Manifest]) -> None:
    mixture = mix(manifests)
    _, state = deliver(mixture, 1, global_batch_size=12, steps=7, **ORDER)
    [plain] = rows_of_ranks(mixture, 1, 9, state=state)
    ranks = rows_of_ranks(mixture, 3, 9, state=state, cost="tokens")
    assert [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)] == plain
    with DistributedDataLoader(mixture, global_batch_size=12, cost="tokens", **ORDER) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        loader.set_shares([1.0])


def test_a_source_without_an_index_is_named(manifests: list[Manifest], tmp_path: Path) -> None:
    mixture = Mixture(
        {"a": Source(manifests[0], columns=["n"]), "d": Source(write_rows(tmp_path / "d", [20]), columns=["n"])}
    )
    for name in ("cost", "bucket"):
        with pytest.raises(DatasetError) as raised:
            DistributedDataLoader(mixture, batch_size=4, **{name: "tokens"})
        assert "in the source 'd' of the mixture" in raised.value.__notes__


def bucketed_reference(manifests: list[Manifest], state: dict[str, Any], steps: int) -> list[list[tuple[int, int]]]:
    endless = [_bucketed(manifest, state, k) for k, manifest in enumerate(manifests)]
    return [
        sorted((k, next(endless[k])) for k, count in enumerate(counts_of(step, WEIGHTS, 12)) for _ in range(count))
        for step in range(steps)
    ]


def _bucketed(manifest: Manifest, state: dict[str, Any], number: int) -> Any:
    own = state["sources"][number]
    order = BucketedOrder(
        lanes=state["lanes"], **{name: own[name] for name in ("seed", "window", "piece")}, **own["bucket"]
    )
    costs = open_costs(manifest, Cost(), storage_options=None, cache_dir=None)
    for epoch in itertools.count():
        plan = plan_epoch(manifest.samples, order, epoch, None, costs)
        for position in range(plan.num_samples):
            yield int(batch_ids(plan, manifest.first_ids, position, 1)[0])


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", "never"])
@pytest.mark.parametrize("bucket", ["tokens", Bucket(run=8, pool=64)])
def test_each_source_is_bucketed_by_itself_on_any_ranks_and_after_resumes(
    manifests: list[Manifest], tmp_path: Path, stop: Any, bucket: Any
) -> None:
    mixture = mix(manifests, stop=stop)
    found, state = [], None
    for world_size, steps in ((1, 3), (2, 9), (3, 11), (1, 17)):
        part, state = deliver(
            mixture,
            world_size,
            global_batch_size=12,
            steps=steps,
            state=state,
            bucket=bucket,
            audit_dir=tmp_path,
            **ORDER,
        )
        state = json.loads(json.dumps(state))
        found += part
    assert state is not None
    assert found == bucketed_reference(manifests, state, len(found))
    assert audit(tmp_path).is_exact
    by_cost = rows_of_ranks(mixture, 2, len(found), bucket=bucket, cost="tokens")
    assert [sorted(itertools.chain(*parts)) for parts in zip(*by_cost, strict=True)] == found


def test_a_state_belongs_to_its_buckets(manifests: list[Manifest]) -> None:
    mixture = mix(manifests)
    _, plain = deliver(mixture, 1, global_batch_size=12, steps=3, **ORDER)
    _, bucketed = deliver(mixture, 1, global_batch_size=12, steps=3, bucket="tokens", **ORDER)
    for state, options in ((plain, {"bucket": "tokens"}), (bucketed, {}), (bucketed, {"bucket": Bucket(run=64)})):
        with (
            DistributedDataLoader(mixture, batch_size=12, **ORDER, **options) as loader,
            pytest.raises(StateMismatchError, match=r"the state's source 'a' .* bucket=: "),
        ):
            loader.load_state_dict(state)
    with DistributedDataLoader(mixture, batch_size=12, bucket="tokens") as loader:  # of other lanes
        loader.load_state_dict(bucketed)
        assert loader.state_dict() == bucketed
    other = Mixture({**mixture.sources, "d": Source(manifests[0])})
    with DistributedDataLoader(other, batch_size=12, bucket="tokens") as loader:
        with pytest.warns(match="'d' is new"):
            loader.load_state_dict(bucketed)
        assert len({tuple(source["bucket"]) for source in loader.state_dict()["sources"]}) == 1
        assert next(iter(loader))


def test_buckets_save_padding(manifests: list[Manifest]) -> None:
    def padded(**options: Any) -> int:
        with DistributedDataLoader(mix(manifests), batch_size=24, **options) as loader:
            batches = list(itertools.islice(loader, 8))
        return sum(len(batch["tokens"]) * int(batch["tokens"].max()) for batch in batches)

    assert padded(bucket="tokens") < 0.9 * padded()


DRAWS = {"000*": 3.0, "*": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", "never"])
def test_samples_of_a_source_are_drawn_by_its_own_weights(manifests: list[Manifest], stop: Any) -> None:
    each = np.linspace(1, 4, SIZES[2])
    mixture = mix(manifests, stop=stop)
    weights = {"a": DRAWS, "b": None, "c": each}
    mixture = Mixture(
        {name: Source(of.url, weight=of.weight, weights=weights[name]) for name, of in mixture.sources.items()},  # type: ignore[union-attr]
        stop=stop,
    )
    found, state = [], None
    for world_size, steps in ((1, 3), (2, 9), (3, 11), (1, 17)):
        part, state = deliver(mixture, world_size, global_batch_size=12, steps=steps, state=state, **ORDER)
        state = json.loads(json.dumps(state))
        found += part
    assert state is not None
    by_shard = np.where(np.arange(2) == 0, 3.0, 1.0)[manifests[0].shard_index]
    selections = [
        Selection(manifests[0].samples, None, Weights.read(by_shard, by_chunk=True)),
        None,
        Selection(manifests[2].samples, None, Weights.read(each)),
    ]
    endless = [_drawn(manifests[k], state, k, selections[k]) for k in range(3)]
    assert found == [
        sorted((k, next(endless[k])) for k, count in enumerate(counts_of(step, WEIGHTS, 12)) for _ in range(count))
        for step in range(len(found))
    ]


def _drawn(manifest: Manifest, state: dict[str, Any], number: int, selection: Selection | None) -> Any:
    own = state["sources"][number]
    order = Order(lanes=state["lanes"], **{name: own[name] for name in ("seed", "window", "piece")})
    for epoch in itertools.count():
        plan = EpochPlan(manifest.samples, order, epoch, selection)
        for position in range(plan.num_samples):
            yield int(batch_ids(plan, manifest.first_ids, position, 1)[0])


def test_weights_of_samples_are_a_sources_own(manifests: list[Manifest], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Source\(weights=\)"):
        DistributedDataLoader(mix(manifests), batch_size=4, weights={"*": 1.0})
    drawn = Mixture({"a": Source(manifests[0], weights={"*": 1.0})})
    with pytest.raises(ConfigError, match="weights= with audit_dir="):
        DistributedDataLoader(drawn, batch_size=4, audit_dir=tmp_path)


@pytest.mark.parametrize("options", [{"cost": "tokens"}, {"bucket": "tokens"}, {"weights": DRAWS}], ids=str)
def test_a_mixture_of_one_is_its_data_set(manifests: list[Manifest], options: dict[str, Any]) -> None:
    given = {**ORDER, "global_batch_size": 12, "with_ids": True}
    drawn, others = {"weights": options.get("weights")}, {k: v for k, v in options.items() if k != "weights"}
    with DistributedDataLoader(Mixture({"b": Source(manifests[1], **drawn)}), **given, **others) as mixed:
        seed = mixed.state_dict()["sources"][0]["seed"]
        found = [batch["__id__"].tolist() for batch in mixed]
    with DistributedDataLoader(manifests[1], seed=seed, **given, **options) as alone:
        assert found[: len(alone)] == [batch["__id__"].tolist() for batch in alone]
