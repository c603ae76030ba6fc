"""Memory of batches is used again, and never while anything refers to it."""

from __future__ import annotations

import gc
import random
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image
from pil_images import encode

from penstock import DistributedDataLoader, ImageDecoder, pack
from penstock.loader import TokensFormat
from penstock.loader.decoding.batch_memory import BatchMemory

SHAPE, DTYPE = (64, 512), np.dtype(np.int64)
NBYTES = 64 * 512 * 8


def test_an_array_lies_where_one_was_that_is_gone():
    memory = BatchMemory(NBYTES)
    first = memory.empty(SHAPE, DTYPE)
    where = first.ctypes.data
    del first
    assert memory.free_bytes == NBYTES
    again = memory.empty(SHAPE, DTYPE)
    assert again.ctypes.data == where
    assert memory.free_bytes == 0
    assert (again.shape, again.dtype, again.flags.writeable, again.flags.c_contiguous) == (SHAPE, DTYPE, True, True)


@pytest.mark.parametrize(
    "keep",
    [
        lambda array: array[3:4, ::2],
        lambda array: array.T.reshape(-1, order="F")[5:],
        lambda array: array.view(np.uint8)[..., :1],
        memoryview,
        lambda array: memoryview(array)[1:2],
        torch.from_numpy,
        lambda array: torch.from_numpy(array)[:, -1],
        lambda array: torch.from_numpy(array).view(torch.uint8)[0].numpy(),
        lambda array: torch.from_numpy(array).untyped_storage(),
        lambda array: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(torch.from_numpy(array))),
        np.from_dlpack,
        lambda array: torch.from_numpy(array).detach(),
    ],
)
def test_whatever_is_made_of_an_array_keeps_its_memory(keep):
    memory = BatchMemory(1 << 30)
    array = memory.empty(SHAPE, DTYPE)
    array[...] = 7
    where = array.ctypes.data
    kept = keep(array)
    del array
    others = [memory.empty(SHAPE, DTYPE) for _ in range(3)]
    for other in others:
        other[...] = 9
    assert where not in [other.ctypes.data for other in others]
    del kept, other
    others.append(memory.empty(SHAPE, DTYPE))
    assert others[-1].ctypes.data == where


def test_what_a_cycle_refers_to_is_whole_when_its_finalizer_runs():
    memory = BatchMemory(1 << 30)
    seen = []

    class Holder:
        def __init__(self) -> None:
            self.batch = {"values": torch.from_numpy(memory.empty(SHAPE, DTYPE)).fill_(7), "self": self}

        def __del__(self) -> None:
            other = memory.empty(SHAPE, DTYPE)
            other[...] = 9
            seen.append(int(self.batch["values"].min()))

    Holder()
    gc.collect()
    assert seen == [7]


def test_no_more_is_kept_than_is_allowed_and_the_size_in_use_comes_first():
    memory = BatchMemory(3 * NBYTES)
    arrays = [memory.empty(SHAPE, DTYPE) for _ in range(5)]
    arrays.clear()
    assert memory.free_bytes == 3 * NBYTES
    larger = memory.empty((128, 512), DTYPE)
    del larger
    assert memory.free_bytes == 2 * NBYTES  # the blocks of the size before are gone


def test_closing_keeps_nothing_and_takes_nothing_away():
    memory = BatchMemory(1 << 30)
    lent, gone = memory.empty(SHAPE, DTYPE), memory.empty(SHAPE, DTYPE)
    lent[...] = 7
    del gone
    memory.close()
    assert memory.free_bytes == 0
    memory.empty(SHAPE, DTYPE)[...] = 9
    assert (lent == 7).all()
    del lent
    assert memory.free_bytes == 0


