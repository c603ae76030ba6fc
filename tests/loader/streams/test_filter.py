"""What users see of a loader that drops samples: the same batches of what is left, and errors that name their cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filtered_loaders import SIZES, TOTAL, make
from row_functions import drop_odd
from streams_ranks import ThreadRanks
from tar_dataset import write_tars

from penstock import DistributedDataLoader, Subset, audit
from penstock.loader import (
    BadChunkWarning,
    ConfigError,
    Keep,
    StateMismatchError,
    open_manifest,
)
from penstock.loader.integrations.torch_loader import TorchLoader
from penstock.loader.order.outputs import pack_integers, unpack_integers
from penstock.loader.order.state import LoaderState
from penstock.tools.state_file import skip_in_state

EVEN = list(range(0, TOTAL, 2))


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, SIZES)
    return str(folder)


def ids_of(batches: Any) -> list[int]:
    return [i for batch in batches for i in batch["__id__"].tolist()]


@pytest.mark.parametrize(
    "options",
    [
        {"raw": "view"},
        {"threads": 3, "memory_limit": "64MiB"},
        {"piece": 1},
        {"shuffle": False},
        {"keep": lambda sample: int(sample["txt"]) % 2 == 0},
        {
            "keep": Keep(["txt"], lambda columns: np.array([int(t) % 2 == 0 for t in columns["txt"]])),
            "columns": ["bin"],
        },
    ],
    ids=["view", "threads", "piece", "in order", "keep", "keep columns"],
)
def test_an_epoch_is_every_survivor_once_with_its_own_fields(tars: str, options: dict[str, Any]) -> None:
    with make(tars, **options) as loader:
        for _ in range(2):
            batches = list(loader)
            assert sorted(ids_of(batches)) == EVEN
            for batch in batches:
                assert set(batch) == {"bin", "__key__", "__id__"} | (set() if "columns" in options else {"txt"})
                for sample_id, data in zip(batch["__id__"].tolist(), batch["bin"], strict=True):
                    assert bytes(data) == np.random.default_rng(sample_id).bytes(40)


@pytest.mark.slow
def test_worker_processes_drop_the_same_samples_in_the_same_order(tars: str) -> None:
    with make(tars) as threads, make(tars, processes=2) as processes:
        assert ids_of(threads) == ids_of(processes)


@pytest.mark.slow
def test_what_a_random_transform_drops_depends_on_seed_epoch_and_sample_alone(tars: str) -> None:
    def drop_some(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any] | None:
        return sample if rng.random() < 0.5 else None

    with make(tars, transform=drop_some, may_drop=True) as one, make(tars, transform=drop_some, may_drop=True) as two:
        first, second = ids_of(one), ids_of(one)
        assert set(first) != set(second)
        two.set_epoch(1)
        assert ids_of(two) == second


@pytest.mark.slow
def test_of_a_subset_and_of_draws_by_weight_the_survivors_are_delivered(tars: str) -> None:
    with (
        make(tars, subset=Subset.share(0, 0.5)) as part,
        DistributedDataLoader(
            tars, batch_size=8, subset=Subset.share(0, 0.5), with_ids=True, last_batch="partial"
        ) as whole,
    ):
        assert sorted(ids_of(part)) == sorted(i for i in ids_of(whole) if i % 2 == 0)
    weights = [1.0] * TOTAL
    with (
        make(tars, weights=weights) as drawn,
        DistributedDataLoader(tars, batch_size=8, weights=weights, with_ids=True, last_batch="partial") as whole,
    ):
        assert sorted(ids_of(drawn)) == sorted(i for i in ids_of(whole) if i % 2 == 0)


def test_batches_are_padded_and_collated_as_ever(tars: str) -> None:
    def collate(samples: list[dict[str, Any]]) -> list[tuple[int, bool]]:
        return [(sample["__id__"], sample["__valid__"]) for sample in samples]

    with make(tars, last_batch="pad", batch_size=32, collate=collate) as loader:
        batches = list(loader)
    assert [len(batch) for batch in batches] == [32] * 5
    assert sorted(i for batch in batches for i, is_valid in batch if is_valid) == EVEN
    with make(tars, last_batch="pad", batch_size=32) as loader:
        last = list(loader)[-1]
    assert torch.equal(last["__valid__"], torch.arange(32) < len(EVEN) % 32)


def test_peek_shows_the_next_pass_and_consumes_nothing(tars: str) -> None:
    with make(tars) as loader:
        seen = loader.peek()["__id__"].tolist()
        batches = iter(loader)
        assert next(batches)["__id__"].tolist() == seen
        state = loader.state_dict()
        after = loader.peek
        assert after()["__id__"].tolist() == seen  # of a pass that would begin anew
        assert loader.state_dict() == state
        rest = ids_of(batches)
        assert sorted(seen + rest) == EVEN


def test_a_loader_that_drops_has_no_length_and_skips_no_batches(tars: str) -> None:
    with make(tars) as loader:
        with pytest.raises(TypeError, match="no number of batches"):
            len(loader)
        with pytest.raises(ConfigError, match="skip_batches"):
            loader.skip_batches(1)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [{}, {"transform": drop_odd, "may_drop": True}])
@pytest.mark.parametrize("epochs", [0, 1])
def test_after_a_skip_of_no_batches_the_next_pass_goes_on_too(tars: str, kept: dict[str, Any], epochs: int) -> None:
    options = {"batch_size": 8, "last_batch": "partial", "with_ids": True, **kept}
    with DistributedDataLoader(tars, **options) as loader, DistributedDataLoader(tars, **options) as other:
        rest = iter(other)
        for _ in range(epochs):
            list(loader)
            list(rest)
            rest = iter(other)
        for _, _, _ in zip(range(2), loader, rest, strict=False):
            pass
        loader.skip_batches(0)
        assert [batch["__id__"].tolist() for batch in loader] == [batch["__id__"].tolist() for batch in rest]


@pytest.mark.slow
def test_shares_by_weight_leave_global_batches_as_they_are(tars: str) -> None:
    def run(loader: DistributedDataLoader[Any], weights: Any = None) -> list[list[int]]:
        batches = iter(loader)
        got = [next(batches)["__id__"].tolist()]
        loader.set_shares(weights)
        return got + [batch["__id__"].tolist() for batch in batches]

    options = {"global_batch_size": 12, "transform": drop_odd, "may_drop": True, "last_batch": "partial"}
    even = ThreadRanks(2, tars, with_ids=True, **options).run(run)
    cut = ThreadRanks(2, tars, with_ids=True, **options).run(lambda loader: run(loader, [3.0, 1.0]))
    assert [len(share) for share in cut[0][1:5]] == [9] * 4
    assert [a + b for a, b in zip(*even, strict=True)] == [a + b for a, b in zip(*cut, strict=True)]


@pytest.mark.slow
def test_padded_batches_have_one_shape_with_uneven_shares_too(tars: str) -> None:
    def run(loader: DistributedDataLoader[Any]) -> list[list[int]]:
        loader.set_shares([1, 1.5, 1, 1.5, 1])
        batches = list(loader)
        assert len({len(batch["__id__"]) for batch in batches}) == 1
        return [batch["__id__"][batch["__valid__"]].tolist() for batch in batches]

    options = {"global_batch_size": 15, "transform": drop_odd, "may_drop": True, "last_batch": "pad"}
    got = ThreadRanks(5, tars, with_ids=True, subset=Subset.take(58), **options).run(run)
    with make(tars, subset=Subset.take(58)) as alone:
        kept = [number for batch in alone for number in batch["__id__"].tolist()]
    assert sorted(number for rank in got for batch in rank for number in batch) == sorted(kept)


@pytest.fixture
def state(tars: str) -> dict[str, Any]:
    with make(tars) as loader:
        next(iter(loader))
        return loader.state_dict()


def test_states_of_loaders_with_and_without_a_filter_are_told_apart(tars: str, state: dict[str, Any]) -> None:
    with DistributedDataLoader(tars, batch_size=8) as plain, make(tars) as loader:
        with pytest.raises(StateMismatchError, match="this one drops"):
            plain.load_state_dict(state)
        next(iter(plain))
        with pytest.raises(StateMismatchError, match="drops nothing"):
            loader.load_state_dict(plain.state_dict())


def test_a_state_is_not_moved_by_arithmetic(state: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="known only by reading"):
        skip_in_state(LoaderState.from_dict(state), samples=5)


def test_frameworks_that_count_batches_are_refused(tars: str) -> None:
    with make(tars) as loader, pytest.raises(ConfigError, match="counts batches"):
        TorchLoader(loader)


def test_a_change_of_the_batch_size_goes_on_with_the_next_survivor(tars: str, tmp_path: Path) -> None:
    with make(tars, audit_dir=tmp_path) as loader:
        batches = iter(loader)
        first = [next(batches), next(batches)]
        loader.set_batch_size(5)
        rest = list(batches)
    assert [len(batch["__id__"]) for batch in rest[:-1]] == [5] * (len(rest) - 1)
    assert sorted(ids_of(first + rest)) == EVEN
    report = audit(tmp_path)
    assert report.is_exact
    assert (report.epochs[0].delivered, report.epochs[0].dropped) == (len(EVEN), TOTAL - len(EVEN))


@pytest.mark.parametrize(
    "damage",
    [
        {"offsets": [0]},
        {"offsets": "no numbers"},
        {"outputs": None},
        {"taken": [1] * 16},
        {"in_tail": 1},
        {"kind": "nothing"},
        {"offsets": [-5] * 16},
        {"outputs": [10**9] * 16, "offsets": [10**9] * 16, "taken": [10**9] * 16},
    ],
)
def test_damaged_cursors_are_refused(tars: str, state: dict[str, Any], damage: dict[str, Any]) -> None:
    old = {name: value for name, value in state.items() if name != "checksum"}
    with make(tars) as loader, pytest.raises(StateMismatchError, match=r"damaged loader state: .*(cursors|kind)"):
        loader.load_state_dict({**old, "stream": {**old["stream"], **damage}})


def test_a_changed_offset_of_a_lane_is_refused(tars: str, state: dict[str, Any]) -> None:
    stream = state["stream"]
    offsets = [stream["offsets"][0] + 1, *stream["offsets"][1:]]  # which is a possible state, that loses a sample
    with make(tars) as loader, pytest.raises(StateMismatchError, match="checksum"):
        loader.load_state_dict({**state, "stream": {**stream, "offsets": offsets}})


def test_cursors_of_many_lanes_take_a_few_bytes_each() -> None:
    rng = np.random.default_rng(0)
    values = (rng.normal(50_000, 200, 4096)).astype(np.int64)
    packed = pack_integers(values)
    assert len(packed) < 3 * 4096
    assert unpack_integers(packed, 4096).tolist() == values.tolist()


@pytest.mark.parametrize("options", [{"keep": Keep(["txt"], lambda columns: np.ones(len(columns["txt"]), bool))}, {}])
def test_what_comes_in_the_place_of_a_bad_chunk_is_audited_as_itself(tmp_path: Path, options: dict[str, Any]) -> None:
    write_tars(tmp_path / "data", [20, 20, 20])
    manifest = open_manifest(tmp_path / "data")
    (tmp_path / "data" / "shard-00001.tar").unlink()
    with make(manifest, **options, max_bad_chunks=1, audit_dir=tmp_path / "audit") as loader:
        with pytest.warns(BadChunkWarning, match="its 20 samples are replaced"):
            delivered = ids_of(loader)
        assert not set(delivered) & set(range(20, 40))
    (account,) = audit(tmp_path / "audit").epochs
    assert (account.missing, account.duplicated) == (20, len(delivered) + account.dropped - 40)
