"""The actor of a worker: it builds the recipe where it is placed, and trains until the run is over."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...storage.errors import PenstockError
from ...storage.ray_cluster import import_ray
from ..asynchronous.learner_ranks import run_learner_ranks
from ..asynchronous.member import WorkerOptions
from ..asynchronous.worker import run_worker
from ..recipes.recipe import build_recipe
from ..watch.process_end import write_stderr
from .calls import Refused
from .services import RayServices


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """All that a worker is started with; ``folder`` is the one that relative paths of the recipe are in."""

    name: str
    recipe: Mapping[str, Any]
    folder: str
    token: str
    silence_s: float

    def __repr__(self) -> str:
        return f"WorkerSettings(name={self.name!r})"  # no token


class TrainingWorker:
    """A worker as an actor; one that died is replaced by the driver, and not by Ray."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        if Path(settings.folder).is_dir():
            os.chdir(settings.folder)

    def pid(self) -> int:
        """The process that it runs in."""
        return os.getpid()

    def run(self) -> Refused | None:
        """Train until the run is over."""
        settings = self._settings
        try:
            recipe = build_recipe(settings.recipe)
            options = WorkerOptions(silence_s=settings.silence_s)
            services = RayServices(settings.token)
            if recipe.trainer.parallel.mode == "diloco":
                run_learner_ranks(recipe, settings.name, services, options, note=self._note)
            else:
                run_worker(recipe, settings.name, services, options)
        except PenstockError as exc:
            return Refused.of(exc)
        return None

    def _note(self, text: str) -> None:
        """Write a sentence for people where Ray collects the messages of workers."""
        write_stderr(f"{self._settings.name}: {text}\n")


def make_actor_class() -> Any:
    """The class as Ray wants it."""
    return import_ray().remote(max_restarts=0, max_task_retries=0)(TrainingWorker)
