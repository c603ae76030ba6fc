"""A loader that passes for torch's DataLoader is the loader itself, and what is made of its parts skips for free."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from made_rows import ROWS, write_rows
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from penstock import DistributedDataLoader, Mixture, open_manifest
from penstock.loader import ConfigError, CostExpression, Source, Subset, index_costs, write_costs
from penstock.loader.integrations import TorchLoader

BATCH, STEPS = 10, 12


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder / "rows")
    return str(folder / "rows")


@pytest.fixture
def loader(rows: str) -> Iterator[TorchLoader]:
    with open_loader(rows) as opened:
        yield TorchLoader(opened)


def open_loader(rows: str, **options: Any) -> DistributedDataLoader[dict[str, Any]]:
    return DistributedDataLoader(rows, **{"batch_size": BATCH, "with_ids": True, "rank": 0, "world_size": 1, **options})


def ids(batches: Any) -> list[list[int]]:
    return [batch["__id__"].tolist() for batch in batches]


@pytest.fixture(scope="module")
def unbroken(rows: str) -> list[list[int]]:
    """The ids of each step of two epochs."""
    with open_loader(rows) as loader:
        return ids(loader) + ids(loader)


def skip(loader: TorchLoader, steps: int) -> DataLoader[Any]:
    """The rest of an epoch, as Accelerate and Hugging Face's Trainer make it."""

    class Rest(torch.utils.data.Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            yield from islice(loader.batch_sampler, steps, None)

    return DataLoader(loader.dataset, batch_sampler=Rest(), collate_fn=loader.collate_fn)


def test_it_passes_for_a_torch_loader_that_is_dealt_out_already(loader: TorchLoader) -> None:
    assert isinstance(loader, DataLoader)
    assert isinstance(loader.sampler, DistributedSampler)
    assert (len(loader), loader.batch_size, len(loader.dataset)) == (STEPS, BATCH, ROWS)


def test_one_that_is_taken_for_a_data_set_says_what_to_do(loader: TorchLoader) -> None:
    with pytest.raises(TypeError, match=r"is a DataLoader already.*get_train_dataloader"):
        next(iter(DataLoader(loader)))  # type: ignore[arg-type]
    assert not hasattr(loader, "__getitem__")
    assert len(ids(loader)) == STEPS


def test_a_loop_over_it_is_a_pass_of_the_loader(loader: TorchLoader, unbroken: list[list[int]]) -> None:
    assert next(iter(loader)).keys() == {"x", "y", "__id__"}
    assert ids(loader) + ids(loader) == unbroken
    loader.set_epoch(1)
    loader.sampler.set_epoch(0)  # as Fabric does after each resume
    assert ids(loader) == unbroken[STEPS:]


def test_skipping_batches_reads_none_of_them(rows: str, unbroken: list[list[int]]) -> None:
    with open_loader(rows, lanes=1, window=1) as opened:
        rest = ids(skip(TorchLoader(opened), STEPS - 1))
        assert opened.metrics().samples == BATCH
        assert len(rest) == 1
    with open_loader(rows) as opened:
        loader = TorchLoader(opened)
        loader.set_epoch(1)
        assert ids(skip(loader, 7)) == unbroken[STEPS + 7 :]
        assert opened.epoch == 2
        assert ids(skip(loader, 0)) != unbroken[:STEPS]


def test_skipping_all_batches_leads_to_the_next_epoch(loader: TorchLoader, unbroken: list[list[int]]) -> None:
    assert ids(skip(loader, STEPS)) == []
    assert ids(loader) == unbroken[STEPS:]


def open_tokens(folder: str) -> DistributedDataLoader[dict[str, Any]]:
    """Batches of about 300 tokens, of rows of 0 to 119."""
    manifest = open_manifest(folder)
    expression = CostExpression.parse("tokens=x*120")
    write_costs(manifest, expression, index_costs(manifest, expression))
    return open_loader(folder, batch_size=None, batch_tokens=300)


def open_mixture(folder: str) -> DistributedDataLoader[dict[str, Any]]:
    sources = {"a": Source(folder), "b": Source(folder, subset=Subset.share(0, 0.5))}
    return open_loader(Mixture(sources))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("open_batches", [open_tokens, open_mixture])
@pytest.mark.parametrize("steps", [0, 3, 8])
def test_skipping_finds_the_batch_where_no_arithmetic_does(tmp_path: Path, open_batches: Any, steps: int) -> None:
    write_rows(tmp_path / "rows")
    with open_batches(str(tmp_path / "rows")) as opened:
        loader = TorchLoader(opened)
        whole = ids(loader)
        opened.set_epoch(0)
        rest = skip(loader, steps)
        assert len(loader.dataset) > 0
        assert ids(rest) == whole[steps:]
        opened.set_epoch(0)
        for batch, _ in enumerate(loader, start=1):
            if batch == steps + 1:
                break
        state = loader.state_dict()
        loader.load_state_dict(state)
        assert ids(skip(loader, steps + 1)) == whole[steps + 1 :]
        loader.load_state_dict(state)
        with pytest.raises(ConfigError, match=r"the loaded state is at .*skips"):
            ids(skip(loader, steps + 2))


def test_a_loaded_state_and_a_skip_to_it_are_one_skip(loader: TorchLoader, unbroken: list[list[int]]) -> None:
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    ids(batches)
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert ids(skip(loader, 5)) == unbroken[5:STEPS]
    assert ids(loader) == unbroken[STEPS:]


def test_a_skip_to_another_place_than_the_loaded_state_is_refused(rows: str, loader: TorchLoader) -> None:
    batches = iter(loader)
    for _ in range(6):
        next(batches)
    with open_loader(rows, batch_size=20) as opened:
        resumed = TorchLoader(opened)
        resumed.load_state_dict(loader.state_dict())
        with pytest.raises(
            ConfigError, match=r"sample 60 of epoch 0.*skips 6 batches of 20, to sample 120.*global_batch_size"
        ):
            ids(skip(resumed, 6))
        assert len(ids(resumed)) == 3, "without a skip the rest is delivered"
