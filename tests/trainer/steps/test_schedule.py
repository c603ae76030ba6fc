from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from penstock.trainer import ScheduleConfig, StepConfig, TrainerConfig, TrainerConfigError
from penstock.trainer.run.length import count_steps, effective_batch_size
from penstock.trainer.steps.schedule import Schedule, rate_factor


def halve(update: int, total: int) -> float:
    return 0.5 if update >= total // 2 else 1.0


def climb(update: int, total: int) -> float:
    return 1.0 - update


def lose(update: int, total: int) -> float:
    return float("nan") if update else 1.0


def forget(update: int, total: int) -> float | None:
    return None if update == 2 else 0.0


def make_schedule(config: ScheduleConfig, *, total: int = 100, batch: int | None = None) -> Schedule:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [parameter], "lr": 0.5}])
    return Schedule(config, optimizer, total_updates=total, effective_batch_size=batch)


def test_warm_up_climbs_linearly_to_the_whole_rate() -> None:
    config = ScheduleConfig(warmup_steps=4)
    assert [rate_factor(config, update, 100) for update in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_a_falling_schedule_starts_whole_and_ends_at_its_end_factor(shape: str) -> None:
    config = ScheduleConfig(shape=shape, warmup_steps=10, end_factor=0.1)
    factors = [rate_factor(config, update, 110) for update in range(10, 130)]
    assert factors[0] == 1.0
    assert factors[50] == pytest.approx(0.55)
    assert factors[100:] == pytest.approx([0.1] * 20)
    assert factors == sorted(factors, reverse=True)


def test_cosine_follows_its_formula() -> None:
    config = ScheduleConfig(shape="cosine")
    for update in (0, 13, 77, 99):
        assert rate_factor(config, update, 100) == pytest.approx(0.5 * (1 + math.cos(math.pi * update / 100)))


def test_a_shape_may_be_a_function_named_by_its_import_path() -> None:
    schedule = make_schedule(ScheduleConfig(shape="test_schedule:halve", warmup_steps=2))
    rates = []
    for update in (0, 10, 60):
        schedule.set_rates(update)
        rates.append(schedule.rate)
    assert rates == [0.25, 0.5, 0.25]


@pytest.mark.parametrize(("scaling", "rate"), [("none", 0.5), ("linear", 2.0), ("sqrt", 1.0)])
def test_the_rate_follows_the_effective_batch_size(scaling: str, rate: float) -> None:
    schedule = make_schedule(ScheduleConfig(scaling=scaling, base_batch_size=64), batch=256)
    schedule.set_rates(0)
    assert schedule.rate == pytest.approx(rate)


def test_a_rate_that_is_a_tensor_is_set_in_place() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([parameter], lr=rate, capturable=False, foreach=False)
    schedule = Schedule(ScheduleConfig(warmup_steps=2), optimizer, total_updates=9, effective_batch_size=None)
    schedule.set_rates(0)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25


class Sized:
    """A loader that says how large its batches are."""

    def __init__(self, **sizes: int | None) -> None:
        vars(self).update(sizes)

    def __iter__(self) -> Iterator[None]:
        return iter(())


@pytest.mark.parametrize(
    ("loader", "samples"),
    [
        (Sized(global_batch_size=24), 48),
        (Sized(global_batch_size=24, batch_size=8), 48),
        (Sized(batch_size=8), 64),  # of each of four ranks
        (torch.utils.data.DataLoader([0, 1, 2], batch_size=2), 16),
    ],
)
def test_the_effective_batch_size_is_that_of_all_ranks_and_microbatches(loader: Any, samples: int) -> None:
    config = TrainerConfig(steps=1, step=StepConfig(accumulate=2))
    assert effective_batch_size(loader, config, 4) == samples


@pytest.mark.parametrize("loader", [Sized(), Sized(batch_size=None)])
def test_scaling_without_a_known_batch_size_names_the_loader_and_the_cure(loader: Any) -> None:
    config = TrainerConfig(steps=1, schedule=ScheduleConfig(scaling="linear", base_batch_size=64))
    with pytest.raises(TrainerConfigError, match=r"scaling='linear' needs .* loader=Sized has neither .*='none'"):
        effective_batch_size(loader, config, 4)
    assert effective_batch_size(loader, TrainerConfig(steps=1), 4) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": "cosin"}, "schedule.shape='cosin': must be 'constant', 'linear' or 'cosine'; did you mean 'cosine'"),
        ({"warmup_steps": -1}, "schedule.warmup_steps=-1 is out of range"),
        ({"scaling": "linear"}, "give schedule.base_batch_size"),
        ({"end_factor": 0.1}, "schedule.shape='constant' does not come there; give schedule.shape='cosine'"),
        ({"shape": "my:shape", "end_factor": 0.1}, "schedule.shape='my:shape' does not come there"),
        ({"scaling": "cubic"}, "schedule.scaling='cubic': must be"),
    ],
)
def test_a_wrong_option_is_refused_with_its_key_and_value(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(TrainerConfigError) as caught:
        ScheduleConfig(**arguments)  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("limits", "batches", "steps"),
    [({"steps": 9}, None, 9), ({"epochs": 2}, 4, 8), ({"epochs": 2, "steps": 5}, 4, 5), ({"epochs": 2}, None, None)],
)
def test_a_warm_up_longer_than_the_run_is_refused_where_the_length_is_known(
    limits: dict[str, int], batches: int | None, steps: int | None
) -> None:
    def count(warmup_steps: int) -> int | None:
        return count_steps(TrainerConfig(schedule=ScheduleConfig(warmup_steps=warmup_steps), **limits), batches, [])

    assert count(steps or 100) == steps
    if steps is not None:
        with pytest.raises(TrainerConfigError, match=f"warmup_steps={steps + 1} is more than the {steps} steps"):
            count(steps + 1)


def test_a_shape_that_is_not_callable_is_refused() -> None:
    with pytest.raises(TrainerConfigError, match="is not callable"):
        make_schedule(ScheduleConfig(shape="math:pi"))


@pytest.mark.parametrize(("name", "last", "found"), [("climb", 2, "-1.0"), ("lose", 1, "nan"), ("forget", 2, "None")])
def test_a_function_that_returns_no_factor_is_refused_with_the_update(name: str, last: int, found: str) -> None:
    schedule = make_schedule(ScheduleConfig(shape=f"test_schedule:{name}"))
    for update in range(last):
        schedule.set_rates(update)
    message = (
        f"schedule.shape='test_schedule:{name}' returned {found} for update {last} of 100; it must return a factor"
    )
    with pytest.raises(TrainerConfigError, match=re.escape(message)):
        schedule.set_rates(last)
