"""A run of workers that are threads of this process, and of shards that they call directly: no cluster is needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing

from ...storage.resolve import open_store
from ...storage.threads.interruptible import Thread
from ..errors import StallError, TrainerConfigError
from ..recipes.recipe import Recipe
from ..report.progress import Summary
from ..server.checkpoints import find_newest
from ..watch.stop_flag import StopFlag
from .learner_ranks import run_learner_ranks
from .local_cluster import LocalCluster
from .narrator import Narrator, View
from .saved_runs import checkpoint_place, load, resume_setup, save
from .worker import WorkerOptions, run_worker

_TURN_S = 0.05
_PAUSE_S = 0.003  # a call costs a tenth of that here


def train_locally(recipe: Recipe, *, workers: int, shards: int) -> Summary:
    """Train with this many workers and shards in this process; returns when all batches are trained on.

    A run whose folder has a checkpoint goes on from it, with these numbers of workers and shards.

    Raises:
        TrainerConfigError: the recipe, or the numbers, cannot work.
        CheckpointError: the newest checkpoint is of another model, or none of them is whole.
        StallError: no batch counted for ``stall_timeout_s``.
        TrainerError: what a worker met; the others have ended by then.
    """
    if recipe.trainer.server.replicas > 1:
        raise TrainerConfigError(
            f"server.replicas={recipe.trainer.server.replicas} keeps values on another machine, and all shards of this "
            "run are in one process; use --ray, or server.replicas=1"
        )
    every, keep = recipe.trainer.checkpoint.every_steps, recipe.trainer.checkpoint.keep_last
    notes: list[str] = []
    with ExitStack() as stack:
        store = stack.enter_context(closing(open_store(checkpoint_place(recipe)))) if every else None
        saved = None if store is None else find_newest(store, notes.append)
        setup = resume_setup(recipe, workers, saved)
        cluster = LocalCluster(setup, shards=shards, silence_s=recipe.trainer.server.silence_s)
        cluster.coordinator.expected = workers
        if store is not None and saved is not None:
            load(cluster, store, saved)
        narrator = stack.enter_context(Narrator(recipe, setup.plan))
        flag = stack.enter_context(StopFlag()) if threading.current_thread() is threading.main_thread() else None
        resumed = None if saved is None else View.of(cluster.coordinator)
        narrator.begin(workers=workers, shards=shards, server=setup.server, resumed=resumed)
        saved_step = cluster.coordinator.step
        crew = Crew(recipe, cluster, workers, notes.append)
        stack.callback(crew.end)
        is_over = False
        while not is_over:
            is_over = crew.wait(_TURN_S)
            if flag is not None and flag.reason is not None:
                cluster.ask(lambda one, now: one.stop())
            cluster.tick()
            cluster.ask(lambda one, now: narrator.look(one))
            while notes:
                narrator.note(notes.pop(0))
            if problem := narrator.find_stall(recipe.trainer.stall_timeout_s):
                raise StallError(problem)
            if store is not None and (is_over or cluster.coordinator.step >= saved_step + every):
                crew.raise_error()
                started = time.monotonic()
                saved_step = save(cluster, setup, store, keep=keep)
                narrator.record("checkpoint", {"seconds": time.monotonic() - started, "state": "written"})
        crew.raise_error()
        stopped_by = "" if flag is None else flag.reason or ""
        view = View.of(cluster.coordinator)
        resumes_at = view.step if stopped_by and store is not None else None
        return narrator.finish(view, stopped_by=stopped_by, resumes_at=resumes_at)


class Crew:
    """The workers of a run, each a thread, or a learner, each a thread that watches processes of its own.

    One that fails has the others end. ``note`` gets sentences for people, from any of these threads.

    All mutable state: the threads, and their errors.
    """

    def __init__(
        self, recipe: Recipe, cluster: LocalCluster, workers: int, note: Callable[[str], None] = lambda text: None
    ) -> None:
        self._cluster, self._note = cluster, note
        self._errors: list[BaseException] = []
        options = WorkerOptions(pause_s=_PAUSE_S, silence_s=recipe.trainer.server.silence_s, seeds_steps=workers == 1)
        self._threads = [
            Thread(target=self._run, args=(recipe, f"worker-{index:03d}", options), name=f"worker-{index}")
            for index in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for so long at most; returns whether all have ended."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def raise_error(self) -> None:
        """Raise what the first worker that failed met."""
        if self._errors:
            raise self._errors[0]

    def end(self) -> None:
        """Have all end after the batch that each is training on, and wait for that."""
        self._cluster.ask(lambda one, now: one.stop())
        for thread in self._threads:
            thread.join(timeout=60.0)

    def _run(self, recipe: Recipe, name: str, options: WorkerOptions) -> None:
        try:
            if recipe.trainer.parallel.mode == "diloco":
                run_learner_ranks(recipe, name, self._cluster, options, note=self._note)
            else:
                run_worker(recipe, name, self._cluster, options)
        except BaseException as exc:  # noqa: BLE001 - raised in the main thread
            self._errors.append(exc)
            self._cluster.ask(lambda one, now: one.stop())
