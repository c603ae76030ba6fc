"""One update: what its gradient is the gradient of, and when it is not made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_world import Slope, batch_of, make_steps, sum_of_outputs
from torch import nn

from penstock.trainer import (
    ArrayLoader,
    DistributedTrainer,
    NonFiniteLossError,
    PrecisionConfig,
    ScheduleConfig,
    TrainerConfig,
    TrainerConfigError,
    World,
)
from penstock.trainer.options import build_config
from penstock.trainer.parallel.precision import LossScaler
from penstock.trainer.report.progress import Progress
from penstock.trainer.steps.schedule import Schedule


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def squares(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return model(batch["x"]).square().sum(), len(batch["x"])


@pytest.mark.parametrize("parts", [(4, 8), (1, 2, 3), (3,)])
def test_accumulated_microbatches_of_any_sizes_equal_one_big_batch(world: World, parts: tuple[int, ...]) -> None:
    x = torch.linspace(-1.0, 2.0, sum(parts)).reshape(-1, 1)
    whole, cut = Slope(0.7), Slope(0.7)
    one = make_steps(world, whole, loss=squares, optimizer=adam)
    many = make_steps(world, cut, loss=squares, optimizer=adam, accumulate=len(parts))
    for step in range(5):
        expected = one.run(step, [{"x": x}])
        found = many.run(step, [{"x": piece} for piece in x.split(list(parts))])
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)
        assert (found.count, found.rows) == (expected.count, expected.rows)
    assert float(cut.w.detach()) == pytest.approx(float(whole.w.detach()), rel=1e-6)


def test_the_gradient_is_the_mean_over_valid_rows_of_all_microbatches(world: World) -> None:
    model = Slope(0.0)
    padded = batch_of(6.0, 100.0, 100.0, __valid__=torch.tensor([True, False, False]))
    result = make_steps(world, model, accumulate=3).run(0, [batch_of(1.0, 2.0), padded, batch_of(3.0)])
    assert float(model.w.detach()) == pytest.approx(-(1 + 2 + 6 + 3) / 4)
    assert (result.count, result.rows, result.outcome) == (4, 4, "updated")


def test_counts_that_change_from_step_to_step_do_not_weigh_in(world: World) -> None:
    """The count that a step expects is that of the step before; what it is wrong by must be corrected."""
    model = Slope(0.0)
    steps = make_steps(world, model)
    w = 0.0
    for step, rows in enumerate((4, 1, 7, 2)):
        steps.run(step, [batch_of(*[3.0] * rows)])
        w -= 3.0
        assert float(model.w.detach()) == pytest.approx(w)


def test_a_microbatch_without_rows_changes_nothing(world: World) -> None:
    model = Slope(0.0)
    steps = make_steps(world, model, accumulate=2)
    steps.run(0, [batch_of(2.0, 4.0), batch_of()])
    assert float(model.w.detach()) == pytest.approx(-3.0)
    result = steps.run(1, [batch_of()])
    assert (result.outcome, result.rows) == ("empty", 0)
    assert math.isnan(result.loss)
    assert float(model.w.detach()) == pytest.approx(-3.0)


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_mean_over_a_share_without_rows_is_an_error_that_says_what_to_return(
    world: World, tmp_path: Path, on_nan: str, is_padded: bool
) -> None:
    def mean(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        x = batch["x"][batch["__valid__"]] if is_padded else batch["x"]
        return model(x).mean() * len(x), len(x)

    # Of the last of three global batches, with one row, the first of two ranks has none.
    loader = ArrayLoader(
        {"x": torch.ones(9, 1)},
        global_batch_size=4,
        shuffle=False,
        last_batch="pad" if is_padded else "partial",
        rank=0,
        world_size=2,
    )
    step = {"accumulate": 3, "on_nan": on_nan}
    values = {"steps": 2, "output_dir": str(tmp_path), "step": step, "report": {"quiet": True}}
    config = build_config(TrainerConfig, values)
    told = r"step 0: .* without rows is not finite \(rank 0, microbatch 2\)\. .* losses\.sum\(\), len\(losses\)"
    with DistributedTrainer(Slope(), adam, loader, config, loss=mean, world=world) as trainer:
        with pytest.raises(NonFiniteLossError, match=told):
            trainer.train()
        assert float(trainer.parallel.inner.w.detach()) == 1.0


@pytest.mark.parametrize(("x", "moved"), [(30.0, 2.0), (0.5, 0.5)])
def test_clipping_shortens_a_long_gradient_alone_and_reports_its_length(world: World, x: float, moved: float) -> None:
    model = Slope(0.0)
    result = make_steps(world, model, clip_norm=2.0).run(0, [batch_of(x, x)])
    assert float(model.w.detach()) == pytest.approx(-moved, rel=1e-5)
    assert result.gradient_norm == pytest.approx(x)


def test_the_norm_that_is_clipped_is_that_of_the_mean_gradient(world: World) -> None:
    """The second step has another count than it expects, and its norm is corrected before it is compared."""
    model = Slope(0.0)
    steps = make_steps(world, model, clip_norm=2.5)
    steps.run(0, [batch_of(1.0)])
    result = steps.run(1, [batch_of(*[2.0] * 8)])
    assert result.gradient_norm == pytest.approx(2.0)
    assert float(model.w.detach()) == pytest.approx(-3.0)


def test_a_loss_that_is_not_finite_stops_before_the_weights_are_touched(world: World) -> None:
    model = Slope(1.0)
    bad = batch_of(1.0, math.nan, __id__=torch.tensor([7, 8]))
    with pytest.raises(NonFiniteLossError, match=r"step 4: .* \(rank 0, microbatch 1, sample ids \[7, 8\]\)"):
        make_steps(world, model, accumulate=2).run(4, [batch_of(1.0), bad])
    assert float(model.w.detach()) == 1.0


def test_steps_with_a_loss_that_is_not_finite_are_skipped_up_to_a_number(world: World) -> None:
    model = Slope(1.0)
    steps = make_steps(world, model, on_nan="skip", max_skipped=2)
    for step in range(2):
        assert steps.run(step, [batch_of(math.inf)]).outcome == "non-finite"
    assert steps.run(2, [batch_of(0.25)]).outcome == "updated"
    assert float(model.w.detach()) == 0.75, "a skipped step's gradient came back"
    with pytest.raises(NonFiniteLossError, match=r"3 steps were skipped, and step\.max_skipped=2"):
        steps.run(3, [batch_of(math.nan)])


def test_a_batch_whose_rows_are_not_known_is_skipped_as_others_are(world: World) -> None:
    class Rows:
        x = torch.full((2, 1), math.nan)

    steps = make_steps(world, Slope(1.0), loss=lambda model, batch: (model(batch.x).sum(), 2), on_nan="skip")
    assert steps.run(0, [Rows()]).outcome == "non-finite"


def test_a_gradient_that_is_not_finite_is_skipped_where_it_is_measured(world: World) -> None:
    """The loss is finite, its gradient is not: the root's slope at 0 is infinite."""

    def root(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return model(batch["x"]).sqrt().sum(), len(batch["x"])

    model = Slope(1.0)
    steps = make_steps(world, model, loss=root, on_nan="skip", clip_norm=1.0)
    assert steps.run(0, [batch_of(0.0)]).outcome == "non-finite"
    assert float(model.w.detach()) == 1.0


def test_an_overflow_of_fp16_makes_no_update_and_halves_the_scale(world: World) -> None:
    model = Slope(0.0)
    precision = PrecisionConfig(dtype="fp16", init_scale=2.0**18, growth_interval=100)
    steps = make_steps(world, model, precision=precision)
    outcomes = []
    while "updated" not in outcomes:
        before = steps.loss_scale
        outcomes.append(steps.run(len(outcomes), [batch_of(2.0)]).outcome)
        assert steps.loss_scale == (before if outcomes[-1] == "updated" else before / 2)
    assert outcomes[0] == "overflow"
    assert float(model.w.detach()) == -2.0


def test_gradients_are_unscaled_by_format_as_cudas_kernel_wants_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    unscale, seen = torch._amp_foreach_non_finite_check_and_unscale_, []

    def watch(gradients: list[torch.Tensor], *others: torch.Tensor) -> None:
        seen.append({one.dtype for one in gradients})
        unscale(gradients, *others)

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", watch)
    weights = [nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.float32)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 6.0)
    scaler = LossScaler(PrecisionConfig(dtype="fp16", init_scale=2.0), world)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(weights, lr=1.0))
    assert seen == [{torch.float32}, {torch.float64}]
    assert all(weight.grad.tolist() == [3.0, 3.0] for weight in weights)


