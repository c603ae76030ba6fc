"""Values that are dropped leave memory to those that come next, and not to the kernel."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys

import pytest

from penstock.storage.memory.libc import keep_freed_memory

_PR_SET_THP_DISABLE = 41
# Batches are made by one thread, and each is dropped before the next is made.
_PROGRAMME = """
import ctypes, resource, sys, threading
from penstock.storage.memory.libc import keep_freed_memory

def count_faults():
    before = 0
    for number in range(12):
        if number == 4:
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        values = [bytes([number]) * 40_000 for _ in range(64)]
        del values
    print(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)

ctypes.CDLL(None).prctl({no_huge_pages}, 1, 0, 0, 0)  # one of these is one fault
if {keeps}:
    keep_freed_memory()
thread = threading.Thread(target=count_faults)
thread.start()
thread.join()
"""


def faults(*, keeps: bool) -> int:
    programme = _PROGRAMME.format(keeps=keeps, no_huge_pages=_PR_SET_THP_DISABLE)
    tuned = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    env = {name: value for name, value in os.environ.items() if not name.startswith(tuned)}
    done = subprocess.run([sys.executable, "-c", programme], env=env, check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's allocator")
def test_a_batch_of_bytes_lies_where_the_one_before_it_did() -> None:
    pages = 8 * 64 * 40_000 // 4096
    assert faults(keeps=True) < pages / 20
    assert faults(keeps=False) > pages / 2  # or this shows nothing


def test_it_is_done_once_and_takes_no_memory_again() -> None:
    keep_freed_memory()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(4):
        keep_freed_memory()
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 9
