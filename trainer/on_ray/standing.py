"""Standing of a run on Ray, as the driver heard it last: for `penstock top`, and to notice who started anew."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..recipes.recipe import Recipe
from ..report.status.servers import FINAL, ServersStatus, ShardStatus, State, WorkerStatus, write_servers
from ..server.placement import Placement
from ..server.schema import Schema
from ..server.services import DataPlan

_EVERY_S = 1.0


class Standing:
    """Knowledge of shards, workers and coordinator.

    All mutable state: their newest numbers, their starts, and the placement.
    """

    def __init__(self, recipe: Recipe, plan: DataPlan, folder: Path) -> None:
        self.saved_step: int | None = None
        self.pids: dict[str, int] = {}
        """The processes of workers, by name."""
        self._policy, self._plan, self._folder = recipe.trainer.server.policy, plan, folder
        self._shards: dict[str, Mapping[str, Any]] = {}
        self._silent: dict[str, float] = {}
        self._starts: dict[str, int] = {}
        self._run: Mapping[str, Any] = {}
        self._state: State = "starting"
        self._placement: Placement | None = None
        self._written_s = -_EVERY_S

    @property
    def consumed(self) -> int:
        """Count the batches whose gradients count."""
        return int(self._run.get("consumed", 0))

    @property
    def is_stopping(self) -> bool:
        """Return whether the coordinator has workers end."""
        return bool(self._run.get("is_stopping", False))

    @property
    def batches(self) -> float:
        """Count the batches that workers have trained on, also those that may still be lost."""
        return float(sum(one.get("batches_sum", 0.0) for one in self._run.get("numbers", {}).values()))

    def is_filled(self, schema: Schema) -> bool:
        """Return whether the shards hold all dense values: the first worker gives them."""
        wanted = sum(spec.size for spec in schema.tensors)
        return bool(sum(numbers["values"] for numbers in self._shards.values()) == wanted)

    def step_of(self, state: Mapping[str, Any]) -> int:
        """The step of a coordinator's state."""
        leases = state["leases"]
        done = sum(stop - start for start, stop in leases["consumed"])
        return int(leases["epoch"] * self._plan.batches + done) // self._plan.workers

    def note_shard(self, name: str, numbers: Mapping[str, Any]) -> bool:
        """Note what a shard tells; returns whether it has started anew since."""
        self._silent.pop(name, None)
        before = self._shards.get(name)
        self._shards[name] = numbers
        return self._count_start(name, before, numbers)

    @property
    def held_bytes(self) -> int:
        """Count the bytes that shards hold, optimizers' state too."""
        return sum(int(numbers["held_bytes"]) for numbers in self._shards.values())

    def forget_others(self, names: Collection[str]) -> None:
        """Forget the shards that have left, all but these."""
        self._shards = {name: numbers for name, numbers in self._shards.items() if name in names}
        self._silent = {name: since for name, since in self._silent.items() if name in names}

    def note_silent(self, name: str) -> float:
        """Note that a shard gave no answer; returns for how many seconds it has given none."""
        return time.monotonic() - self._silent.setdefault(name, time.monotonic())

    def note_coordinator(self, found: Mapping[str, Any]) -> bool:
        """Note what the coordinator tells; returns whether it has started anew since."""
        before, self._run = self._run, found
        return self._count_start("the coordinator", before or None, found)

    def _count_start(self, name: str, before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> bool:
        is_new = before is not None and before["start"] != now["start"]
        self._starts[name] = self._starts.get(name, 1) + is_new
        return is_new

    def write(self, state: State, placement: Placement) -> None:
        """Write the status for `penstock top`, about once a second; a disk that fails stops nothing."""
        if state == self._state and time.monotonic() - self._written_s < _EVERY_S:
            return
        self._state, self._written_s, self._placement = state, time.monotonic(), placement
        with suppress(OSError):
            write_servers(self._folder, self._describe(""))

    def end(self) -> None:
        """Write that the run failed, unless it ended otherwise."""
        if self._state not in FINAL:
            self._state = "failed"
            with suppress(OSError):
                write_servers(self._folder, self._describe("the message is where it was started"))

    def _describe(self, error: str) -> ServersStatus:
        run = self._run
        waiting: dict[str, set[str]] = {}
        clocks: dict[str, int] = {}
        for numbers in self._shards.values():
            for worker, names in numbers["waiting"].items():
                waiting.setdefault(worker, set()).update(names)
            for worker, clock in numbers["clocks"].items():
                clocks[worker] = min(clock, clocks.get(worker, clock))
        fastest = max(clocks.values(), default=0)
        workers = [
            WorkerStatus(
                name=name,
                pid=self.pids.get(name, 0),
                clock=clocks.get(name),
                behind=fastest - clocks.get(name, fastest),
                waits_for=sorted(waiting.get(name, ())),
                starts=member["incarnation"] + 1,
                leases=member["leases"],
                silent_s=member["silent_s"],
                numbers=run["numbers"].get(name, {}),
            )
            for name, member in sorted(run.get("members", {}).items())
        ]
        weights = {} if self._placement is None else self._placement.weights
        shares = {} if self._placement is None else self._placement.shares
        shards = [
            ShardStatus(
                name=name,
                is_answering=name not in self._silent,
                starts=self._starts[name],
                share=shares.get(name, 0.0),
                weight=weights.get(name, 0.0),
                mb_per_s=run.get("speeds", {}).get(name),
                **{
                    key: numbers[key]
                    for key in ("pid", "version", "values", "rows", "requests", "bytes_in", "bytes_out")
                },
            )
            for name, numbers in sorted(self._shards.items())
        ]
        return ServersStatus(
            time=time.time(),
            every_s=_EVERY_S,
            state=self._state,
            error=error,
            policy=self._policy,
            step=int(run.get("step", 0)),
            total_steps=self._plan.steps,
            epoch=int(run.get("epoch", 0)),
            batches=self.consumed,
            total_batches=self._plan.units,
            metrics=run.get("metrics", {}),
            saved_step=self.saved_step,
            coordinator_pid=int(run.get("pid", 0)),
            shards=shards,
            workers=workers,
        )
