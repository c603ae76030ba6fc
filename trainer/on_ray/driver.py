"""The driver of a run on Ray: it starts shards, coordinator and workers, watches them, and saves.

Ray starts shards and the coordinator anew when they die; the driver notices, and has them hear what they missed.
Workers that die it replaces itself. It holds no state of the run: if it dies, the run goes on from its checkpoint.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
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
from ..report.status.scaling import (
    Answer,
    Progress,
    Wanted,
    answer_request,
    choose_names,
    open_to_requests,
    read_request,
)
from ..server.checkpoints import SavedServer, complete, find_newest, new_save
from ..server.coordinator import Identity
from ..watch.stop_flag import StopFlag
from . import coordinator_actor, worker_actor
from .calls import wait_for
from .fleet import Fleet
from .standing import Standing

_TURN_S = 0.3
_START_S = 180.0
_ANSWER_S = 20.0
_SAVE_S = 120.0
_SAVE_EVERY_S = 60.0
_WEIGH_S = 10.0
_GONE_S = 120.0  # that a shard gives no answer, as where its node is lost and there is no room elsewhere
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
    """A run that goes on.

    All mutable state: the actors, who died how often, what was saved when, who leaves, and what is asked of the run.
    """

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
        self._fleet = Fleet(
            ray,
            setup.server,
            weights=find_weights(recipe, options.shards, saved),
            replicas=recipe.trainer.server.replicas,
            place=place,
            ask=self._ask,
        )
        self._saved_at = None if saved is None else saved.step
        self._wanted: Wanted | None = None
        self._leaving: set[str] = set()
        self._weighed_s = time.monotonic()
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
                if self._is_save_due(view) and not self._fleet.is_between:
                    self._save()
                self._weigh()
            self._scale()
            if self._flag.reason is not None and not (self._is_stopping and self._standing.is_stopping):
                self._is_stopping = True  # one that has started anew does not know
                self._ask("stop")
        while self._fleet.is_between:
            self._look()
            self._move_on()
        self._save()
        view = self._look_until()
        self._standing.write("stopped" if self._is_stopping else "ended", self._fleet.placement)
        stopped_by = self._flag.reason or "" if self._is_stopping else ""
        return self._narrator.finish(view, stopped_by=stopped_by, resumes_at=view.step if stopped_by else None)

    def end(self) -> None:
        """End all actors; those of a cluster that goes on, too."""
        self._standing.end()
        if self._wanted is not None:
            self._answer(self._wanted, "refused", "the run has ended")
        for actor in (*self._workers.values(), *self._fleet.actors.values(), self._coordinator):
            if actor is not None:
                with suppress(Exception):  # it may be gone already
                    self._ray.kill(actor, no_restart=True)

    # The beginning

    def _start(self) -> None:
        setup, saved = self._setup, self._saved
        open_to_requests(self._output)
        self._check_room()
        self._fleet.start(self._fleet.names, self._fleet.placement.weights)
        for name in self._fleet.names:
            self._fleet.fill(name, step=self._saved_at, notices=())
        for name, numbers in zip(self._fleet.names, self._fleet.call_all("tick"), strict=True):
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
                    weights=self._fleet.placement.weights,
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

    def _start_worker(self, name: str, *, cpus: int = 1) -> None:
        settings = worker_actor.WorkerSettings(
            name=name,
            recipe=self._recipe.describe(),
            folder=str(Path.cwd()),
            token=self._token,
            silence_s=self._recipe.trainer.server.silence_s,
        )
        ranks = self._recipe.trainer.parallel.diloco.ranks
        gpus = ranks if self._recipe.trainer.device == "cuda" else 0
        options = {"num_cpus": cpus * ranks, "num_gpus": gpus, "scheduling_strategy": "SPREAD"}
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
                if name in self._leaving:
                    self._leaving.remove(name)
                    with suppress(Exception):  # it may be gone already
                        self._ray.kill(self._workers.pop(name), no_restart=True)
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
        if not self._is_stopping and name not in self._leaving:
            self._start_worker(name)

    def _look(self) -> View | None:
        """Look at coordinator and shards; None while the coordinator starts anew."""
        lost, self._restarted = self._restarted, []
        asked = {
            name: actor.tick.remote(self._token, [one for one in lost if one != name])
            for name, actor in self._fleet.actors.items()
        }
        for name, reply in asked.items():
            try:
                numbers = wait_for(reply, name, timeout_s=_ANSWER_S)
                origin = None if numbers["is_filled"] else self._fleet.fill(name, step=self._saved_at)
            except ShardUnreachableError:
                if self._standing.note_silent(name) > _GONE_S and self._fleet.give_up(name):
                    self._narrator.note(f"{name} does not come back; its buckets move to the other shards")
                self._restarted += [one for one in lost if one not in self._restarted]
                continue
            if self._standing.note_shard(name, numbers):
                self._restarted.append(name)
                self._narrator.note(f"{name} started anew, from {origin or 'nothing'}")
        try:
            found = wait_for(self._coordinator.tick.remote(self._token), "the coordinator", timeout_s=_ANSWER_S)
        except ShardUnreachableError:
            return None
        if self._standing.note_coordinator(found):
            self._narrator.note("the coordinator started anew, from its journal")
        self._standing.write("training", self._fleet.placement)
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

    # More or fewer

    def _scale(self) -> None:
        """Take a request for other numbers of workers and shards, or bring one to its end."""
        self._move_on()
        wanted = read_request(self._output)
        if self._wanted is None and wanted is not None and not self._fleet.is_moving:
            problem = self._find_problem(wanted)
            if problem:
                self._answer(wanted, "refused", problem)
                return
            self._wanted = wanted
            self._begin_scaling(wanted)
        if self._wanted is not None and not self._fleet.is_moving and not self._leaving:
            self._answer(self._wanted, "done")
            self._wanted = None

    def _answer(self, wanted: Wanted, progress: Progress, reason: str = "") -> None:
        workers, shards = len(self._workers) - len(self._leaving), len(self._fleet.names)
        answer = Answer(id=wanted.id, progress=progress, workers=workers, shards=shards, reason=reason)
        answer_request(self._output, answer)

    def _find_problem(self, wanted: Wanted) -> str:
        """Say why a run cannot have the numbers that are wanted; empty if it can."""
        workers = len(self._workers) if wanted.workers is None else wanted.workers
        shards = len(self._fleet.names) if wanted.shards is None else wanted.shards
        replicas = self._recipe.trainer.server.replicas
        if self._is_stopping or self._standing.is_stopping:
            return "the run is ending; start it again with these numbers"
        if workers < 1 or shards < 1:
            return f"--workers={workers} and --shards={shards} must be 1 or more"
        if shards < replicas:
            return f"server.replicas={replicas} needs as many shards; give --shards={replicas} or more"
        slots = int(self._ray.cluster_resources().get("CPU", 0))
        if self._options.address != HERE and workers + shards > slots:
            return (
                f"--workers={workers} and --shards={shards} need {workers + shards} CPUs of the Ray cluster, and it "
                f"has {slots}; add nodes, or ask for fewer"
            )
        return ""

    def _begin_scaling(self, wanted: Wanted) -> None:
        cpus = 0 if self._options.address == HERE else 1  # slots of a cluster here were counted at the beginning
        if wanted.shards is not None:
            weights = self._fleet.placement.weights
            added, removed = choose_names(weights.keys(), wanted.shards, "shard-{}")
            mean = sum(weights.values()) / len(weights)
            after = {name: weights.get(name, mean) for name in (*(weights.keys() - set(removed)), *added)}
            self._fleet.begin_move(after, cpus=cpus)
        if wanted.workers is not None:
            added, removed = choose_names(self._workers.keys(), wanted.workers, "worker-{:03d}")
            for name in removed:
                self._leaving.add(name)
                self._ask("retire", name)
            for name in added:
                self._ask("admit", name)
                self._start_worker(name, cpus=cpus)
        workers = len(self._workers) - len(self._leaving)
        self._narrator.note(f"{workers} workers and {len(self._fleet.names)} shards from now on")
        self._answer(wanted, "begun")

    def _move_on(self) -> None:
        moved = self._fleet.move_on(_TURN_S)
        if moved is not None:
            self._standing.forget_others(self._fleet.names)
            self._narrator.note(f"{moved:,} buckets have moved to {len(self._fleet.names)} shards")

    def _weigh(self) -> None:
        """Move buckets to faster shards, if that pays."""
        is_measured = self._recipe.trainer.server.weights == "measured" and len(self._fleet.names) > 1
        if not is_measured or self._fleet.is_moving or time.monotonic() - self._weighed_s < _WEIGH_S:
            return
        self._weighed_s = time.monotonic()
        weights = self._ask("weigh", float(self._standing.held_bytes))
        if weights is not None and not self._is_stopping:
            speeds = ", ".join(f"{name} {speed:g}" for name, speed in sorted(weights.items()))
            self._narrator.note(f"buckets move to faster shards, by MB/s: {speeds}")
            self._fleet.begin_move(weights)

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
            self._check_whole(self._fleet.call_all("take", save))
            files = self._fleet.call_all("write", step, save)
            server = self._setup.server
            run: Mapping[str, Any] = {"run": server.run, "schema": server.schema.digest, "coordinator": state}
            complete(self._store, step, save, files, run, keep=self._recipe.trainer.checkpoint.keep_last)
            self._fleet.call_all("confirm", save)
        except (ShardUnreachableError, CheckpointError) as exc:
            self._narrator.note(f"the servers could not be saved, and will be again: {exc}")
            return
        self._saved_batches, self._saved_s = done, time.monotonic()
        self._standing.saved_step = step
        self._narrator.record("checkpoint", {"seconds": time.monotonic() - started, "state": "written"})

    def _check_whole(self, taken: Sequence[Collection[int]]) -> None:
        """Refuse to save less than all.

        Raises:
            ShardUnreachableError: some bucket is on no shard, and so on its way.
        """
        held = {number for numbers in taken for number in numbers}
        missing = set(self._setup.server.schema.buckets().tolist()) - held
        if missing:
            raise ShardUnreachableError(f"{len(missing)} buckets are on their way")


def find_weights(recipe: Recipe, shards: int, saved: SavedServer | None) -> dict[str, float]:
    """The weights that shards begin with: those of a checkpoint if they are measured; a new one's is their mean."""
    names = [f"shard-{index}" for index in range(shards)]
    given = (
        {} if saved is None or recipe.trainer.server.weights == "equal" else saved.run["coordinator"].get("shards", {})
    )
    known = {name: float(given[name]) for name in names if name in given}
    mean = sum(known.values()) / len(known) if known else 1.0
    return {name: known.get(name, mean) for name in names}


def _is_waiting(numbers: Mapping[str, float]) -> bool:
    return numbers.get("waits_for_checkpoint", 0.0) > 0
