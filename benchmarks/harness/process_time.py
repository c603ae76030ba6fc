"""The CPU time of a process and of all that it started, also of those that still run."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from .subprocesses import find_tree

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def waited_cpu_s() -> float:
    """User and system time of this process and of the children that it has waited for."""
    both = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def tree_cpu_s() -> float:
    """The same, and that of the descendants which still run, by the kernel's account in ticks of 10 ms."""
    return waited_cpu_s() + sum(map(_cpu_of, find_tree(os.getpid())[1:]))


def _cpu_of(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended meanwhile
        return 0.0
    own_and_waited = text.rpartition(")")[2].split()[11:15]  # utime, stime, cutime, cstime; see proc(5)
    return sum(map(int, own_and_waited)) * _TICK_S
