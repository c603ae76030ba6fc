"""A delivery as bytes in memory that two processes share: pickles, and beside them the buffers of tensors and arrays.

A frame is the number of its parts and their sizes, little-endian uint64, and then the parts: the pickled delivery
without its batch, the pickled batch, and its large buffers, each at a multiple of 64 bytes. Whoever reads a frame gets
tensors and arrays on the frame's own memory. The pickles are made by this package in a process that it started; nothing
from a data set is unpickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from io import BytesIO
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from ...columns import AnyArray

_ALIGN = 64
_APART_BYTES = 1 << 20  # of values together: of fewer, joining and cutting takes longer than it saves
_SMALL_BYTES = 1024  # a buffer that is copied into the pickle: a view would keep a whole slot for it


class Frame:
    """The parts of a delivery on their way into shared memory."""

    def __init__(self, about: Any, batch: Any) -> None:
        """Pickle ``about`` whole, and ``batch`` with its buffers beside it. Raises whatever pickling raises."""
        out, buffers = BytesIO(), list[memoryview]()

        def is_small(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes >= _SMALL_BYTES:
                buffers.append(raw)
            return raw.nbytes < _SMALL_BYTES

        _Pickler(out, pickle.HIGHEST_PROTOCOL, buffer_callback=is_small).dump(_set_bytes_apart(batch))
        head = pickle.dumps(about, pickle.HIGHEST_PROTOCOL)
        self._parts: list[bytes | memoryview] = [head, out.getbuffer(), *buffers]
        self._sizes = np.array([len(self._parts), *map(len, self._parts)], "<u8")
        self._stops = _lay_out(self._sizes)
        self.nbytes = int(self._stops[-1])

    def write(self, memory: AnyArray) -> None:
        """Write the frame to the beginning of ``memory``, uint8; large parts are copied without the GIL."""
        memory[: self._sizes.nbytes] = self._sizes.view(np.uint8)
        for part, stop in zip(self._parts, self._stops.tolist(), strict=True):
            start = stop - (len(part) + -len(part) % _ALIGN)
            np.copyto(memory[start : start + len(part)], np.frombuffer(part, np.uint8))


def read_frame(memory: AnyArray) -> tuple[Any, Any]:
    """Read what a frame is about, and its batch, whose tensors and arrays lie in ``memory``, (nbytes,) uint8."""
    count = int(memory[:8].view("<u8")[0])
    sizes = memory[: 8 * (count + 1)].view("<u8")
    stops = _lay_out(sizes)
    parts = [
        memory[stop - (size + -size % _ALIGN) :][:size]
        for size, stop in zip(sizes[1:].tolist(), stops.tolist(), strict=True)
    ]
    return pickle.loads(parts[0].data), pickle.loads(parts[1].data, buffers=parts[2:])


def _lay_out(sizes: AnyArray) -> AnyArray:
    """Compute where each part ends, with its padding."""
    parts = sizes[1:].astype(np.int64)
    first = sizes.nbytes + -sizes.nbytes % _ALIGN
    stops: AnyArray = first + np.cumsum(parts + -parts % _ALIGN)
    return stops


def _set_bytes_apart(batch: Any) -> Any:
    """Have many bytes of a field come beside the pickle, which they would be copied into twice, value by value."""
    if type(batch) is not dict:
        return batch
    return {name: _Bytes(values) if _are_bytes(values) else values for name, values in batch.items()}


def _are_bytes(values: Any) -> bool:
    return type(values) is list and {*map(type, values)} == {bytes} and sum(map(len, values)) >= _APART_BYTES


class _Bytes:
    """A list of bytes, which comes out as one again."""

    def __init__(self, values: Sequence[bytes]) -> None:
        self._values = values

    def __reduce_ex__(self, protocol: object) -> Any:
        joined = pickle.PickleBuffer(b"".join(self._values))
        return _cut_bytes, (joined, *accumulate(map(len, self._values)))


def _cut_bytes(joined: Any, *stops: int) -> list[bytes]:
    """Copy the values out of a slot, which is then free again."""
    view = memoryview(joined)
    return [bytes(view[start:stop]) for start, stop in zip((0, *stops), stops, strict=False)]


class _Pickler(pickle.Pickler):
    """Sends plain tensors as their bytes: torch's own pickling would copy them through an archive."""

    def reducer_override(self, value: Any) -> Any:
        if (
            type(value) is not torch.Tensor
            or value.layout != torch.strided
            or value.device.type != "cpu"
            or value.requires_grad
            or value.is_conj()
            or value.is_neg()
            or value.is_quantized
            or value.is_nested
        ):
            return NotImplemented
        dense = value if _is_dense(value) else value.contiguous()
        flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
        return _make_tensor, (flat, value.dtype, tuple(dense.shape), dense.stride())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether each element has a place of its own and there are no gaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _make_tensor(flat: AnyArray, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Make a tensor on the bytes ``flat`` again."""
    return torch.from_numpy(flat).view(dtype).as_strided(shape, strides)
