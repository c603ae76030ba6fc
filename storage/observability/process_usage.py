"""Resources that this process and its node use, by the kernel's counts: resident memory, disk and network."""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM, _STATUS, _IO, _NETWORK = "/proc/self/statm", "/proc/self/status", "/proc/self/io", "/proc/net/dev"
_DEVICES = "/sys/class/net"
_RUSAGE_UNIT = 1 if sys.platform == "darwin" else 1024


def resident_bytes() -> int | None:
    """Bytes of this process in memory; None where there is no /proc."""
    try:
        pages = int(Path(_STATM).read_text().split()[1])
    except OSError:
        return None
    return pages * _PAGE_BYTES


def peak_resident_bytes() -> int:
    """The most bytes of this process that were in memory at once.

    ``getrusage`` is asked only where there is no /proc: Linux counts the process that started this one, too.
    """
    try:
        peak = re.search(r"^VmHWM:\s+(\d+) kB", Path(_STATUS).read_text(), re.MULTILINE)
    except OSError:
        peak = None
    if peak is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RUSAGE_UNIT
    return int(peak[1]) * 1024


def read_traffic() -> dict[str, int]:
    """Bytes since the start: that this process read from and wrote to disks, and that its host received and sent.

    The network is that of the process's network namespace, without the loopback. What the kernel does not tell is left
    out.
    """
    found: dict[str, int] = {}
    try:
        counts = dict(line.split(": ", 1) for line in Path(_IO).read_text().splitlines() if ": " in line)
        found["disk_read_bytes"] = int(counts["read_bytes"])
        found["disk_written_bytes"] = int(counts["write_bytes"])
    except (OSError, KeyError, ValueError):
        pass  # no /proc, or a sandbox without this file
    try:
        lines = [line.split(":", 1) for line in Path(_NETWORK).read_text().splitlines()[2:]]
        named = {name.strip(): numbers.split() for name, numbers in lines if name.strip() != "lo"}
        # What a bond, a bridge or a VLAN counts, the device below it has counted; a container has none with hardware.
        hardware = [numbers for name, numbers in named.items() if (Path(_DEVICES) / name / "device").exists()]
        devices = hardware or list(named.values())
        found["network_received_bytes"] = sum(int(numbers[0]) for numbers in devices)
        found["network_sent_bytes"] = sum(int(numbers[8]) for numbers in devices)
    except (OSError, IndexError, ValueError):
        pass
    return found
