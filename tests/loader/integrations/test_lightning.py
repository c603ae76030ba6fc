"""Lightning's own Trainer on the loader: epochs, early ends, validation, exact resumes from whatever was saved."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any

import pytest
from made_rows import ROWS, once_an_epoch, write_rows

from penstock import Mixture, open_manifest
from penstock.loader import ConfigError, CostExpression, Source, StateMismatchError, index_costs, write_costs

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings are Lightning's own

BATCH, STEPS = 10, 12


@pytest.fixture(scope="module")
def lightning() -> Any:
    """``lightning_cases``, which imports Lightning."""
    pytest.importorskip("lightning", reason="install penstock[integrations]")
    return importlib.import_module("lightning_cases")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path / "rows")
    return tmp_path


@pytest.fixture(scope="module")
def unbroken(lightning: Any, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The ids of each step of three epochs by the loader alone."""
    folder = tmp_path_factory.mktemp("unbroken")
    write_rows(folder / "rows")
    with lightning.Module(folder).open() as loader:
        return [batch["__id__"].tolist() for _ in range(3) for batch in loader]


AT_EPOCHS_END = {"every_n_train_steps": None, "save_on_train_epoch_end": True}
SAVED = {
    "in mid-epoch": (17, {}),
    "at an epoch's last batch": (26, {"saving": {"every_n_train_steps": STEPS}}),
    "at an epoch's end": (26, {"saving": AT_EPOCHS_END}),
    "after a validation in mid-epoch": (
        21,
        {"saving": {"every_n_train_steps": None}, "val_check_interval": 7, "limit_val_batches": 2},
    ),
    "after a validation at an epoch's end": (26, {"saving": {"every_n_train_steps": None}, "limit_val_batches": 2}),
    "in mid-epoch, of a run of steps": (17, {"max_steps": 3 * STEPS, "max_epochs": None}),
    "at an epoch's end, of a run of steps": (26, {"max_steps": 3 * STEPS, "max_epochs": None, "saving": AT_EPOCHS_END}),
    "at an epoch's end, of a run of steps and epochs": (26, {"max_steps": 3 * STEPS, "saving": AT_EPOCHS_END}),
    "while a batch was trained on": (17, {"saving": {"every_n_train_steps": None, "save_on_exception": True}}),
}


@pytest.mark.parametrize("case", SAVED)
def test_a_resume_trains_on_what_an_unbroken_run_does(
    lightning: Any, folder: Path, unbroken: list[list[int]], case: str
) -> None:
    kill_at, options = SAVED[case]
    assert lightning.killed_and_resumed(folder, kill_at=kill_at, **options) == unbroken


@pytest.mark.parametrize("saving", [{"every_n_train_steps": 1}, AT_EPOCHS_END])
@pytest.mark.parametrize("limit", [1, 4, 1.0])
@pytest.mark.parametrize("ends", [{"max_epochs": 3}, {"max_steps": 12, "max_epochs": None}])
def test_a_run_that_is_resumed_again_and_again_trains_on_what_an_unbroken_run_does(
    lightning: Any, folder: Path, saving: dict[str, Any], limit: float, ends: dict[str, Any]
) -> None:
    options = {"saving": saving, "limit_train_batches": limit, **ends}
    whole = lightning.Module(folder)
    lightning.fit(whole, folder / "whole", **options)
    steps: dict[int, list[int]] = {}
    for stop_after in (2, 5, 7, 10, 11):  # at an epoch's end of 4 or 1 batches, behind it, and in the middle
        module = lightning.Module(folder, kill_at=stop_after)
        with contextlib.suppress(lightning.KilledError):
            lightning.fit(module, folder, resume=bool(steps), **options)
        steps |= module.trained
    assert steps.keys() <= whole.trained.keys()
    assert [steps[step] for step in sorted(steps)] == [whole.trained[step] for step in sorted(steps)]


def test_a_run_that_was_stopped_in_mid_epoch_goes_on_there(
    lightning: Any, folder: Path, unbroken: list[list[int]]
) -> None:
    first = lightning.Module(folder)
    lightning.fit(first, folder, max_steps=STEPS + 7, saving=AT_EPOCHS_END)
    second = lightning.Module(folder)
    lightning.fit(second, folder, resume=True)
    assert list((first.trained | second.trained).values()) == unbroken


def test_several_loaders_resumed_in_mid_epoch_go_on_together(lightning: Any, folder: Path) -> None:
    whole = lightning.Several(folder, short=17)
    lightning.fit(whole, folder / "whole")
    killed = lightning.Several(folder, kill_at=8, short=17)
    with pytest.raises(lightning.KilledError):
        lightning.fit(killed, folder)
    resumed = lightning.Several(folder, short=17)
    lightning.fit(resumed, folder, resume=True)
    assert killed.short[:5] + resumed.short == whole.short


def test_a_resume_is_exact_where_the_optimizer_asked_for_the_number_of_steps(
    lightning: Any, folder: Path, unbroken: list[list[int]]
) -> None:
    assert lightning.killed_and_resumed(folder, lightning.Estimating, kill_at=17) == unbroken


