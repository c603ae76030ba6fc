"""Copies batches to a CUDA device ahead of need: a ring of pinned buffers, a copy stream, an event per slot in flight.

The feeder thread starts the copies of a batch to the device on a separate stream: of what lies in pinned memory from
there, of all else from the ring's next slot, into which it is copied. The consumer's stream waits for them on the
device; the consumer's thread never waits.

Why this is safe (see "CUDA semantics" in PyTorch's notes):

- A slot is overwritten only after its last event has passed, so no copy still reads from it. Until then it also
  refers to the tensors that are copied in place, so that their memory is lent to no other batch.
- Device memory is allocated on the copy stream. The consumer's stream waits for the batch's event before it reads, and
  ``record_stream`` keeps the caching allocator from reusing the memory for a later copy until the consumer's stream is
  done with it, whenever the consumer drops the tensors.
- Each batch has its own event: reusing a slot does not make the consumer of an earlier batch wait longer.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ...storage.suggestions import did_you_mean
from ..decoding.batch import Stored
from ..decoding.byte_views import ByteViews
from ..errors import ConfigError, LoaderClosedError

if TYPE_CHECKING:
    from ..columns import AnyArray


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Get the stream for copies to a device: one a process, as torch hands out streams of a small pool in turns."""
    return torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]


