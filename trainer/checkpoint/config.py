"""Where checkpoints go, how often they are written, and which are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from ..errors import TrainerConfigError


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints go, how often they are written, and which are kept."""

    folder: str = "checkpoints"
    """Folder that all ranks share, inside output_dir unless it is absolute."""

    every_steps: int = 0
    """Steps between checkpoints; 0: only when asked to."""

    keep_last: int = 3
    """How many of the newest checkpoints to keep."""

    keep_best: int = 0
    """How many of those with the best metric to keep as well."""

    best: Literal["max", "min"] | None = None
    """Which end of the metric is good; none: known by the metric's name."""

    background: bool = True
    """Write while training goes on."""

    def __post_init__(self) -> None:
        scheme = urlsplit(str(self.folder)).scheme
        if not str(self.folder) or scheme:
            raise TrainerConfigError(
                f"checkpoint.folder={str(self.folder)!r} is not a path; checkpoints are written to a file system that "
                "all ranks share: give a path, or mount the store"
            )
        if self.every_steps < 0:
            raise TrainerConfigError(f"checkpoint.every_steps={self.every_steps} must be 0 (only when asked) or more")
        if self.keep_last < 1:
            raise TrainerConfigError(f"checkpoint.keep_last={self.keep_last} must be 1 or more")
        if self.keep_best < 0:
            raise TrainerConfigError(f"checkpoint.keep_best={self.keep_best} must be 0 or more")
        if self.best not in ("max", "min", None):
            raise TrainerConfigError(f"checkpoint.best={self.best!r} must be 'max' or 'min'")
