"""Stages of one process, one after another: what each needs of the others is found, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pipeline_cases import CASES, Batch, class_loss
from pipeline_runs import gradients_alone
from torch import Tensor, nn

from penstock.trainer import TrainerConfigError
from penstock.trainer.parallel.pipeline.cut import cut_model, split_evenly
from penstock.trainer.parallel.pipeline.orders import make_flush
from penstock.trainer.parallel.pipeline.pipeline import Facts, agree_on_crossings
from penstock.trainer.parallel.pipeline.runner import Runner
from penstock.trainer.parallel.pipeline.staged import Crossing, Rehearsal, StagedModel
from penstock.trainer.steps.microbatches import cut_batch

CPU = torch.device("cpu")
Loss = Callable[[nn.Module, Any], Any]


def rehearse(
    model: nn.Module, loss: Loss, part: Any, *, count: int = 3, stages: Sequence[Any] = ()
) -> tuple[StagedModel, dict[int, Crossing], dict[int, Rehearsal]]:
    staged = StagedModel(model, cut_model(model, stages, count), CPU)
    staged.keep(range(count))
    staged.gate()
    found = {at: staged.rehearse(at, lambda shadow: loss(shadow, part)) for at in range(count)}
    without = {at: staged.rehearse(at, lambda shadow: loss(shadow, part), have_gradients=False) for at in range(count)}
    facts = {
        at: Facts(received=one.received, sent=one.sent, sent_without=without[at].sent, draws=one.draws)
        for at, one in found.items()
    }
    return staged, agree_on_crossings(staged.cut, facts), found


def run(
    model: nn.Module, loss: Loss, batch: Any, *, parts: int = 2, count: int = 3, stages: Sequence[Any] = ()
) -> None:
    """Leave the model the gradients of half the loss."""
    cut = cut_batch(batch, parts)
    staged, crossings, found = rehearse(model, loss, cut[0], count=count, stages=stages)
    Runner(staged, crossings, None, CPU).run(
        make_flush((0,) * count, parts),
        0,
        cut,
        loss,
        model,
        {(stage, part): found[stage] for stage in range(count) for part in range(parts)},
        found=lambda part, returned: returned[0],
        weigh=lambda loss: loss * 0.5,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["perceptron", "convolutions", "streams", "llama"])
def test_stages_have_the_gradients_of_the_whole(name: str) -> None:
    case = CASES[name]
    model = case.model()
    run(model, case.loss, case.batch(4))
    expected, buffers, _ = gradients_alone(name, 4, 2)
    for key, one in model.named_parameters():
        assert one.grad is not None, key
        assert torch.equal(one.grad, expected[key]), key
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[key]), key


class Chain(nn.Module):
    """Layers one after another; ``walk`` is forward."""

    def __init__(self, walk: Callable[[Chain, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(5)])
        self.out = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.walk = walk

    def forward(self, x: Tensor) -> Tensor:
        return self.walk(self, x)


def straight(self: Chain, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = layer(x).tanh()
    found: Tensor = self.out(x)
    return found


def rows() -> Batch:
    return CASES["perceptron"].batch(4)


def refused(walk: Callable[[Chain, Tensor], Tensor], words: str, loss: Loss = class_loss) -> None:
    with pytest.raises(TrainerConfigError, match=words):
        rehearse(Chain(walk), loss, rows(), stages=("layers.2", "layers.4"))


def test_a_residual_around_stages_is_refused() -> None:
    def walk(self: Chain, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        x = first
        for layer in self.layers[1:]:
            x = layer(x)
        return self.out(x + first)  # type: ignore[no-any-return]

    refused(walk, "made from layers.0, which is on another stage")


def test_a_mask_of_values_of_the_input_is_the_same_on_each_stage() -> None:
    def walk(self: Chain, x: Tensor) -> Tensor:
        mask = x > 0
        for layer in self.layers:
            x = layer(x).masked_fill(mask, 0.5)
        return self.out(x)  # type: ignore[no-any-return]

    together, apart = Chain(walk), Chain(walk)
    run(apart, class_loss, rows(), stages=("layers.2", "layers.4"))
    for part in cut_batch(rows(), 2):
        (class_loss(together, part)[0] * 0.5).backward()
    for (name, one), other in zip(together.named_parameters(), apart.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]


def test_a_mask_of_values_of_another_stage_is_refused() -> None:
    def walk(self: Chain, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        mask = x > 0
        for layer in self.layers[1:]:
            x = layer(x).masked_fill(mask, 0.5)
        return self.out(x)  # type: ignore[no-any-return]

    refused(walk, "layers.0")


def test_writing_into_a_tensor_of_this_stage_is_refused() -> None:
    def walk(self: Chain, x: Tensor) -> Tensor:
        kept = torch.zeros(len(x), 6)
        x = self.layers[0](x)
        kept += x.detach()
        for layer in self.layers[1:]:
            x = layer(x)
        return self.out(x + kept)  # type: ignore[no-any-return]

    refused(walk, "writes by .*layers.0 returned")


def test_a_branch_on_values_of_another_stage_is_refused() -> None:
    def walk(self: Chain, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x if x.sum() > 0 else -x
        return self.out(x)  # type: ignore[no-any-return]

    refused(walk, "the values of what layers.[0-9] returned are needed")


def test_a_module_that_is_called_twice_over_stages_is_refused() -> None:
    def walk(self: Chain, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return self.out(x)  # type: ignore[no-any-return]

    refused(walk, "begins with 'layers.2', and a loss calls it twice")


def test_a_module_of_the_first_stage_that_is_called_last_is_refused() -> None:
    def walk(self: Chain, x: Tensor) -> Tensor:
        for layer in self.layers[1:]:
            x = layer(x)
        return self.out(self.layers[0](x))  # type: ignore[no-any-return]

    refused(walk, "made from layers.0")


def test_a_module_that_is_not_called_cannot_begin_a_stage() -> None:
    def walk(self: Chain, x: Tensor) -> Tensor:
        return self.out(self.layers[2](self.layers[0](x)))  # type: ignore[no-any-return]

    refused(walk, "begins with 'layers.4', and forward does not call it")


def test_a_loss_that_needs_weights_of_another_stage_is_refused() -> None:
    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        total, count = class_loss(model, batch)
        first: Any = model.get_submodule("layers.0")
        return total + first.weight.square().sum(), count

    refused(straight, "made from layers.0.weight", loss)


def test_a_loss_that_calls_the_model_twice_is_refused() -> None:
    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        total, count = class_loss(model, batch)
        return total + class_loss(model, batch)[0], count

    refused(straight, "a loss calls it twice", loss)


def test_random_numbers_that_several_stages_would_draw_are_refused() -> None:
    def walk(self: Chain, x: Tensor) -> Tensor:
        kept = torch.rand(len(x), 1) > 0.1
        for layer in self.layers:
            x = layer(x) * kept
        return self.out(x)  # type: ignore[no-any-return]

    refused(walk, "draws random numbers outside of the modules of stages")


def test_a_weight_outside_of_modules_is_on_the_stage_that_is_named() -> None:
    def walk(self: Chain, x: Tensor) -> Tensor:
        return straight(self, x) * self.scale

    refused(walk, "made from scale, which is on another stage")
    lists = (["layers.0", "layers.1"], ["layers.2", "layers.3"], ["layers.4", "out", "scale"])
    model = Chain(walk)
    run(model, class_loss, rows(), stages=lists)
    assert model.scale.grad is not None


def test_a_batch_norm_without_weights_counts_on_its_own_stage_only() -> None:
    def walk(self: Chain, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))  # type: ignore[no-any-return]

    model = Chain(walk)
    run(
        model,
        class_loss,
        rows(),
        stages=(["layers.0", "layers.1", "scale"], ["layers.2"], ["layers.3", "layers.4", "out", "norm"]),
    )
    assert int(model.norm.num_batches_tracked) == 2  # type: ignore[arg-type]


def test_frozen_stages_send_no_gradients_back() -> None:
    model = Chain(straight)
    for layer in list(model.layers)[:3]:
        layer.requires_grad_(False)
    run(model, class_loss, rows(), stages=("layers.2", "layers.4"))
    assert all(one.grad is None for layer in list(model.layers)[:3] for one in layer.parameters())
    assert all(one.grad is not None for layer in list(model.layers)[3:] for one in layer.parameters())


def test_a_loss_may_read_its_own_values() -> None:
    seen = []

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        total, count = class_loss(model, batch)
        seen.append(total.item())
        return total, count

    run(Chain(straight), loss, rows(), stages=("layers.2", "layers.4"))
    assert len(set(seen)) > 1


def test_the_rest_of_a_model_takes_no_memory() -> None:
    model = Chain(straight)
    staged = StagedModel(model, cut_model(model, ("layers.2", "layers.4"), 3), CPU)
    staged.keep([1])
    assert [name for name, _ in model.named_parameters()] == [
        f"layers.{at}.{key}" for at in (2, 3) for key in ("weight", "bias")
    ]
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]


def test_even_stages_have_about_equal_parameters() -> None:
    assert split_evenly(Chain(straight), 3) == ["layers.2", "layers.4"]
    with pytest.raises(TrainerConfigError, match="the model has 7 modules in a row"):
        split_evenly(Chain(straight), 9)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (("layers.1", "layer.4"), "names 'layer.4', no module of the model; did you mean 'layers.4'"),
        (("layers.1", "layers.1"), "names 'layers.1' twice"),
        (("layers.4", "layers.1"), "in the order layers.4, layers.1"),
        (("layers", "layers.1"), "names 'layers' and 'layers.1', which is a part of it"),
        (("layers.1", ["layers.4"]), "mixes names and lists of names"),
        ((["layers.0"], ["layers.1", "layers.2"], ["out"]), "leaves out scale, layers.3.weight"),
        ((["layers"], ["out", "layers"], ["scale"]), "names 'layers' twice, for stages 0 and 1"),
        ((["layers"], ["layers.3"], ["out", "scale"]), "names 'layers' for stage 0 and a part of it, 'layers.3'"),
        ((["layers"], ["out"], ["scale"]), r"stages\[2\] must begin with the name of a module, and has scale"),
    ],
)
def test_stages_that_cannot_be_are_refused_by_name(stages: Sequence[Any], words: str) -> None:
    with pytest.raises(TrainerConfigError, match=words):
        cut_model(Chain(straight), stages, 3)
