"""Makes an input smaller while its fault stays the same: parts are left out, then bytes made alike."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .limits import describe_exit, judge, limit_process, time_limit
from .targets import TARGETS


def fault_of(name: str, data: bytes) -> str | None:
    """Find a target's fault on an input, tried in a forked process; None for nothing."""
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder, "answer"), Path(folder, "log")
        child = os.fork()
        if child == 0:  # the first case imports modules, which is no allocation of its own
            try:
                for seed in TARGETS[name].seeds():
                    judge(TARGETS[name].run, seed)
                with log.open("w") as file:
                    limit_process(file)
                    with time_limit():
                        answer.write_text(judge(TARGETS[name].run, data) or "")
            finally:
                sys.stdout = sys.stderr = None
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            return describe_exit(-os.WTERMSIG(status), log.read_text())
        return (answer.read_text() if answer.exists() else "the case ended its process") or None


def shrink(data: bytes, fails: Callable[[bytes], bool], seconds: float) -> bytes:
    """Shrink an input within about ``seconds``, as long as it ``fails``."""
    until = time.monotonic() + seconds
    size = max(1, len(data) // 2)
    while size and time.monotonic() < until:
        at = 0
        while at < len(data) and time.monotonic() < until:
            shorter = data[:at] + data[at + size :]
            if shorter != data and fails(shorter):
                data = shorter
            else:
                at += size
        size //= 2
    for width in (256, 32, 4, 1):
        for at in range(0, len(data), width):
            plain = data[:at] + b"0" * len(data[at : at + width]) + data[at + width :]
            if time.monotonic() > until:
                return data
            if plain != data and fails(plain):
                data = plain
    return data


def shrink_finding(name: str, fault: str, data: bytes, seconds: float = 20.0) -> bytes:
    """Shrink the input of a target's fault, where that can be."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if fault_of(name, data) != fault:
        return data
    return shrink(data, lambda smaller: fault_of(name, smaller) == fault, seconds)
