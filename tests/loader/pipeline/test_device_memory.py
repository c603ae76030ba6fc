"""Batches that lie in pinned memory go to the device from there: no byte of theirs is copied again on the host."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from device_pictures import encode, photo
from late_device import LateDevice, feeder

from penstock import DistributedDataLoader, ImageDecoder, pack
from penstock.loader.decoding.batch import Stored
from penstock.loader.decoding.batch_memory import BatchMemory
from penstock.loader.pipeline import device as device_module
from penstock.loader.pipeline.pipeline import Pipeline

KIB = 1 << 10


def test_a_tensor_in_pinned_memory_is_copied_from_where_it_is():
    ring, device = feeder()
    memory = BatchMemory(1 << 20, ring.allocate)
    images = torch.from_numpy(memory.empty((4, 100, 100, 3), np.dtype(np.uint8))).fill_(7).permute(0, 3, 1, 2)
    batch = {"jpg": images, "cls": torch.arange(4)}
    staged = ring.stage(batch, lambda one: memory.is_pinned(one.data_ptr(), one.nbytes))
    jpg, cls = device.sources[0]
    assert jpg.address == images.data_ptr()
    assert cls.address != batch["cls"].data_ptr()
    arrived = staged.take()
    assert (arrived["jpg"] == 7).all()
    assert arrived["jpg"].is_contiguous(memory_format=torch.channels_last)
    assert arrived["cls"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_memory_is_lent_to_nobody_before_its_copy_is_done(lag):
    ring, _ = feeder(slots=2)
    memory = BatchMemory(1 << 20, ring.allocate)
    waiting, arrived = [], []
    for number in range(12):
        values = memory.empty((64 * KIB,), np.dtype(np.uint8))
        values[:] = number
        waiting.append(ring.stage(torch.from_numpy(values), lambda one: True))
        del values
        gc.collect()
        if len(waiting) > lag:
            arrived.append(waiting.pop(0).take())
    arrived += [staged.take() for staged in waiting]
    assert [set(one.tolist()) for one in arrived] == [{number} for number in range(12)]


def test_stored_numbers_are_widened_on_the_device():
    ring, device = feeder()
    numbers = torch.tensor([[0, 65535], [1, 40000]]).to(torch.uint16)
    arrived = ring.stage({"tokens": Stored(numbers)}).take()["tokens"]
    assert arrived.dtype == torch.int64
    assert arrived.tolist() == [[0, 65535], [1, 40000]]
    assert device.sources[0][0].nbytes == 8


def test_where_no_more_memory_can_be_pinned_batches_are_staged():
    def refuse(nbytes: int) -> np.ndarray:
        raise RuntimeError("cudaHostAlloc")

    memory = BatchMemory(1 << 20, refuse)
    values = memory.empty((100 * KIB,), np.dtype(np.uint8))
    assert not memory.is_pinned(values.ctypes.data, values.nbytes)


def test_memory_that_is_given_back_to_the_system_is_pinned_no_more():
    ring, _ = feeder()
    memory = BatchMemory(300 * KIB, ring.allocate)
    places = []
    for _ in range(2):
        held = [memory.empty((100 * KIB,), np.dtype(np.uint8)) for _ in range(4)]
        places = [(one.ctypes.data, one.nbytes) for one in held]
        assert all(memory.is_pinned(*place) for place in places)
        assert not memory.is_pinned(places[0][0], 200 * KIB)
        del held
    assert memory.free_bytes == 300 * KIB
    assert sum(memory.is_pinned(*place) for place in places) == 3
    memory.close()
    assert not any(memory.is_pinned(*place) for place in places)


class Runtime:
    """CUDA's calls that lock memory, and a stream, in the order in which they are called."""

    cudaError = SimpleNamespace(success=0)  # noqa: N815

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.calls.append(("register", address))
        return 2 if self.refuses else 0

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        self.calls.append(("unregister", address))

    def synchronize(self) -> None:
        self.calls.append(("wait", 0))


