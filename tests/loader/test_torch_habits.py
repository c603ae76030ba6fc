"""What users of torch's DataLoader try is there, or answered with what to use here."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tar_dataset import write_tars
from torch.utils.data import DataLoader

from penstock import DistributedDataLoader, Mixture, Packing, Source
from penstock.loader import ConfigError, StateMismatchError
from penstock.loader.integrations import TorchLoader


@pytest.fixture
def tars(tmp_path: Path) -> str:
    write_tars(tmp_path, [30, 31])
    return str(tmp_path)


def load(source: str, **options: Any) -> DistributedDataLoader:
    return DistributedDataLoader(source, **{"rank": 0, "world_size": 1, **options})


@pytest.mark.parametrize(
    ("options", "batch_size", "global_batch_size"),
    [
        ({"batch_size": 4}, 4, 4),
        ({"batch_size": 4, "rank": 2, "world_size": 3}, 4, 12),
        ({"global_batch_size": 12, "rank": 1, "world_size": 3}, 4, 12),
    ],
)
def test_sizes_and_ranks_can_be_read(tars, options, batch_size, global_batch_size):
    with load(tars, **options) as loader:
        assert (loader.batch_size, loader.global_batch_size) == (batch_size, global_batch_size)
        assert (loader.rank, loader.world_size) == (options.get("rank", 0), options.get("world_size", 1))


@pytest.mark.parametrize("make", [np.array, np.asarray, np.sum])
def test_numpy_is_told_that_a_loader_is_no_array(tars: str, make: Callable[[Any], Any]) -> None:
    with load(tars, batch_size=4) as loader:
        with pytest.raises(TypeError, match=r"is no array: .*for batch in loader.*list\(loader\)"):
            make(loader)
        assert loader.metrics().batches == 0  # nothing was read for it
        assert len(list(loader)) == len(loader)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("hold", [lambda loader: loader, lambda loader: {"loader": [loader]}, TorchLoader])
def test_a_loader_that_is_copied_or_pickled_says_what_to_do(tars, duplicate, hold):
    with load(tars, batch_size=4) as loader:
        held = hold(loader)
        if duplicate is copy.copy and held is not loader:
            return  # copies what holds it alone
        with pytest.raises(TypeError, match=r"neither copied nor pickled.*train_dataloader.*state_dict\(\)"):
            duplicate(held)
        assert len(list(loader)) == len(loader)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"keep": bool},
        {"transform": lambda sample: None, "may_drop": True},
        {
            "packing": Packing(seq_len=8, field="txt", tokenizer=lambda texts: [[1]] * len(texts)),
            "decode": {"txt": str},
        },
        {"on_error": "skip"},
    ],
    ids=["plain", "keep", "may_drop", "packing", "skip"],
)
def test_a_loader_is_true_whether_its_number_of_batches_is_known_or_not(tars: str, options: dict[str, Any]) -> None:
    with load(tars, batch_size=4, **options) as loader:
        assert loader
        assert bool(loader.dataset)
    endless = Mixture({"a": Source(tars), "b": Source(tars)}, stop="never")
    with load(endless, batch_size=4) as loader:
        assert loader
    with load(Mixture(endless.sources), batch_size=4) as loader:
        assert TorchLoader(loader)


def test_the_batch_size_follows_the_shares(tars):
    with load(tars, batch_size=4, rank=0, world_size=2) as loader:
        loader.set_shares([3, 1])
        assert (loader.batch_size, loader.global_batch_size) == (6, 8)
        assert len(next(iter(loader))["txt"]) == 6


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        ({"workers": 3}, r"workers=3.*threads=.*processes="),
        ({"num_workers": 4}, r"num_workers=4.*threads=.*processes="),
        ({"pin_memory": True}, r"pin_memory=True.*device='cuda'"),
        ({"drop_last": False}, r"drop_last=False.*last_batch='partial'"),
        ({"collate_fn": list}, r"collate_fn=.*collate="),
        ({"sampler": None}, r"sampler=None.*shuffle=.*seed="),
        ({"generator": None}, r"generator=None.*seed="),
        ({"worker_init_fn": None}, r"worker_init_fn=None.*rng"),
        ({"prefetch_factor": 2, "persistent_workers": True}, r"prefetch_factor=2.*memory_limit=.*persistent_workers"),
        ({"num_replicas": 2}, r"num_replicas=2.*world_size="),
        ({"remote": "s3://a", "local": "/tmp"}, r"remote='s3://a'.*source=.*local=.*cache_dir="),
        ({"shuffle_seed": 9176, "num_canonical_nodes": 2}, r"shuffle_seed=9176.*seed=.*num_canonical_nodes=2.*lanes="),
        ({"shuffle": 5000}, r"shuffle=5000.*True or False.*window="),
    ],
)
def test_arguments_of_other_loaders_are_answered_with_what_to_use_here(tars, given, cure):
    with pytest.raises(ConfigError, match=cure):
        load(tars, batch_size=4, **given)


@pytest.mark.parametrize("name", sorted({*inspect.signature(DataLoader).parameters} - {"batch_size", "shuffle"}))
def test_every_argument_of_a_torch_loader_is_answered(tars: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=1: there is no such argument; use "):
        load(tars, batch_size=4, **{name: 1})


def test_an_argument_that_nobody_has_is_pythons_own_error(tars):
    with pytest.raises(TypeError, match="colour"):
        load(tars, batch_size=4, colour="red")
    assert "threads" in inspect.signature(DistributedDataLoader).parameters


@pytest.mark.parametrize(
    "use",
    [
        lambda loader: next(iter(DataLoader(loader))),
        lambda loader: next(iter(DataLoader(loader, batch_size=None))),
        lambda loader: next(iter(DataLoader(loader, batch_size=2, shuffle=True))),
        pytest.param(lambda loader: next(iter(DataLoader(loader, num_workers=1))), marks=pytest.mark.slow),
        lambda loader: torch.utils.data.random_split(loader, [0.5, 0.5])[0][0],
        lambda loader: loader[0],
    ],
    ids=["batches", "single", "shuffled", "in workers", "split", "by number"],
)
def test_a_loader_that_is_taken_for_a_data_set_says_what_to_do(tars, use):
    with load(tars, batch_size=4) as loader:
        cure = r"(?s)for batch in loader.*TorchLoader\(loader\).*get_train_dataloader.*subset=.*dataset\[i\]"
        with pytest.raises(TypeError, match=cure):
            use(loader)
        assert len(list(loader)) == 15, "it goes on as if nothing had been tried"


def test_asking_for_items_finds_none(tars):
    with load(tars, batch_size=4) as loader:
        assert not hasattr(loader, "__getitem__"), "frameworks that look would prefer it over __iter__"
        assert not hasattr(DistributedDataLoader, "__getitem__")
        assert dict(inspect.getmembers(loader))["rank"] == 0


def test_a_state_that_is_empty_or_of_something_else_is_refused_with_what_is_missing(tars):
    with load(tars, batch_size=4) as loader:
        state = loader.state_dict()
        with pytest.raises(StateMismatchError, match=r"missing: fingerprint, .*consumed, version; it is empty"):
            loader.load_state_dict({})
        with pytest.raises(StateMismatchError, match=r"missing: .*it has: model, loader"):
            loader.load_state_dict({"model": {}, "loader": state})
        with pytest.raises(StateMismatchError, match=r"missing: seed;"):
            loader.load_state_dict({name: value for name, value in state.items() if name != "seed"})
        with pytest.raises(StateMismatchError, match=r"version 44"):
            loader.load_state_dict({**state, "version": 44})
        with pytest.raises(StateMismatchError, match=r"NoneType"):
            loader.load_state_dict(None)


def test_a_loader_can_be_annotated_with_its_batches():
    assert get_args(DistributedDataLoader[tuple[int, str]]) == (tuple[int, str],)


TYPES = Path(__file__).parents[2] / ".types"  # penstock as type checkers see it
TYPED = """
from typing import Any
from penstock import DistributedDataLoader

