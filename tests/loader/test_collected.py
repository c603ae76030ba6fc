"""A loader that only a cycle of references holds ends whole, whichever thread the garbage collector runs in."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tar_dataset import write_tars

from penstock import DistributedDataLoader
from penstock.loader.assembly.span_assembler import SpanAssembler


@pytest.fixture
def complaints(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What was raised where nobody could catch it; the collector runs only when a test says so."""
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_value))
    gc.collect()
    gc.disable()
    yield told
    gc.enable()


class Holder:
    """Holds a pass over a loader, and itself, as a framework's trainer does."""

    def __init__(self, source: Path) -> None:
        self.itself = self
        self.batches = iter(DistributedDataLoader(source, batch_size=10, rank=0, world_size=1))


@pytest.mark.slow
def test_a_loader_collected_in_a_thread_of_its_own_ends_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complaints: list[Any]
) -> None:
    write_tars(tmp_path, [200] * 5)
    before = set(threading.enumerate())
    dropped, collected = threading.Event(), threading.Event()
    assemble = SpanAssembler._assemble
    calls = 0

    def collecting(assembler: SpanAssembler, *span: Any) -> bool:
        nonlocal calls
        calls += 1
        if calls == 2:  # while it reads ahead of the first batch
            assert dropped.wait(60)
            gc.collect()
            collected.set()
        return assemble(assembler, *span)

    monkeypatch.setattr(SpanAssembler, "_assemble", collecting)
    holder = Holder(tmp_path)
    next(holder.batches)
    del holder
    dropped.set()
    assert collected.wait(60)
    until = time.monotonic() + 60
    while set(threading.enumerate()) - before and time.monotonic() < until:
        time.sleep(0.01)
    assert complaints == []
    assert set(threading.enumerate()) - before == set()
