"""A Ray cluster of this machine, for the tests of a module: it runs in a process of its own, and ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PROGRAM = """
import sys
from penstock.storage.ray_cluster import HERE, open_cluster

with open_cluster(HERE, cpus=int(sys.argv[1])) as ray:
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""


@contextmanager
def run_ray(cpus: int = 6) -> Iterator[str]:
    """Yield the address of a cluster with so many slots."""
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(cpus)],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},  # its token would be in the user's home
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            assert address, "no Ray cluster has started; its output is above"
            yield address
        finally:
            process.stdin.close()
            process.wait(60)
