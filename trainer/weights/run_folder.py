"""Choose a checkpoint of a run, and which of its weights to load."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from ...storage.store import ByteRange
from ..checkpoint.config import CheckpointConfig
from ..checkpoint.folder import EXTRA_NAME, MANIFEST_NAME, find_damage, list_steps, read_manifest, step_folder
from ..errors import CheckpointError

Step = Literal["best", "latest"] | int
Weights = Literal["model", "ema"]
"""Of a checkpoint: the weights that were trained, or their moving averages."""

CONFIG_NAME = "config.json"

Advance = Callable[[int], None]
Ranges = Mapping[str, Sequence[ByteRange]]


class Chosen(Protocol):
    """Checkpoint that was chosen to be read; its opener closes it."""

    @property
    def name(self) -> str:
        """Its path or URL, for messages."""
        ...

    @property
    def step(self) -> int: ...

    @property
    def folder(self) -> Path:
        """Folder of its metadata, and of the tensors after ``bring``."""
        ...

    def count_bytes(self, ranges: Ranges) -> int:
        """Total bytes that ``find_damage`` over all shares and ``bring`` report to ``advance``."""
        ...

    def find_damage(self, *, share: int = 0, shares: int = 1, advance: Advance = lambda count: None) -> list[str]:
        """One sentence for each file, of this share of all, that can be seen not to be what was saved."""
        ...

    def bring(self, ranges: Ranges, advance: Advance = lambda count: None) -> None:
        """Have these bytes of its files in ``folder``, verified.

        Raises:
            CheckpointError: they cannot be had, or are damaged.
        """
        ...

    def read_config(self) -> bytes | None:
        """The run's config.json, if it has one."""
        ...

    def close(self) -> None:
        """Give up what was brought; closing twice is allowed."""
        ...


class LocalCheckpoint:
    """A checkpoint on a file system, of the run that was named."""

    def __init__(self, folder: Path, run: Path) -> None:
        self.folder = folder
        self._run = run
        self._manifest = read_manifest(folder)
        self.step = self._manifest.step

    @property
    def name(self) -> str:
        return str(self.folder)

    def count_bytes(self, ranges: Ranges) -> int:
        return sum(seal.size for seal in self._manifest.files.values())

    def find_damage(self, *, share: int = 0, shares: int = 1, advance: Advance = lambda count: None) -> list[str]:
        files = sorted(self._manifest.files.values(), key=lambda seal: -seal.size)
        if shares > 1:
            return find_damage(self.folder, self._manifest, share=share, shares=shares)
        damage = []
        for number, seal in enumerate(files):
            damage += find_damage(self.folder, self._manifest, share=number, shares=len(files))
            advance(seal.size)
        return damage

    def bring(self, ranges: Ranges, advance: Advance = lambda count: None) -> None:
        """Do nothing: everything is local."""

    def read_config(self) -> bytes | None:
        """In what was given, beside the checkpoints, or above their folder of the usual name."""
        places = [self._run, self.folder, self.folder.parent]
        if self.folder.parent.name == CheckpointConfig.folder:
            places.append(self.folder.parent.parent)
        found = next((place / CONFIG_NAME for place in places if (place / CONFIG_NAME).is_file()), None)
        try:
            return None if found is None else found.read_bytes()
        except OSError as exc:
            raise CheckpointError(f"{found} cannot be read: {exc.strerror or exc}") from exc

    def close(self) -> None:
        """Do nothing: nothing was brought."""


def holds_checkpoints(run: Path) -> bool:
    """Return whether this is a checkpoint, a folder of checkpoints, or a run's folder with one inside."""
    return (run / MANIFEST_NAME).is_file() or bool(_folders_of(run))


def find_checkpoint(run: Path, step: Step) -> Path:
    """The folder of one checkpoint: of a run's output folder, of its folder of checkpoints, or a checkpoint itself.

    ``step`` is "latest", the newest; "best", that of the best metric, as the newest records it; or a number.

    Raises:
        CheckpointError: there is none, or not this one; the message names the existing ones.
    """
    if (run / MANIFEST_NAME).is_file():
        check_single(str(run), _number(run), step)
        return run
    folders = _folders_of(run)
    if not folders:
        if any(run.glob("servers/*")) or any(run.glob("*/servers/*")):
            raise CheckpointError(
                f"{run} holds checkpoints of a parameter server, which export does not read; train with export = "
                '"model.safetensors" in [trainer], also by starting the run again, and its end writes that'
            )
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
    best = read_best_step(step_folder(folder, steps[0]) / EXTRA_NAME, str(folder)) if step == "best" else None
    return step_folder(folder, choose_step(str(folder), steps, step, best))


def check_single(name: str, number: int | None, step: Step) -> None:
    """Raise a CheckpointError if ``step`` is another than that of the one checkpoint which was named."""
    if step not in ("latest", number):
        raise CheckpointError(f"{name} is one checkpoint, and step={step!r} chooses among several; give the run")


def choose_step(name: str, steps: Sequence[int], step: Step, best: int | None) -> int:
    """Resolve a step to its number among the existing ones, newest first."""
    number = steps[0] if step == "latest" else best if step == "best" else step
    if number not in steps:
        there = ", ".join(map(str, sorted(steps)))
        kept = "; keep_best was 0 or it is gone" if step == "best" else ""
        raise CheckpointError(f"{name} has no checkpoint of step {number}{kept}; there are those of steps {there}")
    assert isinstance(number, int)
    return number


def read_best_step(newest: Path, name: str) -> int:
    """The best step so far, as the newest checkpoint's counters have it."""
    try:
        best = json.loads(newest.read_bytes())["progress"]["best_step"]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise CheckpointError(
            f"{newest} cannot be read ({type(exc).__name__}: {exc}), which names the best step; choose a step by number"
        ) from exc
    if not isinstance(best, int):
        raise CheckpointError(
            f"{name}: the run measured no metric that could be the best (evaluate.best); choose 'latest' or a step"
        )
    return best


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
