"""Files that another library wrote, made as if they were written here: readable as the umask has it, and durable."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def finish_file(path: Path) -> None:
    """Give a new file the permissions that the umask leaves, and sync it; raises OSError where the disk is full."""
    path.chmod(_mode_of_new_files(path.parent))  # safetensors lets nobody else read what it writes
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _mode_of_new_files(folder: Path) -> int:
    """What the umask leaves, which can't be read without being set."""
    with tempfile.TemporaryDirectory(dir=folder) as probe:
        (Path(probe) / "new").touch()
        return (Path(probe) / "new").stat().st_mode & 0o777
