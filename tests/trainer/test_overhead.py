"""What a step of the loop computes besides the step of a bare loop: counted, so that load changes nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from small_world import batch_of, make_steps
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.trainer import World


class Operations(TorchDispatchMode):
    """Counts the operations that torch runs, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def sum_and_count(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return model(batch["x"]).sum(), len(batch["x"])


def count_bare(batch: dict[str, torch.Tensor]) -> Counter[str]:
    model = net()
    optimizer = adam(model.parameters())
    for _ in range(2):  # the first step makes the optimizer's state
        with Operations() as found:
            loss, count = sum_and_count(model, batch)
            (loss / count).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return found.counts


def test_a_step_adds_few_operations_to_those_of_a_bare_loop(world: World) -> None:
    """One look at the gradients takes three operations for any number of them.

    Two numbers are read, the loss and the norm; one tensor has the sums over the ranks.
    """
    batch = batch_of(1.0, 2.0)
    steps = make_steps(world, net(), loss=sum_and_count, optimizer=adam)
    steps.run(0, [batch])
    with Operations() as found:
        steps.run(1, [batch])
    added = found.counts - count_bare(batch)
    looks = Counter({"aten::_foreach_norm": 1, "aten::stack": 1, "aten::linalg_vector_norm": 1})
    reads = Counter({"aten::_local_scalar_dense": 2})
    sums = Counter({"aten::detach": 1, "aten::lift_fresh": 1, "aten::view": 1})
    scaled = Counter({"aten::mul": 2})  # where the bare loop divides, forward and backward
    assert added - looks - reads - sums - scaled == Counter()
