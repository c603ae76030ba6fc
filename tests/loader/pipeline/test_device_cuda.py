"""The pinned ring on a real CUDA device."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from late_device import TENSORS

from penstock.loader.decoding.batch import Stored
from penstock.loader.decoding.batch_memory import BatchMemory
from penstock.loader.pipeline.device import DeviceFeeder, register_memory

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here")


@pytest.mark.gpu
@needs_cuda
def test_a_batch_arrives_on_the_device_as_it_was():
    ring = DeviceFeeder("cuda")
    try:
        arrived = ring.stage(TENSORS).take()
        for name, tensor in TENSORS.items():
            assert arrived[name].device.type == "cuda"
            assert arrived[name].stride() == torch.empty_like(tensor).stride()
            torch.testing.assert_close(arrived[name].cpu(), tensor.detach().resolve_conj(), rtol=0, atol=0)
    finally:
        ring.close()


@pytest.mark.gpu
@needs_cuda
def test_batches_fed_by_another_thread_are_never_mixed_under_slow_kernels():
    ring = DeviceFeeder("cuda", slots=2)
    ready: list = []
    filled = threading.Semaphore(0)
    room = threading.Semaphore(4)
    rows = 4 << 20

    def feed() -> None:
        for number in range(60):
            room.acquire()
            ready.append(ring.stage({"x": torch.full((rows,), number, dtype=torch.int32)}))
            filled.release()

    feeding = threading.Thread(target=feed)
    feeding.start()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    try:
        for number in range(60):
            filled.acquire()
            batch = ready.pop(0).take()
            torch.cuda._sleep(5_000_000)  # the consumer's stream is late; the batch must stay what it is meanwhile
            wrong += (batch["x"] != number).sum()
            del batch  # given back to the allocator while the kernels above have not run yet
            room.release()
        feeding.join()
        assert wrong.item() == 0
    finally:
        ring.close()


@pytest.mark.gpu
@needs_cuda
def test_staging_opens_no_context_on_a_device_that_is_not_ours():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    program = """
import threading, torch
from penstock.loader.pipeline.device import DeviceFeeder
ring = DeviceFeeder("cuda:1")
thread = threading.Thread(target=lambda: ring.stage({"x": torch.ones(1 << 20)}))
thread.start()
thread.join()
ring.close()
print([torch._C._cuda_hasPrimaryContext(index) for index in range(2)])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, True]"


@pytest.mark.gpu
@needs_cuda
def test_close_in_the_middle_of_copies_is_safe_on_the_device():
    ring = DeviceFeeder("cuda", slots=2)
    staged = [ring.stage({"x": torch.full((16 << 20,), number, dtype=torch.uint8)}) for number in range(2)]
    ring.close()
    assert [int(batch.take()["x"].max()) for batch in staged] == [0, 1]
    assert ring.pinned_bytes == 0


@pytest.mark.gpu
@needs_cuda
def test_batches_copied_from_pinned_memory_that_is_lent_again_are_never_mixed():
    ring = DeviceFeeder("cuda", slots=2)
    memory = BatchMemory(64 << 20, ring.allocate)
    shape, wrong = (1 << 20,), torch.zeros((), dtype=torch.int64, device="cuda")
    arrived = []
    for number in range(300):
        values = memory.empty(shape, np.dtype(np.uint16))
        values[:] = number
        batch = {"x": Stored(torch.from_numpy(values))}
        del values
        arrived.append(ring.stage(batch, lambda one: memory.is_pinned(one.data_ptr(), one.nbytes)))
        del batch
        if number % 3 == 0:
            torch.cuda._sleep(2_000_000)
        if len(arrived) > 2:
            taken = arrived.pop(0).take()["x"]
            assert taken.dtype == torch.int64
            wrong += (taken != number - 2).sum()
    assert wrong.item() == 0
    assert ring.pinned_bytes == 0
    ring.close()
    memory.close()


@pytest.mark.gpu
@needs_cuda
def test_memory_that_is_registered_is_pinned_until_it_is_gone():
    memory = register_memory(3 << 20, torch.device("cuda", 0))
    assert torch.from_numpy(memory).is_pinned()
    for _ in range(20):
        memory = register_memory(3 << 20, torch.device("cuda", 0))
        torch.from_numpy(memory).fill_(1)
        there = torch.from_numpy(memory).to("cuda", non_blocking=True)
    assert int(there.sum()) == 3 << 20
