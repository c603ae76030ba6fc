"""Raw bytes of files become objects when the training loop asks for their batch, or a little before; never others."""

from __future__ import annotations

import gc
import io
import math
import tarfile
import threading
import time
from inspect import iscode
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from interrupt import Interrupt

from penstock.loader import DistributedDataLoader, TarFormat
from penstock.loader.assembly import kind_rows
from penstock.loader.columns import Block, BytesColumn
from penstock.loader.decoding import batch as batch_module
from penstock.loader.decoding.batch import Call
from penstock.loader.decoding.batch_memory import BatchMemory
from penstock.loader.decoding.decode import FieldDecoders
from penstock.loader.decoding.gather import LateBytes, gather
from penstock.loader.decoding.row_job import RowJob
from penstock.loader.decoding.rows import Rows
from penstock.loader.errors import LoaderClosedError
from penstock.loader.order.spans import ChunkRows
from penstock.loader.pipeline import pipeline
from penstock.loader.pipeline.delivery_queue import DeliveryQueue
from penstock.loader.reading import mapped as mapped_chunks
from penstock.loader.reading.mapped import Looks, MappedColumn, MappedFile
from penstock.storage import LocalStore, ObjectChangedError
from penstock.storage.memory import mapped

SAMPLES, BATCH = 64, 4
FORMAT = TarFormat(chunk_bytes=32 << 10)


