"""After a loss spike training goes back to the last good checkpoint and past the batches that led to it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from rewound_runs import (
    GLOBAL_BATCH,
    ROWS,
    SPIKE,
    Run,
    arrays,
    batches_to_rows,
    load,
    records,
    train,
)

from penstock import DistributedDataLoader, audit
from penstock.loader import pack
from penstock.trainer import (
    ArrayLoader,
    Callbacks,
    DistributedTrainer,
    NonFiniteLossError,
    RewindRecord,
    World,
)


def saved_steps(folder: str | Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (Path(folder) / "checkpoints").glob("step-*"))


def rewind_and_compare(world: World, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """A spike in step 14 of 20; a run made of what that should come to; one resumed after it; one broken off after it.

    The last good checkpoint is of step 12; batches 12 to 14 are not trained again and 15 and 16 are skipped.
    """
    bad = batches_to_rows(14)
    found = train(world, f"{folder}/found", steps=20, bad=bad, **options)

    train(world, f"{folder}/expected", steps=12, bad=bad, **options)

    loader = load(world)
    moved = {"loader": loader, "before": lambda trainer: loader.skip_batches(5)}
    expected = train(world, f"{folder}/expected", steps=20, bad=bad, **moved, **options)
    first_part = train(world, f"{folder}/parts", steps=14, bad=bad, **options)
    train(world, f"{folder}/parts", steps=15, bad=bad, **options)
    parts = train(world, f"{folder}/parts", steps=20, bad=bad, **options)
    broken = train(world, f"{folder}/broken", steps=20, bad=bad, fail_at=(12, 1), **options)
    after = train(world, f"{folder}/broken", steps=20, bad=bad, **options)
    return {
        "rewinds": [found.rewinds, expected.rewinds, first_part.rewinds, parts.rewinds, after.rewinds],
        "steps": found.steps,
        "as expected": (found.state, found.average) == (expected.state, expected.average),
        "resumed": (found.state, found.average) == (parts.state, parts.average),
        "broken off": (broken.error, (found.state, found.average) == (after.state, after.average)),
        "went on with batch": after.steps[0][1] // GLOBAL_BATCH,
        "moved": found.state != found.average,
        "state": found.state,
    }


CASES: list[dict[str, Any]] = [
    {"parallel": {"zero": 0}, "compression": {"scheme": "powersgd", "rank": 1}},
    {"parallel": {"zero": 3}, "precision": {"dtype": "fp16", "init_scale": 64.0, "growth_interval": 3}},
    {"average_every": 4},
]


@pytest.mark.parametrize("options", CASES, ids=["zero0", "zero3", "local"])
def test_a_rewound_run_is_one_that_jumped_over_the_batches(tmp_path: Path, options: dict[str, Any]) -> None:
    ranks = run_ranks(rewind_and_compare, 2, str(tmp_path), options)
    for found in ranks:
        assert found["rewinds"] == [1, 0, 0, 1, 1]
        assert found["as expected"]
        assert found["resumed"] or "average_every" in options, "local SGD goes on from the mean"
        assert found["broken off"] == ("ZeroDivisionError", True)
        assert found["went on with batch"] == 17
        assert found["moved"]
    assert all(len({tuple(rank["state"]["0.line.weight"]) for rank in ranks}) == 1 for _ in ranks)
    firsts = [GLOBAL_BATCH * batch for batch in [*range(15), *range(17, 25)]]
    assert ranks[0]["steps"] == list(zip([*range(15), *range(12, 20)], firsts, strict=True))
    (told,) = records(tmp_path / "found", "rewind")
    assert (told["step"], told["to_step"], told["first_spike_step"], told["skipped_batches"]) == (15, 12, 14, 2)
    assert "step 14: the loss" in told["why"]
    assert saved_steps(tmp_path / "found") == [4, 8, 12, 16, 20]


class Adapting(torch.optim.SGD):
    """Makes its steps shorter and shorter, and keeps how short among its settings."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-3)
        self.defaults["d"] = self.param_groups[0]["d"] = 1.0

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["d"] *= 0.875
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad *= group["d"]
        super().step(closure)


def sgd_by_a_tensor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=torch.tensor(1e-3), momentum=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [Adapting, sgd_by_a_tensor])
def test_a_rewind_takes_what_optimizers_keep_among_their_settings_back_and_rates_that_are_tensors(
    world: World, tmp_path: Path, optimizer: Any
) -> None:
    options = {"optimizer": optimizer, "schedule": {"shape": "rewound_runs:fall"}}
    found = rewind_and_compare(world, str(tmp_path), options)
    assert found["rewinds"] == [1, 0, 0, 1, 1]
    assert found["as expected"]
    assert found["resumed"]
    assert found["broken off"] == ("ZeroDivisionError", True)


