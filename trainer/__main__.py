"""``torchrun ... -m penstock.trainer recipe.toml [--overrides]``: train what a recipe describes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from ..storage.errors import PenstockError
from ..storage.process import replace_closed_outputs
from ..storage.ray_cluster import HERE
from .errors import RecipeError, StallError
from .evaluation.evaluate import Evaluation
from .parallel.config import open_mesh
from .ranks.mesh import Mesh
from .ranks.world import World, close_world, open_world
from .recipes.command_line import Command, read_command
from .recipes.parameter_groups import freeze_parameters
from .recipes.plan import print_plan
from .recipes.recipe import Component, Recipe, format_toml, opened
from .report.progress import Summary
from .reproducibility import seed_all
from .trainer import DistributedTrainer
from .watch.process_end import leave_to_launcher, write_stderr
from .watch.watchdog import EXIT_STALLED


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns the exit code: 0 if trained or asked to stop, 2 for an error to fix, and 75 if training can continue when
    started again: a rank stalled or died, or only another node was asked to stop.
    """
    replace_closed_outputs()
    is_alike = True  # what a command says is wrong on every rank, or on none
    try:
        with _may_be_cut_off():
            command = read_command(sys.argv[1:] if arguments is None else arguments)
            command.check()
            recipe = command.recipe
            if command.dry_run:
                print(format_toml(recipe.describe()).strip())
                return 0
            if command.plan:
                print_plan(recipe, ranks=command.ranks, memory=command.memory)
                return 0
        is_alike = False
        if recipe.trainer.parallel.uses_servers:
            return EXIT_STALLED if train_asynchronously(command) else 0
        world = open_world(device=recipe.trainer.device)
        prepare_data(recipe, world)
        summary = train_recipe(recipe, world)
        return EXIT_STALLED if summary.stopped_by_others else 0
    except PenstockError as exc:
        _report(exc, is_alike=is_alike or getattr(exc, "is_on_all_ranks", False))
        return EXIT_STALLED if isinstance(exc, StallError) else 2
    except SystemExit as exc:
        if exc.code:
            leave_to_launcher("a flag of the command line was refused; see the output of rank 0")
        raise
    finally:
        close_world()  # after the handler, when the error no longer references frames that use the group


def _report(error: PenstockError, *, is_alike: bool) -> None:
    """Print an error, one that is alike on all ranks once on each node; torchrun's summary has that of each rank."""
    text = f"{type(error).__name__}: {error}"
    is_left = leave_to_launcher(text)
    if is_alike and is_left and os.environ.get("LOCAL_RANK", "0") != "0":
        return
    rank = f" on rank {os.environ['RANK']}" if "RANK" in os.environ else ""
    write_stderr(f"penstock.trainer{rank}: {text}\n")


@contextmanager
def _may_be_cut_off() -> Iterator[None]:
    """End the process with 0 and no traceback if the reader of its output has left, as ``| head`` does."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would fail again at exit
        raise SystemExit(0) from None


def train_asynchronously(command: Command) -> bool:
    """Train with workers and a parameter server: in this process, in the ranks of a launcher, or on a Ray cluster.

    Returns whether others asked to stop, so that it goes on when it is started again.

    Raises:
        RecipeError: a launcher started several processes, and options say that workers are to be elsewhere.
    """
    from .asynchronous.local_run import train_locally

    recipe, ranks = command.recipe, int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and recipe.trainer.parallel.mode == "diloco":
        raise RecipeError(
            f"parallel.diloco.over='server' starts its workers itself, and WORLD_SIZE={ranks} says that a launcher "
            "started several processes; start one: python -m penstock.trainer RECIPE --workers 3 --shards 2"
        )
    if ranks > 1 and (command.ray or command.workers != 1):
        given = "--ray" if command.ray else f"--workers={command.workers}"
        raise RecipeError(
            f"{given} says where workers are, and WORLD_SIZE={ranks} that a launcher started several processes, each "
            f"one a worker; leave {given} out, or start one process: python -m penstock.trainer RECIPE {given}"
        )
    if ranks > 1:
        from .asynchronous.ranks_run import train_on_ranks

        world = open_world(device=recipe.trainer.device)
        prepare_data(recipe, world)
        return train_on_ranks(recipe, world, shards=command.shards)
    _prepare_here(recipe)
    if command.ray:
        from .on_ray.driver import RayOptions, train_on_ray

        options = RayOptions(address=command.address or HERE, workers=command.workers, shards=command.shards)
        train_on_ray(recipe, options)
    else:
        train_locally(recipe, workers=command.workers, shards=command.shards)
    return False


def _prepare_here(recipe: Recipe) -> None:
    """Prepare the recipe's data, in this process alone."""
    for data in (recipe.data, recipe.evaluation_data):
        if data is not None and data.prepare is not None:
            made = data.prepare.resolve()()
            if made is not None:
                write_stderr(f"{data.prepare.key}: {made}\n")


def prepare_data(recipe: Recipe, world: World) -> None:
    """Prepare the recipe's data on the first rank of each node while the others wait; a collective.

    Node 0 goes first: if the nodes share the target, the others find its data there; if each has its own disk, each
    makes its own.

    Raises:
        RecipeError: on every rank, if it failed on one.
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
                        write_stderr(f"{data.prepare.key}: {made}\n")
            problems = [problem]
            if world.world_size > 1:
                problems = [None] * world.world_size
                dist.all_gather_object(problems, problem)
            if any(problems):
                raise RecipeError("; ".join(filter(None, problems)))


def train_recipe(recipe: Recipe, world: World) -> Summary:
    """Build everything that the recipe names, train, and close what can be closed."""
    mesh = open_mesh(recipe.trainer.parallel, world)
    seed_all(recipe.trainer.seed)  # the same initial weights on every rank, and in every run
    model = recipe.make_model()
    freeze_parameters(model, recipe.groups)
    with opened(place_data(recipe.data, mesh).make()) as loader:
        evaluation_source = place_data(recipe.evaluation_data, mesh).make() if recipe.evaluation_data else None
        with opened(evaluation_source) as evaluation_batches:
            evaluation = (
                Evaluation(batches=evaluation_batches, metrics=recipe.evaluation.resolve(2))
                if recipe.evaluation
                else None
            )
            with DistributedTrainer(
                model,
                partial(recipe.make_optimizer, model),
                loader,
                recipe.trainer,
                loss=recipe.loss.resolve(2),
                evaluation=evaluation,
                world=world,
                mesh=mesh,
                initialise=recipe.initialise.resolve(2) if recipe.initialise else None,
            ) as trainer:
                return trainer.train()


def place_data(data: Component, mesh: Mesh) -> Component:
    """The component with this rank's share, where replicas lie on several ranks: the mesh, or rank and world_size.

    One that takes neither, or is given one of them by the recipe, stays as it is.
    """
    if not mesh.is_spread or data.args.keys() & {"mesh", "rank", "world_size"}:
        return data
    share: dict[str, Any] = {"rank": mesh.replica, "world_size": mesh.replicas}
    for given in ({"mesh": mesh.device_mesh}, share):
        if all(map(data.takes, given)):
            return replace(data, args={**data.args, **given})
    return data


if __name__ == "__main__":
    sys.exit(record(main)())  # other errors, too, are in torchrun's summary