def blob(number: int) -> bytes:
    return np.random.default_rng(number).bytes(2000 + 97 * number)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if not mapped.can_map(tmp_path.stat().st_dev):
        pytest.skip(f"nothing is mapped of {mapped.kind_of_disk(tmp_path.stat().st_dev) or 'this file system'}")
    monkeypatch.setattr(mapped_chunks, "_LEAST_BYTES", 24 << 10)  # larger than the last chunk
    data = tmp_path / "data"
    data.mkdir()
    with tarfile.open(data / "0.tar", "w") as archive:
        for number in range(SAMPLES):
            for field, value in ({"bin": blob(number)} | ({"opt": blob(number)} if number % 5 == 0 else {})).items():
                member = tarfile.TarInfo(f"{number:04d}.{field}")
                member.size = len(value)
                archive.addfile(member, io.BytesIO(value))
    return data


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads in which a field of a batch was made."""
    found: list[str] = []
    make = LateBytes.make

    def note(self: LateBytes, memory: object = None) -> dict[str, list[Any]]:
        values = make(self, memory)
        found.append(threading.current_thread().name)
        return values

    monkeypatch.setattr(LateBytes, "make", note)
    return found


def load(folder: Path, **options: Any) -> DistributedDataLoader:
    settings: dict[str, Any] = {"batch_size": BATCH, "decode": None, "format": FORMAT, "seed": 3, "with_ids": True}
    return DistributedDataLoader(folder, **settings | options)


def batches_of(loader: DistributedDataLoader) -> list[dict[str, Any]]:
    with loader:
        return [{name: list(values) for name, values in batch.items()} for batch in loader]


@pytest.mark.parametrize(
    "options",
    [
        {"last_batch": "pad", "batch_size": 7},
        {"last_batch": "partial", "batch_size": 7, "columns": ["opt", "__key__"]},
        {"rank": 1, "world_size": 2, "last_batch": "pad", "batch_size": 100},
        {"transform": lambda sample: sample | {"bin": sample["bin"][:9]}},
        {"decode": {"bin": len}},
    ],
)
def test_batches_are_those_of_files_that_are_read(folder: Path, made: list[str], options: dict[str, Any]) -> None:
    found = batches_of(load(folder, **options))
    assert made
    made.clear()
    expected = batches_of(load(folder, storage_options={"mapped_reads": False}, **options))
    assert not made
    assert list(map(list, found)) == list(map(list, expected))  # the fields, in their order
    assert found == expected


@pytest.mark.parametrize(
    ("nbytes", "per_file", "most_bytes", "ahead"),
    [(0, 0, 1 << 20, 0), (1 << 20, 0, 1 << 20, 3), (0, 1 << 20, 1 << 20, 3), (0, 1 << 20, 0, 0)],
)
def test_no_more_than_a_few_small_batches_are_made_that_nobody_asked_for(
    folder: Path,
    made: list[str],
    monkeypatch: pytest.MonkeyPatch,
    nbytes: int,
    per_file: int,
    most_bytes: int,
    ahead: int,
) -> None:
    """Of each file that is asked for some more bytes at once, but no more than the most."""
    monkeypatch.setattr(pipeline, "_AWAY_S", math.inf)  # however slow this machine is
    monkeypatch.setattr(kind_rows, "_OBJECTS_AT_ONCE", 4)
    monkeypatch.setattr(kind_rows, "_OBJECT_BYTES_AT_ONCE", nbytes)
    monkeypatch.setattr(kind_rows, "_OBJECT_BYTES_PER_FILE", per_file)
    monkeypatch.setattr(kind_rows, "_MOST_OBJECT_BYTES", most_bytes)
    most = 0
    with load(folder, columns=["bin"]) as loader:
        batches = iter(loader)
        for asked in range(1, SAMPLES // BATCH + 1):
            next(batches)
            assert set(made) == {threading.current_thread().name}
            most = max(most, len(made) - asked)
    assert most == ahead


def test_batches_that_are_made_together_ask_for_their_files_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of one that fails, those beside it are made."""
    asked: list[int] = []
    complete_all = batch_module.complete_all

    def note(parts: list[Rows], memory: BatchMemory | None) -> list[Rows]:
        asked.append(len(parts))
        if len(parts) > 1 and sum(asked) > SAMPLES // BATCH // 2:
            raise ObjectChangedError("file://", "0.tar", "for all of them")
        return complete_all(parts, memory)

    expected = batches_of(load(folder, storage_options={"mapped_reads": False}))
    monkeypatch.setattr(batch_module, "complete_all", note)
    monkeypatch.setattr(kind_rows, "_OBJECTS_AT_ONCE", 4)
    assert batches_of(load(folder)) == expected
    assert set(asked) == {1, 2, 4}


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupt_while_some_are_made_together_is_raised_at_once_and_loses_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    complete_all = batch_module.complete_all

    def complete(parts: list[Rows], memory: BatchMemory | None) -> list[Rows]:
        if fails and len(parts) > 1:
            raise ObjectChangedError("file://", "0.tar", "for all of them")
        return complete_all(parts, memory)

    monkeypatch.setattr(batch_module, "complete_all", complete)
    expected = batches_of(load(folder, storage_options={"mapped_reads": False}))
    inner = [SimpleNamespace(__code__=code) for code in batch_module.start_on_call.__code__.co_consts if iscode(code)]
    functions: list[Any] = [LateBytes.make, RowJob.__init__, Call.make, *inner]
    for number in count():
        with load(folder) as loader:
            batches = iter(loader)
            found = [next(batches) for _ in range(3)]  # alone, and two together
            with Interrupt(functions, number) as interrupt:
                try:
                    found.append(next(batches))
                except KeyboardInterrupt:
                    is_raised = True
                else:
                    is_raised = False
            assert is_raised == interrupt.was_raised
            found += list(batches)
        assert [{name: list(values) for name, values in batch.items()} for batch in found] == expected
        if not is_raised:
            break
    assert number > 20


