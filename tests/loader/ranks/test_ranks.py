"""Which rank a loader takes itself for, and that it refuses to guess."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from tar_dataset import write_tars
from torch.utils.data import DataLoader, IterableDataset

from penstock import DistributedDataLoader
from penstock.loader import ConfigError


@pytest.fixture
def tars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    write_tars(tmp_path, [30, 30])
    return str(tmp_path)


@pytest.fixture
def world_of_one() -> Iterator[Any]:
    """Initialises torch.distributed as rank 0 of 1 when it is called."""
    yield lambda: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_world_size_without_a_rank_is_refused_instead_of_making_every_process_rank_0(tars, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")  # as Lightning's launcher sets it
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=2.*without RANK.*rank= and world_size=.*torchrun.*Lightning"):
        DistributedDataLoader(tars, batch_size=4)
    with DistributedDataLoader(tars, batch_size=4, rank=1, world_size=2) as loader:
        next(iter(loader))
    monkeypatch.setenv("WORLD_SIZE", "1")
    with DistributedDataLoader(tars, batch_size=4) as loader:
        next(iter(loader))


def test_a_world_that_torch_initialises_with_another_rank_later_is_refused_at_the_first_batch(
    tars, monkeypatch, world_of_one
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with (
        DistributedDataLoader(tars, batch_size=4) as loader,
        DistributedDataLoader(tars, batch_size=4, rank=1, world_size=2) as given,
    ):
        next(iter(loader))
        world_of_one()
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"rank=1, world_size=2.*rank 0 of 1.*make the loader after"):
                next(iter(loader))
        next(iter(given))  # what is given is meant


def test_a_world_that_torch_initialises_later_with_the_same_rank_is_fine(tars, world_of_one):
    with DistributedDataLoader(tars, batch_size=4) as loader:
        world_of_one()
        next(iter(loader))


@pytest.mark.parametrize(
    ("rank", "world_size", "name"), [(1.0, 2, "rank"), (True, 2, "rank"), ("1", 2, "rank"), (1, 2.0, "world_size")]
)
def test_a_rank_that_is_no_whole_number_is_refused(tars, rank, world_size, name):
    with pytest.raises(ConfigError, match=rf"{name}=.*must be a whole number"):
        DistributedDataLoader(tars, batch_size=4, rank=rank, world_size=world_size)


def test_a_rank_may_be_a_whole_number_of_numpy(tars):
    with DistributedDataLoader(tars, batch_size=4, rank=np.int64(1), world_size=np.int64(2)) as loader:
        assert next(iter(loader))["txt"]
        assert (type(loader.rank), type(loader.world_size)) == (int, int)


class Wrapped(IterableDataset):
    """A loader inside a torch DataLoader: one that came along, or one that the worker makes."""

    def __init__(self, source: str, loader: DistributedDataLoader | None) -> None:
        self.source = source
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        if self.loader is not None:
            yield from self.loader
            return
        with DistributedDataLoader(self.source, batch_size=4) as loader:
            yield from loader


@pytest.mark.slow
@pytest.mark.parametrize("made", ["before", "inside"])
def test_a_worker_process_of_a_torch_loader_is_refused_instead_of_delivering_everything_again(tars, made):
    with DistributedDataLoader(tars, batch_size=4) as loader:
        wrapped = Wrapped(tars, loader if made == "before" else None)
        with pytest.raises(ConfigError, match=r"worker process .* num_workers=0.*processes="):
            list(DataLoader(wrapped, batch_size=None, num_workers=1, multiprocessing_context="fork"))
        assert len(list(DataLoader(wrapped, batch_size=None))) == 15
