"""A worker's side: it cuts gradients into parts, sends each until it counts, and keeps them until none can be lost.

The client knows no network. ``call(shard, request)`` returns the reply of a shard, or raises ShardUnreachableError if
none came, whether or not the request was applied. ``start(shard, request)``, if there is one, sends a request and
returns what waits for the reply, so that several are under way at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import NotHeldError, NotJoinedError, ServerError, ServerRefusedError, ShardUnreachableError
from . import placement as placement_module
from .messages import (
    Advance,
    Advanced,
    Ask,
    Create,
    Header,
    Join,
    Joined,
    Outcome,
    PieceKey,
    Pull,
    Pulled,
    Push,
    Pushed,
    Reply,
    Request,
)
from .payloads import CodecConfig, ErrorFeedback, Payload, decode, encode, is_finite, select_rows
from .placement import Placement, buckets_of_rows
from .schema import Schema

Call = Callable[[str, Request], Reply]
Start = Callable[[str, Request], Callable[[], Reply]]
Numbers = NDArray[np.int64]
Rows = Mapping[str, tuple[Numbers, Tensor]]
"""By table ids (n,) and rows (n, width)."""


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
    """A push that was made, in parts: one for each bucket (n,), with its sequence (n,) and base (n,)."""

    buckets: Numbers
    sequences: Numbers
    bases: Numbers
    pieces: dict[PieceKey, Payload]
    rows: dict[str, tuple[Numbers, Numbers, Payload]]
    """By table ids (m,), ascending, the bucket of each, and gradients (m, width)."""
    step: int
    weight: float
    rate: float | None
    unit: int | None
    is_shared: bool
    """Its memory is the caller's, who may write to it once the push has returned."""


@dataclass(kw_only=True)
class _Lookup:
    """Rows of distinct ids (n,), ascending, as far as they are read: values (n, width) and their versions (n,)."""

    ids: Numbers
    numbers: Numbers
    versions: Numbers
    """-1: not known."""
    values: Tensor
    left: NDArray[np.bool_]
    """The rows that are to be asked for."""


MESSAGE_BYTES = 64 << 20
"""Bytes of values from which a request is sent as several: one is worked on while the next is on its way.

Through Ray 16 MiB in four messages took 1.4 times as long as in one (two cores)."""


