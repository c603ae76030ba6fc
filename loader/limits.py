"""What this process may use: cores and memory; and sizes as people write them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(value: int | float | str, name: str) -> int:
    """Read a number of bytes from a number or from text such as '512MiB', '2GB', '1.5 GiB'.

    Raises:
        ConfigError: it is neither, or less than one byte. Names ``name`` and the value.
    """
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*((?:[kmgt]i?)?)b?\s*", value.lower())
        size = float(found.group(1)) * _UNITS[found.group(2)] if found else None
    elif isinstance(value, bool) or not hasattr(value, "__float__"):
        size = None
    else:
        size = float(value)
    if size is None:
        raise ConfigError(f"{name}={value!r} is not a size; write bytes as a number, or like '512MiB' or '2GB'")
    if not 1 <= size < float("inf"):
        raise ConfigError(f"{name}={value!r}: must be at least 1 byte")
    return int(size)


def usable_cores() -> int:
    """The cores that this process may run on: its affinity, limited by the cgroup's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        cores = min(cores, int(quota[0]) / int(quota[1]))
    return max(1, int(cores))


def usable_memory() -> int:
    """The bytes of memory that this process and its siblings may use: the machine's, limited by the cgroup."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = _read(path)
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