def test_an_overflow_of_fp16_does_not_advance_the_schedule(world: World) -> None:
    precision = PrecisionConfig(dtype="fp16", init_scale=2.0**18, growth_interval=100)
    steps = make_steps(world, Slope(0.0), precision=precision)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    config = ScheduleConfig(warmup_steps=4)
    schedule = Schedule(config, optimizer, total_updates=9, effective_batch_size=None)
    progress = Progress()
    rates: dict[str, list[float]] = {"overflow": [], "updated": []}
    while progress.updates < 3:
        schedule.set_rates(progress.updates)
        result = steps.run(progress.step, [batch_of(2.0)])
        progress.count(result)
        rates[result.outcome].append(schedule.rate)
    assert set(rates["overflow"]) == {0.25}
    assert rates["updated"] == [0.25, 0.5, 0.75]
    assert progress.step == progress.updates + progress.overflows


def test_a_resumed_runner_continues_with_the_same_scale_count_and_skips(world: World) -> None:
    precision = PrecisionConfig(dtype="fp16", init_scale=8.0, growth_interval=2)
    one = make_steps(world, Slope(0.0), precision=precision, on_nan="skip", max_skipped=1)
    for step, x in enumerate((1.0, 2.0, math.nan)):
        one.run(step, [batch_of(x)])
    other = make_steps(world, Slope(0.0), precision=precision, on_nan="skip", max_skipped=1)
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()
    assert other.loss_scale == 16.0
    with pytest.raises(NonFiniteLossError, match="2 steps were skipped"):
        other.run(3, [batch_of(math.nan)])