class ServerClient:
    """One incarnation of a worker. ``wait(seconds)`` is called before each retry, and may raise to end it.

    All mutable state: the clock, the number of parts sent to each bucket, of which each shard has some and some cannot
    be lost, pushes that could, what rounding owes, the tensors as last pulled with their buckets' versions, and rows
    that were read ahead. Not for several threads.
    """

    def __init__(
        self,
        header: Header,
        schema: Schema,
        *,
        call: Call,
        placement: Callable[[], Placement],
        wait: Callable[[float], None],
        start: Start | None = None,
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
        self._call_once, self._start, self._ask_placement, self._wait = call, start, placement, wait
        self._placement = placement()
        self._joined_at = 0
        self._buckets = schema.buckets()
        self._bucket_of = schema.places()
        self._counts, self._taken, self._durable = (np.zeros(placement_module.BUCKETS, np.int64) for _ in range(3))
        self._log: list[_Sent] = []
        """Pushes with parts that could still be lost, in order."""
        self._versions = np.full(placement_module.BUCKETS, -1, np.int64)
        self._dense = np.unique(np.array([*self._bucket_of.values()], np.int64))
        self._sizes = np.zeros(placement_module.BUCKETS, np.int64)
        """The bytes of the pieces in each bucket."""
        for (name, index), number in self._bucket_of.items():
            self._sizes[number] += 4 * schema.tensor(name).piece_size(index)
        self._ahead: dict[str, _Lookup] = {}

    @property
    def kept(self) -> int:
        """The number of parts that are kept because they could still be lost."""
        return sum(int((one.sequences > self._durable[one.buckets]).sum()) for one in self._log)

    @property
    def kept_units(self) -> set[int]:
        """The batches whose gradients could still be lost."""
        return {one.unit for one in self._log if one.unit is not None}

    def join(self, clock: int = 0) -> None:
        """Join all shards, at a clock that none of them is behind of: others' steps before it are not waited for."""
        agreed = -1
        while agreed < clock:
            agreed = clock
            for shard in self._placement.shards:
                reply = self._call(shard, Join(header=self._header, clock=clock))
                assert isinstance(reply, Joined)
                clock = max(clock, reply.clock)
        self.clock = self._joined_at = clock

    def create(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the servers first values of dense tensors; where they have some, those stay."""
        todo: dict[int, dict[PieceKey, Payload]] = {}
        for name, tensor in tensors.items():
            for key, flat in self._cut(name, tensor):
                todo.setdefault(self._bucket_of[key], {})[key] = encode(flat, CodecConfig())
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
        rows: Rows | None = None,
        *,
        weight: float = 1.0,
        rate: float | None = None,
        only: Collection[int] | None = None,
        is_given: bool = False,
    ) -> None:
        """Push gradients of this step; returns when all count. Ids (n,) may repeat: their rows (n, width) are added.

        Of tensors the pieces in the buckets ``only`` are pushed; without it all. With ``is_given`` nobody writes to
        the tensors any more, so that what must be kept of them needs no copy.

        Raises:
            ServerRefusedError: a value is not finite, or a shape is not the server's; nothing counts.
        """
        self._prepare(tensors, rows or {}, weight, rate, only, is_shared=not is_given)
        try:
            self.flush()
        finally:
            self._own_kept()

    def _prepare(
        self,
        tensors: Mapping[str, Tensor],
        rows: Rows,
        weight: float,
        rate: float | None,
        only: Collection[int] | None,
        *,
        is_shared: bool,
    ) -> None:
        """Cut gradients into parts, which share the memory of fp32 ones until ``_own_kept``."""
        self._check_finite(tensors, rows)
        cut = [each for name, tensor in tensors.items() for each in self._cut(name, tensor)]
        self._check_rows(rows)
        pieces = {
            key: self.feedback.encode(f"{key[1]} {key[0]}", flat)
            for key, flat in cut
            if only is None or self._bucket_of[key] in only
        }
        codec = self._config.push if self._config.push.codec in ("fp32", "bf16") else CodecConfig()
        summed: dict[str, tuple[Numbers, Numbers, Payload]] = {}
        for table, (ids, gradients) in rows.items():
            distinct, places = np.unique(ids, return_inverse=True)
            total = torch.zeros(len(distinct), gradients.shape[1]).index_add_(0, torch.from_numpy(places), gradients)
            summed[table] = distinct, buckets_of_rows(table, distinct), encode(total, codec)
        touched = np.zeros(placement_module.BUCKETS, bool)
        touched[[self._bucket_of[key] for key in pieces]] = True
        for _, numbers, _ in summed.values():
            touched[numbers] = True
        buckets = np.flatnonzero(touched)
        self._counts[buckets] += 1
        sent = _Sent(
            buckets=buckets,
            sequences=self._counts[buckets],
            bases=np.maximum(self._versions[buckets], 0),
            pieces=pieces,
            rows=summed,
            step=self.clock,
            weight=weight,
            rate=rate,
            unit=self.unit,
            is_shared=is_shared,
        )
        self._log.append(sent)

    def _own_kept(self) -> None:
        """Copy what is kept of memory that the caller may write to; a push that cannot be lost by now is not kept."""
        for one in self._log:
            if one.is_shared:
                one.pieces = {key: _own(payload) for key, payload in one.pieces.items()}
                one.is_shared = False

    def flush(self) -> None:
        """Send what does not count yet, until all does."""
        while any(len(self._find_untaken(one)) for one in self._log):
            for one in list(self._log):
                if not self._send(one):
                    break

    def _find_untaken(self, sent: _Sent) -> Numbers:
        """The buckets of a push whose shards have not said that they have its part."""
        return sent.buckets[sent.sequences > self._taken[sent.buckets]]

    def _send(self, sent: _Sent) -> bool:
        """Send what shards lack of a push; False if they do not hold its buckets, or lack what was before."""
        untaken = self._placement.split(self._find_untaken(sent))
        requests = [
            (shard, self._cut_push(sent, part))
            for shard, numbers in untaken.items()
            for part in self._split(numbers, [*sent.pieces])
        ]
        outcomes = set[int]()
        for (_, request), reply in zip(requests, self._call_all(requests), strict=True):
            assert isinstance(reply, Pushed)
            is_applied = reply.outcomes == Outcome.APPLIED
            if is_applied.any():
                behind = reply.versions[is_applied] - 1 - request.bases[is_applied]
                self.staleness = max(self.staleness, int(behind.max()))
            self._note(reply)
            outcomes.update(reply.outcomes.tolist())
        if Outcome.MOVED in outcomes:
            self._find_moved()
        return not outcomes & {Outcome.MOVED, Outcome.GAP}

    def _split(self, numbers: Numbers, keys: Sequence[PieceKey]) -> list[Numbers]:
        """Divide buckets (n,), so that the pieces ``keys`` of each part are not much more than ``MESSAGE_BYTES``."""
        sizes = np.zeros(placement_module.BUCKETS, np.int64)
        touched = [self._bucket_of[key] for key in keys]
        sizes[touched] = self._sizes[touched]
        before = np.cumsum(sizes[numbers]) - sizes[numbers]
        return np.split(numbers, np.flatnonzero(np.diff(before // MESSAGE_BYTES)) + 1)

    def _cut_push(self, sent: _Sent, numbers: Numbers) -> Push:
        """The parts of a push for these buckets."""
        is_wanted = np.zeros(placement_module.BUCKETS, bool)
        is_wanted[numbers] = True
        parts = is_wanted[sent.buckets]
        rows = {}
        for table, (ids, of_rows, payload) in sent.rows.items():
            chosen = is_wanted[of_rows]
            if chosen.all():
                rows[table] = ids, payload
            elif chosen.any():
                rows[table] = ids[chosen], select_rows(payload, chosen)
        return Push(
            header=self._header,
            step=sent.step,
            buckets=sent.buckets[parts],
            sequences=sent.sequences[parts],
            bases=sent.bases[parts],
            pieces={key: payload for key, payload in sent.pieces.items() if is_wanted[self._bucket_of[key]]},
            rows=rows,
            weight=sent.weight,
            rate=sent.rate,
            unit=sent.unit,
            settled=self.settled,
        )

    def ask_durable(self) -> None:
        """Ask what can no longer be lost of what is kept, and send again what shards lack of it."""
        touched = np.zeros(placement_module.BUCKETS, bool)
        for one in self._log:
            touched[one.buckets[one.sequences > self._durable[one.buckets]]] = True
        asked = self._placement.split(np.flatnonzero(touched))
        requests = [(shard, Ask(header=self._header, buckets=numbers)) for shard, numbers in asked.items()]
        is_moved = False
        for reply in self._call_all(requests):
            assert isinstance(reply, Pushed)
            self._note(reply)
            is_moved |= bool((reply.outcomes == Outcome.MOVED).any())
        if is_moved:
            self._find_moved()
        self.flush()

    def advance(self) -> None:
        """Finish this step: push first what is left of it."""
        self.clock += 1
        self.send_clock()

    def pull(self, only: Collection[int] | None = None) -> dict[str, Tensor]:
        """Bring ``tensors`` up to date, once the policy lets this worker read; returns them in their shapes.

        Pieces in the buckets ``only`` are; without it all.
        """
        self._read(self._dense if only is None else np.array(sorted(only), np.int64), {})
        return {spec.name: self.tensors[spec.name].view(spec.shape) for spec in self._schema.tensors}

    def pull_rows(self, table: str, ids: Numbers) -> Tensor:
        """Read rows (n, width) by ids (n,), which may repeat."""
        found = self._start_lookup(table, ids)
        self._read(np.zeros(0, np.int64), {table: found})
        return found.values[torch.from_numpy(np.searchsorted(found.ids, ids))]

    def pull_ahead(self, lookups: Mapping[str, Numbers]) -> None:
        """Read rows, by table ids that may repeat, that the next ``pull_with_rows`` asks for."""
        self._ahead = {table: self._start_lookup(table, ids) for table, ids in lookups.items()}
        self._read(np.zeros(0, np.int64), self._ahead)

    def pull_with_rows(self, lookups: Mapping[str, Numbers]) -> dict[str, tuple[Numbers, Tensor]]:
        """Bring ``tensors`` up to date, and read rows, once the policy lets this worker read.

        Shards send those rows that are of another version than when they were read ahead, or were not. Returns by table
        the distinct ids (n,), ascending, and rows (n, width).
        """
        ahead, self._ahead = self._ahead, {}
        todo = {table: self._start_lookup(table, ids) for table, ids in lookups.items()}
        for table, lookup in todo.items():
            if table in ahead:
                _reuse(ahead[table], lookup)
        self._read(self._dense, todo)
        return {table: (lookup.ids, lookup.values) for table, lookup in todo.items()}

    def _start_lookup(self, table: str, ids: Numbers) -> _Lookup:
        distinct = np.unique(ids)
        return _Lookup(
            ids=distinct,
            numbers=buckets_of_rows(table, distinct),
            versions=np.full(len(distinct), -1, np.int64),
            values=torch.empty(len(distinct), self._schema.table(table).width),
            left=np.ones(len(distinct), bool),
        )

    def _read(self, dense: Numbers, lookups: Mapping[str, _Lookup]) -> None:
        """Bring the tensors of buckets (n,), and rows, up to date."""
        requests = self._make_pulls(dense, lookups)
        while requests:
            slow, is_moved, again = set[str](), False, []
            for (shard, request), reply in zip(requests, self._call_all(requests), strict=True):
                assert isinstance(reply, Pulled)
                is_moved |= bool(reply.moved)
                if reply.waiting_for:
                    slow.update(reply.waiting_for)
                    again.append((shard, request))
                elif not reply.moved:
                    self._take(request, reply, lookups)
                    dense = np.setdiff1d(dense, np.array([*request.buckets], np.int64))
            if slow:
                self._wait(self._config.pause)
            if self._header.worker in slow:  # a shard came back from an older state
                self.send_clock()
            if is_moved:
                self._find_moved()
            requests = self._make_pulls(dense, lookups) if is_moved else again

    def _make_pulls(self, dense: Numbers, lookups: Mapping[str, _Lookup]) -> list[tuple[str, Pull]]:
        """Ask each shard for what is left of tensors in buckets (n,), and of rows."""
        requests = []
        left = [one.numbers[one.left] for one in lookups.values()]
        for shard, numbers in self._placement.split(np.unique(np.concatenate([dense, *left]))).items():
            rows = {}
            for table, one in lookups.items():
                at = np.flatnonzero(one.left & self._placement.holds(shard, one.numbers))
                if len(at):
                    rows[table] = one.ids[at], one.versions[at]
            for part in self._split(np.intersect1d(numbers, dense), [*self._bucket_of]):
                known = dict(zip(part.tolist(), self._versions[part].tolist(), strict=True))
                clock = self.clock + self.reads_ahead
                requests.append(
                    (shard, Pull(header=self._header, clock=clock, buckets=known, rows=rows, codec=self._config.pull))
                )
                rows = {}
        return requests

    def _take(self, request: Pull, reply: Pulled, lookups: Mapping[str, _Lookup]) -> None:
        """Take what a shard sent."""
        for (name, index), payload in reply.pieces.items():
            start = index * self._schema.tensor(name).piece
            self.tensors[name][start : start + payload.shape[0]] = decode(payload, checks_values=False)
        for number, version in reply.versions.items():
            self._versions[number] = version
        for table, (ids, versions, payload) in reply.rows.items():
            lookup = lookups[table]
            at = np.searchsorted(lookup.ids, ids)
            lookup.versions[at] = versions
            lookup.values[torch.from_numpy(at)] = decode(payload, checks_values=False)
        for table, (asked, _) in request.rows.items():
            lookups[table].left[np.searchsorted(lookups[table].ids, asked)] = False

    def _cut(self, name: str, tensor: Tensor) -> list[tuple[PieceKey, Tensor]]:
        spec = self._schema.tensor(name)
        if tuple(tensor.shape) != spec.shape:
            raise ServerRefusedError(
                f"{name!r} has shape {spec.shape} on the server, and here {tuple(tensor.shape)}; nothing was sent"
            )
        flat = tensor.detach().reshape(-1).float()
        return [((name, index), part) for index, part in enumerate(torch.split(flat, spec.piece) if spec.size else ())]

    def _check_finite(self, tensors: Mapping[str, Tensor], rows: Rows) -> None:
        for name, tensor in (*tensors.items(), *((table, gradients) for table, (_, gradients) in rows.items())):
            if not is_finite(tensor):
                raise ServerRefusedError(
                    f"worker {self._header.worker!r}, step {self.clock}: gradients of {name!r} are NaN or infinite; "
                    "nothing was sent"
                )

    def _check_rows(self, rows: Rows) -> None:
        for table, (ids, gradients) in rows.items():
            width = self._schema.table(table).width
            if tuple(gradients.shape) != (len(ids), width) or ids.dtype != np.int64:
                raise ServerRefusedError(
                    f"rows of {table!r} have shape {(len(ids), width)} and int64 ids, and here "
                    f"{tuple(gradients.shape)} and {ids.dtype}; nothing was sent"
                )

    def _note(self, reply: Pushed) -> None:
        """Note which parts of buckets count, and let go of pushes that cannot be lost."""
        is_held = reply.outcomes != Outcome.MOVED
        numbers = reply.buckets[is_held]
        self._set_back(numbers, reply.sequences[is_held])
        self._durable[numbers] = np.maximum(self._durable[numbers], reply.durables[is_held])
        self._log = [one for one in self._log if (one.sequences > self._durable[one.buckets]).any()]

    def _set_back(self, numbers: Numbers, last: Numbers) -> None:
        """Take a shard's word for the last part (n,) that it has of each of these buckets (n,)."""
        durable = self._durable[numbers]
        is_lost = last < durable
        if is_lost.any():
            at = int(np.flatnonzero(is_lost)[0])
            raise ServerError(
                f"worker {self._header.worker!r}: bucket {numbers[at]} was restored to push {last[at]} of this worker, "
                f"which keeps those from {durable[at] + 1} on; restore the servers from their newest checkpoint"
            )
        self._taken[numbers] = last

    def send_clock(self) -> None:
        """Tell all shards the clock, and send again what they lack; needed where a shard came back from the past."""
        left = self._buckets
        while len(left):
            self.flush()
            requests = [
                (shard, Advance(header=self._header, clock=self.clock, buckets=numbers, counts=self._counts[numbers]))
                for shard, numbers in self._placement.split(left).items()
            ]
            again: list[int] = []
            is_moved = False
            for reply in self._call_all(requests):
                assert isinstance(reply, Advanced)
                self._set_back(np.array([*reply.behind], np.int64), np.array([*reply.behind.values()], np.int64))
                again += [*reply.behind, *reply.moved]
                is_moved |= bool(reply.moved)
            left = np.array(sorted(again), np.int64)
            if is_moved:
                self._find_moved()

    def _find_moved(self) -> None:
        self._wait(self._config.pause)
        self._placement = self._ask_placement()

    def _call_all(self, requests: Sequence[tuple[str, Request]]) -> Iterator[Reply]:
        """Send requests, all at once where that can be done, and give the reply to each."""
        if self._start is None or len(requests) == 1:
            for shard, request in requests:
                yield self._call(shard, request)
            return
        started: list[Callable[[], Reply] | None] = []
        for shard, request in requests:
            try:
                started.append(self._start(shard, request))
            except (NotJoinedError, ShardUnreachableError):
                started.append(None)
        for (shard, request), take in zip(requests, started, strict=True):
            try:
                reply = self._call(shard, request) if take is None else take()
            except (NotJoinedError, ShardUnreachableError):
                reply = self._call(shard, request)
            yield reply

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
                if shard not in self._placement.shards:
                    return _gone(request)
        raise ServerError(f"{shard} asks worker {self._header.worker!r} to join again and again")


def _gone(request: Request) -> Reply:
    """Answer for a shard that the placement no longer names: its buckets have moved."""
    if isinstance(request, Push | Ask):
        none = np.zeros(len(request.buckets), np.int64)
        outcomes = np.full(len(request.buckets), Outcome.MOVED, np.int8)
        return Pushed(buckets=request.buckets, outcomes=outcomes, sequences=none, durables=none, versions=none)
    if isinstance(request, Advance):
        return Advanced(behind={}, moved=tuple(request.buckets.tolist()))
    if isinstance(request, Pull):
        rows = [number for table, (ids, _) in request.rows.items() for number in buckets_of_rows(table, ids).tolist()]
        return Pulled(moved=(*request.buckets, *rows))
    if isinstance(request, Join):
        return Joined(clock=request.clock)
    raise NotHeldError("the shard of these pieces is gone")


def _reuse(known: _Lookup, wanted: _Lookup) -> None:
    """Take over the rows that were read."""
    if not len(known.ids):
        return
    places = np.searchsorted(known.ids, wanted.ids)
    places[places == len(known.ids)] = 0
    at = np.flatnonzero(known.ids[places] == wanted.ids)
    wanted.versions[at] = known.versions[places[at]]
    wanted.values[torch.from_numpy(at)] = known.values[torch.from_numpy(places[at])]


def _own(payload: Payload) -> Payload:
    """Copy a payload that shares the memory of gradients."""
    if payload.codec != "fp32":
        return payload
    return Payload(codec=payload.codec, shape=payload.shape, data=payload.data.copy())