def go_on(world: World, folder: str, steps: int) -> Run:
    return train(world, folder, steps=steps, bad=batches_to_rows(14), parallel={"zero": 2})


def test_a_resume_on_other_ranks_knows_of_the_rewind(tmp_path: Path) -> None:
    """Three ranks meet the spike and rewind; three, and two, go on from what they saved."""
    before = run_ranks(go_on, 3, str(tmp_path / "three"), 16)[0]
    shutil.copytree(tmp_path / "three", tmp_path / "two")
    three, two = (run_ranks(go_on, ranks, str(tmp_path / name), 20)[0] for ranks, name in ((3, "three"), (2, "two")))
    assert [run.rewinds for run in (before, three, two)] == [1, 1, 1]
    assert three.steps == two.steps == [(step, GLOBAL_BATCH * (step + 5)) for step in range(16, 20)]


@contextmanager
def shards(folder: Path, world: World, **options: Any) -> Iterator[DistributedDataLoader]:
    given = arrays()
    samples = ({"__key__": f"{row:04d}", "x.npy": given["x"][row].numpy(), "number.cls": row} for row in range(ROWS))
    if not (folder / "shards").exists():
        pack(samples, str(folder / "shards"))
    with DistributedDataLoader(
        str(folder / "shards"),
        global_batch_size=GLOBAL_BATCH,
        seed=1,
        rank=world.rank,
        world_size=world.world_size,
        audit_dir=folder / "audit",
        **options,
    ) as loader:
        yield loader


