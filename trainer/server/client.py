"""A worker's side: it cuts gradients into parts, sends each until it counts, and keeps them until none can be lost.

The client knows no network. ``call(shard, request)`` returns the reply of a shard, or raises ShardUnreachableError if
none came, whether or not the request was applied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import NotHeldError, NotJoinedError, ServerError, ServerRefusedError, ShardUnreachableError
from . import placement as placement_module
from .messages import (
    Ack,
    Advance,
    Advanced,
    Create,
    Header,
    Join,
    Joined,
    Part,
    PieceKey,
    Pull,
    Pulled,
    Push,
    Pushed,
    Reply,
    Request,
)
from .payloads import CodecConfig, ErrorFeedback, Payload, decode, encode, is_finite
from .placement import Placement, bucket_of_piece, buckets_of_rows
from .schema import Schema

Call = Callable[[str, Request], Reply]
_PushKey = tuple[str, int, float, float | None, int | None]
"""The shard, step, weight, rate and batch of a push."""


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Codecs and patience of a client; ``pause`` is in seconds."""

    push: CodecConfig = field(default_factory=CodecConfig)
    pull: CodecConfig = field(default_factory=CodecConfig)
    attempts: int = 60
    """Calls in a row without an answer before the client gives up."""
    pause: float = 0.5


@dataclass(kw_only=True)
class _Sent:
    """A part that was made, with the push it is of; it counts once it is acknowledged."""

    part: Part
    step: int
    weight: float
    rate: float | None
    unit: int | None = None
    is_acknowledged: bool = False
    is_shared: bool = True
    """Its memory is the caller's, who may write to it once the push has returned."""


