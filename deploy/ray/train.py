"""Train a recipe of penstock.trainer on the workers of a Ray cluster, one rank each.

    python train.py --workers 16 --gpus recipe.toml --trainer.checkpoint.every_steps=500

Arguments after the recipe go to the trainer. A worker that dies ends all; Ray starts them again, --failures times, and
the trainer continues from its newest checkpoint, so its folder must be one that every node sees. docs/deploy.md
explains what happens.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ray import train
from ray.train.torch import TorchTrainer


def train_recipe(config: dict[str, list[str]]) -> None:
    """Run the trainer's command line in a worker; Ray has joined the workers in torch.distributed."""
    from penstock.trainer.__main__ import main as run_trainer

    code = run_trainer(config["arguments"])
    if code:
        raise RuntimeError(f"the trainer ended with {code}; its message is above, or on another worker")


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
        scaling_config=train.ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
        run_config=train.RunConfig(
            name="penstock",
            storage_path=options.storage,
            failure_config=train.FailureConfig(max_failures=options.failures),
        ),
    ).fit()


if __name__ == "__main__":
    main()
