"""Messages between two processes over a socket pair: a pickle, and beside it large buffers that are not copied into it.

The kernel closes both ends with their processes. No shared memory, file or semaphore can be left behind.
"""

from __future__ import annotations

import pickle
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BytesIO
from typing import Any

import numpy as np

_COUNT = struct.Struct("<Q")
_ALIGN = 64  # where buffers begin, so that arrays on them are aligned for any dtype
_PADDING = bytes(_ALIGN)
_MOST_PIECES = 512  # per sendmsg; the kernel accepts 1024
_BUFFER_BYTES = 1 << 20
LOOK_S = 1.0


class Channel:
    """One end of a pair. Only one thread may send, and one receive, at a time.

    Received messages were pickled by this package in a process that it started; nothing from a data set is unpickled.
    """

    def __init__(self, end: socket.socket, look: Callable[[], None] | None = None) -> None:
        """Wrap one end; ``look`` is called each second without progress, and an error that it raises ends the wait."""
        self._socket = end
        self._look = look
        if look is not None:
            end.settimeout(LOOK_S)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)

    def send(self, message: Any) -> None:
        """Send a message. Raises OSError if the other end is gone, and whatever pickling raises."""
        self.send_packed(*pack(message))

    def send_packed(self, head: bytes, buffers: Sequence[memoryview]) -> None:
        sizes = [len(head), *map(len, buffers)]
        pieces: list[bytes | memoryview] = [_COUNT.pack(len(sizes)), np.array(sizes, "<u8").tobytes()]
        parts: list[bytes | memoryview] = [head, *buffers]
        for part in parts:
            pieces += [part, _PADDING[: -len(part) % _ALIGN]]
        for start in range(0, len(pieces), _MOST_PIECES):
            self._send_pieces([memoryview(piece) for piece in pieces[start : start + _MOST_PIECES] if len(piece)])

    def _send_pieces(self, pieces: list[memoryview]) -> None:
        while pieces:
            try:
                sent = self._socket.sendmsg(pieces)
            except TimeoutError:
                self._wait_on()
                continue
            done = 0
            while done < len(pieces) and sent >= len(pieces[done]):
                sent -= len(pieces[done])
                done += 1
            pieces = pieces[done:]
            if sent:
                pieces[0] = pieces[0][sent:]

    def receive(self) -> Any:
        """Wait for a message. Raises EOFError if the other end is gone."""
        (count,) = _COUNT.unpack(self._read(_COUNT.size))
        sizes = np.frombuffer(self._read(8 * count), "<u8").astype(np.int64)
        stops = np.cumsum(sizes + -sizes % _ALIGN)
        body = self._read(int(stops[-1]))
        starts = stops - (sizes + -sizes % _ALIGN)
        parts = [body[start : start + size] for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
        return pickle.loads(parts[0], buffers=parts[1:])

    def _read(self, size: int) -> memoryview:
        whole = np.empty(size, np.uint8).data
        left = whole
        while len(left):
            try:
                received = self._socket.recv_into(left)
            except TimeoutError:
                self._wait_on()
                continue
            except OSError as exc:
                raise EOFError(str(exc)) from exc
            if not received:
                raise EOFError("the other end is closed")
            left = left[received:]
        return whole

    def _wait_on(self) -> None:
        if self._look is not None:
            self._look()

    def let_go(self) -> None:
        """Close this process's copy of the end, as a forked child does; the connection stays open."""
        self._socket.close()

    def close(self) -> None:
        """End the connection, even while another thread waits in ``receive``."""
        with suppress(OSError):  # the other end closed first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def pack(message: Any) -> tuple[bytes, list[memoryview]]:
    """Pickle a message, with the buffers of arrays (and of ``pickle.PickleBuffer``) beside it, without a copy."""
    out, buffers = BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(out, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(message)
    return out.getvalue(), [buffer.raw() for buffer in buffers]


class _Pickler(pickle.Pickler):
    """Sends plain tensors as arrays: torch's own pickling would copy them through a zip archive."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if (
            torch is None
            or type(value) is not torch.Tensor
            or value.layout != torch.strided
            or value.device.type != "cpu"
            or value.requires_grad
            or value.is_conj()
            or value.is_neg()
            or value.dtype not in _numpy_dtypes(torch)
        ):
            return NotImplemented
        return torch.from_numpy, (value.numpy(),)


def _numpy_dtypes(torch: Any) -> set[Any]:
    names = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
    return {getattr(torch, name) for name in names}
