"""Mixtures through the public face: which samples come when, on any number of ranks and after any resume."""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mixed_rows import Sample, deliver, reference, take, write_rows

from penstock import DistributedDataLoader, Manifest, Mixture, Source, Subset
from penstock.loader import ConfigError, MixtureChangedWarning, PartitionError, StateMismatchError

SIZES = [90, 300, 41]
WEIGHTS = [0.5, 0.3, 0.2]
OPTIONS: dict[str, Any] = {"lanes": 8, "piece": 0, "window": 2}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    folder: Path = tmp_path_factory.mktemp("sources")
    return [
        write_rows(folder / name, [size // 2, size - size // 2], 1000 * number)
        for number, (name, size) in enumerate(zip("abc", SIZES, strict=True))
    ]


def mix(sources: list[Manifest], weights: Any = WEIGHTS, names: str = "abc", **options: Any) -> Mixture:
    return Mixture(
        {name: Source(s, weight=w) for name, s, w in zip(names, sources, weights, strict=False)},
        **{"stop": "all_exhausted", **options},
    )


def counts_of(batches: list[list[Sample]], source: int) -> Counter[int]:
    return Counter(sample for batch in batches for number, sample in batch if number == source)


def assert_each_once_an_epoch(batches: list[list[Sample]]) -> None:
    """Each source's samples have come equally often, those of its running epoch once more."""
    for number, size in enumerate(SIZES):
        counts = counts_of(batches, number)
        times, rest = divmod(counts.total(), size)
        assert Counter(counts[sample] for sample in range(size)) == Counter({times: size - rest, times + 1: rest})


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("world_size", "size"), [(1, 12), (3, 12), (2, 2), pytest.param(4, 64, marks=pytest.mark.slow)]
)
def test_batches_are_those_of_the_naive_reference_on_any_number_of_ranks(sources, world_size, size):
    batches, state = deliver(mix(sources), world_size, global_batch_size=size, steps=80, **OPTIONS)
    assert batches == reference(sources, state, WEIGHTS, size, 80)
    assert_each_once_an_epoch(batches)


def test_values_ids_and_sources_of_a_batch_belong_together(sources):
    with DistributedDataLoader(mix(sources), batch_size=10, with_ids=True, **OPTIONS) as loader:
        first = loader.peek()
        for step, batch in enumerate(loader):
            assert batch["n"].tolist() == (1000 * batch["__source__"] + batch["__id__"]).tolist()
            assert step or batch["n"].tolist() == first["n"].tolist()


@pytest.mark.slow
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(1, 25), st.integers(1, 4), st.integers(1, 6), st.booleans()), min_size=2, max_size=4)
)
def test_every_sample_comes_once_in_each_epoch_of_its_source_whatever_changes(sources, legs):
    """Each leg resumes with another number of ranks, batch size and perhaps other weights."""
    batches: list[list[Sample]] = []
    state = None
    for steps, world_size, batch_size, reversed_ in legs:
        weights = WEIGHTS[::-1] if reversed_ else WEIGHTS
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MixtureChangedWarning)
            more, state = deliver(
                mix(sources, weights),
                world_size,
                global_batch_size=batch_size * world_size,
                steps=steps,
                state=state and json.loads(json.dumps(state)),
                **OPTIONS,
            )
        assert len(more) == steps
        batches += more
    assert_each_once_an_epoch(batches)
    assert [source["taken"] for source in state["sources"]] == [counts_of(batches, k).total() for k in range(3)]


@pytest.mark.slow
def test_a_run_cut_anywhere_goes_on_as_if_it_had_not_been_cut(sources):
    whole, last = deliver(mix(sources), 1, global_batch_size=12, steps=90, **OPTIONS)
    for cut, world_size in ((1, 2), (37, 3), (61, 4)):
        head, state = deliver(mix(sources), 1, global_batch_size=12, steps=cut, **OPTIONS)
        tail, end = deliver(mix(sources), world_size, global_batch_size=12, steps=90 - cut, state=state)
        assert head + tail == whole
        assert end == last


@pytest.mark.slow
def test_a_pass_begun_anew_gives_the_same_batches_and_an_ended_one_the_next_epoch(sources):
    with DistributedDataLoader(mix(sources), batch_size=12, with_ids=True, **OPTIONS) as loader:
        once = list(take(loader, 5))
        assert list(take(loader, 5)) == once
        whole = list(take(loader, None))
        assert whole[:5] == once
        assert len(whole) == len(loader)
        second = list(take(loader, None))
        assert second[0] != whole[0]
        assert_each_once_an_epoch([*whole, *second])
        loader.set_epoch(0)
        assert list(take(loader, None)) == whole
        loader.set_epoch(1)
        assert list(take(loader, None)) == second


