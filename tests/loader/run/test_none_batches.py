"""A batch may be of any type: None, too, which is not the epoch's end."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from tar_dataset import write_tars

from penstock import DistributedDataLoader, Mixture, Source, audit
from penstock.loader.pipeline.delivery_queue import Delivery, DeliveryQueue

SAMPLES = 40
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filtered": {"keep": lambda sample: True},
    "skipping": {"on_error": "skip"},
}


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, [SAMPLES // 2, SAMPLES // 2])
    return str(folder)


def nothing(samples: list[dict[str, Any]]) -> None:
    assert samples


def every_other(samples: list[dict[str, Any]]) -> int | None:
    return len(samples) if int(samples[0]["txt"]) % 8 else None


@pytest.mark.parametrize("kind", KINDS)
def test_none_batches_are_delivered_like_others_epoch_after_epoch(tars: str, tmp_path: Path, kind: str) -> None:
    options = {"batch_size": 4, "collate": nothing, "audit_dir": tmp_path / "audit", **KINDS[kind]}
    with DistributedDataLoader(tars, **options) as loader:
        assert loader.peek() is None
        for epoch in range(2):
            assert list(loader) == [None] * 10
            assert loader.epoch == epoch + 1
        batches = iter(loader)
        assert list(itertools.islice(batches, 3)) == [None] * 3
        state = loader.state_dict()
        assert list(batches) == [None] * 7
        metrics = loader.metrics()
        assert (metrics.batches, metrics.samples) == (30, 3 * SAMPLES)
    assert audit(tmp_path / "audit").is_exact
    with DistributedDataLoader(tars, batch_size=4, collate=nothing, **KINDS[kind]) as resumed:
        resumed.load_state_dict(state)
        assert list(resumed) == [None] * 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_collate_may_return_none_for_some_batches(tars: str, kind: str) -> None:
    with DistributedDataLoader(tars, batch_size=4, shuffle=False, collate=every_other, **KINDS[kind]) as loader:
        assert list(loader) == [None, 4] * 5


@pytest.mark.parametrize("options", [{}, {"keep": lambda sample: True}], ids=["whole", "filtered"])
def test_so_are_those_of_a_mixture(tars: str, options: dict[str, Any]) -> None:
    mixture = Mixture({"a": Source(tars, **options), "b": Source(tars)}, stop="all_exhausted")
    with DistributedDataLoader(mixture, batch_size=8, collate=nothing) as loader:
        assert loader.peek() is None
        for _ in range(2):
            assert list(loader) == [None] * 10


def test_a_queue_counts_batches_of_none_and_no_ends_of_epochs() -> None:
    queue = DeliveryQueue(max_bytes=1000)
    batch = Delivery.end_of(0, 4, 4)
    for item in (Delivery(0, 0, 4, batch.ids, 0, None), batch):
        assert queue.put(item)
    assert queue.count() == (1, 1)
    assert [queue.get().is_end for _ in range(2)] == [False, True]