def register_memory(nbytes: int, device: torch.device) -> AnyArray | None:
    """Lock (nbytes,) uint8 of whole pages as long as the array or a view lives; None where CUDA refuses.

    A copy's caller keeps it until the copy is done: torch does not know of it. A forked child has none of it.
    """
    pages = mmap.mmap(-1, max(1, nbytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # or else a fork would move pages away from under a copy
        if hasattr(mmap, advice):
            pages.madvise(getattr(mmap, advice))
    whole: AnyArray = np.frombuffer(pages, np.uint8)
    address = whole.ctypes.data
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        if runtime.cudaHostRegister(address, len(whole), 0) != runtime.cudaError.success:
            return None
    weakref.finalize(whole, _unregister, runtime, address, copy_stream(device)).atexit = False
    return whole[:nbytes]


def _unregister(runtime: Any, address: int, stream: torch.cuda.Stream) -> None:
    """Unregister the memory once nothing refers to it, before it is freed."""
    stream.synchronize()
    runtime.cudaHostUnregister(address)


# Tensors start at multiples of this in a slot: what cudaMalloc aligns to, and a multiple of any cache line.
ALIGN_BYTES = 256
_DEVICES = ("cpu", "cuda", "cuda:0", "mps", "xpu")
_LEAST_SLOT_BYTES = 1 << 20
_NEVER_MOVED = {str, bytes, int, float, bool, type(None)}


class CopyEvent(Protocol):
    """A point on the copy stream."""

    def synchronize(self) -> Any:
        """Block the calling thread, without the GIL, until the stream has passed this point."""
        ...


class CopyBackend(Protocol):
    """The operations of a device that the feeder needs; ``CudaBackend`` is the real one."""

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        """Allocate a page-locked (nbytes,) uint8 tensor."""
        ...

    def start_copies(
        self, sources: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
    ) -> tuple[list[torch.Tensor], CopyEvent]:
        """Start copies of pinned tensors to the device, shapes and strides kept, which are converted there.

        The event follows the last of them. The caller keeps the sources until then; where this raises, none is read.
        """
        ...

    def hand_over(self, tensors: Sequence[torch.Tensor], event: CopyEvent) -> None:
        """Make the calling thread's current stream wait for ``event``, and record that it uses ``tensors``."""
        ...


class CudaBackend:
    """The copy stream of one CUDA device.

    Each call makes that device the current one while it runs: a new thread's current device is 0, and even restoring a
    stream on it would open a context, and take memory, on a device that belongs to another rank.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = copy_stream(device)

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        registered = register_memory(nbytes, self.device)
        if registered is not None:
            return torch.from_numpy(registered)
        with torch.cuda.device(self.device):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def start_copies(
        self, sources: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
    ) -> tuple[list[torch.Tensor], CopyEvent]:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            try:
                copies = [self._copy(source).to(dtype) for source, dtype in zip(sources, dtypes, strict=True)]
            except BaseException:
                self._stream.synchronize()  # memory may have run out with copies under way, which no event follows
                raise
            # blocking: the feeder sleeps until the event instead of spinning on a core that could decode.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return copies, event

    def _copy(self, source: torch.Tensor) -> torch.Tensor:
        copy = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device=self.device)
        return copy.copy_(source, non_blocking=True)

    def hand_over(self, tensors: Sequence[torch.Tensor], event: CopyEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(stream)


class StagedBatch:
    """A batch on its way to the device."""

    def __init__(self, batch: Any, tensors: list[torch.Tensor], event: CopyEvent, backend: CopyBackend):
        self._batch = batch
        self._tensors = tensors
        self._event = event
        self._backend = backend

    def take(self) -> Any:
        """Take the batch, for use on the calling thread's current stream; on the consumer's thread, without blocking.

        To use the tensors on yet another stream, synchronise the two streams, as with any tensor.
        """
        self._backend.hand_over(self._tensors, self._event)
        return self._batch


@dataclass(slots=True)
class _Slot:
    """A place of the ring, and the copy that leaves it."""

    buffer: torch.Tensor | None = None
    event: CopyEvent | None = None
    lent: list[torch.Tensor] = field(default_factory=list)  # copied from where they are

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()
            self.event = None
        self.lent.clear()


class DeviceFeeder:
    """A ring of ``slots`` pinned buffers through which batches go to a CUDA ``device``.

    One thread, the feeder, calls ``stage``; any thread may call ``close``. The mutable state is the ring and the
    closed flag, both under one lock. A buffer grows to the largest batch that it has held, rounded up to a power of
    two; ``pinned_bytes`` is the sum.
    """

    def __init__(self, device: torch.device | str, *, slots: int = 3, backend: CopyBackend | None = None) -> None:
        if slots < 1:
            raise ConfigError(f"slots={slots} leaves no buffer to stage in; use 2 or more to copy while the next fills")
        self._backend = CudaBackend(resolve_cuda(device)) if backend is None else backend
        self._ring = [_Slot() for _ in range(slots)]
        self._next = 0
        self._closed = False
        self._lock = threading.Lock()

    @property
    def pinned_bytes(self) -> int:
        """Bytes of page-locked memory that the ring holds."""
        buffers = [slot.buffer for slot in self._ring]
        return sum(buffer.numel() for buffer in buffers if buffer is not None)

    def allocate(self, nbytes: int) -> AnyArray:
        """Allocate pinned memory, (nbytes,) uint8, from which ``stage`` may start copies; any thread may ask."""
        return self._backend.allocate_pinned(nbytes).numpy()

    def stage(self, batch: Any, is_pinned: Callable[[torch.Tensor], bool] = lambda tensor: False) -> StagedBatch:
        """Start a batch's copies to the device; waits, without the GIL, until the ring's oldest slot is free.

        The batch is a dict, or whatever ``collate`` makes. Strided CPU tensors are moved, it itself or those inside
        lists, tuples, named tuples and dicts; dtype and strides (channels_last) are kept, and tensors with gaps or
        overlaps become contiguous. Everything else passes through unchanged; of tensors that are on the device already
        it is recorded that the consumer's stream uses them. ``ByteViews`` arrive as ``GatheredBytes``, and ``Stored``
        tensors widened. The batch may be modified as soon as this returns, except tensors that ``is_pinned`` says
        lie in memory of ``allocate``: these must not be written to any more.

        Raises:
            LoaderClosedError: the feeder was closed.
        """
        found: list[tuple[torch.Tensor, torch.dtype]] = []
        there: list[torch.Tensor] = []
        noted = _map_leaves(batch, partial(_note, found, there))
        with self._lock:
            if self._closed:
                raise LoaderClosedError("the device feeder was closed; no more batches can be staged")
            slot = self._ring[self._next]
            slot.wait()
            self._next = (self._next + 1) % len(self._ring)
            sources = self._fill(slot, [tensor for tensor, _ in found], is_pinned)
            tensors, event = self._backend.start_copies(sources, [dtype for _, dtype in found])
            slot.event = event
        moved = _map_leaves(noted, lambda leaf: tensors[leaf.number] if isinstance(leaf, _Moved) else leaf)
        return StagedBatch(moved, [*tensors, *there], event, self._backend)

    def _fill(
        self, slot: _Slot, tensors: Sequence[torch.Tensor], is_pinned: Callable[[torch.Tensor], bool]
    ) -> list[torch.Tensor]:
        """Place the tensors in pinned memory, shapes and strides kept: where they are, or packed into the slot's."""
        are_there = [is_pinned(tensor) and _dense_strides(tensor) == tensor.stride() for tensor in tensors]
        sizes = [0 if there else tensor.nbytes for tensor, there in zip(tensors, are_there, strict=True)]
        offsets, total = pack_offsets(sizes)
        if total and (slot.buffer is None or slot.buffer.numel() < total):
            slot.buffer = None  # freed before more is allocated
            slot.buffer = self._backend.allocate_pinned(max(_LEAST_SLOT_BYTES, 1 << (total - 1).bit_length()))
        slot.lent = [tensor for tensor, there in zip(tensors, are_there, strict=True) if there]
        return [
            tensor if there or not tensor.nbytes else pack_tensor(tensor, slot.buffer, offset)
            for tensor, offset, there in zip(tensors, offsets, are_there, strict=True)
        ]

    def close(self) -> None:
        """Wait for copies in flight and return the pinned memory to PyTorch's allocator. Idempotent.

        Batches that were staged before stay valid.
        """
        with self._lock:
            self._closed = True
            ring, self._ring = self._ring, []
        for slot in ring:
            slot.wait()


def resolve_cuda(device: torch.device | str) -> torch.device:
    """Resolve the CUDA device with its index; by default the calling thread's current one.

    Raises:
        ConfigError: it is no CUDA device, or this machine has no such device.
    """
    try:
        resolved = torch.device(device)
    except RuntimeError as exc:
        cure = did_you_mean(device, _DEVICES)
        raise ConfigError(f"device={device!r} is no torch device{cure or f': {exc}'}") from exc
    if resolved.type != "cuda":
        raise ConfigError(f"device={str(resolved)!r} needs no staging; only CUDA devices are fed through pinned memory")
    if not torch.cuda.is_available():
        raise ConfigError(f"device={str(resolved)!r}, but torch sees no CUDA device here; use device=None")
    count = torch.cuda.device_count()
    if resolved.index is not None and resolved.index >= count:
        raise ConfigError(f"device={str(resolved)!r}, but there are {count} CUDA devices here, from cuda:0")
    return torch.device("cuda", torch.cuda.current_device() if resolved.index is None else resolved.index)


def pack_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Lay blocks of ``sizes`` bytes end to end at multiples of ALIGN_BYTES; return their offsets and their end."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGN_BYTES) * ALIGN_BYTES
    return offsets, end


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Choose a copy's strides: the tensor's own if it is dense without overlaps, else those of a contiguous one."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


def pack_tensor(tensor: torch.Tensor, buffer: torch.Tensor | None, offset: int) -> torch.Tensor:
    """Copy ``tensor`` into ``buffer`` at a byte offset; returns a view on the buffer of the same shape and strides.

    numpy does the copy: one memcpy without the GIL. torch would start OpenMP threads for the feeder, which would
    contend with the threads that decode.
    """
    assert buffer is not None
    strides = _dense_strides(tensor)
    if strides != tensor.stride():
        dense = torch.empty_strided(tensor.size(), strides, dtype=tensor.dtype)
        tensor = dense.copy_(tensor)
    length = tensor.numel() * tensor.element_size()
    target = buffer[offset : offset + length]
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    np.copyto(target.numpy(), flat.numpy())
    return target.view(tensor.dtype).as_strided(tensor.size(), strides)


@dataclass(frozen=True, slots=True)
class _Moved:
    """The place of a moved tensor within a batch: its number among them."""

    number: int


def _note(found: list[tuple[torch.Tensor, torch.dtype]], there: list[torch.Tensor], value: Any) -> Any:
    """Append a tensor that is to be moved to ``found``, with its dtype then, and one on the device to ``there``."""
    if isinstance(value, Stored):
        found.append((value.tensor, torch.int64))
        return _Moved(len(found) - 1)
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type == "cpu" and value.layout == torch.strided:
        found.append((value.detach().resolve_conj().resolve_neg(), value.dtype))
        return _Moved(len(found) - 1)
    if value.device.type == "cuda":
        there.append(value)
    return value


def _map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to every value inside nested dicts, lists and tuples."""
    kind = type(value)
    if kind in _NEVER_MOVED:  # first: a batch may have thousands
        return value
    if kind is ByteViews:
        value = value.gather()
    elif kind in (list, tuple):
        return kind([_map_leaves(item, change) for item in value])
    elif isinstance(value, Mapping):
        return {key: _map_leaves(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple, such as GatheredBytes
        return type(value)(*[_map_leaves(item, change) for item in value])
    return change(value)
