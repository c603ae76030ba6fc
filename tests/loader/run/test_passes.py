"""What one pass of a loader is: where it ends, what interrupts it, and that every rank sees the same fields."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from started_threads import started_threads
from tar_dataset import write_tars

from penstock import DistributedDataLoader, Mixture, Source, audit
from penstock.loader import ConfigError, LoaderClosedError
from penstock.loader.pipeline.delivery_queue import Delivery
from penstock.loader.pipeline.pipeline import Pipeline

SAMPLES = 100


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, [30, 45, 25])
    return str(folder)


def load(source: str, **options: Any) -> DistributedDataLoader:
    return DistributedDataLoader(source, **{"batch_size": 10, "with_ids": True, "rank": 0, "world_size": 1, **options})


def ids(batches: Iterable[dict[str, Any]]) -> list[int]:
    return [sample for batch in batches for sample in batch["__id__"].tolist()]


def assemblers() -> list[threading.Thread]:
    """The threads of which each pipeline has one."""
    return [thread for thread in started_threads() if thread.name == "penstock-assemble"]


@pytest.mark.parametrize("at_step", [1, 5, 9, 10])
def test_a_pass_with_new_shares_at_any_step_is_one_epoch(tars, at_step):
    with load(tars) as loader:
        seen = []
        for step, batch in enumerate(loader, start=1):
            seen += ids([batch])
            if step == at_step:
                loader.set_shares([2.0])
        assert sorted(seen) == list(range(SAMPLES))
        assert loader.epoch == 1
        assert sorted(ids(loader)) == list(range(SAMPLES))


@pytest.mark.parametrize("at_step", [1, 5, 10])
def test_loading_the_present_state_in_mid_pass_changes_nothing(tars, at_step):
    with load(tars) as loader:
        expected = ids(loader)
        loader.set_epoch(0)
        seen = []
        for step, batch in enumerate(loader, start=1):
            seen += ids([batch])
            if step == at_step:
                loader.load_state_dict(loader.state_dict())
        assert seen == expected


def test_going_back_in_mid_pass_goes_on_from_there_to_the_epochs_end(tars):
    with load(tars) as loader:
        seen, state = [], None
        for step, batch in enumerate(loader, start=1):
            seen.append(ids([batch]))
            if step == 3:
                state = loader.state_dict()
            if step == 6:
                loader.load_state_dict(state)
        assert seen[3:6] == seen[6:9]
        assert len(seen) == 13


def test_going_to_another_epoch_ends_the_pass(tars):
    with load(tars) as loader:
        steps = 0
        for _ in loader:
            steps += 1
            if steps == 2:
                loader.set_epoch(7)
        assert (steps, loader.epoch) == (2, 7)
        assert sorted(ids(loader)) == list(range(SAMPLES))
        assert loader.epoch == 8


def test_an_iterator_that_another_pass_overtook_is_refused_instead_of_sharing_its_batches(tars):
    with load(tars) as loader:
        older = iter(loader)
        next(older)
        newer = iter(loader)
        seen = ids([next(newer)])
        for _ in range(2):
            with pytest.raises(ConfigError, match="another pass over this loader has begun"):
                next(older)
        assert sorted(seen + ids(newer)) == list(range(SAMPLES))


def test_a_pass_that_is_asked_while_it_is_asked_refuses_and_goes_on(tars):
    errors: list[Exception] = []

    def ask_again(samples: list[dict[str, Any]]) -> dict[str, Any]:
        with pytest.raises(ConfigError, match="before the last call had returned") as caught:
            next(batches)
        errors.append(caught.value)
        return {"__id__": torch.tensor([sample["__id__"] for sample in samples])}

    with load(tars, collate=ask_again) as loader:
        batches = iter(loader)
        assert sorted(ids(batches)) == list(range(SAMPLES))
    assert len(errors) == SAMPLES / 10


def test_a_loader_closed_by_another_thread_while_its_pipeline_is_made_leaves_no_thread(tars, monkeypatch):
    loader = load(tars)
    made = Pipeline.__init__

    def make_and_close(pipeline: Pipeline, **options: Any) -> None:
        made(pipeline, **options)
        closer = threading.Thread(target=loader.close)
        closer.start()
        closer.join()

    monkeypatch.setattr(Pipeline, "__init__", make_and_close)
    with pytest.raises(LoaderClosedError):
        next(iter(loader))
    assert [thread.name for thread in started_threads() if thread.name.startswith("penstock-")] == []


def test_an_interrupt_while_a_batch_is_waited_for_loses_none(tars, monkeypatch):
    get = Pipeline.get
    calls = 0

    def interrupted(pipeline: Pipeline) -> Delivery:
        nonlocal calls
        calls += 1
        item = get(pipeline)
        if calls == 4:
            raise KeyboardInterrupt
        return item

    monkeypatch.setattr(Pipeline, "get", interrupted)
    with load(tars) as loader:
        seen: list[int] = []
        batches = iter(loader)
        with pytest.raises(KeyboardInterrupt):
            seen.extend(sample for batch in batches for sample in ids([batch]))
        assert len(seen) == 30
        assert sorted(seen + ids(batches)) == list(range(SAMPLES))


@pytest.mark.parametrize("source", ["one", "mixture"])
@pytest.mark.parametrize("options", [{}, {"keep": lambda sample: int(sample["txt"]) % 10}], ids=["plain", "filtered"])
@pytest.mark.parametrize("way", ["interrupt", "skip"])
def test_a_pass_whose_pipeline_is_stopped_after_its_last_batch_ends_there(tars, monkeypatch, source, options, way):
    def interrupted(_: Pipeline) -> Delivery:
        raise KeyboardInterrupt

    with load(tars if source == "one" else Mixture({"a": Source(tars)}), last_batch="drop", **options) as loader:
        count = len(list(loader))
        batches = iter(loader)
        for _ in range(count):
            next(batches)
        if way == "skip":
            loader.skip_batches(0)
        else:
            with monkeypatch.context() as patched:
                patched.setattr(Pipeline, "get", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    next(batches)
        assert list(batches) == []
        assert loader.epoch == 2
        assert len(list(loader)) == count


@pytest.mark.slow
def test_a_pass_begun_again_closes_the_pipeline_of_the_one_before_it(tars):
    with load(tars, processes=1) as loader:
        next(iter(loader))
        (abandoned,) = assemblers()
        for _ in range(20):
            next(iter(loader))
            assert len(assemblers()) == 1
        assert not abandoned.is_alive()
        assert sum(thread.name.startswith("penstock") for thread in started_threads()) < 40, "one pipeline's"
    assert assemblers() == []


def test_the_next_epoch_is_read_ahead_by_the_same_pipeline(tars):
    with load(tars) as loader:
        next(batches := iter(loader))
        running = assemblers()
        ids(batches)
        loader.set_epoch(1)
        next(iter(loader))
        assert assemblers() == running


def test_a_pass_begun_again_is_counted_as_replayed_by_an_audit(tars, tmp_path):
    with load(tars, batch_size=5, world_size=2, audit_dir=tmp_path) as first:
        next(iter(first))  # on one rank alone
        with load(tars, batch_size=5, rank=1, world_size=2, audit_dir=tmp_path) as second:
            for loader in (first, second):
                for _, _ in zip(range(3), loader, strict=False):
                    pass
                ids(loader)
    report = audit(tmp_path)
    assert report.is_exact
    (account,) = report.epochs
    assert (account.reached, account.delivered, account.replayed) == (SAMPLES, SAMPLES, 5 + 2 * 15)


@pytest.mark.slow
@pytest.mark.parametrize("last_batch", ["partial", "pad"])
@pytest.mark.parametrize("batch_size", [1, 30])
def test_a_rank_without_samples_sees_the_fields_that_the_others_see(tars, last_batch, batch_size):
    world_size = 7
    counts, delivered = set(), []
    for rank in range(world_size):
        with load(tars, rank=rank, world_size=world_size, batch_size=batch_size, last_batch=last_batch) as loader:
            batches = list(loader)
        counts.add(len(batches))
        for batch in batches:
            assert batch.keys() - {"__valid__"} == {"txt", "bin", "__key__", "__id__"}
            valid = batch["__valid__"].numpy() if last_batch == "pad" else np.ones(len(batch["__id__"]), bool)
            assert {len(values) for values in batch.values()} == {len(valid)}
            if last_batch == "pad":
                assert len(valid) == batch_size
            delivered += batch["__id__"].numpy()[valid].tolist()
    assert sorted(delivered) == list(range(SAMPLES))
    assert len(counts) == 1


def test_a_rank_of_hardly_any_weight_gets_empty_batches_with_all_fields(tars):
    with load(tars, rank=1, world_size=2, batch_size=4) as loader:
        loader.set_shares([1.0, 1e-6])
        batches = list(loader)
    assert len(batches) == 12
    assert {len(batch["__id__"]) for batch in batches} == {0}
    assert all(batch.keys() == {"txt", "bin", "__key__", "__id__"} for batch in batches)


@pytest.mark.parametrize("sizes", [[1], [3], [1, 1, 1]])
@pytest.mark.parametrize("lanes", [1, 64])
def test_the_smallest_data_sets_give_whole_epochs_again_and_again(tmp_path, sizes, lanes):
    write_tars(tmp_path, sizes)
    with load(str(tmp_path), lanes=lanes, batch_size=2, last_batch="partial", window=1) as loader:
        for epoch in range(30):
            assert loader.epoch == epoch
            assert sorted(ids(loader)) == list(range(sum(sizes)))


@pytest.fixture(scope="module")
def six_epochs(tars: str) -> dict[str, list[list[int]]]:
    """The ids of every batch, where nothing is skipped."""
    found = {}
    for last_batch in ("drop", "partial"):
        with load(tars, global_batch_size=22, batch_size=None, last_batch=last_batch) as loader:
            found[last_batch] = [ids([batch]) for _ in range(6) for batch in loader]
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("at_step", "count", "last_batch"),
    [
        *((at_step, count, "drop") for at_step, count in ((1, 0), (1, 3), (4, 1), (4, 2), (5, 12))),
        *((at_step, count, "partial") for at_step, count in ((1, 3), (4, 2), (5, 1), (2, 13))),
    ],
)
def test_skipping_is_drawing_and_dropping(tars, six_epochs, tmp_path, at_step, count, last_batch):
    expected = six_epochs[last_batch]
    ranks = [
        load(
            tars,
            global_batch_size=22,
            batch_size=None,
            last_batch=last_batch,
            rank=rank,
            world_size=2,
            audit_dir=tmp_path,
        )
        for rank in range(2)
    ]
    found: list[list[int]] = []
    for loader in ranks:
        running = iter(loader)
        mine = [ids([next(running)]) for _ in range(min(at_step, len(loader)))]
        loader.skip_batches(count)
        mine += [ids([batch]) for batch in running]
        while len(mine) < 2 * len(loader):
            mine += [ids([batch]) for batch in loader]
        found = [before + now for before, now in zip(found, mine, strict=True)] if found else mine
        loader.close()
    begun = min(at_step, len(expected) // 6)
    dropped = expected[:begun] + expected[begun + count :]
    assert [sorted(batch) for batch in found] == [sorted(batch) for batch in dropped[: len(found)]]
    report = audit(tmp_path)
    assert report.is_exact
    assert sum(account.skipped for account in report.epochs) == sum(map(len, expected[begun : begun + count]))


def test_a_count_that_is_none_is_refused(tars):
    with load(tars) as loader, pytest.raises(ConfigError, match="count=-1"):
        loader.skip_batches(-1)
