"""Mixtures of experts: what a token gets follows from its row alone, equals a loop over tokens, and is balanced."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from penstock.trainer import TrainerConfigError
from penstock.trainer.data.batches import VALID
from penstock.trainer.recipes.experts import ExpertsConfig, MixtureOfExperts, list_mixtures
from penstock.trainer.recipes.llama import Llama, next_token_loss
from penstock.trainer.recipes.llama_config import LlamaConfig
from penstock.trainer.report.flops import copy_without_data, count_flops

WIDTH, INNER = 16, 24


def make_layer(**values: Any) -> MixtureOfExperts:
    torch.manual_seed(3)
    return MixtureOfExperts(WIDTH, INNER, ExpertsConfig(**{"num_experts": 5, **values}), 0.4, 0.3)


def naive(layer: MixtureOfExperts, x: Tensor, capacity: int | None) -> Tensor:
    """The definition: token by token, expert by expert."""
    experts, result = layer.experts, torch.zeros_like(x)
    for row in range(len(x)):
        taken = [0] * layer.config.num_experts
        for place in range(x.shape[1]):
            token = x[row, place]
            scores = (layer.router.weight @ token).softmax(0)
            chosen = (scores + layer.router.bias).topk(layer.config.num_experts_per_tok).indices.tolist()
            for one in chosen:
                taken[one] += 1
                if capacity is None or taken[one] <= capacity:
                    inner = F.silu(experts.gate_proj[one] @ token) * (experts.up_proj[one] @ token)
                    weight = scores[one] / (scores[chosen].sum() if len(chosen) > 1 else 1.0)
                    result[row, place] += weight * (experts.down_proj[one] @ inner)
    return result


@pytest.mark.parametrize("each", [1, 2, 5])
@pytest.mark.parametrize("factor", [None, 1.0, 0.1])
def test_a_mixture_is_the_sum_over_each_tokens_experts(each: int, factor: float | None) -> None:
    layer = make_layer(num_experts_per_tok=each, capacity_factor=factor)
    layer.router.bias.copy_(torch.tensor([0.2, 0.0, -0.1, 0.0, 0.1]))
    x = torch.randn(3, 7, WIDTH, requires_grad=True)
    room = None if factor is None else math.ceil(factor * 7 * each / 5)
    got, expected = layer(x), naive(layer, x, room)
    assert torch.allclose(got, expected, atol=1e-6)
    wanted = torch.autograd.grad(expected.square().sum(), [x, *layer.parameters()])
    found = torch.autograd.grad(got.square().sum(), [x, *layer.parameters()])
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("balance", ["bias", "loss"])
def test_rows_do_not_depend_on_those_beside_them(balance: str) -> None:
    layer = make_layer(capacity_factor=1.0, balance=balance)
    x = torch.randn(4, 9, WIDTH)
    whole = layer(x)
    auxiliary = layer.auxiliary_loss
    parts = [layer(x[i : i + 1]) for i in range(4)]
    assert torch.allclose(whole, torch.cat(parts), atol=1e-6)
    if balance == "loss":
        total = torch.zeros(())
        for i in range(4):
            layer(x[i : i + 1])
            assert layer.auxiliary_loss is not None
            total = total + layer.auxiliary_loss
        assert auxiliary is not None
        assert torch.allclose(auxiliary, total)


def test_experts_that_no_token_chose_have_gradients_of_zero() -> None:
    layer = make_layer(num_experts_per_tok=1)
    layer.router.bias[2] = 100.0
    layer(torch.randn(2, 3, WIDTH)).sum().backward()
    gradient = layer.experts.gate_proj.grad
    assert gradient is not None
    assert gradient.abs().sum((1, 2)).nonzero().flatten().tolist() == [2]


@pytest.mark.slow
def test_biases_bring_all_experts_to_their_share() -> None:
    layer = make_layer(num_experts_per_tok=1, bias_rate=0.003)
    with torch.no_grad():
        layer.router.weight[0] += 1.0
    x = torch.randn(4, 64, WIDTH) + 0.3
    layer(x)
    layer.after_update(lambda load: load)
    assert layer.shares is not None
    before = float(layer.shares.max())
    for _ in range(400):
        layer(x)
        layer.after_update(lambda load: load)
    assert before > 0.4
    assert float(layer.shares.max()) < 0.3


def test_a_step_without_an_update_and_evaluation_leave_the_balance_alone() -> None:
    layer = make_layer()
    layer(torch.randn(2, 3, WIDTH))
    layer.forget_step()
    with torch.no_grad():
        layer(torch.randn(2, 3, WIDTH))
    layer.after_update(lambda load: load)
    assert layer.router.bias.eq(0).all()


def test_a_step_tells_the_loads_of_the_busiest_and_the_idlest_expert() -> None:
    layer = make_layer(num_experts_per_tok=1)
    assert layer.describe_step() == {}
    layer.router.bias[2] = 100.0
    layer(torch.randn(2, 3, WIDTH))
    layer.after_update(lambda load: load)
    assert {name: float(one) for name, one in layer.describe_step().items()} == {
        "expert_load_max": 5.0,
        "expert_load_min": 0.0,
    }
    layer.after_update(lambda load: load)  # as on another stage, where no token comes
    assert all(one.isnan() for one in layer.describe_step().values())


@pytest.mark.parametrize("balance", ["bias", "loss"])
def test_padding_counts_neither_for_loads_nor_for_the_auxiliary_loss(balance: str) -> None:
    shape = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    torch.manual_seed(2)
    model = Llama(LlamaConfig(**shape, experts=ExpertsConfig(num_experts=4, balance=balance, bias_rate=0.0)))
    tokens = torch.randint(0, 50, (3, 9))
    documents = torch.zeros(3, 9, dtype=torch.long)
    documents[1, 6:] = -1
    rows = {"tokens": tokens, "position_ids": torch.arange(9).expand(3, 9), "document_ids": documents}
    rows["loss_mask"] = documents >= 0

    def run(batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        total, _ = next_token_loss(model, batch)
        for _, one in list_mixtures(model):
            one.after_update(lambda load: load)
        return total, [one.shares for _, one in list_mixtures(model) if one.shares is not None]

    short = {name: one[1:2, :7] for name, one in rows.items()}  # of which the last token is predicted, not taken
    first = {name: one[:1] for name, one in rows.items()}
    filled = {**rows, VALID: torch.tensor([True, True, False])}
    whole, shares = run(filled)
    parts = [run(first), run(short)]
    assert torch.allclose(whole, parts[0][0] + parts[1][0], rtol=1e-5)
    for at, share in enumerate(shares):
        expected = (parts[0][1][at] * 8 + parts[1][1][at] * 6) / 14
        assert torch.allclose(share, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, whose kernel takes all experts at once")
def test_experts_on_a_gpu_in_bf16_are_those_of_a_loop() -> None:
    layer = make_layer(num_experts=4, capacity_factor=1.0)
    x = torch.randn(3, 8, WIDTH).bfloat16().float().requires_grad_()  # rounded scores would choose other experts
    expected = layer(x)
    wanted = torch.autograd.grad(expected.square().sum(), [x, *layer.experts.parameters()])
    layer.cuda()
    there = x.detach().cuda().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        got = layer(there.bfloat16())
    found = torch.autograd.grad(got.float().square().sum(), [there, *layer.experts.parameters()])
    for one, other in zip([got, *found], [expected, *wanted], strict=True):
        difference = (one.detach().cpu().float() - other.detach()).norm()
        assert float(difference / other.detach().norm().clamp(min=1e-6)) < 0.05


@pytest.mark.slow
def test_the_flops_of_experts_are_those_of_the_experts_that_a_token_has() -> None:
    def flops(**values: Any) -> float:
        shape = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        model = Llama(LlamaConfig(**shape, **values))
        tokens = torch.zeros(2, 9, dtype=torch.long)
        batch = {"tokens": tokens, "position_ids": tokens, "document_ids": tokens, "loss_mask": tokens == 0}
        return count_flops(copy_without_data(model), next_token_loss, batch)

    dense = flops()
    router = 3 * 2 * 8 * 16 * 4
    one = flops(experts=ExpertsConfig(num_experts=4, num_experts_per_tok=1))
    two = flops(experts=ExpertsConfig(num_experts=4, num_experts_per_tok=2))
    assert one == dense + router
    assert two - one == 3 * 2 * 8 * 3 * 16 * 24


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_experts": 0}, "num_experts=0"),
        ({"num_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok=3 of num_experts=2"),
        ({"num_experts": 2, "balance": "bais"}, "balance='bais'"),
        ({"num_experts": 2, "capacity_factor": 0.0}, "capacity_factor=0.0"),
    ],
)
def test_impossible_experts_are_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainerConfigError, match=words):
        ExpertsConfig(**values)
