"""``torchrun ... -m penstock.trainer recipe.toml [--overrides]``: train what a recipe describes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..storage.errors import PenstockError
from .config import TrainerConfig
from .errors import RecipeError, StallError
from .evaluate import Evaluation
from .options import list_options
from .ranks.world import World, close_world, open_world
from .recipes.recipe import Recipe, format_toml, read_recipe, shipped_recipes
from .report.progress import Summary
from .trainer import DistributedTrainer
from .watch.watchdog import EXIT_STALLED

_USAGE = """\
usage: [torchrun --nproc-per-node=N] -m penstock.trainer RECIPE [--dry-run] [--KEY=VALUE ...]

Train what a recipe describes, on the ranks that torchrun starts, or on one.

RECIPE is a TOML file or the name of one that ships: {shipped}.
Its sections [model], [optimizer], [loss], [data], and, if wanted, [evaluation] and [evaluation.data], each have

  use    what to call, as "package.module:name"
  args   a table of keyword arguments for it

  model(**args) -> torch.nn.Module
  optimizer(parameters, **args) -> torch.optim.Optimizer
  loss(model, batch, **args) -> (sum of losses, count of samples or tokens)
  data(**args) -> iterable of this rank's batches; evaluation.data alike
  evaluation(model, batch, **args) -> {{name: (sum, count)}}

An argument may itself be named: {{ use = "package.module:name" }} is what is named there, and with args, what it
returns when called with them. [data.prepare] and [evaluation.data.prepare], also use and args, name what is called on
one rank of each node before the data is opened, with target_url=..., which is by default the source of the data.

[trainer] has the options below. Any key can be overridden: --trainer.steps=100 --model.args.width=64.

  --dry-run   print the resolved recipe as TOML, with every import checked, and stop
  --help      print this and stop

options and their defaults:
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns its exit code: 0 trained or asked to stop, 2 for an error to be cured, and 75 where training can go on when
    started again: a rank stalled or died, or another node alone was asked to stop.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or "--help" in words or "-h" in words:
        print(format_help())
        return 0 if words else 2
    dry = "--dry-run" in words
    words = [word for word in words if word != "--dry-run"]
    try:
        recipe = read_recipe(words[0], words[1:])
        recipe.check()
        if dry:
            print(format_toml(recipe.describe()).strip())
            return 0
        world = open_world(device=recipe.trainer.device)
        prepare_data(recipe, world)
        summary = train_recipe(recipe, world)
        return EXIT_STALLED if summary.stopped_by_others else 0
    except PenstockError as exc:
        rank = f" on rank {os.environ['RANK']}" if "RANK" in os.environ else ""
        print(f"penstock.trainer{rank}: {type(exc).__name__}: {exc}", file=sys.stderr)
        return EXIT_STALLED if isinstance(exc, StallError) else 2
    finally:
        close_world()  # after the handler, when the error no longer holds the frames of what uses the group


def prepare_data(recipe: Recipe, world: World) -> None:
    """Have the first rank of each node prepare the recipe's data while the others wait; a collective.

    Node 0 goes first: where nodes share the place, the others find its data there; where each has a disk of its own,
    each makes its own.

    Raises:
        RecipeError: on every rank, where it failed on one.
    """
    for data in (recipe.data, recipe.evaluation_data):
        if data is None or data.prepare is None:
            continue
        for is_first_node in (True, False)[: min(2, world.num_nodes)]:
            problem: str | None = None
            if world.local_rank == 0 and (world.node_rank == 0) == is_first_node:
                try:
                    made = data.prepare.resolve()()
                except PenstockError as exc:
                    problem = f"{data.prepare.key} failed on rank {world.rank}: {type(exc).__name__}: {exc}"
                else:
                    if made is not None:
                        print(f"{data.prepare.key}: {made}", file=sys.stderr, flush=True)
            problems = [problem]
            if world.world_size > 1:
                problems = [None] * world.world_size
                dist.all_gather_object(problems, problem)
            if any(problems):
                raise RecipeError("; ".join(filter(None, problems)))


def train_recipe(recipe: Recipe, world: World) -> Summary:
    """Build everything that the recipe names, train, and close what can be closed."""
    torch.manual_seed(recipe.trainer.seed)  # the same initial weights on every rank, and in every run
    model = recipe.model.make()
    with _opened(recipe.data.make()) as loader:
        evaluation_source = recipe.evaluation_data.make() if recipe.evaluation_data else None
        with _opened(evaluation_source) as evaluation_batches:
            evaluation = (
                Evaluation(batches=evaluation_batches, metrics=recipe.evaluation.resolve(2))
                if recipe.evaluation
                else None
            )
            with DistributedTrainer(
                model,
                recipe.optimizer.make,
                loader,
                recipe.trainer,
                loss=recipe.loss.resolve(2),
                evaluation=evaluation,
                world=world,
            ) as trainer:
                return trainer.train()


def format_help() -> str:
    """The text of ``--help``: usage and every option of [trainer] with its type, default and meaning."""
    lines = [_USAGE.format(shipped=", ".join(shipped_recipes()))]
    for entry in list_options(TrainerConfig, "trainer."):
        default = "none" if entry.default is None or entry.default == () else entry.default
        lines.append(f"  --{entry.key}={entry.kind}  (default: {str(default).lower()})\n        {entry.text}\n")
    return "".join(lines).rstrip()


@contextmanager
def _opened(source: Any) -> Iterator[Any]:
    try:
        yield source
    finally:
        if hasattr(source, "close"):
            source.close()


if __name__ == "__main__":
    sys.exit(main())
