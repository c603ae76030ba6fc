"""Batches of a loader by their numbers, and the account of a run whose batches are dealt out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from penstock.loader import ConfigError, DistributedDataLoader, Mixture, Source, audit, pack


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    for name, first in (("a", 0), ("b", 1000)):
        rows = [pa.record_batch({"x": np.arange(first, first + 100)})]
        pack(rows, str(folder / name), format="parquet", shard_bytes=400)
    return str(folder)


def batches(loader: DistributedDataLoader, epoch: int) -> list[list[int]]:
    loader.set_epoch(epoch)
    return [batch["x"].tolist() for batch in loader]


@pytest.mark.slow
@pytest.mark.parametrize("is_mixed", [False, True])
def test_sought_batches_are_those_of_a_pass(data: str, is_mixed: bool) -> None:
    mixed = Mixture({"a": Source(f"{data}/a", weight=2), "b": Source(f"{data}/b", weight=1)})
    source = mixed if is_mixed else f"{data}/a"
    with DistributedDataLoader(source, batch_size=8) as plain, DistributedDataLoader(source, batch_size=8) as sought:
        expected = [batches(plain, epoch) for epoch in range(2)]
        for epoch, place in [(0, 3), (1, 2), (0, 4), (0, 4), (1, len(expected[1]) - 1), (1, 0), (0, 0)]:
            sought.seek(epoch, place)
            found = iter(sought)
            assert next(found)["x"].tolist() == expected[epoch][place]
            if place + 1 < len(expected[epoch]):
                assert next(found)["x"].tolist() == expected[epoch][place + 1]


def test_a_batch_that_is_not_there_cannot_be_sought(data: str) -> None:
    with DistributedDataLoader(f"{data}/a", batch_size=8) as loader:
        with pytest.raises(ConfigError, match="epoch 2 has 12 batches"):
            loader.seek(2, 12)
        with pytest.raises(ConfigError):
            loader.seek(-1, 0)
    with (
        DistributedDataLoader(f"{data}/a", batch_size=8, keep=lambda sample: True) as loader,
        pytest.raises(ConfigError, match="seek"),
    ):
        loader.seek(0, 1)


def take(loader: DistributedDataLoader, epoch: int, places: list[int]) -> None:
    for place in places:
        loader.seek(epoch, place)
        next(iter(loader))


@pytest.mark.slow
def test_an_audit_counts_dealt_batches_once_whoever_got_them(data: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "audit")
    loaders = [DistributedDataLoader(f"{data}/a", batch_size=8, audit_dir=folder) for _ in range(3)]
    take(loaders[0], 0, [0, 1, 2, 6, 7])
    take(loaders[1], 0, [3, 4, 5, 8, 9])
    take(loaders[2], 0, [10, 11, 9])  # the last was another's, who died
    take(loaders[2], 1, [0, 1])
    for loader in loaders:
        loader.close()
    first, second = audit(folder).epochs
    assert (first.delivered, first.missing, first.duplicated, first.replayed) == (96, 0, 0, 8)
    assert (second.delivered, second.missing, second.duplicated) == (16, 0, 0)


def test_an_audit_misses_a_dealt_batch_that_nobody_got(data: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "audit")
    with DistributedDataLoader(f"{data}/a", batch_size=8, audit_dir=folder) as loader:
        take(loader, 0, [0, 2])
    [epoch] = audit(folder).epochs
    assert (epoch.delivered, epoch.missing, epoch.duplicated) == (16, 8, 0)
