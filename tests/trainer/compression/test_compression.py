"""Gradient compression: it converges, sends the bytes that it promises, and loses nothing that it owes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch_ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock.trainer import CompressionConfig, CompressionError, World
from penstock.trainer.compression.compression import Compression, CompressionStats
from penstock.trainer.compression.dense import INT8_BLOCK, dequantise, quantise
from penstock.trainer.compression.memory import GradientMemory
from penstock.trainer.compression.sparse import density_at

STEPS, BATCH = 700, 48


def build_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


@cache
def load_split() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits  # two seconds, which only those who train here spend

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]
    return images[400:], labels[400:], images[:400], labels[:400]


def install(
    world: World, zero: int, momentum: float, **config: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Compression]:
    net: nn.Module = build_net()
    if zero:
        fully_shard(net[0])
        net = fully_shard(net)
    else:
        net = DistributedDataParallel(net, bucket_cap_mb=0.04)  # more than one bucket
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum)
    return net, optimizer, Compression(net, optimizer, CompressionConfig(**config), world)


def train(
    world: World, net: nn.Module, optimizer: torch.optim.Optimizer, compression: Compression, first: int, steps: int
) -> None:
    images, labels, _, _ = load_split()
    for step in range(first, first + steps):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / STEPS)
        order = torch.randint(len(images), (world.world_size, BATCH), generator=torch.Generator().manual_seed(step))
        chosen = order[world.rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        compression.end_step()


def saved_share(stats: CompressionStats) -> float:
    return 1 - stats.wire_bytes / stats.plain_bytes


@torch.no_grad()
def measure(net: nn.Module) -> float:
    _, _, images, labels = load_split()
    return float((net(images).argmax(1) == labels).double().mean())


def flat_parameters(net: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


SCHEMES = ("none", "bf16", "fp16", "int8", "powersgd", "topk")


def _converge(world: World) -> dict[str, Any]:
    results = {}
    for scheme in SCHEMES:
        net, optimizer, compression = install(world, 0, 0.0 if scheme == "topk" else 0.9, scheme=scheme)
        train(world, net, optimizer, compression, 0, STEPS)
        results[scheme] = measure(net), compression.stats, flat_parameters(net)
    return results


@pytest.mark.full
def test_each_scheme_converges_on_the_digits_and_sends_what_it_promises() -> None:
    first, second = run_ranks(_converge, 2)
    plain_accuracy, plain, _ = first["none"]
    assert plain_accuracy > 0.96
    numel = sum(parameter.numel() for parameter in build_net().parameters())
    assert plain.wire_bytes == plain.plain_bytes == STEPS * 4 * numel  # a ring of two sends every byte once
    saved = {
        "bf16": (0.5, 0.5),
        "fp16": (0.5, 0.5),
        "int8": (0.745, 0.75),
        "powersgd": (0.85, 1.0),
        "topk": (0.979, 0.981),
    }
    for scheme, (least, most) in saved.items():
        accuracy, stats, parameters = first[scheme]
        assert accuracy >= plain_accuracy - 0.005, scheme
        assert stats.plain_bytes == plain.plain_bytes
        assert least <= saved_share(stats) <= most, (scheme, stats)
        assert torch.equal(parameters, second[scheme][2]), f"{scheme}: the ranks drifted apart"


def _shard_and_converge(world: World) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for scheme in ("none", "bf16", "fp16", "int8"):
        net, optimizer, compression = install(world, 3, 0.9, scheme=scheme)
        train(world, net, optimizer, compression, 0, 120)
        results[scheme] = measure(net), compression.stats
    for scheme in ("powersgd", "topk"):
        with pytest.raises(
            CompressionError, match=f"'{scheme}' needs whole gradients .* use one of none, bf16, fp16, int8"
        ):
            install(world, 3, 0.0, scheme=scheme)
    return results


def test_sharded_gradients_are_reduced_in_fewer_bytes() -> None:
    results = run_ranks(_shard_and_converge, 2)[0]
    plain_accuracy, plain = results["none"]
    assert plain.wire_bytes == plain.plain_bytes > 0
    # Gloo's reduce-scatter sends what an all-reduce sends; int8 goes through an all-to-all, which does not.
    for scheme, least, most in (("bf16", 0.499, 0.501), ("fp16", 0.499, 0.501), ("int8", 0.87, 0.876)):
        accuracy, stats = results[scheme]
        assert accuracy >= plain_accuracy - 0.01, scheme
        assert least <= saved_share(stats) <= most


def _resume(world: World, scheme: str, zero: int) -> tuple[bool, bool, int]:
    momentum = 0.0 if scheme == "topk" else 0.9
    net, optimizer, compression = install(world, zero, momentum, scheme=scheme, warmup_steps=8)
    train(world, net, optimizer, compression, 0, 6)
    kept = [
        {name: value.clone() for name, value in net.state_dict().items()},
        compression.state_dict(),
        [optimizer.state_dict()["state"][index].get("momentum_buffer") for index in optimizer.state_dict()["state"]],
    ]
    kept[2] = [None if value is None else value.clone() for value in kept[2]]
    train(world, net, optimizer, compression, 6, 6)
    unbroken = [value.clone() for value in net.state_dict().values()]
    again, again_optimizer, again_compression = install(world, zero, momentum, scheme=scheme, warmup_steps=8)
    train(world, again, again_optimizer, again_compression, 0, 2)  # so that DDP has laid out its buckets
    ends = []
    for state in (kept[1], {}):
        again.load_state_dict(kept[0])
        for parameter, buffer in zip(again.parameters(), kept[2], strict=False):
            if buffer is not None:
                again_optimizer.state[parameter]["momentum_buffer"] = buffer.clone()
        again_compression.load_state_dict(state, steps=6)
        train(world, again, again_optimizer, again_compression, 6, 6)
        ends.append(
            all(torch.equal(one, other) for one, other in zip(again.state_dict().values(), unbroken, strict=True))
        )
    return ends[0], ends[1], len(kept[1])


def _resume_all(world: World) -> dict[tuple[str, int], tuple[bool, bool, int]]:
    cases = [("int8", 0), ("powersgd", 0), ("topk", 0), ("int8", 3)]
    return {case: _resume(world, *case) for case in cases}


def test_with_its_memory_restored_compression_goes_on_bit_equal_and_not_without() -> None:
    for results in run_ranks(_resume_all, 2):
        for case, (with_memory, without_memory, tensors) in results.items():
            assert with_memory, case
            assert not without_memory, case
            assert tensors > 0


def _count_owed(world: World) -> float:
    """Send the same gradient again and again by top-k: the sum that arrives tends to the sum that was owed."""
    net = DistributedDataParallel(nn.Linear(40, 25, bias=False))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    compression = Compression(net, optimizer, CompressionConfig(scheme="topk", momentum=0.0, density=0.02), world)
    torch.manual_seed(world.rank)
    data = torch.randn(8, 40)
    arrived = torch.zeros(25, 40)
    for _ in range(400):
        optimizer.zero_grad()
        net(data).sum().backward()
        arrived += net.module.weight.grad
        compression.end_step()
    gradient = data.sum(0).expand(25, 40).clone()
    dist.all_reduce(gradient)
    owed = compression.state_dict()["topk.unsent.weight"].clone()
    dist.all_reduce(owed)
    return float((arrived + owed / 2 - 400 * gradient / 2).abs().max() / (400 * gradient / 2).abs().max())


def test_what_is_not_sent_is_kept_and_nothing_is_lost() -> None:
    assert max(run_ranks(_count_owed, 2)) < 1e-4


def test_a_second_momentum_is_refused() -> None:
    run_ranks(_refuse_momentum, 2)


def _refuse_momentum(world: World) -> None:
    for make in (_sgd, torch.optim.Adam):
        net = DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(CompressionError, match="has its own; use SGD with momentum=0"):
            Compression(net, make(net.parameters()), CompressionConfig(scheme="topk"), world)
        Compression(net, make(net.parameters()), CompressionConfig(scheme="topk", momentum=0.0), world)
    with pytest.raises(CompressionError, match="Linear is neither"):
        Compression(net.module, _sgd(net.parameters()), CompressionConfig(scheme="bf16"), world)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


# --- parts ---


@pytest.mark.parametrize("size", [1, 3, INT8_BLOCK, INT8_BLOCK + 1, 5000])
def test_int8_rounds_to_half_a_step_and_says_what_it_lost(size: int) -> None:
    values = torch.randn(2, size) * torch.logspace(-3, 3, size)
    packed, error = quantise(values)
    back = dequantise(packed, size)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, size + 4 * -(-size // INT8_BLOCK))
    torch.testing.assert_close(back + error, values)
    for start in range(0, size, INT8_BLOCK):
        block = slice(start, start + INT8_BLOCK)
        step = values[:, block].abs().amax(1, keepdim=True) / 127
        assert bool((error[:, block].abs() <= step * 0.501).all())


def test_int8_keeps_zeros_and_lets_an_overflow_be_seen() -> None:
    packed, error = quantise(torch.zeros(10))
    assert dequantise(packed, 10).count_nonzero() == error.count_nonzero() == 0
    packed, error = quantise(torch.tensor([1.0, float("inf")]))
    assert not dequantise(packed, 2).isfinite().any()
    assert error.isfinite().all()


def test_the_density_falls_to_its_end_over_the_warm_up() -> None:
    densities = [density_at(step, 0.01, 4) for step in range(6)]
    assert densities == sorted(densities, reverse=True)
    assert densities[0] == pytest.approx(0.25)
    assert densities[4:] == [0.01, 0.01]
    assert density_at(0, 0.01, 0) == 0.01


def test_memory_of_another_model_is_refused() -> None:
    memory = GradientMemory(nn.Linear(3, 2))
    memory.load_state_dict({"topk.unsent.weight": torch.zeros(5, 5)})
    with pytest.raises(
        CompressionError, match=r"topk\.unsent\.weight has shape \(5, 5\) and the gradient has \(2, 3\)"
    ):
        memory.named("topk.unsent.weight", torch.zeros(2, 3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: CompressionConfig(scheme="zip"),
        lambda: CompressionConfig(rank=0),
        lambda: CompressionConfig(density=0.0),
        lambda: CompressionConfig(momentum=1.0),
        lambda: CompressionConfig(warmup_steps=-1),
    ],
)
def test_options_that_cannot_be_are_refused(make: Callable[[], CompressionConfig]) -> None:
    with pytest.raises(CompressionError, match=r"must be|is not known"):
        make()
