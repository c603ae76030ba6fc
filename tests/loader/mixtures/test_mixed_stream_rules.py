"""Mixtures of sources that filter or pack: changes of the mixture, live control, errors and states."""

from __future__ import annotations

import copy
import itertools
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mixed_ranks import run_leg
from mixed_rows import write_rows
from stream_mixtures import ODD, OPTIONS, SIZES
from streams_ranks import ThreadRanks

from penstock import DistributedDataLoader, Manifest, Mixture, Source, audit
from penstock.loader import (
    ConfigError,
    MixtureChangedWarning,
    PartitionError,
    StateMismatchError,
)
from penstock.loader.order.mixture import Lap
from penstock.loader.order.mixture_state import SourceStream
from penstock.loader.order.outputs import Cursors


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Manifest]:
    folder = tmp_path_factory.mktemp("rows")
    return {name: write_rows(folder / name, [size // 2, size - size // 2]) for name, size in SIZES.items()}


def mix(rows: dict[str, Manifest], names: str = "abc", filtered: str = "ac", **options: Any) -> Mixture:
    """Sources with the names of ``names``; those of ``filtered`` keep what is odd."""
    sources = {name: Source(rows[name], keep=ODD) if name in filtered else Source(rows[name]) for name in names}
    return Mixture(sources, **{"stop": "all_exhausted", **options})


def counts_of(batches: Any, source: int) -> Counter[Any]:
    return Counter(output for _, batch in batches for k, output in batch if k == source)


def assert_each_once_an_epoch(batches: Any, source: int, ids: range) -> None:
    counts = counts_of(batches, source)
    times, rest = divmod(counts.total(), len(ids))
    assert Counter(counts[i] for i in ids) == Counter({times: len(ids) - rest, times + 1: rest})


@pytest.mark.slow
def test_sources_come_go_and_are_renamed_and_each_goes_on_where_it_was(
    rows: dict[str, Manifest], tmp_path: Path
) -> None:
    first, state = run_leg(mix(rows, "ab"), 2, 9, None, batch_size=4, audit_dir=tmp_path, **OPTIONS)
    with pytest.warns(MixtureChangedWarning, match="'c' is new"):
        second, state = run_leg(mix(rows), 3, 7, state, batch_size=4, audit_dir=tmp_path)
    with pytest.warns(MixtureChangedWarning, match="'a' is left out after"):
        without, state = run_leg(mix(rows, "bc"), 1, 5, state, batch_size=9, audit_dir=tmp_path)
    renamed = Mixture(
        {"x": Source(rows["a"], keep=ODD), "b": Source(rows["b"]), "c": Source(rows["c"], keep=ODD)}, stop="never"
    )
    with pytest.warns(MixtureChangedWarning, match="'a' is now 'x'"):
        third, state = run_leg(renamed, 2, 12, state, batch_size=5, audit_dir=tmp_path)
    moved = [(epoch, [(k + 1, output) for k, output in batch]) for epoch, batch in without]
    every = [*first, *second, *moved, *third]
    assert_each_once_an_epoch(every, 0, range(1, SIZES["a"], 2))
    assert_each_once_an_epoch(every, 1, range(SIZES["b"]))
    assert_each_once_an_epoch(every, 2, range(1, SIZES["c"], 2))
    assert [source["taken"] for source in state["sources"]] == [counts_of(every, k).total() for k in range(3)]
    report = audit(tmp_path)
    assert report.is_exact
    assert report.mixture is not None
    accounts = {source.name: source for source in report.mixture.sources}
    assert {name: account.delivered for name, account in accounts.items()} == {
        name: counts_of(every, k).total() for k, name in enumerate("xbc")
    }
    epochs, even = accounts["x"].delivered // 30, 31
    assert epochs * even <= accounts["x"].dropped <= (epochs + 1) * even


@pytest.mark.slow
@pytest.mark.parametrize("filtered", ["", "ab"])
def test_a_source_left_out_some_epochs_ago_comes_back(rows: dict[str, Manifest], filtered: str) -> None:
    options: dict[str, Any] = {"filtered": filtered, "stop": "first_exhausted"}
    first, state = run_leg(mix(rows, "ab", **options), 1, 2, None, batch_size=6, **OPTIONS)
    with pytest.warns(MixtureChangedWarning, match="'b' is left out"):
        alone, state = run_leg(mix(rows, "a", **options), 1, 25, state, batch_size=6)
    assert alone[-1][0] > 1
    more, state = run_leg(mix(rows, "a", **options), 1, 3, state, batch_size=6)
    with pytest.warns(MixtureChangedWarning, match="'b' is back after 6 samples"):
        last, state = run_leg(mix(rows, "ab", **options), 1, 30, state, batch_size=6)
    every = [*first, *alone, *more, *last]
    for number, name in enumerate("ab"):
        assert_each_once_an_epoch(every, number, range(int(bool(filtered)), SIZES[name], 1 + bool(filtered)))


def test_what_drops_in_a_source_cannot_change_within_a_run(rows: dict[str, Manifest]) -> None:
    _, state = run_leg(mix(rows, filtered="a"), 1, 3, None, batch_size=6)
    cases = {
        "": "'a' drops samples in the state's run, and delivers every sample here",
        "ab": "'b' delivers every sample in the state's run, and drops samples here.* or a new name to begin it anew",
    }
    for filtered, message in cases.items():
        with (
            DistributedDataLoader(mix(rows, filtered=filtered), batch_size=6) as loader,
            pytest.raises(StateMismatchError, match=message),
        ):
            loader.load_state_dict(state)
    anew = Mixture({"all of a": Source(rows["a"]), "b": Source(rows["b"])}, stop="never")
    with pytest.warns(MixtureChangedWarning, match="'all of a' is new; 'a' is left out"):
        batches, _ = run_leg(anew, 1, 20, state, batch_size=6)
    assert_each_once_an_epoch(batches, 0, range(SIZES["a"]))


def test_a_damaged_state_of_a_source_is_refused(rows: dict[str, Manifest]) -> None:
    _, state = run_leg(mix(rows), 1, 4, None, batch_size=6, **OPTIONS)
    damages: dict[str, Any] = {"here": [0, -1], "start": [9, 9], "offsets": [1 << 40] * 8, "outputs": [7, 7], "kind": 3}
    with DistributedDataLoader(mix(rows), batch_size=6) as loader:
        for name, value in damages.items():
            damaged = copy.deepcopy(state)
            assert name in damaged["sources"][0]["stream"]
            damaged["sources"][0]["stream"][name] = value
            del damaged["checksum"]  # which refuses it sooner
            with pytest.raises(StateMismatchError, match="'a'"):
                loader.load_state_dict(damaged)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
    moved = copy.deepcopy(state)
    del moved["checksum"]
    moved["sources"][0]["stream"] |= {"here": [1, 45], "offsets": [0] * 8, "outputs": [0] * 8}  # an epoch has 30
    with DistributedDataLoader(mix(rows), batch_size=6) as loader:
        loader.load_state_dict(moved)
        with pytest.raises(StateMismatchError, match="'a' is at output 45 of its epoch 1 there, which has 30 here"):
            next(iter(loader))


@pytest.mark.slow
def test_passes_epochs_and_looks(rows: dict[str, Manifest]) -> None:
    with DistributedDataLoader(mix(rows), batch_size=10, with_ids=True, last_batch="pad", **OPTIONS) as loader:
        once = [batch["n"].tolist() for batch in itertools.islice(loader, 7)]
        assert loader.peek()["n"].tolist() == once[0]
        whole = [batch["n"].tolist() for batch in loader]
        assert whole[:7] == once
        second = list(loader)
        assert all(batch["__valid__"].all() and len(batch["n"]) == 10 for batch in second)
        assert loader.drops_samples
        loader.set_epoch(0)
        assert [batch["n"].tolist() for batch in loader] == whole
        loader.set_epoch(1)
        assert [batch["n"].tolist() for batch in loader] == [batch["n"].tolist() for batch in second]
        with pytest.raises(TypeError, match="no number of batches"):
            len(loader)
        with pytest.raises(TypeError, match="no number of batches"):
            _ = loader.steps_left
        with pytest.raises(ConfigError, match="known only by reading"):
            loader.skip_batches(2)
        with pytest.raises(ConfigError, match=r"epoch 9 .* the last one known is 2"):
            loader.set_epoch(9)
        progress = loader.metrics().sources
        kept = SIZES["a"] // 2
        assert progress["a"].epochs == pytest.approx(progress["a"].samples / kept, abs=0.01)
    with (
        DistributedDataLoader(mix(rows), batch_size=4, rank=0, world_size=2) as loader,
        pytest.raises(ConfigError, match="peek"),
    ):
        loader.peek()


@pytest.mark.slow
def test_weights_and_batch_sizes_change_in_mid_run_and_every_source_goes_on(rows: dict[str, Manifest]) -> None:
    with DistributedDataLoader(mix(rows, stop="never"), batch_size=12, with_ids=True, **OPTIONS) as loader:
        batches = iter(loader)
        got = [next(batches) for _ in range(5)]
        loader.set_weights({"a": 0, "c": 4})
        state = loader.state_dict()
        got += [next(batches) for _ in range(5)]
        loader.set_batch_size(7)
        got += [next(batches) for _ in range(9)]
        end = loader.state_dict()
    found = [(0, list(zip(b["__source__"].tolist(), b["__id__"].tolist(), strict=True))) for b in got]
    assert [len(batch) for _, batch in found] == [12] * 10 + [7] * 9
    assert not counts_of(found[5:], 0)
    assert_each_once_an_epoch(found, 0, range(1, SIZES["a"], 2))
    assert_each_once_an_epoch(found, 2, range(1, SIZES["c"], 2))
    again, _ = run_leg(mix(rows, stop="never"), 4, 5, state, batch_size=3)
    assert [batch for _, batch in again] == [sorted(batch) for _, batch in found[5:10]]
    assert end["sources"][0]["taken"] == counts_of(found, 0).total()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_source_of_which_nothing_is_left_is_named_on_every_rank(rows: dict[str, Manifest], world_size: int) -> None:
    asked: list[int] = []

    def never(sample: dict[str, Any]) -> bool:
        asked.append(sample["n"])
        return False

    mixture = Mixture({"empty": Source(rows["a"], keep=never), "b": Source(rows["b"])})
    errors = ThreadRanks(world_size, mixture, batch_size=6).run(lambda loader: next(iter(loader)))
    for error in errors:
        assert isinstance(error, PartitionError)
        assert "'empty' of the mixture has nothing to give" in str(error)
        assert f"all {SIZES['a']} samples" in str(error)
    assert set(asked) == set(range(SIZES["a"]))
    assert len(asked) <= 2 * SIZES["a"] + 256  # once, and a look for the fields


@pytest.mark.slow
def test_what_a_filter_raises_names_source_and_sample_after_the_same_batch_on_all_ranks(
    rows: dict[str, Manifest],
) -> None:
    def fragile(sample: dict[str, Any]) -> dict[str, Any] | None:
        if sample["n"] == 33:
            raise ValueError("thirty-three")
        return sample if sample["n"] % 2 else None

    sources = {"a": Source(rows["a"], transform=fragile, may_drop=True), "b": Source(rows["b"])}

    def read(loader: DistributedDataLoader) -> Any:
        got: list[Any] = []
        try:
            got.extend(batch["n"].tolist() for batch in loader)
        except Exception as exc:  # noqa: BLE001 - looked at below
            return got, exc
        return got, None

    counts = set()
    for world_size in (1, 3):
        ranks = ThreadRanks(world_size, Mixture(sources, stop="never"), batch_size=6 // world_size, **OPTIONS)
        results = ranks.run(read)
        for got, error in results:
            assert error is not None
            notes = "; ".join([str(error), *getattr(error, "__notes__", [])])
            assert "thirty-three" in notes
            assert "sample 33 of source 'a'" in notes
            counts.add(len(got))
    assert len(counts) == 1


def test_a_rank_that_left_before_a_source_began_is_not_waited_for(rows: dict[str, Manifest]) -> None:
    sources = {"b": Source(rows["b"], weight=1), "a": Source(rows["a"], weight=0, keep=ODD)}

    def read(loader: DistributedDataLoader) -> int:
        return sum(1 for _ in itertools.islice(loader, 2 if loader.rank else 400))

    mixture = Mixture(sources, schedule={1200: {"a": 1}}, stop="never")
    stays, left = ThreadRanks(2, mixture, batch_size=3, **OPTIONS).run(read)
    assert left == 2
    assert "the loader of rank 1 was closed" in str(stays)


def test_states_of_8_sources_on_4096_lanes_are_small_and_load_fast() -> None:
    rng = np.random.default_rng(0)
    sizes = np.full(4096, 1_000_000, np.int64)
    streams = []
    for _ in range(8):
        offsets = 256 * rng.integers(2800, 3000, 4096)  # an anchor every 256 inputs, lanes far from each other
        outputs = rng.binomial(offsets, 0.5)
        streams.append(
            SourceStream({"kind": "filter"}, Lap(3, 17), Lap(4, 1 << 31), Cursors(offsets, outputs, outputs))
        )
    text = json.dumps([stream.to_dict() for stream in streams])
    assert len(text) < 256 << 10
    started = time.process_time()
    again = [SourceStream.from_dict(each, name="a", lane_sizes=sizes) for each in json.loads(text)]
    assert time.process_time() - started < 2
    for one, other in zip(streams, again, strict=True):
        assert (one.kind, one.start, one.here) == (other.kind, other.start, other.here)
        assert np.array_equal(one.cursors.offsets, other.cursors.offsets)
        assert np.array_equal(one.cursors.outputs, other.cursors.outputs)


@pytest.mark.slow
def test_processes_of_one_rank_get_the_same(rows: dict[str, Manifest]) -> None:
    """As those of a mesh that hold parts of one model: two for each of two ranks, all on one channel."""
    ranks = ThreadRanks(4, mix(rows), batch_size=6, with_ids=True, **OPTIONS)
    make = ranks._make
    ranks._make = lambda number: DistributedDataLoader(
        mix(rows), rank=number // 2, world_size=2, batch_size=6, with_ids=True, **OPTIONS
    )
    assert make is not ranks._make
    results = ranks.run(lambda loader: [batch["__id__"].tolist() for batch in itertools.islice(loader, 15)])
    assert results[0] == results[1]
    assert results[2] == results[3]
    whole, _ = run_leg(mix(rows), 1, 15, None, batch_size=12, **OPTIONS)
    joined = [sorted([*one, *other]) for one, other in zip(results[0], results[2], strict=True)]
    assert joined == [sorted(output for _, output in batch) for _, batch in whole]


@pytest.mark.slow
def test_shares_change_in_mid_run_and_global_batches_do_not(rows: dict[str, Manifest]) -> None:
    def read(loader: DistributedDataLoader) -> Any:
        batches = iter(loader)
        first = next(batches)["__id__"].tolist()
        if loader.world_size > 1:
            loader.set_shares([2, 1])
        return [first, *(next(batches)["__id__"].tolist() for _ in range(12))]

    options = {"with_ids": True, **OPTIONS}
    whole = ThreadRanks(1, mix(rows), batch_size=12, **options).run(read)[0]
    one, other = ThreadRanks(2, mix(rows), batch_size=6, **options).run(read)
    assert [(len(a), len(b)) for a, b in zip(one, other, strict=True)] == [(6, 6), *[(8, 4)] * 12]
    assert [sorted([*a, *b]) for a, b in zip(one, other, strict=True)] == [sorted(batch) for batch in whole]
