"""Keep a field of a batch as users do, in any form from which a later check can tell whether it still is right."""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from penstock.loader import ByteViews
from penstock.loader.columns import AnyArray


class Kept(NamedTuple):
    """Kept value, how it is read (None: not at all), and what of all values of the field it must then be."""

    value: Any
    read: Callable[[Any], Any] | None
    pick: Callable[[Any], Any]


def _same(values: Any) -> Any:
    return values


def _array(kept: Any) -> AnyArray:
    return np.asarray(kept)


class _Cycle:
    """Refers to itself, so that only the garbage collector ends it; its finalizer hands out what it held."""

    def __init__(self, value: Any, ended: list[Any]) -> None:
        self.value, self.itself, self.ended = value, self, ended

    def __del__(self) -> None:
        self.ended.append(self.value)  # revived


def _backward(pair: tuple[torch.Tensor, torch.Tensor]) -> AnyArray:
    weight, loss = pair
    (gradient,) = torch.autograd.grad(loss, weight, retain_graph=True)
    return gradient.numpy()


def _graph(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss whose graph alone holds the tensor."""
    given = tensor if tensor.is_floating_point() else tensor.double()
    weight = torch.zeros_like(given, requires_grad=True)
    return weight, (weight * given).sum()


def _storage(tensor: torch.Tensor) -> Kept:
    shape, dtype = tensor.shape, tensor.dtype

    def read(kept: torch.UntypedStorage) -> AnyArray:
        made: torch.Tensor = torch.empty(0, dtype=dtype).set_(kept)
        return made.view(shape).numpy() if made.numel() == shape.numel() else np.empty(0)

    assert tensor.is_contiguous()
    assert tensor.storage_offset() == 0
    return Kept(tensor.untyped_storage(), read, _same)


def _numbers(tensor: torch.Tensor, draw: random.Random) -> Kept:
    row = draw.randrange(len(tensor))
    array: Any = tensor.numpy()
    dlpack: Any = torch.utils.dlpack
    shared: Any = tensor
    ways: list[Callable[[], Kept]] = [
        lambda: Kept(tensor, _array, _same),
        lambda: Kept(tensor[row], _array, lambda e: e[row]),
        lambda: Kept(tensor[row:], _array, lambda e: e[row:]),
        lambda: Kept(tensor[..., -1], _array, lambda e: e[..., -1]),
        lambda: Kept(tensor.view(torch.uint8), _array, lambda e: e.view(np.uint8)),
        lambda: Kept(tensor.movedim(0, -1), _array, lambda e: np.moveaxis(e, 0, -1)),
        lambda: Kept(tensor.unbind()[row], _array, lambda e: e[row]),
        lambda: Kept(tensor.detach().flatten()[::3], _array, lambda e: e.reshape(-1)[::3]),
        lambda: Kept(array, _array, _same),
        lambda: Kept(array[row : row + 1], _array, lambda e: e[row : row + 1]),
        lambda: Kept(memoryview(array)[row:], _array, lambda e: e[row:]),
        lambda: Kept(memoryview(array).cast("B"), bytes, lambda e: e.tobytes()),
        lambda: Kept(torch.from_numpy(np.asarray(array[row:])), _array, lambda e: e[row:]),
        lambda: Kept(np.from_dlpack(tensor), _array, _same),
        lambda: Kept(dlpack.from_dlpack(tensor[row:]), _array, lambda e: e[row:]),
        lambda: Kept(dlpack.to_dlpack(tensor), None, _same),
        lambda: Kept(pa.py_buffer(array), lambda k: k.to_pybytes(), lambda e: e.tobytes()),
        lambda: Kept(pa.array(array.reshape(-1)), lambda k: k.to_numpy(), lambda e: e.reshape(-1)),
        lambda: Kept(np.frombuffer(array, np.uint8)[5:], _array, lambda e: e.view(np.uint8).reshape(-1)[5:]),
        lambda: Kept(np.lib.stride_tricks.as_strided(array, array.shape, array.strides), _array, _same),
        lambda: Kept((ctypes.c_char * array.nbytes).from_buffer(array), bytes, lambda e: e.tobytes()),
        lambda: Kept(copy.copy(tensor), _array, _same),
        lambda: Kept(copy.deepcopy(tensor), _array, _same),
        lambda: Kept(pickle.dumps(tensor), lambda k: pickle.loads(k).numpy(), _same),
        lambda: Kept(shared.share_memory_(), _array, _same),
        lambda: Kept(_graph(tensor), _backward, lambda e: e if e.dtype.kind == "f" else e.astype(np.float64)),
        lambda: Kept(torch.nn.Parameter(tensor, requires_grad=False), _array, _same),
        lambda: Kept(torch.asarray(array), _array, _same),
        lambda: _storage(tensor),
        lambda: Kept(torch.empty(0, dtype=tensor.dtype).set_(shared), _array, _same),
        lambda: Kept(_revive(tensor), lambda k: _revived(k).numpy(), _same),
    ]
    return draw.choice(ways)()


def _revive(value: Any) -> list[Any]:
    """A list that gets the value back from the finalizer of a cycle."""
    ended: list[Any] = []
    _Cycle(value, ended)
    return ended


def _revived(ended: list[Any]) -> Any:
    while not ended:  # another thread may be collecting
        gc.collect()
    return ended[0]


def _views(views: ByteViews, draw: random.Random) -> Kept:
    row, skip = draw.randrange(len(views)), draw.randrange(40)
    one = views[row]
    assert one is not None

    def joined(kept: Any) -> list[bytes]:
        ends = kept.offsets.tolist()
        whole = kept.data.numpy().tobytes()
        return [whole[low:high] for low, high in itertools.pairwise(ends)]

    ways: list[Callable[[], Kept]] = [
        lambda: Kept(views, lambda k: k.to_bytes(), _same),
        lambda: Kept(views[row:], lambda k: list(map(bytes, k)), lambda e: e[row:]),
        lambda: Kept(views.pick([row, 0]), lambda k: k.to_bytes(), lambda e: [e[row], e[0]]),
        lambda: Kept(one, bytes, lambda e: e[row]),
        lambda: Kept(one[skip:], bytes, lambda e: e[row][skip:]),
        lambda: Kept(list(views), lambda k: list(map(bytes, k)), _same),
        lambda: Kept(one[: len(one) // 4 * 4].cast("I")[1:], bytes, lambda e: e[row][4 : len(e[row]) // 4 * 4]),
        lambda: Kept(np.frombuffer(one, np.uint8)[skip::2], lambda k: k.tobytes(), lambda e: e[row][skip::2]),
        lambda: Kept(np.asarray(one)[skip:], lambda k: k.tobytes(), lambda e: e[row][skip:]),
        lambda: Kept(
            torch.frombuffer(one, dtype=torch.uint8)[skip:], lambda k: k.numpy().tobytes(), lambda e: e[row][skip:]
        ),
        lambda: Kept(torch.from_numpy(np.asarray(one)), lambda k: k.numpy().tobytes(), lambda e: e[row]),
        lambda: Kept(pa.py_buffer(one)[3:], lambda k: k.to_pybytes(), lambda e: e[row][3:]),
        lambda: Kept(views.arrow(), lambda k: k.to_pylist(), _same),
        lambda: Kept(views.arrow()[row], lambda k: k.as_py(), lambda e: e[row]),
        lambda: Kept(views.arrow().slice(row), lambda k: k.to_pylist(), lambda e: e[row:]),
        lambda: Kept(pa.chunked_array([views.arrow()]), lambda k: k.to_pylist(), _same),
        lambda: Kept(views.gather(), joined, _same),
        lambda: Kept(views.gather().data[skip:], lambda k: k.numpy().tobytes(), lambda e: b"".join(e)[skip:]),
        lambda: Kept(views.to_bytes(), _same, _same),
        lambda: Kept(pickle.dumps(views), lambda k: pickle.loads(k).to_bytes(), _same),
        lambda: Kept(copy.deepcopy(views), lambda k: k.to_bytes(), _same),
        lambda: Kept(copy.copy(views), lambda k: k.to_bytes(), _same),
        lambda: Kept(_revive(one), lambda k: bytes(_revived(k)), lambda e: e[row]),
        lambda: Kept(one.obj, None, _same),  # the whole chunk
    ]
    return draw.choice(ways)()


def _objects(values: Sequence[Any], draw: random.Random) -> Kept:
    row = draw.randrange(len(values))
    ways: list[Callable[[], Kept]] = [
        lambda: Kept(values, list, _same),
        lambda: Kept(values[row], _same, lambda e: e[row]),
        lambda: Kept(values[row:], list, lambda e: e[row:]),
        lambda: Kept(iter(values[:2]), lambda k: list(copy.copy(k)), lambda e: list(e[:2])),
    ]
    if isinstance(values[row], bytes):
        ways += [
            lambda: Kept(memoryview(values[row])[3:], bytes, lambda e: e[row][3:]),
            lambda: Kept(np.frombuffer(values[row], np.uint8), lambda k: k.tobytes(), lambda e: e[row]),
        ]
    return draw.choice(ways)()


def keep_some(field: Any, draw: random.Random) -> Kept:
    """Keep something of a field's values, of which there are some, in a way that is drawn."""
    if isinstance(field, torch.Tensor):
        return _numbers(field, draw)
    return _views(field, draw) if isinstance(field, ByteViews) else _objects(field, draw)