def test_a_loader_that_is_closed_leaves_no_file_to_the_garbage_collector(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where some of those that are made together wait for room in the queue."""
    monkeypatch.setattr(DeliveryQueue, "_is_full", lambda queue, item, **_: len(queue) >= 2)
    gc.collect()
    gc.disable()
    try:
        loader = load(folder)
        batches = iter(loader)
        taken = [next(batches) for _ in range(2)]
        owner: Any = loader
        until = time.monotonic() + 60
        while (blocked := owner._resources.pipeline._out._blocked) is None or len(blocked.ids) != BATCH:
            assert time.monotonic() < until
            time.sleep(0.001)
        del blocked
        assert str(folder) in Path("/proc/self/maps").read_text()
        loader.close()
        assert str(folder) not in Path("/proc/self/maps").read_text()
        assert len(taken) == 2
    finally:
        gc.enable()


def test_a_loop_that_is_elsewhere_meanwhile_finds_the_next_two_made(
    folder: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_AWAY_S", -1.0)
    monkeypatch.setattr(kind_rows, "_OBJECT_BYTES_AT_ONCE", 0)
    monkeypatch.setattr(kind_rows, "_OBJECT_BYTES_PER_FILE", 0)
    expected = batches_of(load(folder, storage_options={"mapped_reads": False}))
    here = threading.current_thread().name
    with load(folder) as loader:
        batches = iter(loader)
        found = [next(batches)]
        owner: Any = loader
        queue = owner._resources.pipeline._out
        until = time.monotonic() + 60
        while len(queue) < 3:
            assert time.monotonic() < until
            time.sleep(0.001)
        found.append(next(batches))
        calls = [item.batch._job for item in list(queue._items)[:3]]
        for call in calls[:2]:
            super(type(call), call).result(60)
        assert not calls[2].done()
        assert here not in made[-2:]
        found += list(batches)
    assert [{name: list(values) for name, values in batch.items()} for batch in found] == expected


def test_a_loader_that_is_closed_makes_no_more(folder: Path, made: list[str]) -> None:
    loader = load(folder)
    batches = iter(loader)
    next(batches)
    loader.close()
    made.clear()
    with pytest.raises(LoaderClosedError):
        next(batches)
    assert not made


def test_values_of_files_and_of_memory_lie_side_by_side(tmp_path: Path) -> None:
    """Also where a chunk in between lacks the field, and of a file that changes until they are made none is."""
    (tmp_path / "a").write_bytes(bytes(range(100)))
    store = LocalStore(tmp_path)
    file = memoryview((tmp_path / "a").read_bytes())
    at = np.array([10, -1, 30])
    columns: list[dict[str, BytesColumn]] = [
        {"x": BytesColumn(memoryview(b"memory"), np.array([0, 3, -1]), np.array([3, 6, -1]))},
        {},
        {"x": MappedColumn(file, at, at + 5, file=MappedFile(store, "a", store.head("a").etag or "", Looks()))},
        {"x": BytesColumn(memoryview(b"more"), np.array([0]), np.array([4]))},
    ]
    places = [(2, 2), (0, 0), (1, 0), (2, 1), (3, 0), (0, 2), (2, 0), (0, 1)]

    def rows(order: list[int]) -> Rows:
        groups = []
        for chunk in order:
            of_chunk = [(row, target) for target, (where, row) in enumerate(places) if where == chunk]
            chosen, targets = np.array(of_chunk).T
            groups.append((ChunkRows(chunk, chosen, targets), Block(len(chosen), 0, columns[chunk])))
        return gather(groups, len(places), np.zeros(4, np.int64), FieldDecoders(None), memory=BatchMemory(1 << 20))

    taken = [bytes(range(30, 35)), b"mem", None, None, b"more", None, bytes(range(10, 15)), b"ory"]
    for order in ([0, 1, 2, 3], [2, 3, 1, 0], [1, 0, 3, 2]):
        late = rows(order)
        assert not late.keeps_chunks
        assert late.complete().fields == {"x": taken}
        assert late.count_bytes({}) == sum(len(value or b"") for value in taken)
        assert late.cut(2, 7).complete().fields == {"x": taken[2:7]}
        assert late.pick([7, 0, 0]).complete().fields == {"x": [taken[7], taken[0], taken[0]]}
    late = rows([0, 1, 2, 3])
    (tmp_path / "a").write_bytes(b"another")
    assert late.cut(1, 3).complete().fields == {"x": taken[1:3]}  # of no file
    with pytest.raises(ObjectChangedError):
        late.complete()
