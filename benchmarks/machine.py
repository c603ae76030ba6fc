"""The machine and the package versions that a measurement was made with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from ..loader.limits import usable_cores, usable_memory

_PACKAGES = (
    "torch",
    "numpy",
    "pyarrow",
    "obstore",
    "simplejpeg",
    "opencv-python-headless",
    "pillow",
    "webdataset",
    "mosaicml-streaming",
    "litdata",
    "fsspec",
    "s3fs",
    "boto3",
)


def describe_machine() -> dict[str, Any]:
    """CPU, cores and memory that this process may use, kernel, and current load."""
    return {
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": usable_memory(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_1m": os.getloadavg()[0],
    }


def list_versions() -> dict[str, str]:
    """Versions of Python, penstock and the relevant packages that are installed."""
    from .. import __version__

    versions = {"python": platform.python_version(), "penstock": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
