"""The driver of a run on Ray: it starts shards, coordinator and workers, watches them, and saves.

Ray starts shards and the coordinator anew when they die; the driver notices, and has them hear what they missed.
Workers that die it replaces itself. It holds no state of the run: if it dies, the run goes on from its checkpoint.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ...storage.ray_cluster import HERE, open_cluster
from ...storage.resolve import open_store
from ...storage.store import Store
from ..asynchronous.narrator import Narrator, View
from ..asynchronous.saved_runs import checkpoint_place, resume_setup
from ..asynchronous.setup import Setup
from ..errors import (
    CheckpointError,
    ServerError,
    ShardUnreachableError,
    StallError,
    TrainerConfigError,
)
from ..recipes.recipe import Recipe
from ..report.progress import Summary
from ..server.checkpoints import SavedServer, complete, find_newest, new_save
from ..server.coordinator import Identity
from ..watch.stop_flag import StopFlag
from . import coordinator_actor, shard_actor, worker_actor
from .calls import wait_for
from .standing import Standing

_TURN_S = 0.3
_START_S = 180.0
_ANSWER_S = 20.0
_SAVE_S = 120.0
_SAVE_EVERY_S = 60.0
_MOST_DEATHS = 5  # of a worker, without a batch that counts between them


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """The cluster of a run, and the numbers of its workers and shards at the beginning."""

    address: str = HERE
    workers: int = 1
    shards: int = 1

    def __post_init__(self) -> None:
        for name in ("workers", "shards"):
            if getattr(self, name) < 1:
                raise TrainerConfigError(f"--{name}={getattr(self, name)} must be 1 or more")


def train_on_ray(recipe: Recipe, options: RayOptions) -> Summary:
    """Train on a Ray cluster; returns when all batches are trained on, or a signal asked to stop and all is saved.

    A run whose folder has a checkpoint goes on from it, with these numbers of workers and shards.

    Raises:
        ClusterError: Ray is not installed, no cluster is there, or it is too small.
        TrainerConfigError: the recipe, or the numbers, cannot work.
        CheckpointError: the newest checkpoint is of another model.
        TrainerError: what a worker met, or a worker dies again and again.
    """
    if recipe.trainer.server.replicas > options.shards:
        raise TrainerConfigError(
            f"server.replicas={recipe.trainer.server.replicas} needs as many shards, and there is "
            f"--shards={options.shards}; give --shards={recipe.trainer.server.replicas}"
        )
    output, place = Path(recipe.trainer.output_dir).absolute(), checkpoint_place(recipe)
    notes: list[str] = []
    store = open_store(place)
    try:
        saved = find_newest(store, notes.append)
        setup = resume_setup(recipe, options.workers, saved)
        setup = replace(setup, server=replace(setup.server, token=secrets.token_hex(16)))
        with ExitStack() as stack:
            flag = stack.enter_context(StopFlag())
            cpus = options.workers * recipe.trainer.parallel.diloco.ranks + options.shards
            namespace = f"penstock-{setup.server.run}-{secrets.token_hex(4)}"
            ray = stack.enter_context(open_cluster(options.address, cpus=cpus, namespace=namespace))
            narrator = stack.enter_context(Narrator(recipe, setup.plan))
            run = _Run(recipe, options, setup, ray, store, place, output, narrator, flag, saved)
            stack.callback(run.end)
            for text in notes:
                narrator.note(text)
            return run.train()
    finally:
        store.close()


class _Run:
    """A run that goes on. All mutable state: the actors, who died how often, and what was saved when."""

    def __init__(
        self,
        recipe: Recipe,
        options: RayOptions,
        setup: Setup,
        ray: Any,
        store: Store,
        place: str,
        output: Path,
        narrator: Narrator,
        flag: StopFlag,
        saved: SavedServer | None,
    ) -> None:
        self._recipe, self._options, self._setup, self._ray = recipe, options, setup, ray
        self._store, self._place, self._output = store, place, output
        self._narrator, self._flag, self._saved = narrator, flag, saved
        self._token = setup.server.token
        self._weights = {f"shard-{index}": 1.0 for index in range(options.shards)}
        self._shards: dict[str, Any] = {}
        self._coordinator: Any = None
        self._workers: dict[str, Any] = {}
        self._running: dict[Any, str] = {}
        self._pids: dict[Any, str] = {}
        self._deaths: dict[str, tuple[int, int]] = {}  # since how many consumed batches, and how often
        self._standing = Standing(recipe, setup.plan, output)
        self._restarted: list[str] = []
        self._saved_batches = -1.0
        self._saved_s = time.monotonic()
        self._is_stopping = False

    def train(self) -> Summary:
        """Start all, and watch until the end."""
        self._start()
        is_over = False
        while not is_over:
            is_over = self._collect()
            view = self._look()
            if view is not None:
                self._narrator.follow(view)
                if problem := self._narrator.find_stall(self._recipe.trainer.stall_timeout_s):
                    raise StallError(problem)
                if self._is_save_due(view):
                    self._save()
            if self._flag.reason is not None and not (self._is_stopping and self._standing.is_stopping):
                self._is_stopping = True  # one that has started anew does not know
                self._ask("stop")
        self._save()
        view = self._look_until()
        self._standing.write("stopped" if self._is_stopping else "ended")
        stopped_by = self._flag.reason or "" if self._is_stopping else ""
        return self._narrator.finish(view, stopped_by=stopped_by, resumes_at=view.step if stopped_by else None)

    def end(self) -> None:
        """End all actors; those of a cluster that goes on, too."""
        self._standing.end()
        for actor in (*self._workers.values(), *self._shards.values(), self._coordinator):
            if actor is not None:
                with suppress(Exception):  # it may be gone already
                    self._ray.kill(actor, no_restart=True)

    # The beginning

    def _start(self) -> None:
        setup, saved = self._setup, self._saved
        self._check_room()
        make_shard = shard_actor.make_actor_class()
        for name in self._weights:
            settings = shard_actor.ShardSettings(
                name=name,
                config=setup.server,
                weights=self._weights,
                replicas=self._recipe.trainer.server.replicas,
                place=self._place,
                step=None if saved is None else saved.step,
            )
            options = {"name": name, "num_cpus": 1, "scheduling_strategy": "SPREAD"}
            self._shards[name] = make_shard.options(**options).remote(settings)
        for name, actor in self._shards.items():
            numbers = wait_for(actor.tick.remote(self._token), name, timeout_s=_START_S)
            self._standing.note_shard(name, numbers)
        journal = self._output / "servers" / f"journal-{time.time_ns()}"
        journal.parent.mkdir(parents=True, exist_ok=True)
        for old in sorted(journal.parent.glob("journal-*"))[:-1]:
            old.unlink(missing_ok=True)
        server = setup.server
        self._coordinator = (
            coordinator_actor.make_actor_class()
            .options(name=coordinator_actor.NAME, num_cpus=0, scheduling_strategy=self._here())
            .remote(
                coordinator_actor.CoordinatorSettings(
                    plan=setup.plan,
                    identity=Identity(run=server.run, schema=server.schema.digest, token=self._token),
                    weights=self._weights,
                    silence_s=self._recipe.trainer.server.silence_s,
                    expected=self._options.workers,
                    journal=str(journal),
                    state=None if saved is None else saved.run["coordinator"],
                )
            )
        )
        view = self._look_until()
        self._narrator.begin(
            workers=self._options.workers,
            shards=self._options.shards,
            server=server,
            resumed=None if saved is None else view,
        )
        for index in range(self._options.workers):
            self._start_worker(f"worker-{index:03d}")

    def _check_room(self) -> None:
        wanted = self._options.workers * self._recipe.trainer.parallel.diloco.ranks + self._options.shards
        slots = int(self._ray.cluster_resources().get("CPU", 0))
        if slots < wanted:
            raise TrainerConfigError(
                f"--workers={self._options.workers} and --shards={self._options.shards} need {wanted} CPUs of the Ray "
                f"cluster, and it has {slots}; add nodes, or ask for fewer"
            )

    def _here(self) -> Any:
        """Place an actor on this node if that is possible: its journal is in a folder of it."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(self._ray.get_runtime_context().get_node_id(), soft=True)

    def _start_worker(self, name: str) -> None:
        settings = worker_actor.WorkerSettings(
            name=name,
            recipe=self._recipe.describe(),
            folder=str(Path.cwd()),
            token=self._token,
            silence_s=self._recipe.trainer.server.silence_s,
        )
        ranks = self._recipe.trainer.parallel.diloco.ranks
        gpus = ranks if self._recipe.trainer.device == "cuda" else 0
        options = {"num_cpus": ranks, "num_gpus": gpus, "scheduling_strategy": "SPREAD"}
        actor = worker_actor.make_actor_class().options(**options).remote(settings)
        self._workers[name] = actor
        self._pids[actor.pid.remote()] = name
        self._running[actor.run.remote()] = name

    # Watching

    def _collect(self) -> bool:
        """Replace workers that died; returns whether all have ended."""
        if self._running:
            done, _ = self._ray.wait(list(self._running), num_returns=len(self._running), timeout=_TURN_S)
            for one in done:
                name = self._running.pop(one)
                try:
                    wait_for(one, name, timeout_s=_ANSWER_S)
                except ShardUnreachableError as exc:
                    self._replace(name, exc)
        if self._pids:
            done, _ = self._ray.wait(list(self._pids), num_returns=len(self._pids), timeout=0)
            for one in done:
                name = self._pids.pop(one)
                with suppress(ShardUnreachableError):
                    self._standing.pids[name] = wait_for(one, name, timeout_s=_ANSWER_S)
        return not self._running

    def _replace(self, name: str, error: ShardUnreachableError) -> None:
        """Forget a worker that died, and start it anew."""
        consumed = self._standing.consumed
        since, count = self._deaths.get(name, (consumed, 0))
        count = count + 1 if since == consumed else 1
        self._deaths[name] = consumed, count
        if count > _MOST_DEATHS:
            raise ServerError(
                f"{name} died {count} times, and no batch counted meanwhile; its last messages are in Ray's logs, and "
                "dmesg tells if memory was full"
            ) from error
        self._narrator.note(f"{name} died; what it had leased goes to others, and it starts anew")
        with suppress(ShardUnreachableError):  # it will be silent for too long
            wait_for(self._coordinator.forget.remote(self._token, name), "the coordinator", timeout_s=_SAVE_S)
        if not self._is_stopping:
            self._start_worker(name)

    def _look(self) -> View | None:
        """Look at coordinator and shards; None while the coordinator starts anew."""
        lost, self._restarted = self._restarted, []
        asked = {
            name: actor.tick.remote(self._token, [one for one in lost if one != name])
            for name, actor in self._shards.items()
        }
        for name, reply in asked.items():
            try:
                numbers = wait_for(reply, name, timeout_s=_ANSWER_S)
            except ShardUnreachableError:
                self._standing.note_silent(name)
                self._restarted += [one for one in lost if one not in self._restarted]
                continue
            if self._standing.note_shard(name, numbers):
                self._restarted.append(name)
                origin = numbers["restored_from"] or "nothing"
                self._narrator.note(f"{name} started anew, from {origin}")
                with suppress(ShardUnreachableError):
                    recalled = self._coordinator.recall.remote(self._token, name)
                    wait_for(recalled, "the coordinator", timeout_s=_SAVE_S)
        try:
            found = wait_for(self._coordinator.tick.remote(self._token), "the coordinator", timeout_s=_ANSWER_S)
        except ShardUnreachableError:
            return None
        if self._standing.note_coordinator(found):
            self._narrator.note("the coordinator started anew, from its journal")
        self._standing.write("training")
        return View(**{one.name: found[one.name] for one in fields(View)})

    def _look_until(self) -> View:
        """Look until the coordinator answers.

        Raises:
            ShardUnreachableError: it does not.
        """
        deadline = time.monotonic() + _START_S
        while (view := self._look()) is None:
            if time.monotonic() > deadline:
                raise ShardUnreachableError("the coordinator gave no answer for minutes; is the cluster alive?")
            time.sleep(_TURN_S)
        return view

    def _ask(self, name: str, *values: Any) -> Any:
        """Call the coordinator until it answers."""
        deadline = time.monotonic() + _START_S
        while True:
            try:
                return wait_for(
                    self._coordinator.ask.remote(self._token, name, *values), "the coordinator", timeout_s=_SAVE_S
                )
            except ShardUnreachableError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_TURN_S)

    # Saving

    def _is_save_due(self, view: View) -> bool:
        if not self._standing.is_filled(self._setup.server.schema):
            return False
        if self._saved_batches < 0:
            return True
        done = sum(one.get("batches_sum", 0.0) for one in view.numbers.values())
        if done == self._saved_batches and not any(map(_is_waiting, view.numbers.values())):
            return False
        every = self._recipe.trainer.checkpoint.every_steps or math.inf
        is_late = time.monotonic() - self._saved_s > _SAVE_EVERY_S
        steps = (done - self._saved_batches) / self._setup.plan.workers
        return steps >= every or is_late or any(map(_is_waiting, view.numbers.values()))

    def _save(self) -> None:
        """Save the run: first what is consumed, then the buckets, which have at least that. A failure is noted."""
        if not self._standing.is_filled(self._setup.server.schema):
            return
        started = time.monotonic()
        done = self._standing.batches
        try:
            state = self._ask("state_dict")
            save, step = new_save(), self._standing.step_of(state)
            self._all("take", save)
            files = self._all("write", step, save)
            server = self._setup.server
            run: Mapping[str, Any] = {"run": server.run, "schema": server.schema.digest, "coordinator": state}
            complete(self._store, step, save, files, run, keep=self._recipe.trainer.checkpoint.keep_last)
            self._all("confirm", save)
        except (ShardUnreachableError, CheckpointError) as exc:
            self._narrator.note(f"the servers could not be saved, and will be again: {exc}")
            return
        self._saved_batches, self._saved_s = done, time.monotonic()
        self._standing.saved_step = step
        self._narrator.record("checkpoint", {"seconds": time.monotonic() - started, "state": "written"})

    def _all(self, method: str, *values: Any) -> list[Any]:
        """Call all shards at once, and wait for all."""
        asked = {name: getattr(actor, method).remote(self._token, *values) for name, actor in self._shards.items()}
        return [wait_for(reply, name, timeout_s=_SAVE_S) for name, reply in asked.items()]


def _is_waiting(numbers: Mapping[str, float]) -> bool:
    return numbers.get("waits_for_checkpoint", 0.0) > 0
