"""Train a recipe of penstock.trainer on the workers of a Ray cluster, one rank each.

    python train.py --workers 16 --gpus recipe.toml --trainer.checkpoint.every_steps=500

Arguments after the recipe go to the trainer. A worker that dies ends all; Ray starts them again, --failures times, and
the trainer continues from its newest checkpoint, so its folder must be one that every node sees. docs/deploy.md
explains what happens.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ray import train
from ray.train.torch import TorchConfig, TorchTrainer


def train_recipe(config: dict[str, list[str]]) -> None:
    """Run the trainer as a process beside a worker: in a worker it would be in a thread, without signals."""
    context = train.get_context()
    address, port = agree_on_address()
    rank = {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "GROUP_RANK": context.get_node_rank(),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    environment = os.environ | {name: str(value) for name, value in rank.items()}
    for name in ("GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        environment.pop(name, None)
    code = subprocess.call(
        [sys.executable, "-m", "penstock.trainer", *config["arguments"]], env=environment, preexec_fn=end_with_parent
    )
    if code:
        raise RuntimeError(f"the trainer ended with {code}; its message is above, or on another worker")


def agree_on_address() -> tuple[str, int]:
    """Rank 0's address, with a free port of its: that of Ray's own group is taken. Collective."""
    import torch.distributed as dist

    found: list[Any] = [None]
    if dist.get_rank() == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            found = [(os.environ["MASTER_ADDR"], free.getsockname()[1])]
    dist.broadcast_object_list(found)
    return found[0]


def end_with_parent() -> None:
    """Have the kernel kill this process when the worker dies: the next start needs its GPU."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options of this script; ``recipe`` has the arguments of the trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, required=True, help="number of ranks")
    parser.add_argument("--gpus", action="store_true", help="one GPU for each rank")
    parser.add_argument("--failures", type=int, default=3, help="restarts after dead workers; -1: always")
    parser.add_argument("--storage", help="folder or URL that every node sees, for Ray's own records")
    parser.add_argument("recipe", nargs=argparse.REMAINDER, help="recipe, and overrides")
    options = parser.parse_args(arguments)
    if not options.recipe:
        parser.error("give a recipe, as for python -m penstock.trainer")
    return options


def main() -> None:
    options = parse()
    TorchTrainer(
        train_recipe,
        train_loop_config={"arguments": options.recipe},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=train.ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
        run_config=train.RunConfig(
            name="penstock",
            storage_path=options.storage,
            failure_config=train.FailureConfig(max_failures=options.failures),
        ),
    ).fit()


if __name__ == "__main__":
    main()
