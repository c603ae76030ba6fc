"""Batches in shared memory: what is read is what was written, and large values are read where they lie."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from late_device import TENSORS

from penstock.loader.pipeline.beside.frames import Frame, read_frame


class Pair(NamedTuple):
    one: Any
    other: Any


def there_and_back(batch: Any, about: Any = None) -> tuple[Any, Any, np.ndarray[Any, Any]]:
    frame = Frame(about, batch)
    memory = np.full(frame.nbytes + 100, 7, np.uint8)
    frame.write(memory)
    assert (memory[frame.nbytes :] == 7).all()
    return *read_frame(memory[: frame.nbytes]), memory


@pytest.mark.parametrize("repeats", [1, 3000])
@pytest.mark.parametrize("name", [name for name in TENSORS if name != "with_grad"])
def test_a_tensor_comes_back_to_the_bit(name: str, repeats: int) -> None:
    tensor = TENSORS[name]
    if tensor.dim() and repeats > 1:
        tensor = torch.stack([tensor] * repeats).movedim(0, -1)
    _, found, _ = there_and_back(tensor)
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)
    if name in ("channels_last", "one_image") and repeats == 1:
        assert found.stride() == tensor.stride()


def test_large_values_lie_in_the_memory_and_small_ones_do_not_keep_it() -> None:
    batch = {"large": torch.arange(1000), "array": np.arange(1000.0), "small": torch.arange(3), "ids": np.arange(4)}
    _, found, memory = there_and_back(batch)
    for name in ("large", "array"):
        address = found[name].data_ptr() if name == "large" else found[name].ctypes.data
        assert memory.ctypes.data <= address < memory.ctypes.data + len(memory)
        found[name][:] = 5  # and may be written to
    for name, value in (("small", found["small"].data_ptr()), ("ids", found["ids"].ctypes.data)):
        assert not memory.ctypes.data <= value < memory.ctypes.data + len(memory), name


def test_other_objects_come_as_they_are() -> None:
    shared = torch.arange(2000)
    batch = Pair({"b": [b"x" * 5000, None], "s": "text", "n": 3}, (shared, shared, bytearray(b"y" * 3000)))
    about, found, _ = there_and_back(batch, {"epoch": 3})
    assert about == {"epoch": 3}
    assert type(found) is Pair
    assert found.one == batch.one
    assert found.other[0] is found.other[1]
    assert found.other[2] == batch.other[2]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_come_back_row_by_row(layout: torch.layout) -> None:
    rows = [torch.arange(2000.0), torch.arange(3.0)]
    _, found, _ = there_and_back(torch.nested.nested_tensor(rows, layout=layout))
    assert (found.is_nested, found.layout) == (True, layout)
    assert all(torch.equal(*pair) for pair in zip(found.unbind(), rows, strict=True))


def test_gradients_are_not_lost() -> None:
    _, found, _ = there_and_back(torch.ones(4, requires_grad=True))
    assert found.requires_grad


@pytest.mark.parametrize("sizes", [[700_000, 0, 800_000], [3, 4], [], [2_000_000]])
def test_bytes_come_as_bytes_however_many_and_keep_no_memory(sizes: list[int]) -> None:
    values = [bytes([number]) * size for number, size in enumerate(sizes)]
    _, found, memory = there_and_back({"jpg": values, "mixed": [*values, None], "n": 3})
    memory[:] = 9
    assert found == {"jpg": values, "mixed": [*values, None], "n": 3}
    assert all(type(value) is bytes for value in found["jpg"])
