"""Local SGD: averages are exact, on all ranks alike, and done within nodes more often."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.trainer import AveragingConfig, TrainerConfigError, World
from penstock.trainer.parallel.averaging import PeriodicAverager


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2).to(torch.bfloat16))
    return net, torch.optim.Adam(net.parameters())


def set_all(net: nn.Module, optimizer: torch.optim.Optimizer, value: int) -> None:
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.fill_(value)
        for parameter in net.parameters():
            optimizer.state[parameter] = {"step": torch.tensor(4.0), "exp_avg": torch.full_like(parameter, value)}


def values(net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[set[float], int, set[float]]:
    floating = {
        float(x) for tensor in net.state_dict().values() if tensor.is_floating_point() for x in tensor.flatten()
    }
    moments = {float(x) for state in optimizer.state.values() for x in state["exp_avg"].flatten()}
    return floating, int(net[1].num_batches_tracked), moments


def _average_by_node(world: World) -> list[Any]:
    net, optimizer = build()
    averager = PeriodicAverager(net, optimizer, AveragingConfig(average_every=4, node_every=2), world)
    seen = []
    for step in range(1, 5):
        if step in (1, 3):
            set_all(net, optimizer, (0, 2, 10, 12)[world.rank])
        seen.append((averager.average_if_due(step), *values(net, optimizer)))
    averager.close()
    averager.close()
    steps = {float(state["step"]) for state in optimizer.state.values()}
    return [seen, steps]


def test_nodes_average_among_themselves_and_now_and_then_with_all() -> None:
    for rank, (seen, steps) in enumerate(run_ranks(_average_by_node, 4, local_world_size=2)):
        own = (0, 2, 10, 12)[rank]
        of_node, largest = ((1.0, 2), (11.0, 12))[rank // 2]
        assert seen[0] == (False, {float(own)}, own, {float(own)})
        assert seen[1] == (False, {of_node}, largest, {of_node})
        assert seen[2] == (False, {float(own)}, own, {float(own)})
        assert seen[3] == (True, {6.0}, 12, {6.0})
        assert steps == {4.0}


def _train_apart(world: World) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    net = nn.Linear(5, 4)
    with torch.no_grad():
        torch.manual_seed(7)
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(world.rank)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(6, 5)).square().sum().backward()
        optimizer.step()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    PeriodicAverager(net, optimizer, AveragingConfig(average_every=1), world).average_all()
    return before, [parameter.detach().clone() for parameter in net.parameters()]


def test_the_average_is_the_mean_and_bit_equal_on_all_ranks() -> None:
    results = run_ranks(_train_apart, 3)
    for index, averaged in enumerate(results[0][1]):
        mean = sum(before[index].double() for before, _ in results) / 3
        torch.testing.assert_close(averaged.double(), mean, rtol=1e-6, atol=1e-7)
        assert all(torch.equal(after[index], averaged) for _, after in results)


def _wrap(world: World) -> None:
    _, optimizer = build()
    with pytest.raises(
        TrainerConfigError, match="average_every=2 does not work with a model under DistributedDataParallel"
    ):
        PeriodicAverager(DistributedDataParallel(nn.Linear(2, 2)), optimizer, AveragingConfig(average_every=2), world)


def test_counters_on_the_cpu_are_summed_on_the_ranks_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process group of the user's may have NCCL alone, which takes no tensor of the CPU's."""
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda flat, **options: seen.append((flat.device.type, len(flat)))
    )
    monkeypatch.setattr(torch.Tensor, "copy_", lambda tensor, other: tensor)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: [0.0] * len(tensor))
    net = build()[0].to("meta")
    optimizer = torch.optim.Adam(net.parameters())
    optimizer.state[net[0].weight] = {"step": torch.tensor(4.0)}
    world = World(
        rank=0, world_size=2, local_rank=0, local_world_size=2, node_rank=0, num_nodes=1,
        device=torch.device("meta"), backend="nccl",
    )  # fmt: skip
    PeriodicAverager(net, optimizer, AveragingConfig(average_every=1), world).average_all()
    assert [device for device, _ in seen] == ["meta"] * 3
    marks, *means = (numbers for _, numbers in seen)
    assert marks == 2
    assert sum(means) == 1 + sum(one.numel() for one in net.state_dict().values())


def test_a_model_whose_gradients_are_exchanged_is_refused() -> None:
    run_ranks(_wrap, 2)


def test_averages_that_cannot_be_are_refused() -> None:
    with pytest.raises(TrainerConfigError, match="average_every=0"):
        AveragingConfig(average_every=0)
    with pytest.raises(TrainerConfigError, match="node_every=4 must be at least 1 and less than average_every=4"):
        AveragingConfig(average_every=4, node_every=4)


def _average_complex(world: World) -> list[complex]:
    net = nn.Module()
    net.phases = nn.Parameter(torch.tensor([1 + 2j, 3.5 - 4j]) * (world.rank + 1))
    averager = PeriodicAverager(net, torch.optim.SGD(net.parameters()), AveragingConfig(average_every=2), world)
    averager.average_if_due(1)
    with averager.averaged():
        mean = net.phases.tolist()
    assert net.phases.tolist() == [(1 + 2j) * (world.rank + 1), (3.5 - 4j) * (world.rank + 1)]
    averager.average_if_due(2)
    assert net.phases.tolist() == mean
    return mean


def test_complex_parameters_have_their_own_mean() -> None:
    assert run_ranks(_average_complex, 2) == [[1.5 + 3j, 5.25 - 6j]] * 2


def _average_what_one_rank_lacks(world: World) -> str:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.Adam(net.parameters())
    used = net if world.rank else net[0]
    used(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(TrainerConfigError) as caught:
        PeriodicAverager(net, optimizer, AveragingConfig(average_every=1), world).average_if_due(1)
    return str(caught.value)


def test_optimizer_state_that_some_ranks_lack_is_refused_by_name() -> None:
    for told in run_ranks(_average_what_one_rank_lacks, 3):
        assert "some ranks have none yet of 1.bias, 1.weight" in told
        assert "parallel.unused_parameters=True" in told


def _average_nested(world: World) -> list[float]:
    net, optimizer = build()
    for parameter in net.parameters():
        history = [torch.full_like(parameter, world.rank), (torch.full_like(parameter, world.rank),)]
        optimizer.state[parameter] = {"history": history, "by_name": {"b": torch.tensor(2.0 * world.rank)}}
    averager = PeriodicAverager(net, optimizer, AveragingConfig(average_every=1), world)
    averager.average_if_due(1)
    averager.close()
    state = optimizer.state[next(net.parameters())]
    return [float(state["history"][0][0, 0]), float(state["history"][1][0][0, 0]), float(state["by_name"]["b"])]


def test_tensors_that_an_optimizer_keeps_in_lists_and_mappings_are_averaged_too() -> None:
    assert run_ranks(_average_nested, 2) == [[0.5, 0.5, 1.0]] * 2
