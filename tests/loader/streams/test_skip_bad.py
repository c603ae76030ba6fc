"""on_error="skip": a bad sample is dropped, and the next of its lane comes instead, alike on any number of ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_images import DAMAGED, TOTAL, write_images
from row_functions import fail_on_sevens
from streams_ranks import ThreadRanks

from penstock import DistributedDataLoader
from penstock.loader import BadChunkWarning, ConfigError, DatasetError, StateMismatchError, audit, open_manifest

OPTIONS: dict[str, Any] = {"on_error": "skip", "global_batch_size": 12, "with_ids": True, "max_errors": 60}
WHOLE = set(range(TOTAL)) - DAMAGED

pytestmark = pytest.mark.filterwarnings("ignore::penstock.loader.BadSampleWarning")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("images")
    write_images(folder, DAMAGED)
    return str(folder)


def ids_of(batches: Any) -> list[int]:
    return [i for batch in batches for i in batch["__id__"].tolist()]


def global_batches(source: Any, world_size: int, *, epochs: int = 1, **options: Any) -> list[list[int]]:
    def steps(loader: DistributedDataLoader[Any]) -> list[list[int]]:
        return [ids_of([batch]) for _ in range(epochs) for batch in loader]

    of_ranks = ThreadRanks(world_size, source, **{**OPTIONS, "last_batch": "partial", **options}).run(steps)
    for each in of_ranks:
        if isinstance(each, Exception):
            raise each
    return [sorted(itertools.chain(*parts)) for parts in zip(*of_ranks, strict=True)]


@pytest.mark.slow
def test_an_epoch_is_every_whole_sample_once_alike_on_any_number_of_ranks(images: str) -> None:
    alone = global_batches(images, 1, epochs=2)
    assert alone == global_batches(images, 2, epochs=2)
    assert alone == global_batches(images, 3, epochs=2)
    assert sorted(itertools.chain(*alone)) == sorted([*WHOLE, *WHOLE])


def kinds_of(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: (type(values), getattr(values, "dtype", None)) for name, values in batch.items()}


def test_batches_are_as_a_loader_that_stops_makes_them(images: str) -> None:
    with DistributedDataLoader(images, shuffle=False, last_batch="partial", **OPTIONS) as loader:
        batches = list(loader)
    with DistributedDataLoader(images, shuffle=False, batch_size=2, with_ids=True) as plain:
        like = next(iter(plain))
    assert kinds_of(batches[0]) == kinds_of(like)
    assert batches[0]["jpg"].shape[1:] == like["jpg"].shape[1:]
    assert torch.equal(batches[0]["jpg"][:2], like["jpg"])
    assert all(batch["cls"].tolist() == batch["__id__"].tolist() for batch in batches)


def test_a_resume_in_mid_epoch_on_other_ranks_goes_on_with_the_same_batches(images: str) -> None:
    def begin(loader: DistributedDataLoader[Any]) -> Any:
        batches = iter(loader)
        return [ids_of([next(batches)]) for _ in range(4)], loader.state_dict()

    (first, state), (second, _) = ThreadRanks(2, images, **OPTIONS).run(begin)
    begun = [sorted(pair[0] + pair[1]) for pair in zip(first, second, strict=True)]
    with DistributedDataLoader(images, **OPTIONS) as resumed:
        resumed.load_state_dict(state)
        rest = [sorted(ids_of([batch])) for batch in resumed]
    assert begun + rest == global_batches(images, 1, last_batch="drop")


def test_the_audit_counts_bad_samples_apart_from_dropped_ones(images: str, tmp_path: Path) -> None:
    def keep(sample: dict[str, Any]) -> bool:
        return int(sample["cls"]) % 5 != 0

    global_batches(images, 2, keep=keep, transform=fail_on_sevens, audit_dir=tmp_path / "audit")
    report = audit(tmp_path / "audit")
    (account,) = report.epochs
    bad = {i for i in range(TOTAL) if i % 5 and (i % 7 == 0 or i in DAMAGED)}
    assert (account.dropped, account.bad) == (TOTAL // 5, len(bad))
    assert account.delivered == TOTAL - TOTAL // 5 - len(bad)
    assert report.is_exact


@pytest.mark.slow
def test_what_is_avoided_is_skipped_untried(images: str, tmp_path: Path) -> None:
    found = global_batches(images, 2, quarantine=tmp_path / "q")
    assert global_batches(images, 1, avoid=tmp_path / "q", max_errors=1) == found
    raw = global_batches(images, 1, avoid=tmp_path / "q", max_errors=1, decode=None)
    assert sorted(itertools.chain(*raw)) == sorted(WHOLE)


def test_the_samples_of_a_chunk_that_cannot_be_read_are_skipped(tmp_path: Path) -> None:
    write_images(tmp_path / "data", set())
    manifest = open_manifest(str(tmp_path / "data"))
    (tmp_path / "data" / "shard-00002.tar").unlink()  # 27 to 57
    with pytest.warns(BadChunkWarning, match="31 samples are skipped"):
        alone = global_batches(manifest, 1, audit_dir=tmp_path / "audit")
    assert sorted(itertools.chain(*alone)) == [i for i in range(TOTAL) if not 27 <= i <= 57]
    (account,) = audit(tmp_path / "audit").epochs
    assert (account.missing, account.duplicated, account.bad) == (0, 0, 31)
    with pytest.warns(BadChunkWarning):
        assert global_batches(manifest, 2, keep=lambda sample: True) == alone


def test_more_than_allowed_is_an_error_on_every_rank_after_the_same_batch(images: str) -> None:
    def count(loader: DistributedDataLoader[Any]) -> tuple[int, Exception | None]:
        taken = 0
        try:
            for _ in loader:
                taken += 1
        except Exception as exc:  # noqa: BLE001 - judged below
            return taken, exc
        return taken, None

    (one, first), (two, second) = ThreadRanks(2, images, **{**OPTIONS, "max_errors": 2}).run(count)
    assert one == two
    assert "max_errors=2" in f"{first} {second}"
    with (
        DistributedDataLoader(
            images, decode=None, transform=lambda s: s["no"], **{**OPTIONS, "max_errors": 0.99}
        ) as broken,
        pytest.raises(DatasetError, match=r"100 samples in a row.*KeyError: 'no'"),
    ):
        next(iter(broken))


def test_a_transform_that_returns_none_still_needs_may_drop(images: str) -> None:
    with DistributedDataLoader(images, transform=lambda s: None, **OPTIONS) as loader, pytest.raises(ConfigError):
        next(iter(loader))
    with pytest.raises(ConfigError, match="on_error='skip'"):
        DistributedDataLoader(images, cost="tokens", **OPTIONS)


def stop_after(source: str, steps: int, **options: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """The first global batches of a loader that stops at bad samples, which it does not decode; and its state."""
    options = {"global_batch_size": 12, "with_ids": True, "decode": None, **options}
    with DistributedDataLoader(source, **options) as loader:
        batches = iter(loader)
        return [sorted(ids_of([next(batches)])) for _ in range(steps)], loader.state_dict()


def resume(source: str, state: dict[str, Any], world_size: int, **options: Any) -> list[list[int]]:
    def steps(loader: DistributedDataLoader[Any]) -> list[list[int]]:
        loader.load_state_dict(state)
        return [ids_of([batch]) for batch in loader]

    of_ranks = ThreadRanks(world_size, source, **{**OPTIONS, "last_batch": "partial", **options}).run(steps)
    for each in of_ranks:
        if isinstance(each, Exception):
            raise each
    return [sorted(itertools.chain(*parts)) for parts in zip(*of_ranks, strict=True)]


ORDERS: list[dict[str, Any]] = [{"shuffle": False, "lanes": 1}, {}, {"lanes": 8, "window": 2}, {"piece": 4, "seed": 3}]


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("steps", [1, 7])
def test_skipping_can_begin_at_a_resume_inside_an_epoch(images: str, order: dict[str, Any], steps: int) -> None:
    begun, state = stop_after(images, steps, **order)
    rests = [resume(images, state, world_size, **order) for world_size in (1, 2, 3)]
    assert rests[0] == rests[1] == rests[2]
    rest = sorted(itertools.chain(*rests[0]))
    assert rest == sorted(WHOLE - set(itertools.chain(*begun)))
    if order.get("lanes") == 1:
        assert list(itertools.chain(*rests[0])) == [i for i in range(12 * steps, TOTAL) if i in WHOLE]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("last_batch", ["drop", "partial"])
def test_where_no_sample_is_bad_a_loader_that_begins_to_skip_goes_on_as_it_was(
    images: str, order: dict[str, Any], last_batch: Any
) -> None:
    begun, state = stop_after(images, 5, **order)
    with DistributedDataLoader(
        images, global_batch_size=12, with_ids=True, decode=None, last_batch=last_batch, **order
    ) as plain:
        whole = [sorted(ids_of([batch])) for batch in plain]
    assert begun + resume(images, state, 2, decode=None, last_batch=last_batch, **order) == whole


@pytest.mark.slow
def test_a_loader_that_began_to_skip_is_resumed_and_audited_as_any(images: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"audit_dir": tmp_path / "audit", "last_batch": "partial"}
    begun, state = stop_after(images, 3, **options)

    def go_on(loader: DistributedDataLoader[Any]) -> tuple[list[list[int]], dict[str, Any]]:
        loader.load_state_dict(state)
        assert loader.state_dict()["consumed"] == 36
        batches = iter(loader)
        return [ids_of([next(batches)]) for _ in range(4)], loader.state_dict()

    (one, later), (two, _) = ThreadRanks(2, images, **OPTIONS, **options).run(go_on)
    then = [sorted(parts[0] + parts[1]) for parts in zip(one, two, strict=True)]
    rest = resume(images, later, 3, **options)
    assert then + rest == resume(images, state, 1)
    report = audit(tmp_path / "audit")
    (account,) = report.epochs
    delivered = set(itertools.chain(*begun, *then, *rest))
    assert report.is_exact
    assert (account.missing, account.duplicated, account.delivered) == (0, 0, len(delivered))
    assert account.bad == len(DAMAGED - delivered)


def test_other_drops_cannot_begin_inside_an_epoch_and_skipping_ends_with_it(images: str) -> None:
    _, state = stop_after(images, 2)
    with (
        DistributedDataLoader(images, keep=lambda sample: True, **OPTIONS) as loader,
        pytest.raises(StateMismatchError, match="on_error='skip' alone can begin here"),
    ):
        loader.load_state_dict(state)
    with DistributedDataLoader(images, **OPTIONS) as loader:
        loader.load_state_dict(state)
        next(iter(loader))
        skipping = loader.state_dict()
    with (
        DistributedDataLoader(images, batch_size=12) as loader,
        pytest.raises(StateMismatchError, match="on_error='skip' with max_errors=0 drops nothing from here on"),
    ):
        loader.load_state_dict(skipping)


@pytest.mark.parametrize("none", [0, 0.0])
@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_a_limit_of_zero_tolerates_no_bad_sample(images: str, tmp_path: Path, on_error: Any, none: float) -> None:
    options = {**OPTIONS, "on_error": on_error, "max_errors": none}
    with (
        DistributedDataLoader(images, **options) as loader,
        pytest.raises(DatasetError, match=r"of epoch 0 (is|are) bad on this rank, more than max_errors=0"),
    ):
        list(loader)
    write_images(tmp_path, set())
    with DistributedDataLoader(tmp_path, last_batch="partial", **options) as loader:
        assert sorted(ids_of(loader)) == list(range(TOTAL))
    with DistributedDataLoader(images, batch_size=4, on_error="stop", max_errors=none) as loader:
        assert loader.bad_samples == []