@pytest.mark.slow
def test_the_batch_size_may_change_in_a_run_and_resumes_and_later_passes_go_on_with_it(sources):
    with DistributedDataLoader(mix(sources), batch_size=12, with_ids=True, **OPTIONS) as loader:
        run = take(loader, 200)
        before = [next(run) for _ in range(7)]
        loader.set_batch_size(6)
        state = loader.state_dict()
        assert (loader.global_batch_size, loader.steps_left) == (6, len(loader) - 14)
        after = [next(run) for _ in range(190)]  # into the second epoch
        resumed, end = deliver(mix(sources), 2, global_batch_size=6, steps=190, state=state)
        assert [sorted(batch) for batch in after] == resumed
        assert loader.state_dict() == end
        assert_each_once_an_epoch([*before, *after])
        loader.set_epoch(0)
        anew = list(take(loader, 200))
        whole, end = deliver(mix(sources), 1, global_batch_size=6, steps=200, **OPTIONS)
        assert [sorted(batch) for batch in anew] == whole
        assert loader.state_dict() == end
    counts = mix(sources, [2, 1, 1], stratified=True)
    with DistributedDataLoader(counts, batch_size=8, **OPTIONS) as loader:
        state = loader.state_dict()
        with pytest.raises(PartitionError, match="stratified"):
            loader.set_batch_size(6)
        assert loader.state_dict() == state
        assert next(iter(loader))["n"].shape == (8,)


@pytest.mark.slow
def test_where_an_epoch_ends(sources):
    first, _ = deliver(mix(sources, stop="first_exhausted"), 1, global_batch_size=10)
    assert min(s - len(counts_of(first, k)) for k, s in enumerate(SIZES)) == 0
    assert min(s - len(counts_of(first[:-1], k)) for k, s in enumerate(SIZES)) > 0
    every, _ = deliver(mix(sources), 1, global_batch_size=10)
    assert [len(counts_of(every, k)) for k in range(3)] == SIZES
    assert any(len(counts_of(every[:-1], k)) < size for k, size in enumerate(SIZES))
    with DistributedDataLoader(mix(sources, stop="never"), batch_size=10, with_ids=True) as endless:
        with pytest.raises(TypeError, match="no length"):
            len(endless)
        with pytest.raises(TypeError, match="no length"):
            _ = endless.steps_left
        assert len([batch for batch, _ in zip(endless, range(300), strict=False)]) == 300
        assert endless.epoch == 0
        endless.set_epoch(0)
        with pytest.raises(ConfigError, match="only epoch 0, which is endless"):
            endless.set_epoch(1)


@pytest.mark.slow
def test_weights_change_by_schedule_by_call_and_after_a_resume_and_each_source_goes_on(sources):
    scheduled = mix(sources, schedule={60: {"a": 0, "c": 1}})
    by_schedule, _ = deliver(scheduled, 2, global_batch_size=12, steps=30, **OPTIONS)
    assert not counts_of(by_schedule[5:], 0)
    assert counts_of(by_schedule[:5], 0)
    with DistributedDataLoader(mix(sources), batch_size=12, with_ids=True, **OPTIONS) as loader:
        batches = iter(loader)
        by_call = [next(batches) for _ in range(3)]
        loader.set_weights({"a": 0, "c": 1}, at=60)
        by_call += [next(batches) for _ in range(12)]
        state = loader.state_dict()
        by_call += [next(batches) for _ in range(5)]
        as_samples = [sorted(zip(b["__source__"].tolist(), b["__id__"].tolist(), strict=True)) for b in by_call]
        assert as_samples == by_schedule[:20]
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        again = list(take(loader, 5))
        assert [sorted(batch) for batch in again] == as_samples[15:]
    with pytest.warns(MixtureChangedWarning, match="weights change from here on"):
        other, _ = deliver(mix(sources, [1, 1, 0]), 1, global_batch_size=12, steps=10, state=state)
    assert not counts_of(other, 2)
    assert_each_once_an_epoch(as_samples[:15] + other)


