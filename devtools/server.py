"""Speed of a parameter server: pushes and pulls of one array in a process, and through a Ray actor beside a bare one.

A step is a push of the array and a pull of what became of it, so it moves the array twice. The bare actor gets an
array and returns one of its own, in one call; both take turns, and ratios are those of their median times and of their
fastest ones, which other jobs of the machine change less. Bytes on
the wire are those of the arrays in requests and replies, by codec, beside the formula.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.benchmarks.machine import describe_machine, list_versions
from penstock.storage.ray_cluster import HERE, open_cluster
from penstock.trainer.on_ray.calls import wait_for
from penstock.trainer.on_ray.shard_actor import Filling, ShardSettings, make_actor_class
from penstock.trainer.server.client import ClientConfig, ServerClient
from penstock.trainer.server.messages import Header, Reply, Request, count_bytes
from penstock.trainer.server.optimizers import Sgd
from penstock.trainer.server.payloads import CODECS, CodecConfig
from penstock.trainer.server.placement import Placement
from penstock.trainer.server.policies import Asp
from penstock.trainer.server.replicas import Copied, Copy, ReplicatedShard
from penstock.trainer.server.schema import Schema, TensorSpec
from penstock.trainer.server.shard import ServerConfig

from .arguments import OptionalPath, parse_config

_ANSWER_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Config:
    """Speed of pushes and pulls, in a process and through Ray."""

    mib: int = 16
    """MiB of the array."""

    rounds: int = 40
    """Steps of each kind, in turns."""

    out: OptionalPath = None
    """Write the results here as JSON, too."""


class BareActor:
    """Returns an array for an array."""

    def __init__(self, size: int) -> None:
        self._values = np.zeros(size, np.float32)

    def swap(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        return self._values


def make_client(
    config: ServerConfig,
    call: Callable[[str, Request], Reply],
    codec: CodecConfig,
    start: Callable[[str, Request], Callable[[], Reply]] | None = None,
) -> ServerClient:
    """Make a worker of one shard that has joined, with a tensor of zeros."""
    client = ServerClient(
        Header(run=config.run, schema=config.schema.digest, worker="worker-0"),
        config.schema,
        call=call,
        placement=lambda: Placement({"shard-0": 1.0}),
        wait=time.sleep,
        start=start,
        config=ClientConfig(push=codec, pull=CodecConfig(codec="bf16" if codec.codec == "bf16" else "fp32")),
    )
    client.join()
    client.create({spec.name: torch.zeros(spec.shape) for spec in config.schema.tensors})
    return client


def time_step(client: ServerClient, values: torch.Tensor) -> tuple[float, float]:
    """Seconds of a push, of values that are given away as the trainer's are, and of a pull."""
    started = time.perf_counter()
    client.push({"w": values}, is_given=True)
    pushed = time.perf_counter()
    client.pull()
    return pushed - started, time.perf_counter() - pushed


