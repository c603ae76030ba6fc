"""What a pass over a loader is: one contract for the loader of sharded data sets and the one of arrays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from small_world import FP32, Slope
from torch import nn

from penstock import DistributedDataLoader
from penstock.loader import ConfigError
from penstock.trainer import ArrayLoader, Evaluation, Mesh, ParallelConfig, TrainerConfigError, World
from penstock.trainer.evaluation.evaluate import evaluate
from penstock.trainer.parallel.model import ParallelModel
from penstock.trainer.parallel.passes import PlainPasses

ROWS = 47  # four batches of 10 and one of 7
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    for first in range(0, ROWS, 20):
        table = pa.table({"n": range(first, min(ROWS, first + 20))})
        pq.write_table(table, folder / f"{first:02d}.parquet", row_group_size=5)
    return folder


@pytest.fixture(params=["shards", "arrays"])
def make(
    request: pytest.FixtureRequest, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """Makes a loader of the rows 0 to 46 in batches of ten; they are closed after the test."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    with ExitStack() as opened:

        def make_one(**options: Any) -> Any:
            options = {"batch_size": 10, "last_batch": "partial", "rank": 0, "world_size": 1, **options}
            if request.param == "arrays":
                return ArrayLoader({"n": torch.arange(ROWS)}, **options)
            return opened.enter_context(DistributedDataLoader(str(shards), **options))

        yield make_one


def rows(batches: Iterable[dict[str, torch.Tensor]]) -> list[int]:
    return [row for batch in batches for row in batch["n"].tolist()]


def leave_after(loader: Any, batches: int) -> list[int]:
    """The rows of a pass that is left after some batches."""
    return rows(batch for _, batch in zip(range(batches), loader, strict=False))


_undisturbed: dict[str, list[list[int]]] = {}


@pytest.fixture
def epochs(make: Make, request: pytest.FixtureRequest) -> list[list[int]]:
    """The rows of the first three epochs in order, from passes that nothing disturbs; read once for each kind."""
    kind = request.node.callspec.params["make"]
    if kind not in _undisturbed:
        loader = make()
        _undisturbed[kind] = [rows(loader) for _ in range(3)]
    return _undisturbed[kind]


