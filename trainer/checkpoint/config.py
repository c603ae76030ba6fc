"""Configuration of checkpoints: their folder, how often they are written, and which are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from ..errors import TrainerConfigError


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints go, how often they are written, and which are kept."""

    folder: str = "checkpoints"
    """Folder that all ranks share, inside output_dir unless it is absolute; or a URL as s3://bucket/prefix."""

    every_steps: int = 0
    """Steps between checkpoints; 0: none; without keep_best nothing is saved then, even at a signal."""

    keep_last: int = 3
    """How many of the newest checkpoints to keep."""

    keep_best: int = 0
    """How many of those with the best metric to keep as well."""

    best: Literal["max", "min"] | None = None
    """Which end of the metric is good; none: known by the metric's name."""

    background: bool = True
    """Write while training goes on."""

    def __post_init__(self) -> None:
        self._check_folder()
        if self.every_steps < 0:
            raise TrainerConfigError(f"checkpoint.every_steps={self.every_steps} must be 0 (none) or more")
        if self.keep_last < 1:
            raise TrainerConfigError(f"checkpoint.keep_last={self.keep_last} must be 1 or more")
        if self.keep_best < 0:
            raise TrainerConfigError(f"checkpoint.keep_best={self.keep_best} must be 0 or more")
        if self.best not in ("max", "min", None):
            raise TrainerConfigError(f"checkpoint.best={self.best!r} must be 'max' or 'min'")

    @property
    def is_remote(self) -> bool:
        """Return whether the folder is the URL of an object store."""
        return "://" in str(self.folder)

    def _check_folder(self) -> None:
        folder = str(self.folder)
        parts = urlsplit(folder)
        if ":" in parts.netloc.rpartition("@")[0]:
            raise TrainerConfigError(
                f"checkpoint.folder is a {parts.scheme} URL that carries a password; set credentials in the "
                "environment, or where the store's own tools look for them"
            )
        if parts.scheme in ("http", "https"):
            raise TrainerConfigError(
                f"checkpoint.folder={folder!r} is a web server's, which takes no checkpoints; give a path, or the URL "
                "of an object store as s3://bucket/prefix"
            )
        if not folder or parts.scheme == "file" or (parts.scheme and not self.is_remote):
            raise TrainerConfigError(
                f"checkpoint.folder={folder!r} is neither a path nor the URL of an object store; give a path that all "
                "ranks share, or a URL as s3://bucket/prefix"
            )
        if self.is_remote and not parts.netloc:
            raise TrainerConfigError(f"checkpoint.folder={folder!r} names no bucket; write s3://bucket/prefix")
