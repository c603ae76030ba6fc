"""Learners train as a naive loop says that they should, whatever lies inside a learner."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from learner_cases import FIRST, SECOND, Normed, Pair, Weights, adam, load, open_trainer, sgd, train, train_and_listen
from small_trainers import square

from penstock.trainer import Evaluation, TrainerError, World

pytestmark = pytest.mark.slow

TOLERANCE = 2e-6
"""In fp32: sums over ranks and fused optimizers round in another order than a loop over whole batches."""

PLAIN: dict[str, Any] = {"every": 4, "rate": 0.7, "momentum": 0.9}
STREAMED: dict[str, Any] = {**PLAIN, "fragments": 2, "overlap": 1, "alpha": 0.25}
MEAN: dict[str, Any] = {"every": 4, "rate": 1.0, "momentum": 0.0}
STAGES = {"plain": (0, 1, 2, 3), "streamed": (0, 3), "int8": (0, 3)}


def naive(
    learners: int,
    ranks: int,
    *,
    steps: int = 12,
    every: int,
    rate: float,
    momentum: float,
    fragments: int = 1,
    overlap: int = 0,
    alpha: float = 0.0,
    clip_norm: float | None = None,
    loss: Callable[..., Any] = square,
) -> Weights:
    """The mean of the learners' weights after ``steps``, in one process, by loops over learners and names.

    ``loss`` is summed over each learner's batches as they are.
    """
    size = learners * ranks
    loaders = [load((rank, size)) for rank in range(size)]
    batches = [[batch for _ in range(2) for batch in loader] for loader in loaders]
    models = [Pair() for _ in range(learners)]
    inner = [adam(model.parameters()) for model in models]
    common = {name: one.detach().clone().requires_grad_() for name, one in models[0].named_parameters()}
    parts = [(*FIRST, *SECOND)] if fragments == 1 else [FIRST, SECOND]
    nesterov = {"momentum": momentum, "nesterov": True} if momentum else {}
    outer = [torch.optim.SGD([common[name] for name in part], lr=rate, **nesterov) for part in parts]
    counts = [[0.0] * learners for _ in parts]
    merges: list[tuple[int, int]] = []
    for step in range(1, steps + 1):
        of_step = [rank[step - 1] for rank in batches]
        if not sum(loss(models[0], batch)[1] for batch in of_step):
            continue
        for learner, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            losses = [loss(model, batch) for batch in of_step[learner * ranks : (learner + 1) * ranks]]
            count = sum(one for _, one in losses)
            optimizer.zero_grad()
            (sum(total for total, _ in losses) / max(count, 1)).backward()
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            for part in range(len(parts)):
                counts[part][learner] += count
        for part, names in enumerate(parts):
            if step % every != (part + 1) * every // fragments % every:
                continue
            shares = [count / sum(counts[part]) for count in counts[part]]
            counts[part] = [0.0] * learners
            for name in names:
                common[name].grad = sum(
                    share * (common[name].detach() - model.get_parameter(name).detach())
                    for share, model in zip(shares, models, strict=True)
                )
            outer[part].step()
            merges.append((step + overlap, part))
        for due, part in merges:
            if due == step:
                for model, name in itertools.product(models, parts[part]):
                    own_weight = model.get_parameter(name).data
                    own_weight.copy_(alpha * own_weight + (1 - alpha) * common[name].detach())
    return {name: sum(model.get_parameter(name).detach() for model in models) / learners for name in common}


def far(one: Weights, other: Weights) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in other)


def is_equal(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


def train_two(world: World, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def case(name: str, diloco: dict[str, Any] | None, **options: Any) -> None:
        found[name] = train(world, folder, diloco, **options)

    case("plain", PLAIN)
    case("streamed", STREAMED)
    case("clipped", PLAIN, step={"clip_norm": 0.2})
    found["bf16 codec"], found["bf16 records"] = train_and_listen(world, folder, {**PLAIN, "codec": "bf16"})
    found["int8 codec"], found["int8 records"] = train_and_listen(world, folder, {**PLAIN, "codec": "int8"})
    case("bf16", PLAIN, precision={"dtype": "bf16"})
    case("bf16 allreduce", None, precision={"dtype": "bf16"})
    case("local sgd", None, average_every=4, optimizer=sgd, steps=10)
    case("local sgd by mean", MEAN, optimizer=sgd, steps=10)
    case("local sgd, normed", None, average_every=3, optimizer=sgd, steps=6, model=Normed())
    case("mean, normed", {**MEAN, "every": 3}, optimizer=sgd, steps=6, model=Normed())
    case("apart, whole", PLAIN, optimizer=sgd, model=Pair(apart=True))
    case("apart, fragments", {**PLAIN, "fragments": 2}, optimizer=sgd, model=Pair(apart=True))
    one: dict[str, Any] = {**MEAN, "learners": 1}
    for zero in (0, 3):
        case(f"one learner, zero {zero}", {**one, "fragments": 2}, zero=zero, ema={"decay": 0.9})
        case(f"allreduce, zero {zero}", None, zero=zero, ema={"decay": 0.9})
    case("one learner, bf16", one, precision={"dtype": "bf16"})
    metrics = {"number": 0}

    def measure(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        metrics["number"] += 1
        return {"loss": square(model, batch)}

    evaluation = Evaluation(batches=load(world), metrics=measure)
    watched = {"checkpoint": {"every_steps": 3, "folder": "watched"}, "evaluate": {"every": 2}}
    case("watched", STREAMED, evaluation=evaluation, **watched)
    found["evaluated"] = metrics["number"]
    case("skipping", PLAIN, loss=spoil_one, step={"on_nan": "skip"})
    case("left out", PLAIN, loss=leave_one_out)
    return found


def spoil_one(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    total, count = square(model, batch)
    return total * torch.where(batch["__id__"] == 7, torch.nan, 1.0).prod(), count


def leave_one_out(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Rank 1 counts nothing in every other batch, and so its learner counts for less."""
    total, count = square(model, batch)
    odd = bool(batch["__id__"].sum() % 2)
    return (total * 0.0, 0) if odd else (total, count)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(train_two, 2, str(tmp_path_factory.mktemp("two")), timeout_s=180)


