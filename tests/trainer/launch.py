"""Starts real ranks for the trainer's tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import penstock


def run_ranks(
    script: Path, ranks: int, *arguments: str, timeout_s: float = 150.0, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` on ``ranks`` local ranks with torchrun; one thread each, warnings are errors."""
    return subprocess.run(
        _command(script, ranks, options, arguments),
        env=ranks_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@contextmanager
def start_ranks(script: Path, ranks: int, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Like ``run_ranks``, but under way; output and errors together are its ``stdout``. Ended with the context."""
    command = _command(script, ranks, (), arguments)
    with subprocess.Popen(
        command, env=ranks_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        try:
            yield running
        finally:
            if running.poll() is None:
                running.terminate()


def _command(script: Path, ranks: int, options: Sequence[str], arguments: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    return [*command, *options, str(script), *arguments]


def ranks_environment() -> dict[str, str]:
    """What ranks need to import what this process does, on one thread each."""
    path = os.pathsep.join(filter(None, [import_root(), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def import_root() -> str:
    """The folder on the path under which this interpreter found penstock; empty for an installed one."""
    parents = {str(Path(entry)) for entry in sys.path if (Path(entry) / "penstock").exists()}
    return next(iter(parents), "") if penstock.__file__ else ""