@pytest.mark.parametrize("refuses", [False, True])
def test_memory_stays_locked_as_long_as_a_view_lives_and_until_the_copies_are_done(monkeypatch, refuses):
    runtime = Runtime(refuses)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(device_module, "copy_stream", lambda device: runtime)
    memory = device_module.register_memory(10_000, torch.device("cuda", 0))
    [(_, address)] = runtime.calls
    if refuses:
        assert memory is None
        return
    assert (memory.ctypes.data, memory.shape, address % 4096) == (address, (10_000,), 0)
    view = torch.from_numpy(memory)[5000:]
    del memory
    assert len(runtime.calls) == 1
    view.fill_(3)
    del view
    assert runtime.calls[1:] == [("wait", 0), ("unregister", address)]


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Loaders copy to a made-up device; the bytes that the host copied for it, tensor by tensor."""
    sizes: list[int] = []
    pack_tensor = device_module.pack_tensor

    def count(tensor: torch.Tensor, buffer: torch.Tensor | None, offset: int) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return pack_tensor(tensor, buffer, offset)

    monkeypatch.setattr(device_module, "pack_tensor", count)
    monkeypatch.setattr(device_module, "resolve_cuda", torch.device)
    monkeypatch.setattr(device_module, "CudaBackend", lambda device: LateDevice())
    return sizes


@pytest.mark.parametrize("last_batch", ["pad", "partial"])
@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32"])
def test_tokens_go_to_the_device_as_they_are_stored(tmp_path: Path, packed: list[int], dtype: str, last_batch: str):
    draw = np.random.default_rng(0)
    rows = (draw.integers(0, 60_000, 4096).astype(dtype) for _ in range(100))
    pack(rows, str(tmp_path / "data"), format="tokens", seq_len=4096, progress=False)
    options = {"batch_size": 16, "seed": 1, "with_ids": True, "last_batch": last_batch}
    with DistributedDataLoader(str(tmp_path / "data"), **options) as loader:
        expected = list(loader)
    with DistributedDataLoader(str(tmp_path / "data"), **options, device="cuda:0") as loader:
        assert loader.peek()["tokens"].dtype == expected[0]["tokens"].dtype
        del packed[:]
        found = list(loader)
        assert torch.equal(torch.as_tensor(loader.dataset[3]["tokens"]), _row(expected, 3))
    assert max(packed, default=0) < 1 * KIB
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        assert all(one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one)


def _row(batches: list[dict[str, torch.Tensor]], sample: int) -> torch.Tensor:
    return next(batch["tokens"][batch["__id__"] == sample][0] for batch in batches if sample in batch["__id__"])


@pytest.mark.slow
def test_images_are_decoded_into_the_memory_that_the_device_copies_from(tmp_path: Path, packed: list[int]):
    url = str(tmp_path / "data")
    rows = ({"__key__": f"{number:03}", "jpg": encode(photo(number)), "cls": number} for number in range(40))
    pack(rows, url, format="tar", progress=False)
    options = {"batch_size": 6, "seed": 1, "decode": {"jpg": ImageDecoder(size=96, crop="random", flip=0.5)}}
    with DistributedDataLoader(url, **options) as loader:
        expected = list(loader)
    with DistributedDataLoader(url, **options, device="cuda:0") as loader:
        found = list(loader)
    assert max(packed, default=0) < 1 * KIB
    assert len(expected) == len(found) > 1
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one["jpg"], other["jpg"])
        assert other["jpg"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("columns", [["vector"], ["one", "two", "three"], ["vector", "one"]])
def test_rows_of_tables_are_gathered_into_the_memory_that_the_device_copies_from(
    tmp_path: Path, packed: list[int], columns: list[str]
):
    """Only fields of a few KiB, here one of numbers beside a wide one, are copied once more."""
    draw, count = np.random.default_rng(0), 6000
    numbers = {name: pa.array(draw.integers(0, 1 << 40, count)) for name in ("one", "two", "three")}
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(draw.random(count * 32), pa.float32()), 32)
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({**numbers, "vector": vectors}), tmp_path / "data" / "0.parquet", row_group_size=500)
    options = {"batch_size": 2000, "seed": 1, "columns": columns}
    with DistributedDataLoader(str(tmp_path / "data"), **options) as loader:
        expected = list(loader)
    with DistributedDataLoader(str(tmp_path / "data"), **options, device="cuda:0") as loader:
        found = list(loader)
    assert len(expected) == len(found) == 3
    assert all(torch.equal(one[name], other[name]) for one, other in zip(expected, found, strict=True) for name in one)
    assert max(packed, default=0) < 64 * KIB


def test_what_a_users_function_returns_may_be_changed_later(tmp_path: Path, packed: list[int]):
    rows = (np.full(4096, number, np.uint16) for number in range(20))
    pack(rows, str(tmp_path / "data"), format="tokens", seq_len=4096, progress=False)
    with DistributedDataLoader(
        str(tmp_path / "data"), batch_size=4, shuffle=False, device="cuda:0", collate=collate
    ) as loader:
        found = [batch["tokens"].clone() for batch in loader]
    assert [one[:, 0].tolist() for one in found] == [list(range(n, n + 4)) for n in range(0, 20, 4)]
    assert max(packed) == 4 * 4096 * 8


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"tokens": torch.stack([torch.as_tensor(sample["tokens"]) for sample in samples])}


class Waits:
    def __init__(self) -> None:
        self.waited: list[float] = []

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)


@pytest.mark.parametrize(
    ("step_s", "since_s", "ready", "most_s"),
    [
        (0.02, 0.0, 1, 0.003),
        (5.0, 0.0, 1, 0.01),
        (0.02, 0.0, 0, None),
        (0.02, 0.004, 1, None),
        (-math.inf, 0.0, 1, None),
        (0.0, -math.inf, 1, None),
    ],
)
def test_after_a_batch_is_taken_the_next_is_begun_a_little_later_if_another_waits(step_s, since_s, ready, most_s):
    waits = Waits()
    taken = {"_step_s": step_s, "_left_at": time.perf_counter() - since_s, "_out": range(ready), "_stopping": waits}
    Pipeline._keep_quiet(SimpleNamespace(**taken))
    if most_s is None:
        assert waits.waited == []
    else:
        assert 0 < waits.waited[0] <= most_s