def train_four(world: World, folder: str) -> dict[str, Any]:
    pairs: dict[str, Any] = {"learners": 2}
    found: dict[str, Any] = {}
    for name, diloco in (("plain", PLAIN), ("streamed", STREAMED), ("int8", {**STREAMED, "codec": "int8"})):
        for zero in STAGES[name]:
            found[f"{name}, zero {zero}"] = train(world, folder, {**pairs, **diloco}, zero=zero)
    apart = replace(world, local_rank=0, local_world_size=1, node_rank=world.rank, num_nodes=4)
    parallel = {"mode": "diloco", "zero": 3, "hybrid": True, "diloco": {**pairs, **PLAIN}}
    found["hybrid"] = train(apart, folder, parallel=parallel)
    found["clipped, zero 3"] = train(world, folder, {**pairs, **PLAIN}, zero=3, step={"clip_norm": 0.2})
    found["clipped, zero 0"] = train(world, folder, {**pairs, **PLAIN}, zero=0, step={"clip_norm": 0.2})
    _, found["records"] = train_and_listen(world, folder, {**pairs, **PLAIN})
    _, found["sharded records"] = train_and_listen(world, folder, {**pairs, **PLAIN}, zero=3)
    evaluation = Evaluation(batches=load(world), metrics=lambda model, batch: {"loss": square(model, batch)})
    with open_trainer(world, folder, {**pairs, **PLAIN}, evaluation=evaluation) as trainer:
        with torch.no_grad():
            if world.rank == 3:
                trainer.parallel.inner.second.weight.mul_(2.0)
        with pytest.raises(TrainerError) as caught:
            trainer.evaluate()
        found["unlike"] = str(caught.value)
    return found


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(train_four, 4, str(tmp_path_factory.mktemp("four")), timeout_s=240)


def test_one_learner_that_averages_is_plain_training_bit_for_bit(two: list[dict[str, Any]]) -> None:
    for found in two:
        for zero in (0, 3):
            assert is_equal(found[f"one learner, zero {zero}"], found[f"allreduce, zero {zero}"])
        assert is_equal(found["one learner, bf16"], found["bf16 allreduce"])


