"""Which checkpoint of a run is meant, and which weights of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal

from ..checkpoint.folder import EXTRA_NAME, MANIFEST_NAME, list_steps, step_folder
from ..errors import CheckpointError

Step = Literal["best", "latest"] | int
Weights = Literal["model", "ema"]
"""Of a checkpoint: the weights that were trained, or their moving averages."""


def refuse_url(path: str | Path) -> None:
    """Raise a CheckpointError for what is not on a file system."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):  # pathlib leaves one slash of two
        raise CheckpointError(
            f"{path} is a URL; weights are read from a file system: copy them, or mount the store. Those of a "
            "checkpoint there: penstock.trainer.export_safetensors('URL/step-N', 'weights.safetensors')"
        )


def holds_checkpoints(run: Path) -> bool:
    """Whether this is a checkpoint, a folder of checkpoints, or a run's folder with one inside."""
    return (run / MANIFEST_NAME).is_file() or bool(_folders_of(run))


def find_checkpoint(run: Path, step: Step) -> Path:
    """The folder of one checkpoint: of a run's output folder, of its folder of checkpoints, or a checkpoint itself.

    ``step`` is "latest", the newest; "best", that of the best metric, as the newest records it; or a number.

    Raises:
        CheckpointError: there is none, or not this one; the message names those that are there.
    """
    refuse_url(run)
    if (run / MANIFEST_NAME).is_file():
        if step not in ("latest", _number(run)):
            raise CheckpointError(f"{run} is one checkpoint, and step={step!r} chooses among several; give the run")
        return run
    folders = _folders_of(run)
    if not folders:
        missing = "does not exist" if not run.exists() else "holds no checkpoint"
        raise CheckpointError(
            f"{run} {missing}; give the output_dir of a run that saved (checkpoint.every_steps), or its folder of "
            "checkpoints"
        )
    if len(folders) > 1:
        names = ", ".join(str(folder) for folder in folders)
        raise CheckpointError(f"{run} has several folders of checkpoints: {names}; give one of them")
    folder = folders[0]
    steps = list_steps(folder)
    number = steps[0] if step == "latest" else _best_step(folder, steps) if step == "best" else step
    if number not in steps:
        there = ", ".join(map(str, sorted(steps)))
        kept = "; keep_best was 0 or it is gone" if step == "best" else ""
        raise CheckpointError(f"{folder} has no checkpoint of step {number}{kept}; there are those of steps {there}")
    return step_folder(folder, number)


def _folders_of(run: Path) -> list[Path]:
    try:
        if list_steps(run):
            return [run]
        inside = sorted(run.iterdir()) if run.is_dir() else []
        return [folder for folder in inside if folder.is_dir() and list_steps(folder)]
    except OSError as exc:
        raise CheckpointError(f"{exc.filename or run} cannot be read: {exc.strerror or exc}") from exc


def _number(checkpoint: Path) -> int | None:
    number = checkpoint.name.removeprefix("step-")
    return int(number) if number.isdecimal() else None


def _best_step(folder: Path, steps: list[int]) -> int:
    """The best step so far, as the newest checkpoint's counters have it."""
    newest = step_folder(folder, steps[0]) / EXTRA_NAME
    try:
        best = json.loads(newest.read_bytes())["progress"]["best_step"]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise CheckpointError(
            f"{newest} cannot be read ({type(exc).__name__}: {exc}), which names the best step; choose a step by number"
        ) from exc
    if not isinstance(best, int):
        raise CheckpointError(
            f"{folder}: the run measured no metric that could be the best (evaluate.best); choose 'latest' or a step"
        )
    return best
