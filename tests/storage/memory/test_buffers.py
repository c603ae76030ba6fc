"""Buffers come back when nothing refers to them, not before; and what is idle stays within what is allowed."""

from __future__ import annotations

import gc
import mmap
import os
import platform
import re
import resource
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from penstock.storage.memory.buffers import LEAST_BYTES, Allowance, Buffers, round_up

NBYTES = 5_000_000


@pytest.fixture
def buffers() -> Buffers:
    return Buffers()


@pytest.fixture
def allowance(buffers: Buffers) -> Iterator[Allowance]:
    allowed = buffers.allow()
    allowed.set(1 << 30)
    yield allowed
    allowed.close()


def fill(buffers: Buffers, value: int, nbytes: int = NBYTES) -> memoryview:
    view = buffers.take(nbytes)
    np.frombuffer(view, np.uint8)[:] = value
    return view.toreadonly()


KEEPERS: dict[str, Callable[[Any], Any]] = {
    "the view": lambda view: view,
    "a slice of a slice": lambda view: view[100:][50:1050],
    "a view of a view": lambda view: memoryview(memoryview(view)),
    "another item type": lambda view: view.cast("Q"),
    "a numpy array": lambda view: np.frombuffer(view, np.uint8),
    "a slice of a numpy array": lambda view: np.asarray(view)[7:].view(np.uint8)[::3].reshape(-1, 1),
    "an array over the exporter": lambda view: np.asarray(view.obj).view(np.uint32)[3:9],
    "a tensor": lambda view: torch.from_numpy(np.frombuffer(view, np.uint8)),
    "a tensor over the view": lambda view: torch.frombuffer(view, dtype=torch.uint8)[100:200],
    "a tensor by DLPack": lambda view: torch.utils.dlpack.from_dlpack(np.frombuffer(view.obj, np.uint8)),
    "an Arrow buffer": lambda view: pa.py_buffer(view).slice(100),
    "an Arrow array": lambda view: pa.Array.from_buffers(pa.uint8(), 1000, [None, pa.py_buffer(view)])[10:],
    "an Arrow array sent by C": lambda view: pa.array(
        pa.Array.from_buffers(pa.uint8(), 1000, [None, pa.py_buffer(view)])
    ),
}


@pytest.mark.filterwarnings("ignore:The given (buffer|NumPy array) is not writable")
@pytest.mark.parametrize("keeper", KEEPERS)
def test_what_is_kept_of_a_buffer_is_never_written_to(keeper: str, buffers: Buffers, allowance: Allowance) -> None:
    kept = KEEPERS[keeper](fill(buffers, 1))
    for value in (2, 3, 4, 5):  # each of which comes back
        fill(buffers, value)
    values = np.asarray(kept)
    assert set(np.ascontiguousarray(values).view(np.uint8).ravel().tolist()) == {1}
    assert buffers.lent_bytes == round_up(NBYTES)
    del kept, values
    assert buffers.lent_bytes == 0


def test_memory_that_nobody_refers_to_is_used_again(buffers: Buffers, allowance: Allowance) -> None:
    addresses = set()
    for value in range(8):
        addresses.add(np.frombuffer(fill(buffers, value), np.uint8).ctypes.data)
    assert len(addresses) == 1
    held = [fill(buffers, value) for value in range(3)]
    assert len({np.frombuffer(view, np.uint8).ctypes.data for view in held}) == 3
    assert buffers.idle_bytes == 0
    del held
    assert buffers.idle_bytes == 3 * round_up(NBYTES)


def test_buffers_have_exactly_the_size_that_was_asked_for(buffers: Buffers, allowance: Allowance) -> None:
    for nbytes in (0, 1, LEAST_BYTES - 1, LEAST_BYTES, LEAST_BYTES + 1, NBYTES, (4 << 20) + 1, NBYTES - 30_000):
        view = buffers.take(nbytes)
        assert (view.nbytes, view.format, view.readonly, view.c_contiguous) == (nbytes, "B", False, True)
        assert nbytes <= round_up(nbytes) <= max(nbytes * 17 / 16, nbytes + 4096)


def test_idle_memory_stays_within_the_allowances(buffers: Buffers) -> None:
    size = round_up(NBYTES)
    fill(buffers, 1)
    assert buffers.idle_bytes == 0  # nobody makes room for it
    first, second = buffers.allow(), buffers.allow()
    first.set(2 * size)
    second.set(size)
    held = [fill(buffers, value) for value in range(9)]
    held.clear()
    assert buffers.idle_bytes == 9 * size  # as much as was held
    held.append(fill(buffers, 1))
    assert buffers.idle_bytes == 3 * size
    second.close()
    second.set(1 << 30)  # closed: of no effect
    assert buffers.idle_bytes == 2 * size
    first.set(size)
    held.append(fill(buffers, 1))
    assert buffers.idle_bytes == size
    del first, held  # without closing it
    assert buffers.idle_bytes == 0


def test_a_view_that_a_finalizer_revives_keeps_its_buffer(buffers: Buffers, allowance: Allowance) -> None:
    revived = []

    class Cycle:
        def __init__(self, view: memoryview) -> None:
            self.view, self.itself = view, self

        def __del__(self) -> None:
            revived.append(self.view)

    Cycle(fill(buffers, 1))
    gc.collect()
    assert len(revived) == 1
    for value in (2, 3):
        fill(buffers, value)
    assert set(revived[0][::1000]) == {1}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_keeps_what_it_refers_to(buffers: Buffers, allowance: Allowance) -> None:
    view = fill(buffers, 1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)  # the parent has written to its memory
        os._exit(0 if set(view[::1000]) == {1} else 1)
    address = np.frombuffer(view, np.uint8).ctypes.data
    del view
    again = fill(buffers, 2)
    assert np.frombuffer(again, np.uint8).ctypes.data == address
    os.write(writer, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(reader)
    os.close(writer)


@pytest.mark.slow
def test_threads_never_share_a_buffer(buffers: Buffers, allowance: Allowance) -> None:
    wrong: list[str] = []
    handed: list[tuple[int, memoryview]] = []  # views that other threads let go of

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for turn in range(120):
            value = (31 * seed + turn) % 251
            nbytes = int(rng.integers(LEAST_BYTES, LEAST_BYTES + 200_000))
            handed.append((value, fill(buffers, value, nbytes)[: nbytes - 7]))
            if len(handed) > 12:
                value, view = handed.pop(int(rng.integers(3)))
                if not (np.frombuffer(view, np.uint8) == value).all():
                    wrong.append(f"{seed} in turn {turn}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handed.clear()
    assert not wrong
    assert buffers.lent_bytes == 0


def test_too_large_a_buffer_is_an_error_of_memory(buffers: Buffers) -> None:
    with pytest.raises(MemoryError, match="no memory for a buffer of"):
        buffers.take(1 << 60)


def test_new_memory_is_there_before_it_is_written_to(buffers: Buffers) -> None:
    """Of Linux before 5.14 it is not."""
    pages = NBYTES // mmap.PAGESIZE
    view = np.frombuffer(buffers.take(NBYTES), np.uint8)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    view[:] = 7
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    populates = tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (5, 14)
    assert faults < pages // 4 if populates else faults >= 0