def test_threads_that_keep_some_arrays_never_see_them_change():
    memory = BatchMemory(8 * NBYTES)
    wrong: list[int] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        kept: list[tuple[int, torch.Tensor]] = []
        for number in range(150):
            array = memory.empty(SHAPE, DTYPE)
            value = 1000 * seed + number
            array[...] = value
            kept.append((value, torch.from_numpy(array)[draw.randrange(64)]))
            del array
            while len(kept) > draw.randrange(1, 8):
                value, row = kept.pop(draw.randrange(len(kept)))
                wrong.extend([value] if bool((row != value).any()) else [])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """1,024 sequences of 512 tokens, each of its own number."""
    folder = tmp_path_factory.mktemp("tokens")
    np.repeat(np.arange(1024, dtype=np.uint16), 512).tofile(folder / "tokens.bin")
    return str(folder)


def open_tokens(folder: str, **options: object) -> DistributedDataLoader:
    settings = {"batch_size": 64, "with_ids": True, "seed": 3, "rank": 0, "world_size": 1, **options}
    return DistributedDataLoader(folder, format=TokensFormat(seq_len=512, chunk_bytes=1 << 16), **settings)


def test_batches_that_are_kept_stay_as_they_were(tokens):
    with open_tokens(tokens) as loader:
        kept = [batch for _ in range(4) for batch in loader]
    assert len(kept) == 4 * 16
    for batch in kept:
        assert batch["tokens"].dtype == torch.int64
        assert torch.equal(batch["tokens"], batch["__id__"][:, None].expand(-1, 512))


@pytest.mark.slow
def test_batches_that_are_let_go_of_lie_where_others_were(tokens):
    # 16 MiB of memory leave room for 8 batches that wait, however late they are taken.
    with open_tokens(tokens, memory_limit="16MiB") as loader:
        places = [batch["tokens"].data_ptr() for _ in range(16) for batch in loader]
    assert len(set(places)) < len(places) // 2


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    """256 grey images of 40 x 40 pixels, each as bright as its number."""
    folder = str(tmp_path_factory.mktemp("pictures"))
    rows = ({"jpg": encode(Image.new("RGB", (40, 40), (number,) * 3), "PNG")} for number in range(256))
    pack(rows, folder, format="tar", progress=False)
    return folder


@pytest.mark.slow
def test_images_of_one_size_are_lent_memory_and_stay_while_they_are_kept(pictures, monkeypatch):
    memories: set[BatchMemory] = set()
    lend = BatchMemory.empty

    def noted(memory: BatchMemory, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if shape == (32, 40, 40, 3):
            memories.add(memory)
        return lend(memory, shape, dtype)

    monkeypatch.setattr(BatchMemory, "empty", noted)
    settings = {"batch_size": 32, "with_ids": True, "seed": 3, "rank": 0, "world_size": 1}
    with DistributedDataLoader(pictures, decode={"jpg": ImageDecoder(size=40)}, **settings) as loader:
        kept = [batch for _ in range(4) for batch in loader]
        for batch in kept:
            bright = batch["__id__"].to(torch.uint8)[:, None, None, None]
            assert torch.equal(batch["jpg"], bright.expand(-1, 3, 40, 40))
    assert len(memories) == 1


def test_batches_that_wait_for_a_thread_take_no_memory_for_their_images(pictures, monkeypatch):
    lent, may_go_on = [], threading.Event()
    lend = BatchMemory.empty
    monkeypatch.setattr(BatchMemory, "empty", lambda *given: lent.append(given) or lend(*given))

    def wait(sample):
        may_go_on.wait()
        return sample

    decode = {"jpg": ImageDecoder(size=224)}
    settings = {"batch_size": 16, "threads": 1, "rank": 0, "world_size": 1}
    with DistributedDataLoader(pictures, decode=decode, transform=wait, **settings) as loader:
        passing = iter(loader)
        first = threading.Thread(target=next, args=(passing,), daemon=True)
        first.start()
        while first.is_alive() and loader.metrics().waiting_batches < 4:
            time.sleep(0.01)
        begun = len(lent)
        may_go_on.set()
        first.join()
        assert len(list(passing)) == 15
    assert begun <= 1
    assert len(lent) >= 16