class ServerClient:
    """One incarnation of a worker. ``wait(seconds)`` is called before each retry, and may raise to end it.

    All mutable state: the clock, the number of parts sent to each bucket, parts that could still be lost, what rounding
    owes, and the tensors as last pulled with their buckets' versions. Not for several threads.
    """

    def __init__(
        self,
        header: Header,
        schema: Schema,
        *,
        call: Call,
        placement: Callable[[], Placement],
        wait: Callable[[float], None],
        config: ClientConfig | None = None,
    ) -> None:
        self.clock = 0
        self.unit: int | None = None
        """The number of the batch that the next push is of; without one, workers may push the same batch twice."""
        self.settled = 0
        """All batches before this one count."""
        self.reads_ahead = 0
        """Steps that are computed between what is pulled and the step that it is for; policies count them in."""
        self.staleness = 0
        """The most versions that a bucket was ahead when a push came; the caller may reset it."""
        self.tensors = {spec.name: torch.zeros(spec.size) for spec in schema.tensors}
        """Each tensor as last pulled, flat."""
        self._header, self._schema, self._config = header, schema, config or ClientConfig()
        self.feedback = ErrorFeedback(self._config.push)
        self._call_once, self._ask_placement, self._wait = call, placement, wait
        self._placement = placement()
        self._joined_at = 0
        self._buckets = schema.buckets()
        self._counts = np.zeros(placement_module.BUCKETS, np.int64)
        self._log: dict[int, list[_Sent]] = {}
        self._new: list[_Sent] = []
        self._versions: dict[int, int] = {}
        self._pieces: dict[int, list[PieceKey]] = {}
        for spec in schema.tensors:
            for index in range(spec.pieces):
                self._pieces.setdefault(bucket_of_piece(spec.name, index), []).append((spec.name, index))

    @property
    def kept(self) -> int:
        """The number of parts that are kept because they could still be lost."""
        return sum(map(len, self._log.values()))

    @property
    def kept_units(self) -> set[int]:
        """The batches whose gradients could still be lost."""
        return {one.unit for sent in self._log.values() for one in sent if one.unit is not None}

    def join(self, clock: int = 0) -> None:
        """Join all shards, at a clock that none of them is behind of: others' steps before it are not waited for."""
        agreed = -1
        while agreed < clock:
            agreed = clock
            for shard in self._placement.weights:
                reply = self._call(shard, Join(header=self._header, clock=clock))
                assert isinstance(reply, Joined)
                clock = max(clock, reply.clock)
        self.clock = self._joined_at = clock

    def create(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the servers first values of dense tensors; where they have some, those stay."""
        todo: dict[int, dict[PieceKey, Payload]] = {}
        for name, tensor in tensors.items():
            for key, flat in self._cut(name, tensor):
                todo.setdefault(bucket_of_piece(*key), {})[key] = encode(flat, CodecConfig())
        for number, pieces in todo.items():
            request = Create(header=self._header, pieces=pieces)
            while True:
                try:
                    self._call(self._placement.shard_of(number), request)
                except NotHeldError:
                    self._find_moved()
                else:
                    break

    def push(
        self,
        tensors: Mapping[str, Tensor],
        rows: Mapping[str, tuple[NDArray[np.int64], Tensor]] | None = None,
        *,
        weight: float = 1.0,
        rate: float | None = None,
        only: Collection[int] | None = None,
    ) -> None:
        """Push gradients of this step; returns when all count. Ids (n,) may repeat: their rows (n, width) are added.

        Of tensors the pieces in the buckets ``only`` are pushed; without it all.

        Raises:
            ServerRefusedError: a value is not finite, or a shape is not the server's; nothing counts.
        """
        self._prepare(tensors, rows or {}, weight, rate, only)
        try:
            self.flush()
        finally:
            self._own_kept()

    def begin_push(
        self,
        tensors: Mapping[str, Tensor],
        rows: Mapping[str, tuple[NDArray[np.int64], Tensor]] | None = None,
        *,
        weight: float = 1.0,
        rate: float | None = None,
    ) -> None:
        """Keep a copy of gradients for the next ``flush``."""
        self._prepare(tensors, rows or {}, weight, rate)
        self._own_kept()

    def _prepare(
        self,
        tensors: Mapping[str, Tensor],
        rows: Mapping[str, tuple[NDArray[np.int64], Tensor]],
        weight: float,
        rate: float | None,
        only: Collection[int] | None = None,
    ) -> None:
        """Cut gradients into parts, which share the memory of fp32 ones until ``_own_kept``."""
        self._check_finite(tensors, rows)
        pieces: dict[int, dict[PieceKey, Payload]] = {}
        for name, tensor in tensors.items():
            for key, flat in self._cut(name, tensor):
                number = bucket_of_piece(*key)
                if only is None or number in only:
                    pieces.setdefault(number, {})[key] = self.feedback.encode(f"{key[1]} {name}", flat)
        by_bucket: dict[int, dict[str, tuple[NDArray[np.int64], Payload]]] = {}
        for table, (ids, gradients) in rows.items():
            distinct, places = np.unique(ids, return_inverse=True)
            total = torch.zeros(len(distinct), gradients.shape[1]).index_add_(0, torch.from_numpy(places), gradients)
            numbers = buckets_of_rows(table, distinct)
            codec = self._config.push if self._config.push.codec in ("fp32", "bf16") else CodecConfig()
            order = np.argsort(numbers, kind="stable")
            numbers, distinct, total = numbers[order], distinct[order], total[torch.from_numpy(order)]
            edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
            for start, stop in pairwise(edges if len(numbers) else ()):
                payload = encode(total[start:stop], codec)
                by_bucket.setdefault(int(numbers[start]), {})[table] = distinct[start:stop], payload
        for number in sorted({*pieces, *by_bucket}):
            self._counts[number] += 1
            part = Part(
                bucket=number,
                sequence=int(self._counts[number]),
                base=max(0, self._versions.get(number, 0)),
                pieces=pieces.get(number, {}),
                rows=by_bucket.get(number, {}),
            )
            sent = _Sent(part=part, step=self.clock, weight=weight, rate=rate, unit=self.unit)
            self._log.setdefault(number, []).append(sent)
            self._new.append(sent)

    def _own_kept(self) -> None:
        """Copy what is kept of memory that the caller may write to; a part that cannot be lost by now needs no copy."""
        for one in self._new:
            if one.is_shared:
                pieces = {key: _own(payload) for key, payload in one.part.pieces.items()}
                one.part, one.is_shared = replace(one.part, pieces=pieces), False
        self._new = []

    def flush(self) -> None:
        """Send what does not count yet, until all does."""
        while todo := self._unacknowledged():
            for (shard, step, weight, rate, unit), parts in todo.items():
                push = Push(
                    header=self._header,
                    step=step,
                    parts=tuple(parts),
                    weight=weight,
                    rate=rate,
                    unit=unit,
                    settled=self.settled,
                )
                reply = self._call(shard, push)
                assert isinstance(reply, Pushed)
                bases = {part.bucket: part.base for part in parts}
                for number, ack in reply.acks.items():
                    if ack.outcome == "applied":
                        self.staleness = max(self.staleness, ack.version - 1 - bases[number])
                    self._note(number, ack)
                if any(ack.outcome == "moved" for ack in reply.acks.values()):
                    self._find_moved()
                    break

    def ask_durable(self) -> None:
        """Send again what could still be lost, to learn what no longer can."""
        for sent in self._log.values():
            for one in sent:
                one.is_acknowledged = False
        self.flush()

    def advance(self) -> None:
        """Finish this step: push first what is left of it."""
        self.clock += 1
        self.send_clock()

    def pull(self, only: Collection[int] | None = None) -> dict[str, Tensor]:
        """Bring ``tensors`` up to date, once the policy lets this worker read; returns them in their shapes.

        Pieces in the buckets ``only`` are; without it all.
        """
        todo = set(self._pieces if only is None else only)
        while todo:
            shard = self._placement.shard_of(min(todo))
            numbers = [number for number in todo if self._placement.shard_of(number) == shard]
            known = {number: self._versions.get(number, -1) for number in numbers}
            reply = self._pull(
                shard,
                Pull(header=self._header, clock=self.clock + self.reads_ahead, buckets=known, codec=self._config.pull),
            )
            if reply is None:
                continue
            for (name, index), payload in reply.pieces.items():
                start = index * self._schema.tensor(name).piece
                self.tensors[name][start : start + payload.shape[0]] = decode(payload, checks_values=False)
            self._versions.update(reply.versions)
            todo.difference_update(numbers)
        return {spec.name: self.tensors[spec.name].view(spec.shape) for spec in self._schema.tensors}

    def pull_rows(self, table: str, ids: NDArray[np.int64]) -> Tensor:
        """Read rows (n, width) by ids (n,), which may repeat."""
        distinct, places = np.unique(ids, return_inverse=True)
        values = torch.empty(len(distinct), self._schema.table(table).width)
        numbers = buckets_of_rows(table, distinct)
        left = np.ones(len(distinct), bool)
        while left.any():
            shard = self._placement.shard_of(int(numbers[left][0]))
            at = np.flatnonzero(left & self._placement.holds(shard, numbers))
            known = np.full(len(at), -1, np.int64)
            request = Pull(
                header=self._header,
                clock=self.clock + self.reads_ahead,
                rows={table: (distinct[at], known)},
                codec=self._config.pull,
            )
            reply = self._pull(shard, request)
            if reply is not None:
                values[torch.from_numpy(at)] = decode(reply.rows[table][2], checks_values=False)
                left[at] = False
        return values[torch.from_numpy(places)]

    def _cut(self, name: str, tensor: Tensor) -> list[tuple[PieceKey, Tensor]]:
        spec = self._schema.tensor(name)
        if tuple(tensor.shape) != spec.shape:
            raise ServerRefusedError(
                f"{name!r} has shape {spec.shape} on the server, and here {tuple(tensor.shape)}; nothing was sent"
            )
        flat = tensor.detach().reshape(-1).float()
        return [((name, index), part) for index, part in enumerate(torch.split(flat, spec.piece) if spec.size else ())]

    def _check_finite(
        self, tensors: Mapping[str, Tensor], rows: Mapping[str, tuple[NDArray[np.int64], Tensor]]
    ) -> None:
        for name, tensor in (*tensors.items(), *((table, gradients) for table, (_, gradients) in rows.items())):
            if not is_finite(tensor):
                raise ServerRefusedError(
                    f"worker {self._header.worker!r}, step {self.clock}: gradients of {name!r} are NaN or infinite; "
                    f"nothing was sent"
                )
        for name, tensor in tensors.items():
            self._cut(name, tensor)
        for table, (ids, gradients) in rows.items():
            width = self._schema.table(table).width
            if tuple(gradients.shape) != (len(ids), width) or ids.dtype != np.int64:
                raise ServerRefusedError(
                    f"rows of {table!r} have shape {(len(ids), width)} and int64 ids, and here "
                    f"{tuple(gradients.shape)} and {ids.dtype}; nothing was sent"
                )

    def _unacknowledged(self) -> dict[_PushKey, list[Part]]:
        """The parts to send, by shard and push, those of earlier steps first."""
        todo: dict[_PushKey, list[Part]] = {}
        for number, sent in self._log.items():
            for one in sent:
                if not one.is_acknowledged:
                    key = self._placement.shard_of(number), one.step, one.weight, one.rate, one.unit
                    todo.setdefault(key, []).append(one.part)
        return dict(sorted(todo.items(), key=lambda item: item[0][:2]))

    def _note(self, number: int, ack: Ack) -> None:
        """Note which parts of a bucket count, and let go of those that cannot be lost."""
        if ack.outcome == "moved":
            return
        self._set_back(number, ack.sequence)
        for one in self._log[number]:
            one.is_shared &= one.part.sequence > ack.durable
        self._log[number] = [one for one in self._log[number] if one.part.sequence > ack.durable]

    def _set_back(self, number: int, last: int) -> None:
        """Take a shard's word that ``last`` is the last part that it has of a bucket."""
        sent = self._log.get(number, [])
        first = sent[0].part.sequence if sent else int(self._counts[number]) + 1
        if last + 1 < first:
            raise ServerError(
                f"worker {self._header.worker!r}: bucket {number} was restored to push {last} of this worker, which "
                f"keeps those from {first} on; restore the servers from their newest checkpoint"
            )
        for one in sent:
            one.is_acknowledged = one.part.sequence <= last

    def send_clock(self) -> None:
        """Tell all shards the clock, and send again what they lack; needed where a shard came back from the past."""
        left = self._buckets
        while len(left):
            self.flush()
            for shard, numbers in self._placement.split(left).items():
                request = Advance(header=self._header, clock=self.clock, buckets=numbers, counts=self._counts[numbers])
                reply = self._call(shard, request)
                assert isinstance(reply, Advanced)
                for number, last in reply.behind.items():
                    self._set_back(number, last)
                again = np.array([*reply.behind, *reply.moved], np.int64)
                left = np.setdiff1d(left, np.setdiff1d(numbers, again))
                if reply.moved:
                    self._find_moved()

    def _pull(self, shard: str, request: Pull) -> Pulled | None:
        """Pull from one shard; None if the worker has to ask again, elsewhere or later."""
        reply = self._call(shard, request)
        assert isinstance(reply, Pulled)
        if reply.moved:
            self._find_moved()
            return None
        if reply.waiting_for:
            self._wait(self._config.pause)
            if self._header.worker in reply.waiting_for:  # the shard came back from an older state
                self.send_clock()
            return None
        return reply

    def _find_moved(self) -> None:
        self._wait(self._config.pause)
        self._placement = self._ask_placement()

    def _call(self, shard: str, request: Request) -> Reply:
        for attempt in range(1, self._config.attempts + 1):
            try:
                return self._call_once(shard, request)
            except NotJoinedError:
                if isinstance(request, Join):
                    raise
                self._call(shard, Join(header=self._header, clock=self._joined_at))
            except ShardUnreachableError as exc:
                if attempt == self._config.attempts:
                    raise ShardUnreachableError(f"{shard} gave no answer in {attempt} calls; is it running?") from exc
                self._wait(self._config.pause)
                self._placement = self._ask_placement()
                if shard not in self._placement.weights:
                    return _gone(request)
        raise ServerError(f"{shard} asks worker {self._header.worker!r} to join again and again")


def _gone(request: Request) -> Reply:
    """Answer for a shard that the placement no longer names: its buckets have moved."""
    if isinstance(request, Push):
        return Pushed(acks={part.bucket: Ack(outcome="moved") for part in request.parts})
    if isinstance(request, Advance):
        return Advanced(behind={}, moved=tuple(request.buckets.tolist()))
    if isinstance(request, Pull):
        rows = [number for table, (ids, _) in request.rows.items() for number in buckets_of_rows(table, ids).tolist()]
        return Pulled(moved=(*request.buckets, *rows))
    if isinstance(request, Join):
        return Joined(clock=request.clock)
    raise NotHeldError("the shard of these pieces is gone")


def _own(payload: Payload) -> Payload:
    """Copy a payload that shares the memory of gradients."""
    if payload.codec != "fp32":
        return payload
    return Payload(codec=payload.codec, shape=payload.shape, data=payload.data.copy())