def test_a_request_to_stop_is_handed_back_with_the_result(world: World) -> None:
    steps = make_steps(world, Slope())
    assert not steps.run(0, [batch_of(1.0)]).stop_requested
    assert steps.run(1, [batch_of(1.0)], stop_requested=True).stop_requested


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda total, count: total, "must return two"),
        (lambda total, count: (total.detach(), count), "without a gradient"),
        (lambda total, count: (total.reshape(1), count), r"returned a tensor of shape \(1,\)"),
        (lambda total, count: (3.0, count), "returned a float as the sum"),
        (lambda total, count: (total * 1j, count), r"returned a sum of torch.complex64"),
        (lambda total, count: (total, -1), r"returned -1 as the count; .* 0 or more"),
        (lambda total, count: (total, torch.tensor(math.nan)), "returned nan as the count"),
        (lambda total, count: (total, None), "returned a NoneType as the count"),
        (lambda total, count: (total, torch.ones(2, 3)), r"returned a tensor of shape \(2, 3\) as the count"),
    ],
)
def test_a_loss_function_that_returns_something_else_is_refused(
    world: World, spoil: Callable[..., Any], message: str
) -> None:
    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        return spoil(*sum_of_outputs(model, batch))

    with pytest.raises(TrainerConfigError, match=message):
        make_steps(world, Slope(), loss=loss).run(0, [batch_of(1.0)])


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.tensor([1.0 + 1.0j]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.turn).abs()


def test_complex_weights_are_scaled_back_as_others_are(world: World) -> None:
    weights = []
    for dtype in ("fp32", "fp16"):
        model = Turned()
        make_steps(world, model, precision=PrecisionConfig(dtype=dtype, init_scale=64.0)).run(0, [batch_of(1.0, 2.0)])
        weights.append(model.turn.detach())
    assert torch.allclose(*weights, atol=1e-3)
    assert weights[0] != 1.0 + 1.0j
