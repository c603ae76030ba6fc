"""A run of workers that are threads of this process, and of shards that they call directly: no cluster is needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from ...storage.resolve import open_store
from ...storage.threads.interruptible import Thread
from ..errors import StallError, TrainerConfigError
from ..recipes.recipe import Recipe
from ..report.progress import Summary
from ..report.status.scaling import Answer, Wanted, answer_request, choose_names, open_to_requests, read_request
from ..server.checkpoints import find_newest
from ..watch.stop_flag import StopFlag
from .learner_ranks import run_learner_ranks
from .local_cluster import LocalCluster
from .member import WorkerOptions
from .narrator import Narrator, View
from .saved_runs import checkpoint_place, held, load, resume_setup, save
from .tcp_services import ServicesHost
from .worker import run_worker

_TURN_S = 0.05
_PAUSE_S = 0.003  # a call costs a tenth of that here


def train_locally(
    recipe: Recipe, *, workers: int, shards: int, host: ServicesHost | None = None, flag: StopFlag | None = None
) -> Summary:
    """Train with this many workers and shards in this process; returns when all batches are trained on.

    A run whose folder has a checkpoint goes on from it, with these numbers of workers and shards. With ``host`` one of
    the workers is here, and others call that. ``flag`` is set by signals, those of the main thread by default.

    Raises:
        TrainerConfigError: the recipe, or the numbers, cannot work.
        CheckpointError: the newest checkpoint is of another model, or none is whole, or another run has them.
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
        if store is not None:
            stack.enter_context(held(recipe, store, notes.append))
        saved = None if store is None else find_newest(store, notes.append)
        setup = resume_setup(recipe, workers, saved)
        cluster = LocalCluster(setup, shards=shards, silence_s=recipe.trainer.server.silence_s)
        cluster.coordinator.expected = workers
        if store is not None and saved is not None:
            load(cluster, store, saved)
        narrator = stack.enter_context(Narrator(recipe, setup.plan))
        if flag is None and threading.current_thread() is threading.main_thread():
            flag = stack.enter_context(StopFlag())
        resumed = None if saved is None else View.of(cluster.coordinator)
        narrator.begin(workers=workers, shards=shards, server=setup.server, resumed=resumed)
        saved_step = cluster.coordinator.step
        output = Path(recipe.trainer.output_dir)
        open_to_requests(output)
        if host is not None:
            stack.enter_context(host.serve(cluster))
        crew = Crew(recipe, cluster, workers if host is None else 1, notes.append)
        stack.callback(crew.end)
        is_over = False
        while not is_over:
            is_over = crew.wait(_TURN_S) and not (host is not None and cluster.coordinator.members)
            if flag is not None and flag.reason is not None:
                cluster.ask(lambda one, now: one.stop())
            cluster.tick()
            if (wanted := read_request(output)) is not None:
                _scale(wanted, output, crew, cluster, narrator, has_ranks=host is not None)
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
        if host is not None and not stopped_by and not cluster.coordinator.is_done:
            stopped_by = "a signal to another rank"
        view = View.of(cluster.coordinator)
        resumes_at = view.step if stopped_by and store is not None else None
        return narrator.finish(view, stopped_by=stopped_by, resumes_at=resumes_at)


def _scale(
    wanted: Wanted, output: Path, crew: Crew, cluster: LocalCluster, narrator: Narrator, *, has_ranks: bool
) -> None:
    """Have the numbers of workers and shards that are wanted, and say so."""
    if has_ranks and wanted.workers is not None:
        reason = "workers are ranks of a launcher; start it again with another --nproc-per-node, to go on with those"
        answer_request(output, Answer(id=wanted.id, progress="refused", reason=reason))
        return
    for name, count in (("workers", wanted.workers), ("shards", wanted.shards)):
        if count is not None and count < 1:
            reason = f"--{name}={count} must be 1 or more"
            answer_request(output, Answer(id=wanted.id, progress="refused", reason=reason))
            return
    moved = 0
    if wanted.shards is not None:
        added, removed = choose_names(cluster.shards.keys(), wanted.shards, "shard-{}")
        names = [*(cluster.shards.keys() - set(removed)), *added]
        moved = cluster.place(dict.fromkeys(names, 1.0))
    if wanted.workers is not None:
        crew.scale(wanted.workers)
    workers, shards = len(cluster.coordinator.members if has_ranks else crew.names), len(cluster.shards)
    narrator.note(f"{workers} workers and {shards} shards from now on; {moved:,} buckets have moved")
    answer_request(output, Answer(id=wanted.id, progress="done", workers=workers, shards=shards))


class Crew:
    """The workers of a run, each a thread, or a learner, each a thread that watches processes of its own.

    One that fails has the others end. ``note`` gets sentences for people, from any of these threads.

    All mutable state: the threads by name, those that are to leave, and the errors.
    """

    def __init__(
        self, recipe: Recipe, cluster: LocalCluster, workers: int, note: Callable[[str], None] = lambda text: None
    ) -> None:
        self._recipe, self._cluster, self._note = recipe, cluster, note
        self._errors: list[BaseException] = []
        self._options = WorkerOptions(
            pause_s=_PAUSE_S, silence_s=recipe.trainer.server.silence_s, seeds_steps=workers == 1
        )
        self._threads: dict[str, Thread] = {}
        self._leaving: list[Thread] = []
        self.scale(workers)

    @property
    def names(self) -> list[str]:
        """The workers that train, or have ended with the run."""
        return list(self._threads)

    def scale(self, workers: int) -> None:
        """Have so many workers: more begin at once, and those that leave do so after the batch they are training on."""
        added, removed = choose_names(self._threads.keys(), workers, "worker-{:03d}")
        for name in removed:
            self._cluster.ask(lambda one, now, name=name: one.retire(name, now))  # type: ignore[misc]
            self._leaving.append(self._threads.pop(name))
        for name in added:
            for thread in self._leaving:  # one of this name may not have left yet
                if thread.name == name:
                    thread.join()
            self._cluster.ask(lambda one, now, name=name: one.admit(name, now))  # type: ignore[misc]
            self._threads[name] = Thread(target=self._run, args=(self._recipe, name, self._options), name=name)
            self._threads[name].start()

    def wait(self, seconds: float) -> bool:
        """Wait for so long at most; returns whether all have ended."""
        until = time.monotonic() + seconds
        threads = (*self._threads.values(), *self._leaving)
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._leaving = [thread for thread in self._leaving if thread.is_alive()]
        return not any(thread.is_alive() for thread in threads)

    def raise_error(self) -> None:
        """Raise what the first worker that failed met."""
        if self._errors:
            raise self._errors[0]

    def end(self) -> None:
        """Have all end after the batch that each is training on, and wait for that."""
        self._cluster.ask(lambda one, now: one.stop())
        for thread in (*self._threads.values(), *self._leaving):
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
