"""Bad samples of mixtures: each source replaces or skips its own, alike on any number of ranks and after any resume."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mixed_ranks import run_leg
from mixed_rows import deliver, reference, write_rows
from row_functions import fail_on_every_fifth
from stream_reference import EndlessSource, batches

from penstock import DistributedDataLoader, Manifest, Mixture, Source, audit
from penstock.loader import BadChunkWarning, ConfigError, DatasetError, DecodeError, Keep, MixtureChangedWarning
from penstock.loader.decoding.replace import candidates
from penstock.loader.order.plan import Order

SIZES = [61, 150, 40]
WEIGHTS = [1.0, 2.0, 0.5]
ORDER: dict[str, Any] = {"lanes": 8, "window": 2, "piece": 0}
LIMIT: dict[str, Any] = {"max_errors": 90}

pytestmark = pytest.mark.filterwarnings("ignore::penstock.loader.BadSampleWarning")


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """Rows of which the column n is the sample id, and m its source's number."""
    folder = tmp_path_factory.mktemp("rows")
    return [
        write_rows(folder / name, [size // 2, size - size // 2], m=lambda count, k=k: np.full(count, k))
        for k, (name, size) in enumerate(zip("abc", SIZES, strict=True))
    ]


def is_bad(number: int, sample_id: int) -> bool:
    return (sample_id * 7 + number) % 5 == 0 or (number == 1 and 21 <= sample_id < 28)


def fail_on_bad(sample: dict[str, Any]) -> dict[str, Any]:
    if is_bad(int(sample["m"]), int(sample["n"])):
        raise ValueError(f"sample {sample['n']} is bad")
    return sample


def fail_too(sample: dict[str, Any]) -> dict[str, Any]:
    return fail_on_bad(sample)


def mix(manifests: list[Manifest], *, kinds: int = 1, **options: Any) -> Mixture:
    """One transform for all sources, or another one for the last."""
    transforms = [fail_on_bad, fail_on_bad, fail_too if kinds > 1 else fail_on_bad]
    return Mixture(
        {
            name: Source(manifest, weight=weight, transform=transform)
            for name, manifest, weight, transform in zip("abc", manifests, WEIGHTS, transforms, strict=True)
        },
        **options,
    )


def order_of(state: dict[str, Any], number: int) -> Order:
    own = state["sources"][number]
    return Order(lanes=state["lanes"], **{name: own[name] for name in ("seed", "window", "piece")})


def replaced_reference(manifests: list[Manifest], state: dict[str, Any], size: int, steps: int) -> Any:
    """Global batches of which each bad sample gives way to the first good one of its candidates."""
    given = [0] * len(manifests)
    found = []
    for batch in reference(manifests, state, WEIGHTS, size, steps):
        rows = []
        for k in range(len(manifests)):
            own = [sample_id for source, sample_id in batch if source == k]
            epochs = _epochs_of(manifests[k], order_of(state, k), given[k], len(own))
            given[k] += len(own)
            assert sorted(own) == sorted(sample_id for _, sample_id in epochs)
            rows += [(k, _stand_in(manifests[k], state["sources"][k]["seed"], k, *each)) for each in epochs]
        found.append(sorted(rows))
    return found


def _epochs_of(manifest: Manifest, order: Order, start: int, count: int) -> list[tuple[int, int]]:
    """The epoch and sample id of some places of a source's endless sequence."""
    source = EndlessSource(manifest.samples, order, lambda lane: lane)
    return [
        (place // manifest.num_samples, source.of_epoch(place // manifest.num_samples)[place % manifest.num_samples])
        for place in range(start, start + count)
    ]


def _stand_in(manifest: Manifest, seed: int, number: int, epoch: int, sample_id: int) -> int:
    if not is_bad(number, sample_id):
        return sample_id
    tried = candidates(seed, epoch, sample_id, manifest.first_ids, manifest.samples)
    ids = (int(manifest.first_ids[chunk]) + row for chunk, row in tried)
    return next(i for i in ids if not is_bad(number, i))


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", "never"])
def test_each_bad_sample_is_replaced_from_its_own_source_on_any_ranks_and_after_resumes(
    manifests: list[Manifest], stop: Any, kinds: int
) -> None:
    mixture = mix(manifests, stop=stop, kinds=kinds)
    options = {"on_error": "replace", **LIMIT, **ORDER}
    found, state = [], None
    for world_size, steps in ((1, 3), (2, 9), (3, 11), (1, 17)):
        part, state = deliver(mixture, world_size, global_batch_size=12, steps=steps, state=state, **options)
        state = json.loads(json.dumps(state))
        found += part
    assert state is not None
    assert found == replaced_reference(manifests, state, 12, len(found))
    plain = deliver(
        mixture, 1, global_batch_size=12, steps=len(found), **ORDER, decode=None, on_error="replace", **LIMIT
    )
    assert plain == (found, state)


def test_a_state_is_that_of_a_mixture_that_stops_at_bad_samples(manifests: list[Manifest]) -> None:
    good = Mixture({name: Source(of, weight=w) for name, of, w in zip("abc", manifests, WEIGHTS, strict=True)})
    _, plain = deliver(good, 1, global_batch_size=12, steps=9, **ORDER)
    _, replacing = deliver(good, 1, global_batch_size=12, steps=9, on_error="replace", **ORDER)
    assert plain == replacing


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["replace", "skip"])
def test_worker_processes_give_the_same_batches(manifests: list[Manifest], tmp_path: Path, on_error: Any) -> None:
    mixture = Mixture({name: Source(manifest) for name, manifest in zip("abc", manifests, strict=True)})
    options = {"on_error": on_error, **LIMIT, **ORDER, "global_batch_size": 12, "with_ids": True}
    options["transform"] = fail_on_every_fifth

    def ids(**more: Any) -> list[Any]:
        with DistributedDataLoader(mixture, **{**options, **more}) as loader:
            return [batch["__id__"].tolist() for batch in itertools.islice(loader, 12)]

    found = ids(quarantine=tmp_path)
    assert ids(processes=2) == found
    assert ids(processes=1, avoid=tmp_path, max_errors=0) == found


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", "never"])
@pytest.mark.parametrize("keeps", [False, True])
def test_bad_samples_are_skipped_as_in_the_reference_on_any_ranks_and_after_resumes(
    manifests: list[Manifest], tmp_path: Path, stop: Any, keeps: bool
) -> None:
    """With ``keeps``, one source also has a filter."""
    mixture = mix(manifests, stop=stop)
    if keeps:
        odd = Keep(["n"], lambda columns: columns["n"] % 2 == 1)
        mixture = Mixture(
            {**mixture.sources, "b": Source(manifests[1], weight=2.0, transform=fail_on_bad, keep=odd)}, stop=stop
        )
    options = {"on_error": "skip", **LIMIT, **ORDER, "audit_dir": tmp_path, "global_batch_size": 12}
    found, state = [], None
    for world_size, steps in ((1, 3), (2, 9), (3, 11), (1, 17)):
        part, state = run_leg(mixture, world_size, steps, state, **options)
        found += part
    assert state is not None

    def stays(number: int, sample_id: int) -> bool:
        return not is_bad(number, sample_id) and not (keeps and number == 1 and sample_id % 2 == 0)

    sources = [
        EndlessSource(manifest.samples, order_of(state, k), lambda lane, k=k: [i for i in lane if stays(k, i)])
        for k, manifest in enumerate(manifests)
    ]
    assert found == list(itertools.islice(batches(sources, itertools.repeat((WEIGHTS, 12)), stop), len(found)))
    report = audit(tmp_path)
    assert report.is_exact
    assert report.mixture is not None
    assert all(account.bad for account in report.mixture.sources)


@pytest.mark.slow
def test_the_audit_tells_what_was_replaced_in_each_source(manifests: list[Manifest], tmp_path: Path) -> None:
    deliver(
        mix(manifests, stop="all_exhausted"), 2, global_batch_size=12, audit_dir=tmp_path, on_error="replace", **LIMIT
    )
    report = audit(tmp_path)
    assert report.is_exact
    assert report.mixture is not None
    by_name = {account.name: account for account in report.mixture.sources}
    for number, name in enumerate("abc"):
        bad = {i for i in range(SIZES[number]) if is_bad(number, i)}
        account = by_name[name]
        assert len(bad) * (account.epochs - 1) < account.replaced <= len(bad) * account.epochs


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["replace", "skip"])
def test_the_quarantine_names_sources_and_a_later_run_avoids_what_is_in_it(
    manifests: list[Manifest], tmp_path: Path, on_error: Any
) -> None:
    mixture = mix(manifests, stop="all_exhausted")
    given = {**ORDER, "on_error": on_error, "global_batch_size": 12}
    steps = 60
    found, _ = run_leg(mixture, 2, steps, None, quarantine=tmp_path, **LIMIT, **given)
    for number, name in enumerate("abc"):
        lines = [json.loads(line) for path in (tmp_path / name).iterdir() for line in path.read_text().splitlines()]
        assert {entry["id"] for entry in lines} == {i for i in range(SIZES[number]) if is_bad(number, i)}
        assert {entry["source"] for entry in lines} == {name}
        assert all(entry["shard"] in ("000.parquet", "001.parquet") for entry in lines)
    for world_size in (1, 2):
        avoided, _ = run_leg(mixture, world_size, steps, None, avoid=tmp_path, max_errors=0, **given)
        assert avoided == found
    with DistributedDataLoader(mixture, avoid=tmp_path, max_errors=0, **given) as loader:
        list(itertools.islice(loader, 10))
        assert loader.bad_samples == []
    with pytest.raises(ConfigError, match="none of the mixture's"):
        DistributedDataLoader(Mixture({"a": Source(manifests[0])}), avoid=tmp_path, **given)
    with pytest.raises(ConfigError, match="is where this run writes"):
        DistributedDataLoader(mixture, avoid=tmp_path / "a", quarantine=tmp_path, **given)
    with DistributedDataLoader(manifests[1], avoid=tmp_path / "b", transform=fail_on_bad, max_errors=0, **given) as one:
        assert all(not is_bad(1, int(n)) for batch in one for n in batch["n"])


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["replace", "skip"])
def test_each_source_has_a_limit_of_its_own_and_records_are_in_the_order_of_their_finding(
    manifests: list[Manifest], on_error: Any
) -> None:
    mixture = mix(manifests, stop="all_exhausted")
    options = {**ORDER, "on_error": on_error, "batch_size": 12, "threads": 1}
    with DistributedDataLoader(mixture, max_errors=40, **options) as loader:
        list(loader)
        assert {entry.source for entry in loader.bad_samples} == set("abc")
        assert [entry.source for entry in loader.bad_samples] != sorted(
            entry.source or "" for entry in loader.bad_samples
        )
    with (
        DistributedDataLoader(mixture, max_errors=13, **options) as loader,
        pytest.raises(DatasetError, match=r"the source .b. of the mixture: .* samples of epoch 0 are bad on this rank"),
    ):
        list(loader)
    with DistributedDataLoader(mixture, on_error=on_error, batch_size=12) as loader, pytest.raises(DatasetError):
        list(loader)


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["replace", "skip"])
def test_chunks_that_cannot_be_read_are_counted_in_their_source(
    manifests: list[Manifest], tmp_path: Path, on_error: Any
) -> None:
    kept = write_rows(tmp_path / "d", [20, 20, 20], row_group=30, m=lambda count: np.full(count, 0))
    (tmp_path / "d" / "001.parquet").unlink()  # 20 to 40
    mixture = Mixture({"a": Source(manifests[0]), "d": Source(kept)}, stop="all_exhausted")
    options = {"on_error": on_error, "max_errors": 20, "audit_dir": tmp_path / "audit", "global_batch_size": 12}
    with pytest.warns(BadChunkWarning):
        alone, _ = run_leg(mixture, 1, 30, None, **options)
    with pytest.warns(BadChunkWarning):
        assert run_leg(mixture, 3, 30, None, **options)[0] == alone
    assert not {i for _, rows in alone for k, i in rows if k == 1 and 20 <= i < 40}
    entry = json.loads((tmp_path / "audit" / "d" / "rank00000.quarantine.jsonl").read_text().splitlines()[0])
    assert (entry["kind"], entry["id"], entry["samples"], entry["source"]) == ("chunk", 20, 20, "d")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BadChunkWarning)
        with pytest.raises(DatasetError, match="the source 'd' of the mixture: "):
            run_leg(mixture, 1, 30, None, on_error=on_error, max_errors=3, global_batch_size=12)


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_with_either_from_its_state(manifests: list[Manifest]) -> None:
    good = Mixture({name: Source(of, weight=w) for name, of, w in zip("abc", manifests, WEIGHTS, strict=True)})
    begun, state = deliver(good, 1, global_batch_size=12, steps=7, **ORDER)
    whole, _ = deliver(good, 1, global_batch_size=12, steps=15, **ORDER)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MixtureChangedWarning)
        for world_size in (1, 2, 3):
            rest, later = run_leg(good, world_size, 8, state, on_error="skip", global_batch_size=12, **ORDER)
            assert begun + [rows for _, rows in rest] == whole
            again, _ = run_leg(good, 4 - world_size, 5, later, on_error="skip", global_batch_size=12, **ORDER)
            assert again == run_leg(good, 1, 5, later, on_error="skip", global_batch_size=12, **ORDER)[0]
        skipping = mix(manifests)
        rest, _ = run_leg(skipping, 2, 8, state, on_error="skip", global_batch_size=12, **LIMIT, **ORDER)
    taken = {(k, i) for rows in begun for k, i in rows}
    later_ones = [row for _, rows in rest for row in rows]
    assert not any(is_bad(*row) for row in later_ones)
    assert not taken & {row for row in later_ones[:60] if row[0] != 2}


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["replace", "skip"])
def test_a_mixture_of_one_is_its_data_set(manifests: list[Manifest], on_error: Any) -> None:
    """Up to the end of the source's first epoch, behind which a mixture fills its batches."""
    mixture = Mixture({"b": Source(manifests[1], transform=fail_on_bad)})
    options = {"on_error": on_error, **LIMIT, **ORDER, "global_batch_size": 12, "with_ids": True}
    with DistributedDataLoader(mixture, **options) as mixed:
        seed = mixed.state_dict()["sources"][0]["seed"]
        found = [batch["__id__"].tolist() for batch in mixed]
        assert mixed.peek()
    with DistributedDataLoader(manifests[1], transform=fail_on_bad, seed=seed, **options) as alone:
        whole = [batch["__id__"].tolist() for batch in alone]
    assert found[: len(whole)] == whole


@pytest.mark.slow
def test_samples_that_are_looked_at_are_bad_as_a_pass_finds_them(manifests: list[Manifest], tmp_path: Path) -> None:
    mixture = mix(manifests, stop="all_exhausted")
    with DistributedDataLoader(mixture, on_error="replace", quarantine=tmp_path, batch_size=12, **LIMIT) as loader:
        list(loader)
    plain = Mixture({name: Source(of) for name, of in zip("abc", manifests, strict=True)})
    with DistributedDataLoader(plain, on_error="replace", avoid=tmp_path, batch_size=12) as loader:
        for number, name in enumerate("abc"):
            for i in range(SIZES[number]):
                if is_bad(number, i):
                    with pytest.raises(DecodeError, match="avoid= names it"):
                        loader.dataset.sources[name][i]
                else:
                    assert int(loader.dataset.sources[name][i]["n"]) == i