def count_wire(config: ServerConfig, codec: CodecConfig, size: int) -> dict[str, int]:
    """Bytes of one push and one pull as counted, and by the formula."""
    counted = {"push": 0, "pull": 0}
    host = _new_host(config)

    def call(shard: str, request: Request) -> Reply:
        reply = host.handle(request, 0.0)
        name = type(request).__name__.lower()
        if name in counted:
            counted[name] += count_bytes(request) + count_bytes(reply)
        return reply

    client = make_client(config, call, codec)
    client.push({"w": torch.randn(size)})
    client.pull()
    blocks = -(-size // 2048)
    formula = {"fp32": 4 * size, "bf16": 2 * size, "int8": size + 4 * blocks, "topk": 8 * -(-size // 100)}[codec.codec]
    parts = len(config.schema.buckets())
    return {
        "push_bytes": counted["push"],
        "push_formula": formula + (24 + 33) * parts,  # numbers of each part, and of its answer
        "pull_bytes": counted["pull"],
        "pull_formula": (2 if codec.codec == "bf16" else 4) * size,
    }


def _new_host(config: ServerConfig) -> ReplicatedShard:
    def send(shard: str, message: Copy) -> Copied:
        raise AssertionError("there is one shard")

    placement = Placement({"shard-0": 1.0})
    buckets = placement.buckets_of("shard-0")
    return ReplicatedShard("shard-0", config, placement, replicas=1, send=send, start=1, buckets=buckets)


def confirm_all(host: ReplicatedShard) -> None:
    """Note that all is in a checkpoint, so that the client keeps nothing of before."""
    for number in host.own.buckets:
        host.own.confirm(number, host.own.sequences(number))


def measure_here(config: ServerConfig, values: torch.Tensor, rounds: int) -> dict[str, float]:
    """Steps in one process."""
    host = _new_host(config)
    client = make_client(config, lambda shard, request: host.handle(request, 0.0), CodecConfig())
    times = []
    for _ in range(rounds + 3):
        times.append(time_step(client, values))
        confirm_all(host)
    return _summarise(times[3:], values.nbytes)


def measure_ray(config: ServerConfig, values: torch.Tensor, rounds: int, folder: str) -> dict[str, Any]:
    """Steps through an actor, and calls of a bare one, in turns."""
    with open_cluster(HERE, cpus=4, namespace="speed") as ray:
        settings = ShardSettings(name="shard-0", config=config, weights={"shard-0": 1.0}, replicas=1, place=folder)
        shard = make_actor_class().options(name="shard-0", num_cpus=1).remote(settings)
        wait_for(shard.fill.remote("", Filling(weights=settings.weights)), "shard-0", timeout_s=_ANSWER_S)
        bare = ray.remote(BareActor).options(num_cpus=1).remote(values.numel())

        def call(name: str, request: Request) -> Reply:
            reply: Reply = wait_for(shard.handle.remote(request), name, timeout_s=_ANSWER_S)
            return reply

        def begin(name: str, request: Request) -> Callable[[], Reply]:
            reply = shard.handle.remote(request)
            return lambda: wait_for(reply, name, timeout_s=_ANSWER_S)

        client = make_client(config, call, CodecConfig(), begin)
        array = values.numpy()
        times, bare_times = [], []
        for index in range(rounds + 3):
            times.append(time_step(client, values))
            save = str(index)
            ray.get(shard.take.remote("", save))
            ray.get(shard.confirm.remote("", save))
            started = time.perf_counter()
            ray.get(bare.swap.remote(array))
            bare_times.append(time.perf_counter() - started)
        summary: dict[str, Any] = _summarise(times[3:], values.nbytes)
        bare_s = statistics.median(bare_times[3:])
        summary["bare_actor_gb_per_s"] = 2 * values.nbytes / bare_s / 1e9
        sums = [push + pull for push, pull in times[3:]]
        summary["bare_actor_fastest_gb_per_s"] = 2 * values.nbytes / min(bare_times[3:]) / 1e9
        summary["ratio_to_bare_actor"] = bare_s / statistics.median(sums)
        summary["fastest_ratio_to_bare_actor"] = min(bare_times[3:]) / min(sums)
        return summary


def _summarise(times: list[tuple[float, float]], size: int) -> dict[str, float]:
    push, pull = (statistics.median(column) for column in zip(*times, strict=True))
    sums = [sum(one) for one in times]
    return {
        "push_ms": 1e3 * push,
        "pull_ms": 1e3 * pull,
        "gb_per_s": 2 * size / statistics.median(sums) / 1e9,
        "fastest_gb_per_s": 2 * size / min(sums) / 1e9,
    }


def main(config: Config) -> None:
    size = config.mib * (1 << 20) // 4
    schema = Schema([TensorSpec(name="w", shape=(size,))])
    server = ServerConfig(run="speed", schema=schema, policy=Asp(), dense=Sgd(rate=0.1), rows=Sgd(rate=0.1))
    values = torch.randn(size, generator=torch.Generator().manual_seed(0))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = {
            "in one process": measure_here(server, values, config.rounds),
            "through Ray": measure_ray(server, values, config.rounds, folder),
        }
    wire = {codec: count_wire(server, CodecConfig(codec=codec), size) for codec in CODECS}
    for name, row in rows.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in row.items()))
    for name, one in wire.items():
        print(f"{name}: " + ", ".join(f"{key} {value:,}" for key, value in one.items()))
    if config.out is not None:
        result = {
            "command": f"python -m devtools server --mib {config.mib} --rounds {config.rounds}",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "versions": list_versions(),
            "array_mib": config.mib,
            "rows": rows,
            "wire": wire,
        }
        config.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(parse_config(Config, __doc__))