@pytest.mark.slow
def test_sources_come_and_go_between_runs_and_one_that_is_back_goes_on(sources):
    first, state = deliver(mix(sources[:2], [1, 1]), 1, global_batch_size=12, steps=10, **OPTIONS)
    with pytest.warns(MixtureChangedWarning, match="'c' is new"):
        second, state = deliver(mix(sources), 2, global_batch_size=12, steps=10, state=state)
    assert counts_of(second, 2)
    with pytest.warns(MixtureChangedWarning, match="'a' is left out after 120 samples"):
        fewer, without = deliver(mix(sources[1:], names="bc"), 1, global_batch_size=10, steps=1, state=state)
    only_b = [[(1, sample) for number, sample in batch if number == 0] for batch in fewer]
    with pytest.warns(MixtureChangedWarning, match="'a' is back after 120 samples"):
        third, state = deliver(mix(sources), 1, global_batch_size=12, steps=20, state=without)
    only_c = [[(2, sample) for number, sample in batch if number == 1] for batch in fewer]
    assert_each_once_an_epoch(first + second + only_b + only_c + third)


def test_a_source_may_begin_in_mid_run_with_weight_0_until_then(sources):
    batches, _ = deliver(
        mix(sources, [1, 1, 0], schedule={120: {"c": 2}}, stop="never"), 1, global_batch_size=12, steps=40
    )
    assert not counts_of(batches[:10], 2)
    assert [sum(number == 2 for number, _ in batch) for batch in batches[10:]] == [6] * 30


def test_renamed_sources_are_found_by_their_data_and_other_data_under_a_name_is_refused(sources):
    _, state = deliver(mix(sources), 1, global_batch_size=12, steps=10)
    with pytest.warns(MixtureChangedWarning, match="'a' is now 'x'"):
        _, moved = deliver(mix(sources, names="xbc"), 1, global_batch_size=12, steps=1, state=state)
    assert moved["sources"][0]["taken"] > state["sources"][0]["taken"]
    with pytest.raises(StateMismatchError, match=r"'a' is another data set than in .* give it a new"):
        deliver(mix(sources[::-1]), 1, global_batch_size=12, steps=1, state=state)
    with pytest.raises(StateMismatchError, match="seed: 0 in the state, 1 here"):
        deliver(mix(sources), 1, global_batch_size=12, steps=1, state=state, seed=1)


@pytest.mark.slow
def test_nested_and_stratified_mixtures(sources):
    nested = Mixture(
        {
            "a": Source(sources[0], weight=1),
            "rest": Mixture({"b": Source(sources[1], weight=3), "c": Source(sources[2], weight=1)}, weight=1),
        },
        stop="never",
    )
    batches, state = deliver(nested, 1, global_batch_size=16, steps=20)
    assert [Counter(number for number, _ in batch) for batch in batches] == [{0: 8, 1: 6, 2: 2}] * 20
    assert [source["name"] for source in state["sources"]] == ["a", "rest/b", "rest/c"]
    exact = mix(sources, [7, 4, 1], stratified=True)
    batches, _ = deliver(exact, 2, global_batch_size=24, steps=20)
    assert [Counter(number for number, _ in batch) for batch in batches] == [{0: 14, 1: 8, 2: 2}] * 20


def test_skipped_batches_and_subsets_count_as_in_a_run_that_has_them(sources):
    halves = Mixture(
        {n: Source(s, subset=Subset.share(0, 0.5), weight=w) for n, s, w in zip("abc", sources, WEIGHTS, strict=True)}
    )
    whole, _ = deliver(halves, 1, global_batch_size=6, steps=60)
    with DistributedDataLoader(halves, batch_size=6, with_ids=True) as loader:
        loader.skip_batches(41)
        assert [sorted(batch) for batch in take(loader, 3)] == whole[41:44]
    inside = [set(counts_of(whole, k)) for k in range(3)]
    assert all(0.2 < len(own) / size < 0.8 for own, size in zip(inside, SIZES, strict=True))


def test_the_state_of_8_sources_on_4096_lanes_is_small_and_loads_fast(sources):
    eight = Mixture({f"s{k}": Source(sources[k % 3]) for k in range(8)}, schedule={9: {"s0": 2}})
    with DistributedDataLoader(eight, batch_size=64, lanes=4096, piece=0, window=1) as loader:
        next(iter(loader))
        text = json.dumps(loader.state_dict())
        assert len(text) < 8 << 10
        started = time.thread_time()
        loader.load_state_dict(json.loads(text))
        assert time.thread_time() - started < 2
