"""A run of workers that are threads of this process, and of shards that they call directly: no cluster is needed."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

from ...storage.threads.interruptible import Thread
from ..errors import StallError, TrainerConfigError
from ..recipes.recipe import Recipe
from ..report.progress import Summary
from ..watch.stop_flag import StopFlag
from .local_cluster import LocalCluster
from .narrator import Narrator
from .setup import prepare_run
from .worker import WorkerOptions, run_worker

_TURN_S = 0.05
_PAUSE_S = 0.001  # a call costs microseconds here


def train_locally(recipe: Recipe, *, workers: int, shards: int) -> Summary:
    """Train with this many workers and shards in this process; returns when all batches are trained on.

    Raises:
        TrainerConfigError: the recipe, or the numbers, cannot work.
        StallError: no batch counted for ``stall_timeout_s``.
        TrainerError: what a worker met; the others have ended by then.
    """
    if recipe.trainer.server.replicas > 1:
        raise TrainerConfigError(
            f"server.replicas={recipe.trainer.server.replicas} keeps values on another machine, and all shards of this "
            "run are in one process; use --ray, or server.replicas=1"
        )
    setup = prepare_run(recipe, workers)
    cluster = LocalCluster(setup, shards=shards, silence_s=recipe.trainer.server.silence_s)
    with ExitStack() as stack:
        narrator = stack.enter_context(Narrator(recipe, setup.plan))
        flag = stack.enter_context(StopFlag()) if threading.current_thread() is threading.main_thread() else None
        narrator.begin(workers=workers, shards=shards, server=setup.server)
        crew = Crew(recipe, cluster, workers)
        stack.callback(crew.end)
        is_over = False
        while not is_over:
            is_over = crew.wait(_TURN_S)
            if flag is not None and flag.reason is not None:
                cluster.ask(lambda one, now: one.stop())
            cluster.tick()
            cluster.ask(lambda one, now: narrator.look(one))
            if problem := narrator.find_stall(recipe.trainer.stall_timeout_s):
                raise StallError(problem)
        crew.raise_error()
        return narrator.end(cluster.coordinator, stopped_by="" if flag is None else flag.reason or "")


class Crew:
    """The workers of a run, each a thread. One that fails has the others end.

    All mutable state: the threads, and their errors.
    """

    def __init__(self, recipe: Recipe, cluster: LocalCluster, workers: int) -> None:
        self._cluster = cluster
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
            run_worker(recipe, name, self._cluster, options)
        except BaseException as exc:  # noqa: BLE001 - raised in the main thread
            self._errors.append(exc)
            self._cluster.ask(lambda one, now: one.stop())