def rename(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {"x": torch.as_tensor(batch["x.npy"]), "number": torch.as_tensor(batch["number.cls"])}


class Renamed:
    """penstock's loader with the fields that the loss knows."""

    def __init__(self, loader: DistributedDataLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (rename(batch) for batch in self._loader)


def train_on_shards(world: World, folder: Path, steps: int, bad: int) -> Run:
    with shards(folder, world, last_batch="partial") as loader:
        return train(
            world, folder, steps=steps, bad=(bad,), loader=Renamed(loader), spike={**SPIKE, "skip_batches": 30}
        )


@pytest.mark.slow
def test_the_audit_tells_skipped_samples_from_lost_ones(world: World, tmp_path: Path) -> None:
    """The skip passes an epoch's end, and the run is broken off and resumed after it."""
    with shards(tmp_path, world) as loader:
        spoiled = [int(batch["number.cls"][0]) for batch in loader][14]
    shutil.rmtree(tmp_path / "audit")
    train_on_shards(world, tmp_path, 13, spoiled)
    run = train_on_shards(world, tmp_path, 26, spoiled)
    assert run.rewinds == 1
    train_on_shards(world, tmp_path, 60, spoiled)
    report = audit(tmp_path / "audit")
    assert report.is_exact
    assert sum(account.skipped for account in report.epochs) == 30 * GLOBAL_BATCH
    assert [account.duplicated for account in report.epochs] == [0] * len(report.epochs)
    assert len(report.epochs) == 3


class Plain:
    """An iterable without a state, of which batches can only be drawn."""

    def __init__(self, loader: ArrayLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Any:
        return iter(self._loader)


@pytest.mark.slow
def test_batches_of_any_iterable_are_drawn_and_dropped(world: World, tmp_path: Path) -> None:
    bad = batches_to_rows(14)
    spike = {**SPIKE, "skip_batches": 28}
    options: dict[str, Any] = {"steps": None, "epochs": 2, "bad": bad, "spike": spike}
    drawn = train(world, tmp_path / "drawn", loader=Plain(load(world)), **options)
    skipped = train(world, tmp_path / "skipped", **options)
    assert drawn.rewinds == skipped.rewinds == 1
    assert drawn.steps == skipped.steps
    assert skipped.steps[15] == (12, GLOBAL_BATCH * 3), "28 batches after the 15th are 3 into the next epoch"
    assert skipped.steps[-1] == (12 + 36, GLOBAL_BATCH * 39), "the run ends with the second epoch"
    assert drawn.state == skipped.state


@pytest.mark.slow
def test_saves_wait_while_a_spike_is_undecided_and_checkpoints_in_it_do_not_count(world: World, tmp_path: Path) -> None:
    """The batches of steps 10 and 11 are bad: the checkpoint of step 10 is too near, and that of 11 is put off."""
    spike = {**SPIKE, "patience": 2, "margin": 1, "window": 8}
    options: dict[str, Any] = {"spike": spike, "checkpoint": {"every_steps": 1, "keep_last": 3}}
    run = train(world, tmp_path, steps=12, bad=batches_to_rows(10, 11), **options)
    assert run.rewinds == 1
    (told,) = records(tmp_path, "rewind")
    assert (told["to_step"], told["first_spike_step"], told["step"]) == (9, 10, 12)
    assert "for 2 steps in a row" in told["why"]
    train(world, tmp_path / "stopped", steps=11, bad=batches_to_rows(10, 11), **options)
    assert saved_steps(tmp_path / "stopped") == [9, 10, 11], "a save that ends a run does not wait"
    resumed = train(world, tmp_path / "stopped", steps=12, bad=batches_to_rows(10, 11), **options)
    assert [record["to_step"] for record in records(tmp_path / "stopped", "rewind")] == [9]
    assert (resumed.rewinds, resumed.state) == (1, run.state)
    one = train(world, tmp_path / "calm", steps=14, bad=batches_to_rows(10), **options)
    assert one.rewinds == 0
    assert saved_steps(tmp_path / "calm") == [12, 13, 14]
    assert [record["step"] for record in records(tmp_path / "calm", "checkpoint")] == [*range(1, 11), 12, 13, 14]


@pytest.mark.slow
def test_the_schedule_goes_back_with_the_weights_or_goes_on(world: World, tmp_path: Path) -> None:
    rates = {}
    for policy in ("rewind", "continue"):
        options = {
            "schedule": {"shape": "linear"},
            "spike": {**SPIKE, "schedule": policy},
            "report": {"quiet": True, "every": 1},
        }
        train(world, tmp_path / policy, steps=16, bad=batches_to_rows(14), **options)
        rates[policy] = [record["rate"] for record in records(tmp_path / policy, "train")]
    assert rates["rewind"][15] == rates["rewind"][12]
    assert rates["continue"][15] < rates["continue"][14]


class Heard(Callbacks):
    def __init__(self) -> None:
        self.rewinds: list[RewindRecord] = []

    def on_rewind(self, record: RewindRecord) -> None:
        self.rewinds.append(record)


@pytest.mark.slow
def test_observers_hear_of_a_rewind_and_a_trace_ends_with_it(world: World, tmp_path: Path) -> None:
    heard = Heard()
    options = {"observers": [heard], "profile": {"steps": ["13:30"]}}
    train(world, tmp_path, steps=20, bad=batches_to_rows(14), **options)
    (record,) = heard.rewinds
    assert (record.step, record.to_step, record.first_spike_step, record.discarded_steps) == (15, 12, 14, 3)
    assert (record.skipped_batches, record.rewinds) == (2, 1)
    assert "step 14: the loss" in record.why
    assert record.seconds > 0
    assert sum(one.get("seconds_rewind", 0.0) for one in records(tmp_path, "train")) == pytest.approx(record.seconds)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["steps-000013-000015-rank-0.json.gz"]


def read_late(trainer: DistributedTrainer) -> None:
    trainer.steps._reads_late = True  # as on CUDA


@pytest.mark.slow
def test_going_back_is_the_same_where_norms_are_read_late(world: World, tmp_path: Path) -> None:
    found = [
        train(world, tmp_path / name, steps=20, bad=batches_to_rows(14), before=before)
        for name, before in (("early", None), ("late", read_late))
    ]
    assert [one.rewinds for one in found] == [1, 1]
    assert (found[0].state, found[0].average) == (found[1].state, found[1].average)


@pytest.mark.slow
def test_a_spike_with_a_norm_that_is_read_late_stops_a_run_that_stops_at_nan(world: World, tmp_path: Path) -> None:
    def before(trainer: DistributedTrainer) -> None:
        read_late(trainer)
        for weight in trainer.parallel.inner.parameters():
            weight.register_hook(lambda slope: slope * torch.inf if trainer.progress.step == 14 else slope)

    with pytest.raises(NonFiniteLossError, match=r"step 14: the loss was finite and the gradient of 0\.line"):
        train(world, tmp_path, steps=20, bad=batches_to_rows(14), before=before)
    assert saved_steps(tmp_path) == [4, 8, 12]
    assert not records(tmp_path, "rewind")
