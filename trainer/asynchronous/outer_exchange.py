"""A learner's exchange with its servers: what its weights have changed by is pushed, and the common weights pulled.

It lives on the learner's first rank, and works on a thread of its own, so that training may go on meanwhile.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from ...storage.threads.interruptible import Condition, Thread
from ..diloco.served import Fragment
from ..server.client import Call, ServerClient
from ..server.messages import Reply, Request, count_bytes
from ..server.schema import Schema

_REST_S = 1.0  # without an exchange after which shards hear the clock again: one may have come back from the past


@dataclass(frozen=True, kw_only=True)
class Change:
    """A learner's weights in a fragment, flat fp32 copies on the CPU by name, and what it counted since the last time.

    ``unit`` is the batch by which its push is known.
    """

    fragment: Fragment
    weights: Mapping[str, Tensor]
    weight: float
    unit: int
    pulls: bool = True
    """Read the common weights afterwards, as far as the policy lets this learner."""


class CountingCall:
    """Calls of shards, from any thread, with the bytes of what is sent and received. All mutable state: their sum."""

    def __init__(self, call: Call) -> None:
        self._bytes, self._call, self._lock = 0, call, threading.Lock()

    def __call__(self, shard: str, request: Request) -> Reply:
        reply = self._call(shard, request)
        with self._lock:
            self._bytes += count_bytes(request) + count_bytes(reply)
        return reply

    def take_bytes(self) -> int:
        """Take the bytes since the last time."""
        with self._lock:
            taken, self._bytes = self._bytes, 0
            return taken


class OuterExchange:
    """Pushes changes and pulls common weights, one fragment at a time.

    ``client.tensors`` are the weights that the learner's own are compared with next: the common ones as pulled, or
    under a quorum whose round is still open the learner's own of when it pushed. The client is used under one lock.

    All mutable state: the change that is under way, the batches by which pushes are known that could still be lost, the
    first batch that is not known to count, an error, whether this is closed, and numbers for displays.
    """

    def __init__(
        self,
        client: ServerClient,
        schema: Schema,
        calls: CountingCall,
        *,
        rate: float,
        pushes_weights: bool,
        keeps_own: bool,
    ) -> None:
        self.client, self._schema = client, schema
        self.norm = 0.0
        """The norm of the change that was pushed last."""
        self.waited_s = 0.0
        self.calls = calls
        self._rate, self._pushes_weights, self._keeps_own = rate, pushes_weights, keeps_own
        self._lock = threading.Lock()
        self._changed = Condition()
        self._work: Change | None = None
        self._kept: set[int] = set()
        self._settled = 0
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread = Thread(target=self._run, name="outer exchange")
        self._thread.start()

    def pull(self) -> Mapping[str, Tensor]:
        """Pull all common weights at once."""
        with self._lock:
            self.client.pull()
        return self.client.tensors

    def start(self, change: Change) -> None:
        """Push a change, and pull its fragment, behind the caller; the one before it must be over."""
        with self._changed:
            self._work = change
            self._changed.notify_all()

    def wait(self) -> Mapping[str, Tensor]:
        """Wait for what was started; returns the weights to go on from, flat fp32 by name.

        Raises:
            ServerError: what the exchange met.
        """
        started = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._work is None or self._error is not None)
            if self._error is not None:
                raise self._error
        self.waited_s += time.monotonic() - started
        return self.client.tensors

    def kept_units(self) -> set[int]:
        """The batches by which pushes are known that could still be lost, when the last exchange was over."""
        with self._changed:
            return self._kept

    def note_settled(self, unit: int | None) -> None:
        """Note that all batches before this one count, if that is known."""
        if unit is not None:
            with self._changed:
                self._settled = unit

    def ask(self) -> None:
        """Ask servers what cannot be lost by now of what was pushed."""
        with self._lock:
            self.client.ask_durable()
            kept = self.client.kept_units
        with self._changed:
            self._kept = kept

    def close(self) -> None:
        """End the thread; what it was pushing may count or not."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work is not None or self._is_closed, timeout=_REST_S)
                if self._is_closed:
                    return
                work, settled = self._work, self._settled
            try:
                with self._lock, torch.no_grad():
                    self.client.settled = settled
                    if work is None:
                        self.client.send_clock()
                    else:
                        self._do(work)
                    kept = self.client.kept_units
            except BaseException as exc:  # noqa: BLE001 - raised where the learner waits
                with self._changed:
                    self._error = exc
                    self._changed.notify_all()
                return
            with self._changed:
                self._kept = kept
                if work is not None:
                    self._work = None
                self._changed.notify_all()

    def _do(self, change: Change) -> None:
        client = self.client
        common = {name: client.tensors[name] for name in change.weights}
        changes = {name: common[name] - own for name, own in change.weights.items()}
        self.norm = math.sqrt(sum(_squares(changes[name], parts) for name, parts in change.fragment.parts.items()))
        pushed = change.weights if self._pushes_weights else changes
        if change.weight > 0:
            client.unit = change.unit
            client.push(
                {name: one.view(self._schema.tensor(name).shape) for name, one in pushed.items()},
                weight=change.weight,
                rate=self._rate,
                only=change.fragment.buckets,
            )
        client.advance()
        if not change.pulls:
            return
        before = {name: one.clone() for name, one in common.items()} if self._keeps_own else {}
        client.pull(change.fragment.buckets)
        for name, one in before.items():
            for start, stop in change.fragment.parts[name]:
                part = slice(start, stop)
                if torch.equal(client.tensors[name][part], one[part]):  # no round has closed
                    client.tensors[name][part] = change.weights[name][part]


def _squares(change: Tensor, parts: Sequence[tuple[int, int]]) -> float:
    return sum(float(change[start:stop].double().square().sum()) for start, stop in parts)
