"""Where training does not go back after a loss spike, or not again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rewound_runs import SPIKE, batches_to_rows, load, records, train

from penstock.trainer import (
    DistributedTrainer,
    TrainerConfigError,
    World,
)


def notes(folder: str | Path) -> str:
    return "\n".join(line["note"] for line in records(folder, "note"))


@pytest.mark.slow
def test_after_so_many_rewinds_training_stops_in_words(world: World, tmp_path: Path) -> None:
    spike = {**SPIKE, "max_rewinds": 2, "skip_batches": 0}
    options: dict[str, Any] = {"spike": spike, "bad": batches_to_rows(14, 18, 22, 26)}
    run = train(world, tmp_path, steps=30, **options)
    assert "training was rewound 2 times already (from step 15 to 12; from step 16 to 12)" in run.error
    assert "spike.max_rewinds=2" in run.error
    again = train(world, tmp_path, steps=30, **options)
    assert "rewound 2 times already" in again.error, "a restart does not begin to count anew"


@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_without_a_checkpoint_it_is_said_and_training_goes_on_or_stops(
    world: World, tmp_path: Path, policy: str
) -> None:
    options: dict[str, Any] = {"spike": {**SPIKE, "without_checkpoint": policy}, "checkpoint": {"every_steps": 16}}
    run = train(world, tmp_path, steps=18, bad=batches_to_rows(14), **options)
    told = run.error if policy == "stop" else notes(tmp_path)
    assert "step 14: the loss" in told
    assert "there is no checkpoint of step 13 or before to go back to" in told
    assert len(run.steps) == (15 if policy == "stop" else 18)
    assert run.rewinds == 0


@pytest.mark.slow
def test_spikes_can_be_noted_alone(world: World, tmp_path: Path) -> None:
    run = train(world, tmp_path, steps=18, bad=batches_to_rows(14), spike={**SPIKE, "on_spike": "note"})
    assert len(run.steps) == 18
    assert notes(tmp_path).count("step 14: the loss") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("on_nan", "rewinds"), [("skip", 0), ("rewind", 1)])
def test_a_loss_that_is_not_finite_is_skipped_or_rewound_as_asked(
    world: World, tmp_path: Path, on_nan: str, rewinds: int
) -> None:
    run = train(
        world,
        tmp_path,
        steps=16,
        bad=batches_to_rows(5),
        factor=float("nan"),
        loader=load(world, with_ids=True),
        step={"on_nan": on_nan},
    )
    assert run.rewinds == rewinds
    for record in records(tmp_path, "rewind"):
        assert record["to_step"] == 4
        assert "step 5: the loss is not finite" in record["why"]
        assert "sample ids [30, 31, 32, 33, 34, 35]" in record["why"]


@pytest.mark.slow
def test_weights_that_are_not_finite_are_rewound_and_never_saved(world: World, tmp_path: Path) -> None:
    def spoil(trainer: DistributedTrainer) -> None:
        def burst(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (trainer.progress.step, trainer.progress.rewinds) == (7, 0):
                optimizer.param_groups[0]["params"][0].data[0] = torch.inf

        trainer.optimizer.register_step_post_hook(burst)

    run = train(world, tmp_path, steps=12, before=spoil, step={"on_nan": "rewind"})
    assert "step 8: the weights 0.line.weight, 0.line.weight (its average) are not finite" in notes(tmp_path)
    assert run.rewinds == 1
    assert [record["to_step"] for record in records(tmp_path, "rewind")] == [4]
    assert all(value == value for values in [*run.state.values(), *run.average.values()] for value in values)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"checkpoint": {}}, r"checkpoint\.every_steps=0 keeps none"),
        (
            {"checkpoint": {"every_steps": 1, "keep_last": 2}, "spike": {**SPIKE, "margin": 2}},
            r"checkpoint\.keep_last=3",
        ),
        ({"spike": {}, "step": {"on_nan": "rewind"}}, r"step\.on_nan='rewind'.*spike\.on_spike='ignore'"),
    ],
)
def test_what_could_not_be_rewound_is_refused(world: World, tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(TrainerConfigError, match=told):
        train(world, tmp_path, steps=4, **options)
