"""Accelerate around the loader: nothing is sharded again, no gradient is left over, checkpoints hold the position."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from made_rows import write_rows

from penstock import DistributedDataLoader

pytestmark = pytest.mark.slow
BATCH, STEPS = 10, 12


@pytest.fixture
def accelerator() -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate", reason="install penstock[integrations]")
    yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=5)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.fixture
def loader(tmp_path: Path) -> Iterator[DistributedDataLoader[dict[str, Any]]]:
    write_rows(tmp_path / "rows")
    options: dict[str, Any] = {"batch_size": BATCH, "with_ids": True, "rank": 0, "world_size": 1}
    with DistributedDataLoader(str(tmp_path / "rows"), **options) as opened:
        yield opened


def ids(batches: Any) -> list[list[int]]:
    return [batch["__id__"].tolist() for batch in batches]


def prepare(accelerator: Any, loader: DistributedDataLoader[Any]) -> Any:
    from penstock.loader.integrations import AccelerateLoader

    return accelerator.prepare(AccelerateLoader(loader, accelerator))


def test_preparing_changes_no_batch(accelerator: Any, loader: DistributedDataLoader[Any]) -> None:
    expected = ids(loader)
    prepared = prepare(accelerator, loader)
    loader.set_epoch(0)
    assert ids(prepared) == expected
    assert prepare(accelerator, loader).dataset is not None
    assert len(prepared) == STEPS


def test_a_prepared_torch_view_is_not_sharded_either(accelerator: Any, loader: DistributedDataLoader[Any]) -> None:
    from penstock.loader.integrations import TorchLoader

    view = TorchLoader(loader)
    assert accelerator.prepare(view) is view


def steps_taken(accelerator: Any, *passes: Any) -> list[int]:
    """After which batches the optimizer took a step."""
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    taken, count = [], 0
    for batches in passes:
        for batch in batches:
            count += 1
            with accelerator.accumulate(model):
                accelerator.backward(model(batch["x"].float()[:, None]).mean())
                if accelerator.sync_gradients:
                    taken.append(count)
    return taken


def test_what_is_left_over_at_an_epochs_end_makes_a_step(accelerator: Any, loader: DistributedDataLoader[Any]) -> None:
    prepared = prepare(accelerator, loader)
    assert steps_taken(accelerator, prepared, prepared) == [5, 10, 12, 17, 22, 24]
    rest = accelerator.skip_first_batches(prepared, 5)
    assert steps_taken(accelerator, rest, prepared) == [5, 7, 12, 17, 19]
    assert steps_taken(accelerator, loader, loader) == [5, 10, 15, 20], "not known to Accelerate, it mixes epochs"


def test_a_loop_left_early_leaves_no_trace_in_accelerates_state(
    accelerator: Any, loader: DistributedDataLoader[Any]
) -> None:
    prepared = prepare(accelerator, loader)
    for _ in prepared:
        break
    assert not accelerator.gradient_state.in_dataloader
    for _ in accelerator.skip_first_batches(prepared, 5):
        break
    assert steps_taken(accelerator, prepared, prepared) == [5, 10, 12, 17, 22, 24]


def test_a_saved_state_and_a_skip_to_it_skip_once(
    accelerator: Any, loader: DistributedDataLoader[Any], tmp_path: Path
) -> None:
    prepared = prepare(accelerator, loader)
    unbroken = ids(prepared) + ids(prepared)
    loader.set_epoch(1)
    batches = iter(prepared)
    for _ in range(4):
        next(batches)
    accelerator.save_state(str(tmp_path / "saved"))
    ids(batches)

    accelerator.load_state(str(tmp_path / "saved"))
    assert ids(prepared) == unbroken[STEPS + 4 :]
    accelerator.load_state(str(tmp_path / "saved"))
    assert ids(accelerator.skip_first_batches(prepared, 4)) == unbroken[STEPS + 4 :]
    loader.set_epoch(1)
    assert ids(accelerator.skip_first_batches(prepared, 4)) == unbroken[STEPS + 4 :], "by its count alone"


def test_a_loader_registered_for_checkpointing_alone_continues(
    accelerator: Any, loader: DistributedDataLoader[Any], tmp_path: Path
) -> None:
    accelerator.register_for_checkpointing(loader)
    unbroken = ids(loader)
    loader.set_epoch(0)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    accelerator.save_state(str(tmp_path / "saved"))
    ids(batches)
    accelerator.load_state(str(tmp_path / "saved"))
    assert ids(loader) == unbroken[4:]