def pairs(samples: list[dict[str, Any]]) -> tuple[int, str]:
    return 0, ""

plain = DistributedDataLoader("x", batch_size=1)
collated = DistributedDataLoader("x", batch_size=1, collate=pairs)
given: DistributedDataLoader[tuple[int, str]] = collated
with collated as opened:
    reveal_type(opened)
for one in plain:
    reveal_type(one)
for other in collated:
    reveal_type(other)
reveal_type(next(iter(collated)))
DistributedDataLoader("x", batch_sise=1)
plain[0]
"""


@pytest.mark.slow
def test_type_checkers_know_the_batches_and_the_arguments(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "typed.py").write_text(TYPED)
    # What penstock is made with is nothing to look at here, and takes ten times as long as penstock.
    (tmp_path / "mypy.ini").write_text("[mypy]\nfollow_imports = skip\n[mypy-penstock.*]\nfollow_imports = silent\n")
    command: Sequence[str] = [sys.executable, "-m", "mypy", "--config-file=mypy.ini", "typed.py"]
    environment = os.environ | {"MYPYPATH": str(TYPES)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True, timeout=300
    )
    told = [line for line in done.stdout.splitlines() if "Revealed" in line or ": error:" in line]
    for line, part in zip(told, REVEALED, strict=True):
        assert part in line


REVEALED = (
    "DistributedDataLoader[tuple[int, str]]",
    '"dict[str, Any]"',
    '"tuple[int, str]"',
    '"tuple[int, str]"',
    'Unexpected keyword argument "batch_sise"',
    "is not indexable",
)
