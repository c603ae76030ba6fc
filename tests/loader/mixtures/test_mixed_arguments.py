"""Mixtures through the public face: fields, transforms, what the loader's arguments mean, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from equal_batches import assert_equal
from mixed_rows import deliver, write_rows
from tar_dataset import write_tars

from penstock import DistributedDataLoader, Manifest, Mixture, Packing, Source, Subset, TokensFormat, audit, pack
from penstock.cli.audit import run
from penstock.loader import (
    BadChunkWarning,
    ConfigError,
    DatasetError,
    PartitionError,
    StateMismatchError,
    open_manifest,
)
from penstock.storage import StorageError
from penstock.storage.observability.counts import count_store


@pytest.fixture(scope="module")
def a(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return write_rows(tmp_path_factory.mktemp("rows") / "a", [30, 31])


@pytest.fixture(scope="module")
def b(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return write_rows(tmp_path_factory.mktemp("rows") / "b", [50], 1000)


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, [20, 20])
    return str(folder)


def two(a: Any, b: Any, **options: Any) -> Mixture:
    return Mixture({"a": Source(a), "b": Source(b)}, **{"stop": "all_exhausted", **options})


def first_batch(mixture: Mixture, **options: Any) -> dict[str, Any]:
    with DistributedDataLoader(mixture, **{"batch_size": 10, "with_ids": True, **options}) as loader:
        batch: dict[str, Any] = next(iter(loader))
        return batch


def add_noise(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"n": int(sample["n"]), "noise": rng.random()}


def read_text(sample: dict[str, Any]) -> dict[str, Any]:
    return {"n": int(sample["txt"]), "noise": -1.0}


def test_formats_decoders_and_transforms_of_their_own_meet_in_one_batch(a, tars):
    mixed = Mixture(
        {"rows": Source(a, transform=add_noise), "tars": Source(tars, columns=["txt"], transform=read_text)},
        stop="all_exhausted",
    )
    seen: dict[int, float] = {}
    with DistributedDataLoader(mixed, batch_size=10, with_ids=True) as loader:
        first = loader.peek()
        for step, batch in enumerate(loader):
            assert batch["n"].tolist() == batch["__id__"].tolist()
            assert ((batch["noise"] < 0) == (batch["__source__"] == 1)).all()
            assert step or batch["noise"].tolist() == first["noise"].tolist()
            seen.update(zip(batch["n"].tolist(), batch["noise"].tolist(), strict=True))
    plain = Mixture({"rows": Source(a), "tars": Source(tars)})
    with pytest.raises(ConfigError, match="'rows' has the field 'n', and 'tars' does not"):
        DistributedDataLoader(plain, batch_size=10)


def test_random_numbers_are_those_of_the_sample_on_any_rank_in_threads_and_processes(a, b):
    def noise(rank: int, world_size: int, **options: Any) -> dict[tuple[int, int], list[float]]:
        found: dict[tuple[int, int], list[float]] = {}
        with DistributedDataLoader(
            two(a, b),
            batch_size=12 // world_size,
            with_ids=True,
            transform=add_noise,
            rank=rank,
            world_size=world_size,
            **options,
        ) as loader:
            for batch in loader:
                for s, i, x in zip(*(batch[k].tolist() for k in ("__source__", "__id__", "noise")), strict=True):
                    found.setdefault((s, i), []).append(x)
        return found

    alone = noise(0, 1)
    halves = [noise(rank, 2) for rank in range(2)]
    assert {key: sorted(x for half in halves for x in half.get(key, [])) for key in alone} == {
        key: sorted(values) for key, values in alone.items()
    }
    repeated = [values for values in alone.values() if len(values) > 1]
    assert repeated
    assert all(len(set(values)) == len(values) for values in repeated)


@pytest.mark.slow
def test_worker_processes_give_the_same_batches(a, b):
    threads, processes = (first_batch(two(a, b), transform=add_noise, processes=count) for count in (0, 2))
    assert threads["noise"].tolist() == processes["noise"].tolist()
    own = Mixture({"a": Source(a, transform=add_noise), "b": Source(b)})
    with pytest.raises(ConfigError, match="processes=2 with sources that have transform= or decode= of their own"):
        DistributedDataLoader(own, batch_size=4, processes=2)


def test_sources_of_other_fields_types_or_shapes_are_refused_by_name(tmp_path, a):
    other = write_rows(tmp_path / "f", [20], n=lambda size: np.arange(size, dtype=np.float32))
    with pytest.raises(ConfigError, match=r"'n' is torch.int64 of shape \(\) in 'a' and torch.float32 .* in 'b'; give"):
        first_batch(two(a, other))
    more = write_rows(tmp_path / "m", [20], extra=np.arange)
    with pytest.raises(ConfigError, match=r"'b' has the field 'extra', and 'a' does not .*Source\(columns="):
        DistributedDataLoader(two(a, more), batch_size=4)
    assert set(first_batch(two(a, more), columns=["n"])) == {"n", "__source__", "__id__"}
    tokens = []
    for name in "xy":
        (tmp_path / name).mkdir()
        np.arange(400, dtype=np.uint16).tofile(tmp_path / name / "t.bin")
        tokens.append(Source(tmp_path / name, format=TokensFormat(seq_len=8 if name == "x" else 16)))
    with pytest.raises(ConfigError, match=r"'tokens' is torch.int64 of shape \(8,\) in 'x' and .*\(16,\) in 'y'"):
        first_batch(Mixture({"x": tokens[0], "y": tokens[1]}))


def test_metrics_count_the_requests_and_cache_hits_of_all_sources(tmp_path: Path) -> None:
    urls = [f"mem://mixed-counts-{uuid4().hex[:8]}/{name}" for name in "ab"]
    for url in urls:
        pack(({"n": i} for i in range(40)), url, format="parquet")
    with DistributedDataLoader(Mixture(dict.fromkeys(urls, 1)), batch_size=10, cache_dir=tmp_path) as loader:
        assert len(list(loader)) > 0
        seen = loader.metrics()
        alone = [count_store(source.store) for source in loader._run.sources]
    assert all(each.requests and each.cache_misses for each in alone)
    assert seen.requests == sum(each.requests for each in alone)
    assert seen.cache_misses == sum(each.cache_misses for each in alone)
    assert seen.request_limit > 0
    assert loader.metrics().requests >= seen.requests  # after close, too


def test_metrics_tell_the_progress_of_each_source(tmp_path):
    sources = {}
    for name, count in (("x", 800), ("y", 160)):
        (tmp_path / name).mkdir()
        np.arange(count, dtype=np.uint16).tofile(tmp_path / name / "t.bin")
        sources[name] = Source(tmp_path / name, weight=3 if name == "x" else 1)
    mixed = Mixture(sources, stop="never")
    with DistributedDataLoader(mixed, batch_size=8, format=TokensFormat(seq_len=8)) as loader:
        for _ in zip(range(5), loader, strict=False):
            pass
        metrics = loader.metrics()
    assert metrics.run_samples == metrics.samples == 40
    assert {n: (p.samples, p.epochs, p.tokens) for n, p in metrics.sources.items()} == {
        "x": (30, 0.3, 240),
        "y": (10, 0.5, 80),
    }
    assert json.loads(json.dumps(metrics.to_dict()))["sources"]["x"]["tokens"] == 240


@pytest.mark.slow
def test_an_audit_proves_each_sources_epochs_over_resumes_and_finds_what_is_wrong(a, b, tmp_path, capsys):
    logs = tmp_path / "audit"
    _, state = deliver(two(a, b), 2, global_batch_size=12, steps=9, audit_dir=logs)
    deliver(two(a, b), 1, global_batch_size=12, steps=3, audit_dir=logs, state=state)  # replayed by the next
    deliver(two(a, b), 3, global_batch_size=12, steps=12, audit_dir=logs, state=state)
    report = audit(logs)
    assert report.is_exact
    assert report.mixture is not None
    assert [(s.name, s.samples, s.delivered, s.replayed, s.epochs) for s in report.mixture.sources] == [
        ("a", 61, 126, 18, 3),
        ("b", 50, 126, 18, 3),
    ]
    assert run([str(logs)]) == 0
    assert "exactly once in each epoch of its source" in capsys.readouterr().out
    with DistributedDataLoader(two(a, b), batch_size=12, audit_dir=tmp_path / "skips") as loader:
        loader.skip_batches(2)
        for _ in zip(range(15), loader, strict=False):
            pass
    skips = audit(tmp_path / "skips")
    assert skips.is_exact
    assert skips.mixture is not None
    assert skips.mixture.skipped == 24 == sum(source.missing for source in skips.mixture.sources)
    with DistributedDataLoader(two(a, b), batch_size=12, audit_dir=tmp_path / "sizes") as loader:
        for step, _ in zip(range(9), loader, strict=False):
            if step == 1:
                loader.set_batch_size(6)
    sizes = audit(tmp_path / "sizes")
    assert sizes.is_exact
    assert list(sizes.batch_sizes) == [(0, 24, 6)]
    assert run([str(tmp_path / "sizes")]) == 0
    assert "global batch" in capsys.readouterr().out
    lost = sorted(logs.iterdir())[-1]
    lost.unlink()
    assert not audit(logs).is_exact
    assert run([str(logs)]) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda a, b: Mixture({}), "at least one name"),
        (lambda a, b: Mixture({"a": Source(a, weight=0), "b": Source(b, weight=0)}), "all weights are 0"),
        (lambda a, b: Mixture({"a": Source(a, weight=-1)}), "the weight of 'a' is -1; weights are finite numbers"),
        (lambda a, b: Mixture({"a": float("nan")}), "the weight of 'a' is nan"),
        (lambda a, b: Mixture({"a": "0.5"}), "the weight of 'a' is '0.5'"),
        (lambda a, b: two(a, b, stop="first"), "stop='first': must be 'first_exhausted'"),
        (lambda a, b: two(a, b, schedule={10: {"c": 1}}), r"schedule\[10\] names \['c'\], and the sources are"),
        (lambda a, b: two(a, b, schedule={10: {"a": 0, "b": 0}}), "all weights are 0"),
        (lambda a, b: two(a, b, schedule={-1: {"a": 1}}), "-1 is no position"),
        (lambda a, b: two(a, b, schedule={1 << 62: {"a": 1}}), "schedule: 4611686018427387904 is no position"),
        (lambda a, b: two(a, b, schedule=[10]), r"schedule=\[10\]: give a mapping"),
        (lambda a, b: two(a, b, stratified="no"), "stratified='no': must be True or False"),
        (lambda a, b: two(a, b, weight=float("nan")), r"the weight of 'Mixture\(weight=\)' is nan"),
        (lambda a, b: Mixture({"m": two(a, b)}), "'m' is a mixture inside another and has stop="),
        (lambda a, b: Mixture({"a": Source(a, weight=1.5)}, stratified=True), "stratified: 'a' has 1.5"),
        (
            lambda a, b: Mixture({"x": Mixture({"y": Source(a)}), "x/y": Source(b)}),
            "two sources are called 'x/y' .* give one another name",
        ),
        (lambda a, b: Mixture({"a": Source(a, subset=0.5)}), "give a Subset"),
    ],
)
def test_bad_mixtures_are_refused_where_they_are_made(a, b, make, message):
    with pytest.raises(ConfigError, match=message):
        make(a, b)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"subset": 0.5}, ConfigError, "subset=0.5"),
        ({"split": "train"}, ConfigError, "split='train' of a manifest"),
        ({"weights": [1.0]}, ConfigError, "weights= with a Mixture: the weights of sources are in the Mixture"),
        ({"may_drop": True}, ConfigError, "may_drop=True without a transform"),
        ({"may_drop": 1, "transform": dict}, ConfigError, "may_drop=1: must be True or False"),
        ({"packing": Packing(seq_len=8, field="x")}, ConfigError, "'x'.* is not among the data set's fields"),
        ({"cost": "tokens"}, DatasetError, "no index of the costs 'tokens' for this data set"),
        ({"bucket": "tokens"}, DatasetError, "no index of the costs 'tokens' for this data set"),
        ({"batch_tokens": 100}, ConfigError, "batch_tokens= with a Mixture: .* give batch_size="),
        ({"columns": ["x"]}, ConfigError, "'x'"),
        ({"lanes": 3}, ConfigError, "lanes=3 is not a power of two"),
    ],
)
def test_arguments_that_a_mixture_cannot_have_are_refused_by_name(a, b, options, error, message):
    with pytest.raises(error, match=message):
        DistributedDataLoader(two(a, b), batch_size=4, **options)


def test_a_subset_of_the_loader_is_that_of_each_source_without_its_own(a, b):
    half, tenth = Subset.share(0, 0.5), Subset.share(0, 0.1)
    spelled = Mixture({"a": Source(a, subset=tenth), "b": Source(b, subset=half)}, stop="all_exhausted")
    inherited = Mixture({"a": Source(a, subset=tenth), "b": Source(b)}, stop="all_exhausted")
    with (
        DistributedDataLoader(spelled, batch_size=4, with_ids=True) as one,
        DistributedDataLoader(inherited, batch_size=4, with_ids=True, subset=half) as other,
    ):
        for batch, same in zip(one, other, strict=True):
            assert_equal(batch, same)
        assert one.state_dict() == other.state_dict()


def test_a_split_of_the_loader_is_that_of_each_source_without_its_own(tmp_path):
    for place, start in (("a", 0), ("b", 100)):
        for split, more in (("train", 0), ("val", 50)):
            write_rows(tmp_path / place / split, [20], start + more)
    mixture = Mixture({"a": Source(tmp_path / "a"), "b": Source(tmp_path / "b", split="val")}, stop="all_exhausted")
    with DistributedDataLoader(mixture, batch_size=4, split="train") as loader:
        found = {int(number) for batch in loader for number in batch["n"]}
    assert found == {*range(20), *range(150, 170)}


def test_bad_sources_are_named(tmp_path, a, b):
    (tmp_path / "none").mkdir()
    for url, error in ((tmp_path / "none", DatasetError), (tmp_path / "missing", (DatasetError, StorageError))):
        with pytest.raises(error) as raised:
            DistributedDataLoader(Mixture({"a": Source(a), "empty": Source(url)}), batch_size=4)
        assert "in the source 'empty' of the mixture" in raised.value.__notes__
    with pytest.raises(PartitionError, match="stratified"):
        DistributedDataLoader(two(a, b, stratified=True), batch_size=5)


def test_an_error_of_a_transform_names_the_sample_its_source_and_its_shard(a, b):
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["n"] == 1007:
            raise ValueError("seven")
        return sample

    mixed = Mixture({"a": Source(a), "b": Source(b, transform=fail)}, stop="all_exhausted")
    with DistributedDataLoader(mixed, batch_size=10) as loader, pytest.raises(ValueError, match="seven") as raised:
        list(loader)
    note = next(note for note in raised.value.__notes__ if "sample 7 of source 'b' (number 7 of" in note)
    assert "/b/000.parquet" in note


def test_calls_on_a_running_mixture_that_cannot_work_are_refused(a, b):
    with DistributedDataLoader(two(a, b), batch_size=4) as loader:
        next(iter(loader))
        before = loader.state_dict()
        for weights, message in (
            ({"c": 1}, r"set_weights names \['c'\]"),
            ({"a": -1}, "the weight of 'a' is -1"),
            ({"a": 0, "b": 0}, "all weights are 0"),
        ):
            with pytest.raises(ConfigError, match=message):
                loader.set_weights(weights)
        with pytest.raises(ConfigError, match="the run is at 4 samples already"):
            loader.set_weights({"a": 1}, at=3)
        for at in (float("inf"), float("nan"), "9", True, 1 << 62, [9]):  # states could not hold some of these
            with pytest.raises(ConfigError, match=r"set_weights\(at=\): .* is no position"):
                loader.set_weights({"a": 1}, at=at)
        for damage in ({"sources": []}, {"consumed": 5}, {"mixture": {}}, {"lanes": 3}, {"epoch": -1}):
            with pytest.raises(StateMismatchError, match="damaged"):
                loader.load_state_dict({**before, **damage})
        with pytest.raises(StateMismatchError, match="checksum"):
            loader.load_state_dict({**before, "seed": 1})
        old = {name: value for name, value in before.items() if name != "checksum"}
        loader.load_state_dict(old)
        for name, value in (("taken", before["sources"][0]["taken"] + 1), ("start", 1)):
            damaged = json.loads(json.dumps(old))
            damaged["sources"][0][name] = value
            with pytest.raises(StateMismatchError, match="damaged"):
                loader.load_state_dict(damaged)
        with DistributedDataLoader(a, batch_size=4) as plain:
            with pytest.raises(StateMismatchError, match="version 5 is of a mixture"):
                plain.load_state_dict(before)
            with pytest.raises(StateMismatchError, match="of a loader of another kind"):
                loader.load_state_dict(plain.state_dict())
            with pytest.raises(ConfigError, match="set_weights on a loader of one data set"):
                plain.set_weights({"a": 1})
        assert loader.state_dict() == before


def test_shares_padding_and_collate_work_with_mixtures(a, b):
    with DistributedDataLoader(two(a, b), batch_size=6, rank=1, world_size=2, last_batch="pad") as loader:
        batches = iter(loader)
        assert next(batches)["__valid__"].tolist() == [True] * 6
        loader.set_shares([3.0, 1.0])
        assert len(next(batches)["n"]) == 3
        loader.set_shares([1.0, 0.0001])
        assert next(batches)["n"].shape == (0,)
    rows = first_batch(two(a, b), collate=lambda samples: samples)
    assert {"n", "__source__", "__id__"} == set(rows[0])
    assert len(rows) == 10


@pytest.mark.parametrize("options", [{}, {"transform": dict}], ids=["alike", "of their own"])
def test_an_audit_counts_the_samples_of_a_replaced_chunk_as_replaced(tmp_path, a, capsys, options):
    bad = write_rows(tmp_path / "bad", [20, 20], 500)
    shard = tmp_path / "bad" / "001.parquet"
    data = bytearray(shard.read_bytes())
    start = int(bad.offsets[1])
    data[start : start + 30] = b"\xff" * 30
    shard.write_bytes(data)
    bad = open_manifest(tmp_path / "bad")
    mixed = Mixture({"a": Source(a), "bad": Source(bad, **options)}, stop="all_exhausted")
    with pytest.warns(BadChunkWarning, match="its 20 samples are replaced"):
        batches, _ = deliver(mixed, 2, global_batch_size=12, audit_dir=tmp_path / "logs", max_bad_chunks=1)
    of_bad = [i for batch in batches for source, i in batch if source == 1]
    assert max(of_bad) < 20  # what is handed out are the samples that came instead
    report = audit(tmp_path / "logs")
    assert report.is_exact
    assert report.mixture is not None
    whole, damaged = report.mixture.sources
    assert (whole.replaced, whole.missing, whole.duplicated) == (0, 0, 0)
    assert (damaged.missing, damaged.duplicated, damaged.delivered) == (0, 0, len(of_bad))
    assert 20 * (damaged.epochs - 1) <= damaged.replaced <= 20 * damaged.epochs
    assert run([str(tmp_path / "logs")]) == 0
    shown = capsys.readouterr().out
    assert "replaced" in shown
    assert f"but for {damaged.replaced} bad, and replaced by others" in " ".join(shown.split())
