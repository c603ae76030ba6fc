"""Starts real ranks for the trainer's tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import penstock


def run_ranks(
    script: Path, ranks: int, *arguments: str, timeout_s: float = 150.0, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` on ``ranks`` local ranks with torchrun; one thread each, warnings are errors."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [import_root(), os.environ.get("PYTHONPATH", "")])),
    }
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    return subprocess.run(
        [*command, *options, str(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def import_root() -> str:
    """The folder on the path under which this interpreter found penstock; empty for an installed one."""
    parents = {str(Path(entry)) for entry in sys.path if (Path(entry) / "penstock").exists()}
    return next(iter(parents), "") if penstock.__file__ else ""
