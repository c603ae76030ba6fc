"""Scripts that tests start as ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_ranks(
    world_size: int, script: Path, *arguments: object, timeout_s: float = 150, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """What became of ``script`` on ``world_size`` ranks that torchrun starts in ``folder``, with one thread each."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    return subprocess.run(
        [*launcher, str(script), *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