def test_validation_and_its_sanity_check_take_the_same_batches_each_time_and_none_of_training(
    lightning: Any, folder: Path, unbroken: list[list[int]]
) -> None:
    module = lightning.Module(folder)
    lightning.fit(module, folder, limit_val_batches=3, num_sanity_val_steps=2)
    assert list(module.trained.values()) == unbroken
    assert len(module.validated) == 2 + 3 * 3
    assert module.validated[:2] == module.validated[2:4]
    assert module.validated[2:5] == module.validated[5:8] == module.validated[8:11]
    assert [i for ids in module.validated[2:5] for i in ids] == list(range(3 * BATCH))


def test_an_epoch_that_lightning_leaves_early_is_followed_by_another_one(
    lightning: Any, folder: Path, unbroken: list[list[int]]
) -> None:
    module = lightning.Module(folder)
    lightning.fit(module, folder, limit_train_batches=4)
    firsts = [unbroken[epoch * STEPS + step] for epoch in range(3) for step in range(4)]
    assert list(module.trained.values()) == firsts
    again = lightning.Module(folder)
    lightning.fit(again, folder, limit_train_batches=4, callback=False)
    assert list(again.trained.values()) == 3 * firsts[:4], "without the callback: the same four batches, each time"


def test_loaders_that_lightning_makes_anew_each_epoch_begin_with_that_epoch(
    lightning: Any, folder: Path, unbroken: list[list[int]]
) -> None:
    module = lightning.Module(folder)
    lightning.fit(module, folder, reload_dataloaders_every_n_epochs=1)
    assert module.made == 3
    assert list(module.trained.values()) == unbroken


def test_overfitting_takes_the_same_batches_each_time(lightning: Any, folder: Path) -> None:
    module = lightning.Module(folder)
    lightning.fit(module, folder, overfit_batches=4)
    steps = list(module.trained.values())
    assert steps[:4] == steps[4:8] == steps[8:]


def test_a_shorter_loader_beside_another_goes_on_to_new_epochs(
    lightning: Any, folder: Path, unbroken: list[list[int]]
) -> None:
    module = lightning.Several(folder)
    lightning.fit(module, folder)
    assert list(module.trained.values()) == unbroken
    assert once_an_epoch(module.short, 6)
    assert len({tuple(ids) for ids in module.short}) == len(module.short), "an epoch was repeated"


def test_a_checkpoint_saved_after_training_goes_on_behind_it(
    lightning: Any, folder: Path, unbroken: list[list[int]]
) -> None:
    lightning.fit(lightning.Module(folder), folder, max_epochs=2).save_checkpoint(folder / "saved" / "last.ckpt")
    module = lightning.Module(folder)
    lightning.fit(module, folder, resume=True)
    assert list(module.trained.values()) == unbroken[2 * STEPS :]


def test_another_global_batch_is_refused_in_mid_epoch_and_taken_at_an_epochs_end(lightning: Any, folder: Path) -> None:
    with pytest.raises(lightning.KilledError):
        lightning.fit(lightning.Module(folder, kill_at=17), folder)
    with pytest.raises(
        ConfigError, match=r"had 12 batches .* has 6 now, with a global batch of 20; .*global_batch_size"
    ):
        lightning.fit(lightning.Module(folder, batch_size=20), folder, resume=True)
    with pytest.raises(lightning.KilledError):
        lightning.fit(lightning.Module(folder, kill_at=17), folder, saving=AT_EPOCHS_END)
    (folder / "saved" / "last.ckpt").unlink(missing_ok=True)
    module = lightning.Module(folder, batch_size=20)
    lightning.fit(module, folder, resume=True)
    assert once_an_epoch(list(module.trained.values()), 2)


def test_another_data_set_or_seed_is_refused(lightning: Any, folder: Path) -> None:
    with pytest.raises(lightning.KilledError):
        lightning.fit(lightning.Module(folder, kill_at=17), folder)
    with pytest.raises(StateMismatchError, match="seed: 5 in the state, 6 here"):
        lightning.fit(lightning.Module(folder, seed=6), folder, resume=True)


def test_a_batch_fetched_ahead_by_lightning_is_refused(lightning: Any, folder: Path) -> None:
    with pytest.raises(ConfigError, match="without __len__"):
        lightning.fit(lightning.Endless(folder), folder)


def test_a_shorter_loader_that_would_not_wait_after_a_resume_is_refused(lightning: Any, folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_size_cycle"):
        lightning.fit(lightning.Waiting(folder), folder)


def test_loaders_whose_epochs_have_no_fixed_number_of_batches_are_refused(lightning: Any, folder: Path) -> None:
    manifest = open_manifest(str(folder / "rows"))
    expression = CostExpression.parse("tokens=x*120")
    write_costs(manifest, expression, index_costs(manifest, expression))
    with pytest.raises(ConfigError, match="batch_tokens= each epoch has a number of batches of its own"):
        lightning.fit(lightning.Module(folder, batch_size=None, batch_tokens=500), folder)
    with pytest.raises(ConfigError, match=r"drops or packs samples .*packing=.* known only by reading"):
        lightning.fit(lightning.Module(folder, keep=lambda sample: True), folder)


def test_a_mixture_is_trained_on(lightning: Any, folder: Path) -> None:
    write_rows(folder / "others")
    mixture = Mixture({name: Source(str(folder / name)) for name in ("rows", "others")})
    module = lightning.Module(folder, source=mixture)
    lightning.fit(module, folder, max_epochs=1)
    with module.open(source=mixture) as loader:
        assert list(module.trained.values()) == [batch["__id__"].tolist() for batch in loader]


def test_every_row_comes(lightning: Any, folder: Path) -> None:
    assert ROWS == BATCH * STEPS
