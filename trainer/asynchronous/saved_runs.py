"""The checkpoints of a run on a parameter server: where they lie, and how a run goes on from one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ...storage.store import Store
from ..checkpoint.lock import FolderLock
from ..checkpoint.remote.lock import StoreLock
from ..errors import CheckpointMismatchError
from ..recipes.recipe import Recipe
from ..server.checkpoints import SavedServer, complete, new_save, read_buckets, write_shard
from ..server.placement import BUCKETS
from .local_cluster import LocalCluster
from .setup import Setup, prepare_run


def checkpoint_place(recipe: Recipe) -> str:
    """The folder or URL of a run's checkpoints, made if it is a folder."""
    given = recipe.trainer.checkpoint
    output = Path(recipe.trainer.output_dir).absolute()
    place = f"{(given.folder if given.is_remote else str(output / given.folder)).rstrip('/')}/servers"
    if not given.is_remote:
        Path(place).mkdir(parents=True, exist_ok=True)
    return place


@contextmanager
def held(recipe: Recipe, store: Store, note: Callable[[str], None]) -> Iterator[None]:
    """Hold the run's checkpoints for this process; ``note`` gets a sentence where the file system has no locks.

    Raises:
        CheckpointTakenError: another run holds them; the message names its host, pid and start.
    """
    place = checkpoint_place(recipe)
    lock = StoreLock(store) if recipe.trainer.checkpoint.is_remote else FolderLock(Path(place))
    try:
        if lock.note:
            note(lock.note)
        yield
    finally:
        lock.close()


def resume_setup(recipe: Recipe, workers: int, saved: SavedServer | None) -> Setup:
    """Make what servers and coordinator are made from, as a checkpoint has it if there is one.

    Raises:
        CheckpointMismatchError: it is of another model.
    """
    if saved is None:
        return prepare_run(recipe, workers)
    described = saved.run
    setup = prepare_run(recipe, workers, run=described["run"], saved=described["coordinator"]["plan"])
    if described["schema"] != setup.server.schema.digest:
        raise CheckpointMismatchError(
            f"the checkpoint of step {saved.step} is of another model: names, shapes or tables differ; use the "
            "recipe that it was trained with, or another output_dir"
        )
    return setup


def load(cluster: LocalCluster, store: Store, saved: SavedServer) -> None:
    """Continue from a checkpoint, on this cluster's number of shards."""
    for place, data in read_buckets(store, saved, range(BUCKETS)):
        cluster.adopt(data, place=place)
    cluster.ask(lambda one, now: one.load_state_dict(saved.run["coordinator"], now))


def save(cluster: LocalCluster, setup: Setup, store: Store, *, keep: int) -> int:
    """Save a run while it goes on: first what is consumed, then the buckets, which have that; returns the step.

    Raises:
        StorageError: the store does not take it; the checkpoints of before stay.
    """
    step, state = cluster.ask(lambda one, now: (one.step, one.state_dict()))
    name = new_save()
    files = [write_shard(store, step, name, shard, cluster.snapshots(shard)) for shard in cluster.shards]
    run = {"run": setup.server.run, "schema": setup.server.schema.digest, "coordinator": state}
    complete(store, step, name, files, run, keep=keep)
    return step
