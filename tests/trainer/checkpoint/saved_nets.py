"""Small nets with optimizers, and all of their state."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def build_net(width: int = 6) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))


def build(zero: int = 0, width: int = 6) -> tuple[nn.Module, torch.optim.Optimizer]:
    net: nn.Module = build_net(width)
    if zero:
        for layer in (net[0], net[3]):
            fully_shard(layer, reshard_after_forward=zero == 3)
        net = fully_shard(net, reshard_after_forward=zero == 3)
    elif dist.get_world_size() > 1:
        net = DistributedDataParallel(net)
    return net, torch.optim.AdamW(net.parameters(), lr=0.05)


def step_once(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    net(torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    optimizer.step()


def whole_state(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = {f"model.{key}": value.clone() for key, value in get_model_state_dict(net, options=options).items()}
    for name, tensors in get_optimizer_state_dict(net, optimizer, options=options).get("state", {}).items():
        state.update({f"{name}.{slot}": value.clone() for slot, value in tensors.items()})
    return state


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(got[key], value), key


def fill(net: nn.Module, value: float) -> None:
    with torch.no_grad():
        for tensor in net.parameters():
            tensor.fill_(value)