def test_two_learners_are_those_of_a_naive_loop(two: list[dict[str, Any]]) -> None:
    for name, options in (("plain", PLAIN), ("streamed", STREAMED), ("clipped", {**PLAIN, "clip_norm": 0.2})):
        expected = naive(2, 1, **options)
        assert far(two[0][name], expected) < TOLERANCE, name
        assert is_equal(two[0][name], two[1][name])
    assert far(naive(2, 1, **PLAIN), naive(2, 1, **STREAMED)) > 1e-2  # the options do something


def test_learners_count_by_what_their_losses_count(two: list[dict[str, Any]]) -> None:
    expected = naive(2, 1, **PLAIN, loss=leave_one_out)
    assert far(two[0]["left out"], expected) < TOLERANCE
    assert far(expected, naive(2, 1, **PLAIN)) > 1e-2


def test_learners_of_two_ranks_are_those_of_a_naive_loop_at_every_zero_stage(four: list[dict[str, Any]]) -> None:
    for name, options in (("plain", PLAIN), ("streamed", STREAMED)):
        expected = naive(2, 2, **options)
        for zero in STAGES[name]:
            assert far(four[0][f"{name}, zero {zero}"], expected) < TOLERANCE, (name, zero)
            for other in four[1:]:
                assert is_equal(other[f"{name}, zero {zero}"], four[0][f"{name}, zero {zero}"])
    assert far(four[0]["hybrid"], naive(2, 2, **PLAIN)) < TOLERANCE
    clipped = naive(2, 2, **PLAIN, clip_norm=0.2)
    assert max(far(four[0][f"clipped, zero {zero}"], clipped) for zero in (0, 3)) < TOLERANCE


def test_local_sgd_is_the_mean_of_learners_of_one_rank_bit_for_bit(two: list[dict[str, Any]]) -> None:
    """With plain SGD, whose state local SGD has nothing to average of, and buffers, which both average."""
    for found in two:
        assert is_equal(found["local sgd by mean"], found["local sgd"])
        assert is_equal(found["mean, normed"], found["local sgd, normed"])


def test_the_last_fragment_is_bit_equal_to_the_same_part_of_a_whole(two: list[dict[str, Any]]) -> None:
    """The last fragment's turns are those of a whole model; its layer does not see the other one, which has others."""
    for found in two:
        for name in SECOND:
            assert torch.equal(found["apart, fragments"][name], found["apart, whole"][name])
        assert not torch.equal(found["apart, fragments"]["first.weight"], found["apart, whole"]["first.weight"])


def test_saves_and_evaluations_in_between_change_nothing(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert found["evaluated"]
        assert is_equal(found["watched"], found["streamed"])


def test_codecs_send_fewer_bytes_and_come_close(two: list[dict[str, Any]], four: list[dict[str, Any]]) -> None:
    found, numel = two[0], 40
    assert 0 < far(found["bf16 codec"], found["plain"]) < 4e-3
    assert 0 < far(found["int8 codec"], found["plain"]) < 1e-2
    sent = [records[-1]["outer_bytes"] for records in (found["bf16 records"], found["int8 records"])]
    assert sent[0] == 3 * 2 * numel  # three exchanges; a ring of two ranks sends what it sums once
    assert sent[1] == 3 * 2 * (numel // 2 + 4)  # two halves of the elements, each with one scale
    for zero in STAGES["int8"]:
        assert far(four[0][f"int8, zero {zero}"], four[0]["streamed, zero 0"]) < 1e-2


def test_ranks_of_a_learner_share_out_what_it_sends(four: list[dict[str, Any]]) -> None:
    keys = ("records", "sharded records")
    for key in keys:
        records = [one for one in four[0][key] if one["kind"] == "train"]
        assert [one["outer_bytes"] for one in records[3::4]] == [4 * 20 * turn for turn in (1, 2, 3)]
    norms = [[one["outer_norm"] for one in four[0][key] if "outer_norm" in one] for key in keys]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert (len(norms[0]), len(set(norms[0]))) == (9, 3)


def test_a_rank_that_differs_from_its_learner_is_found_by_all(four: list[dict[str, Any]]) -> None:
    for found in four:
        assert "the ranks train different models: the norm of second.weight" in found["unlike"]


def test_a_loss_that_is_not_finite_is_skipped_by_all_learners(two: list[dict[str, Any]]) -> None:
    assert all(torch.isfinite(one).all() for one in two[0]["skipping"].values())
    assert is_equal(two[0]["skipping"], two[1]["skipping"])