def test_each_pass_is_the_next_epoch_in_its_own_order(epochs: list[list[int]]) -> None:
    assert [sorted(epoch) for epoch in epochs] == [list(range(ROWS))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_looking_at_one_batch_loses_nothing(make: Make, epochs: list[list[int]]) -> None:
    loader = make()
    assert rows([next(iter(loader))]) == epochs[0][:10]
    assert rows([next(iter(loader))]) == epochs[0][:10]
    assert rows(loader) == epochs[0]
    assert rows(loader) == epochs[1]


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_a_pass_left_early_and_begun_again_is_the_same_epoch_anew(
    make: Make, epochs: list[list[int]], batches: int
) -> None:
    loader = make()
    assert rows(loader) == epochs[0]
    for _ in range(3):
        assert leave_after(loader, batches) == epochs[1][: 10 * batches]
        assert loader.epoch == 1
    assert rows(loader) == epochs[1]
    assert rows(loader) == epochs[2]


def test_an_exception_in_the_loop_is_a_pass_left_early(make: Make, epochs: list[list[int]]) -> None:
    loader = make()

    def fail() -> None:
        for _ in loader:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert rows(loader) == epochs[0]


def test_an_iterator_that_is_kept_continues(make: Make, epochs: list[list[int]]) -> None:
    loader = make()
    batches = iter(loader)
    seen = rows([next(batches), next(batches)])
    seen += rows(batches)
    assert seen == epochs[0]
    assert list(batches) == []
    assert rows(loader) == epochs[1]


def test_an_epoch_has_ended_when_its_last_batch_was_handed_out(make: Make, epochs: list[list[int]]) -> None:
    loader = make()
    assert leave_after(loader, len(loader)) == epochs[0]
    assert rows(loader) == epochs[1]


@pytest.mark.parametrize("batches", [0, 1, 3, 4, 5])
def test_the_first_pass_after_loading_a_state_continues_and_the_next_one_does_not(
    make: Make, epochs: list[list[int]], batches: int
) -> None:
    trained = make()
    leave_after(trained, batches)
    state = json.loads(json.dumps(trained.state_dict()))
    resumed = make()
    resumed.load_state_dict(state)
    assert rows(resumed) == (epochs[0][10 * batches :] or epochs[1])

    left = make()
    left.load_state_dict(state)
    leave_after(left, 1)
    assert rows(left) == epochs[0 if batches < 4 else 1]  # the fifth batch is the last


def test_a_pass_that_hands_out_nothing_uses_up_no_state(make: Make, epochs: list[list[int]]) -> None:
    trained, resumed = make(), make()
    leave_after(trained, 2)
    resumed.load_state_dict(trained.state_dict())
    iter(resumed)
    assert resumed.state_dict() == trained.state_dict()
    assert rows(resumed) == epochs[0][20:]


def test_a_state_from_an_epochs_end_continues_with_the_next_epoch(make: Make, epochs: list[list[int]]) -> None:
    trained = make()
    for _ in trained:
        at_last_batch = trained.state_dict()
    for state in (at_last_batch, trained.state_dict()):
        resumed = make()
        resumed.load_state_dict(state)
        assert resumed.epoch == 1
        assert rows(resumed) == epochs[1]


def test_a_state_is_the_position_of_the_newest_iterators_last_batch(make: Make, epochs: list[list[int]]) -> None:
    loader, resumed = make(), make()
    leave_after(loader, 3)
    batches = iter(loader)
    next(batches)
    resumed.load_state_dict(loader.state_dict())
    assert rows(resumed) == epochs[0][10:] == rows(batches)


def test_an_iterator_is_refused_once_a_newer_pass_has_begun(make: Make, epochs: list[list[int]]) -> None:
    loader = make()
    older = iter(loader)
    next(older)
    newer = iter(loader)
    seen = rows([next(newer)])
    with pytest.raises((ConfigError, TrainerConfigError), match=r"another pass over this loader has begun.*keep"):
        next(older)
    assert seen + rows(newer) == epochs[0]


@pytest.mark.slow
def test_setting_the_epoch_goes_to_its_beginning(make: Make, epochs: list[list[int]]) -> None:
    loader = make()
    for epoch in (0, 1, 1, 0, 2):
        loader.set_epoch(epoch)
        assert loader.epoch == epoch
        assert rows(loader) == epochs[epoch]
        loader.set_epoch(epoch)
        leave_after(loader, 2)
        loader.set_epoch(epoch)
        assert rows(loader) == epochs[epoch]


def test_setting_the_epoch_that_a_loaded_state_is_in_keeps_the_state(make: Make, epochs: list[list[int]]) -> None:
    trained, resumed = make(), make()
    rows(trained)
    leave_after(trained, 2)
    resumed.load_state_dict(trained.state_dict())
    for epoch in (1, 2):
        resumed.set_epoch(epoch)
        assert rows(resumed) == (epochs[1][20:] if epoch == 1 else epochs[2])
    resumed.load_state_dict(trained.state_dict())
    leave_after(resumed, 1)
    resumed.set_epoch(1)  # the state is not what was just loaded any more
    assert rows(resumed) == epochs[1]
    resumed.load_state_dict(trained.state_dict())
    resumed.set_epoch(2)
    assert rows(resumed) == epochs[2]


@pytest.mark.parametrize("epoch", [0, 1])
def test_setting_the_epoch_in_mid_pass_ends_the_pass(make: Make, epochs: list[list[int]], epoch: int) -> None:
    loader = make()
    batches = iter(loader)
    next(batches)
    loader.set_epoch(epoch)
    assert list(batches) == []
    assert rows(loader) == epochs[epoch]


def test_loading_a_state_in_mid_pass_moves_the_pass_within_its_epoch(make: Make, epochs: list[list[int]]) -> None:
    loader = make()
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    next(batches)
    loader.load_state_dict(state)
    assert rows(batches) == epochs[0][10:]
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(state)
    assert list(batches) == [], "went on in another epoch"
    assert rows(loader) == epochs[0][10:]


def test_a_world_size_without_a_rank_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises((ConfigError, TrainerConfigError), match=r"WORLD_SIZE=2.*without RANK.*torchrun"):
        make(rank=None, world_size=None)


def test_an_evaluation_that_was_broken_off_sees_every_row_the_next_time(make: Make, world: World) -> None:
    asked: list[bool] = []

    def stop() -> bool:
        asked.append(True)
        return len(asked) == 3

    def mean_row(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"n": (batch["n"].sum(), len(batch["n"]))}

    evaluation = Evaluation(batches=make(), metrics=mean_row)
    parallel = ParallelModel(Slope(), ParallelConfig(), FP32, Mesh(world))
    passes = PlainPasses(parallel, FP32, lambda name: nullcontext())
    how: dict[str, Any] = {"passes": passes, "phase": lambda name: nullcontext()}
    assert evaluate(parallel, evaluation, stop_requested=stop, **how) is None
    for _ in range(2):
        assert evaluate(parallel, evaluation, **how) == {"n": (ROWS - 1) / 2}


@pytest.mark.parametrize(("begun", "count"), [(0, 3), (2, 0), (2, 3), (5, 1), (3, 9)])
def test_skipped_batches_are_passed_over_through_the_ends_of_epochs(
    make: Make, epochs: list[list[int]], begun: int, count: int
) -> None:
    loader, later = make(), make()
    order = [row for epoch in epochs for row in epoch]
    batches = [
        order[47 * epoch + first : 47 * epoch + min(first + 10, 47)] for epoch in range(3) for first in range(0, 47, 10)
    ]
    running = iter(loader)
    seen = rows(next(running) for _ in range(begun))
    loader.skip_batches(count)
    later.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    for one in (loader, later):
        found = seen + rows(running if one is loader and begun and begun + count < 5 else one)
        ended = begun + count - (begun + count) % 5 + 5
        assert found == [row for batch in batches[:begun] + batches[begun + count : ended] for row in batch]
        assert one.epoch == ended // 5
