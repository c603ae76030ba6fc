"""Optimizers on shards step as torch's, to the bit, on whole tensors, on pieces and on rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.trainer.errors import TrainerConfigError
from penstock.trainer.server.optimizers import AdamW, Optimizer, RowWiseAdagrad, Sgd, outer_nesterov

SIZE, STEPS = 1003, 12
CASES = {
    "sgd": (Sgd(rate=0.1), lambda p: torch.optim.SGD([p], lr=0.1)),
    "momentum": (
        Sgd(rate=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "nesterov": (outer_nesterov(), lambda p: torch.optim.SGD([p], lr=0.7, momentum=0.9, nesterov=True)),
    "adamw": (AdamW(rate=3e-3), lambda p: torch.optim.AdamW([p], lr=3e-3, foreach=False)),
}


def gradients(count: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SIZE, generator=generator) * 10.0 ** (step % 5 - 2) for step in range(count)]


def first() -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("piece", [SIZE, 64, 37])
def test_pieces_step_as_torch_does(name: str, piece: int) -> None:
    ours, make = CASES[name]
    parameter = torch.nn.Parameter(first())
    theirs = make(parameter)
    values = [part.clone().view(1, -1) for part in first().split(piece)]
    states = [ours.new_state(part) for part in values]
    for gradient in gradients():
        parameter.grad = gradient.clone()
        theirs.step()
        for part, state, one in zip(values, states, gradient.split(piece), strict=True):
            ours.step(part, one.view(1, -1), state, ours.rate)
        assert torch.equal(torch.cat(values, 1)[0], parameter)


@pytest.mark.parametrize("optimizer", [*(case[0] for case in CASES.values()), RowWiseAdagrad()], ids=str)
def test_rows_together_step_as_each_alone(optimizer: Optimizer) -> None:
    together = first()[:60].view(12, 5).clone()
    state = optimizer.new_state(together)
    alone = [row.clone().view(1, 5) for row in together]
    states = [optimizer.new_state(row) for row in alone]
    for step, gradient in enumerate(gradients()):
        chosen = torch.tensor([index for index in range(12) if (index * 7 + step) % 3])  # rows differ in their steps
        of_rows = gradient[: 5 * len(chosen)].view(-1, 5)
        values, part = together[chosen], {key: tensor[chosen] for key, tensor in state.items()}
        optimizer.step(values, of_rows, part, 0.05)
        together[chosen] = values
        for key, tensor in part.items():
            state[key][chosen] = tensor
        for row, one in zip(chosen.tolist(), of_rows, strict=True):
            optimizer.step(alone[row], one.view(1, 5), states[row], 0.05)
    assert torch.equal(together, torch.cat(alone))


def test_row_wise_adagrad_of_one_column_is_adagrad() -> None:
    ours = RowWiseAdagrad(rate=0.1)
    parameter = torch.nn.Parameter(first())
    theirs = torch.optim.Adagrad([parameter], lr=0.1, eps=1e-10, foreach=False)
    values = first().view(-1, 1)
    state = ours.new_state(values)
    for gradient in gradients():
        parameter.grad = gradient.clone()
        theirs.step()
        ours.step(values, gradient.view(-1, 1), state, ours.rate)
    torch.testing.assert_close(values[:, 0], parameter.detach(), rtol=1e-6, atol=1e-7)  # torch fuses a multiply-add


def test_row_wise_adagrad_divides_by_the_mean_of_squares() -> None:
    values = torch.zeros(1, 2)
    state = RowWiseAdagrad().new_state(values)
    RowWiseAdagrad().step(values, torch.tensor([[3.0, 4.0]]), state, 1.0)
    assert state["sum"].item() == 12.5
    assert values[0].tolist() == pytest.approx([-3 / 12.5**0.5, -4 / 12.5**0.5])


def test_an_outer_rate_of_one_without_momentum_takes_the_learners_parameters() -> None:
    before, after = first(), torch.round(first() * 64) / 64
    before = torch.round(before * 8) / 8  # so that the difference is exact
    values = before.clone().view(1, -1)
    optimizer = outer_nesterov(rate=1.0, momentum=0.0)
    optimizer.step(values, (before - after).view(1, -1), optimizer.new_state(values), 1.0)
    assert torch.equal(values[0], after)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sgd(rate=float("nan")),
        lambda: Sgd(rate=0.1, momentum=-1),
        lambda: Sgd(rate=0.1, nesterov=True),
        lambda: AdamW(betas=(0.9, 1.0)),
        lambda: RowWiseAdagrad(eps=-1),
    ],
)
def test_impossible_settings_are_refused(make) -> None:
    with pytest.raises(TrainerConfigError):
        make()
