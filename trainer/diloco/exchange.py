"""Exchange of one fragment between learners: the mean of a flat tensor, in few bits, at once or behind training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...storage.threads.interruptible import Thread
from ..compression.dense import average_int8
from ..compression.wire import WireCounter, ring_bytes
from ..errors import TrainerError
from ..parallel.diloco_config import Codec

_CLOSING_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """Result of an exchange: ``mean`` is (n,) and equal on all ranks; ``owed`` is what rounding lost of this rank's.

    ``wire`` has the bytes that this rank sent.
    """

    mean: Tensor
    owed: Tensor | None = None
    wire: WireCounter


def average(flat: Tensor, codec: Codec, group: dist.ProcessGroup | None) -> Exchanged:
    """Average (n,), fp32 or fp64, over the ranks of a group, of which None is this rank alone; ``flat`` is used up.

    fp32 is exact but for the sum's rounding, in the tensor's own format.
    """
    wire = WireCounter()
    if group is None:
        return Exchanged(mean=flat, wire=wire)
    ranks = group.size()
    if codec == "int8":
        mean, owed = average_int8(flat, group, wire)
        return Exchanged(mean=mean.to(flat.dtype), owed=owed, wire=wire)
    sent = flat if codec == "fp32" else flat.div_(ranks).to(torch.bfloat16)
    dist.all_reduce(sent, group=group)
    wire.wire_bytes += ring_bytes(sent.nbytes, ranks)
    wire.plain_bytes += ring_bytes(flat.nbytes, ranks)
    return Exchanged(mean=flat.div_(ranks) if codec == "fp32" else sent.to(flat.dtype), wire=wire)


class Exchange:
    """Work of the ranks of a group that is done at once, or with ``behind`` in a thread while training goes on.

    Nothing else may use the group before ``wait`` has returned. Mutable state: the thread, and what it leaves.
    """

    def __init__(self, work: Callable[[], Exchanged], device: torch.device, *, behind: bool) -> None:
        self.waited_s = 0.0
        self._work = work
        self._result: Exchanged | None = None
        self._error: Exception | None = None
        self._thread: Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        if not behind:
            started = time.perf_counter()
            self._result = work()
            self.waited_s = time.perf_counter() - started
            return
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._thread = Thread(target=self._run, name="penstock-outer-exchange")
        self._thread.start()

    def wait(self) -> Exchanged:
        """The result, once it is there.

        Raises:
            TrainerError: the exchange failed, as where a learner has died.
        """
        if self._thread is not None:
            started = time.perf_counter()
            self._thread.join()
            self._thread = None
            self.waited_s += time.perf_counter() - started
        if self._error is not None:
            raise TrainerError(f"the exchange between learners failed: {self._error}") from self._error
        assert self._result is not None, "the work is done"
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            for one in (self._result.mean, self._result.owed):
                if one is not None:
                    one.record_stream(current)  # its memory is the other stream's
        return self._result

    def close(self) -> None:
        """Let the thread end, if it does so soon: what is collective must not meet the end of the process group."""
        if self._thread is not None:
            self._thread.join(_CLOSING_S)

    def _run(self) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(self._stream):
                self._result = self._work()
        except Exception as exc:  # noqa: BLE001 - the thread that waits raises it
            self._error = exc
