"""Memory of this process, on the device and on the host, without waiting for either."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

_PEAK_UNIT = 1 if sys.platform == "darwin" else 1024  # getrusage counts KiB on Linux


def measure_memory(device: torch.device) -> dict[str, int]:
    """Bytes now and at their peak since the process began: of this process, and of its tensors on a CUDA device.

    ``device_memory_bytes`` is what tensors hold, ``device_memory_reserved_bytes`` what torch has taken for them.
    """
    peak, now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT, _resident_bytes()
    found = {"host_memory_peak_bytes": peak if now is None else max(peak, now)}  # the kernel's peak lags behind
    if now is not None:
        found["host_memory_bytes"] = now
    if device.type == "cuda":
        found["device_memory_bytes"] = torch.cuda.memory_allocated(device)
        found["device_memory_reserved_bytes"] = torch.cuda.memory_reserved(device)
        found["device_memory_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return found


def _resident_bytes() -> int | None:
    """Resident bytes by the kernel; None where there is no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
