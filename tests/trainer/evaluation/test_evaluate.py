"""Evaluation: exact averages, and a model that is as it was before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from small_world import FP32, Slope, batch_of, make_steps, sum_of_outputs
from torch import nn

from penstock.trainer import (
    ArrayLoader,
    Evaluation,
    Mesh,
    MetricFunction,
    ParallelConfig,
    TrainerConfigError,
    TrainerError,
    World,
)
from penstock.trainer.evaluation.evaluate import _add_over_ranks, evaluate
from penstock.trainer.parallel.model import ParallelModel
from penstock.trainer.parallel.passes import PlainPasses


def outputs(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"y": sum_of_outputs(model, batch)}


def run(
    world: World, model: nn.Module, batches: Iterable[Any], metrics: MetricFunction = outputs, **options: Any
) -> dict[str, float] | None:
    parallel = ParallelModel(model, ParallelConfig(), FP32, Mesh(world))
    evaluation = Evaluation(batches=batches, metrics=metrics)
    passes = PlainPasses(parallel, FP32, lambda name: nullcontext())
    return evaluate(parallel, evaluation, passes=passes, phase=lambda name: nullcontext(), **options)


@pytest.mark.parametrize("last_batch", ["partial", "pad"])
def test_an_uneven_last_batch_counts_by_its_rows(world: World, last_batch: str) -> None:
    x = torch.arange(1.0, 24.0).reshape(-1, 1)  # 23 rows in batches of 6: the last has 5
    loader = ArrayLoader({"x": x}, batch_size=6, last_batch=last_batch, rank=0, world_size=1)
    assert run(world, Slope(2.0), loader) == {"y": pytest.approx(24.0, rel=1e-12)}


def test_sums_are_added_in_float64(world: World) -> None:
    def large(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"large": (torch.tensor(2.0**24) if batch["x"][0] > 0 else torch.tensor(1.0), 1)}

    found = run(world, Slope(), [batch_of(1.0), batch_of(0.0), batch_of(0.0)], large)
    assert found is not None
    assert found["large"] * 3 == 2**24 + 2, "float32 has no 2**24 + 1"


def test_a_metric_without_counts_is_nan_and_no_batches_give_no_metrics(world: World) -> None:
    found = run(world, Slope(), [batch_of()])
    assert found is not None
    assert math.isnan(found["y"])
    assert run(world, Slope(), []) == {}


def test_a_spent_iterator_is_an_error_and_not_an_evaluation_of_nothing(world: World) -> None:
    batches = iter([batch_of(1.0), batch_of(2.0)])
    assert run(world, Slope(2.0), batches) == {"y": 3.0}
    with pytest.raises(TrainerError, match="batches is a list_iterator that is exhausted"):
        run(world, Slope(2.0), batches)


@pytest.mark.parametrize("as_number", [False, True])
def test_a_mean_over_a_share_without_rows_adds_nothing_and_a_nan_of_rows_stays(world: World, as_number: bool) -> None:
    def mean(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        found, count = model(batch["x"]).mean(), len(batch["x"])
        return {"y": (found.item() * count, count) if as_number else (found * count, torch.tensor(count))}

    assert run(world, Slope(2.0), [batch_of(1.0, 3.0), batch_of()], mean) == {"y": 4.0}
    found = run(world, Slope(2.0), [batch_of(1.0), batch_of(math.nan), batch_of()], mean)
    assert found is not None
    assert math.isnan(found["y"])


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_evaluated_without_dropout_and_put_back_into_its_mode(world: World, training: bool) -> None:
    model = Slope(1.0, dropout=0.5).train(training)
    assert run(world, model, [batch_of(*[1.0] * 50)]) == {"y": 1.0}
    assert model.training is training
    assert model.dropout.training is training


def test_an_error_in_the_metrics_puts_the_model_back_into_its_mode(world: World) -> None:
    def fail(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        raise ValueError("no such label")

    model = Slope().train()
    with pytest.raises(ValueError, match="no such label"):
        run(world, model, [batch_of(1.0)], fail)
    assert model.training


def test_gradients_are_neither_made_nor_touched(world: World) -> None:
    def measure(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        total, count = sum_of_outputs(model, batch)
        assert not total.requires_grad
        return {"y": (total, count)}

    model = Slope()
    model.w.grad = torch.tensor([[5.0]])
    run(world, model, [batch_of(1.0, 2.0)], measure)
    assert float(model.w.grad) == 5.0


def test_an_evaluation_between_steps_leaves_training_as_it_was(world: World) -> None:
    found = []
    for evaluates in (False, True):
        model = Slope(1.0)
        steps = make_steps(world, model, accumulate=2)
        for step in range(3):
            steps.run(step, [batch_of(0.5), batch_of(0.25, 1.0)])
            if evaluates:
                run(world, model, [batch_of(9.0)])
        found.append(float(model.w.detach()))
    assert found[0] == found[1]


def test_a_request_to_stop_ends_it_without_metrics_and_the_next_one_sees_all_batches(world: World) -> None:
    x = torch.arange(6.0).reshape(-1, 1)
    loader = ArrayLoader({"x": x}, batch_size=2, shuffle=False, rank=0, world_size=1)
    asked: list[bool] = []

    def stop() -> bool:
        asked.append(True)
        return len(asked) == 2

    model = Slope().train()
    assert run(world, model, loader, stop_requested=stop) is None
    assert model.training
    assert run(world, model, loader) == {"y": pytest.approx(2.5)}


def test_what_is_no_mapping_of_sums_and_counts_is_refused(world: World) -> None:
    for wrong in (0.5, {"y": 0.5}, {"y": (1.0, 2.0, 3.0)}):
        with pytest.raises(TrainerConfigError, match=r"metric to \(sum, count\)"):
            run(world, Slope(), [batch_of(1.0)], lambda model, batch, wrong=wrong: wrong)


def test_a_sum_of_several_numbers_is_refused_by_the_metrics_name(world: World) -> None:
    with pytest.raises(TrainerConfigError, match=r"shape \(2,\) for 'y'; .* such as losses.sum\(\)"):
        run(world, Slope(), [batch_of(1.0)], lambda model, batch: {"y": (torch.ones(2), 2)})
    one = {"y": (torch.ones(1), torch.ones(1, 1))}
    assert run(world, Slope(), [batch_of(1.0)], lambda model, batch: one) == {"y": 1.0}


def test_the_error_of_the_batches_comes_through(world: World) -> None:
    def broken() -> Iterator[dict[str, torch.Tensor]]:
        yield batch_of(1.0)
        raise OSError("shard test-3.tar cannot be read")

    with pytest.raises(OSError, match=r"test-3\.tar"):
        run(world, Slope(), broken())


@pytest.mark.parametrize("name", ["kind", "step", "time", "seconds", "weights"])
def test_a_metric_named_as_a_field_of_its_record_is_refused_and_not_written_over_it(world: World, name: str) -> None:
    with pytest.raises(TrainerConfigError, match=rf"a metric called '{name}', which is a field .* 'val/{name}'"):
        run(world, Slope(), [batch_of(1.0)], lambda model, batch: {name: (1.0, 1)})


@pytest.mark.parametrize("name", [1, None, ("a", "b"), ""])
def test_a_metrics_name_that_is_no_text_is_refused(world: World, name: Any) -> None:
    with pytest.raises(TrainerConfigError, match="as a metric's name"):
        run(world, Slope(), [batch_of(1.0)], lambda model, batch: {"y": (1.0, 1), name: (1.0, 1)})


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("3", "a str"),
        (None, "a NoneType"),
        (1j, "a complex"),
        ({"a": 1.0}, "a dict"),
        (torch.tensor(1j), "a tensor of torch.complex64"),
        (np.ones(2), "an array of float64 and of shape"),
        (np.array("3"), "a ndarray"),
    ],
)
def test_a_sum_or_a_count_that_is_no_number_is_refused_by_the_metrics_name(world: World, wrong: Any, told: str) -> None:
    for pair in ((wrong, 1), (1.0, wrong)):
        with pytest.raises(TrainerConfigError, match=rf"returned {told}.* for 'y'; .* each one real number"):
            run(world, Slope(), [batch_of(1.0)], lambda model, batch, pair=pair: {"y": pair})


def test_numbers_of_every_kind_are_sums_and_counts(world: World) -> None:
    kinds = (3, True, 2**70, Fraction(3, 2), np.float32(1.5), np.array([2]), np.bool_(True), torch.tensor(True))
    kinds += (torch.tensor(3, dtype=torch.uint64), torch.tensor(1.5, dtype=torch.bfloat16))
    kinds += (np.uint64(3), np.longdouble(1.5), np.array(3.0, dtype=">f8"))
    for number in kinds:
        found = run(world, Slope(), [batch_of(1.0)], lambda model, batch, one=number: {"y": (one, one)})
        assert found == {"y": 1.0}


@pytest.mark.parametrize("count", [-1, math.inf, math.nan])
def test_a_count_by_which_no_mean_can_be_taken_is_refused(world: World, count: float) -> None:
    with pytest.raises(TrainerConfigError, match=rf"counts for 'y' add up to {count:g}; .* 0 or more"):
        run(world, Slope(), [batch_of(1.0)], lambda model, batch: {"y": (1.0, count)})


def test_one_rank_learns_which_batches_there_are_without_its_device(world: World) -> None:
    assert _add_over_ranks([True, False, True], torch.device("meta")) == [1.0, 0.0, 1.0]
