"""Replicas: a shard has each change copied to another one before it answers, and holds copies for others.

Shard and copy are the same state machine, so that the same requests in the same order give the same bits. A bucket's
``changes`` tell whether a copy stands where the bucket stood before a request; one that does not is sent whole.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import ServerError, ServerRefusedError, TrainerConfigError
from .messages import Advance, Ask, Create, Pull, Push, Reply, Request
from .parcels import Parcels, pack, unpack
from .payloads import select_rows
from .placement import Placement, bucket_of_piece, buckets_of_rows
from .shard import ServerConfig, Shard

_AT_ONCE = 256
"""Buckets that are sent whole in one message."""


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Changes for the shard that holds copies: a request that made them, or buckets whole.

    ``order`` is the time of the sender's start and the number of the message since: what comes late is not applied.
    """

    source: str
    order: tuple[int, int]
    now: float
    request: Request | None = None
    before: Mapping[int, int] = field(default_factory=dict)
    """The ``changes`` of each bucket of the request before it."""
    after: Mapping[int, int] = field(default_factory=dict)
    whole: Mapping[int, bytes] = field(default_factory=dict)
    """Snapshots of buckets."""
    kept: frozenset[int] | None = None
    """If given, all copies of the sender's buckets that are still of use; others are dropped."""
    members: Mapping[str, tuple[int, int]]
    fenced: Mapping[str, int]
    token: str = field(default="", repr=False)


@dataclass(frozen=True, kw_only=True)
class Copied:
    """The buckets of a request that a copy has to get whole."""

    lagging: tuple[int, ...] = ()


Send = Callable[[str, Copy], Copied]
"""Bring a message to a shard, or raise ShardUnreachableError if it gave no answer."""


class ReplicatedShard:
    """A shard of a placement with ``replicas`` (1 or 2), which has its changes copied and holds copies of others.

    ``start`` is higher each time that the shard starts anew. ``copy`` and ``copies_of`` are for one thread, all others
    for another one. All mutable state: the shard, the copies, the order of the last message from each shard, which of
    its own changes have been copied where, and the buckets that it has handed out and may have to hand out again.
    """

    def __init__(
        self,
        name: str,
        config: ServerConfig,
        placement: Placement,
        *,
        replicas: int,
        send: Send,
        start: int,
        buckets: Collection[int] = (),
    ) -> None:
        if replicas not in (1, 2):
            raise TrainerConfigError(f"replicas={replicas} must be 1 (checkpoints only) or 2 (a copy of each bucket)")
        self._copying = replicas == 2 and len(placement.weights) > 1
        self.own = Shard(name, config, buckets, is_replicated=self._copying)
        self._placement, self._send = placement, send
        self._order = (start, 0)
        self._leaving: dict[int, Parcels] = {}
        self._copied: dict[int, tuple[str, int]] = {}
        self._copies: dict[str, Shard] = {}
        self._last: dict[str, tuple[int, int]] = {}

    def handle(self, request: Request, now: float) -> Reply:
        """Handle a request of a worker; when this returns, another shard has what it changed.

        Raises:
            ServerRefusedError, NoQuorumError: as ``Shard.handle``.
            ShardUnreachableError: the copy could not be made; sent again, the request is a duplicate and is copied.
        """
        if not self._copying:
            return self.own.handle(request, now)
        numbers = touched(request, self.own)
        before = {number: self.own.buckets[number].changes for number in numbers}
        reply = self.own.handle(request, now)
        self._copy(numbers, before, request, now)
        return reply

    def tick(self, now: float) -> None:
        """Close rounds whose time is over, and make copies that are lacking."""
        self.own.tick(now)
        if self._copying:
            self._copy(self.own.buckets, {}, None, now)

    def forget_copies_on(self, peer: str) -> None:
        """Note that a shard started anew, and has no copies; the next ``tick`` makes them."""
        self._copied = {number: held for number, held in self._copied.items() if held[0] != peer}

    def copy(self, message: Copy) -> Copied:
        """Apply what another shard sends to the copies of its buckets.

        Raises:
            ServerRefusedError: the sender has not the run's token, or a bucket is damaged.
        """
        if not hmac.compare_digest(message.token.encode(), self.own.config.token.encode()):
            raise ServerRefusedError(f"{self.own.name}: {message.source!r} has not the token of the run")
        if message.order <= self._last.get(message.source, (0, 0)):
            return Copied(lagging=tuple({*message.before, *message.after}))
        self._last[message.source] = message.order
        place = f"the copy of {message.source} on {self.own.name}"
        held = self._copies.setdefault(message.source, Shard(place, self.own.config))
        held.members, held.fenced = dict(message.members), dict(message.fenced)
        lagging = _other(message.before, held)
        if message.request is not None and not lagging:
            try:
                held.handle(message.request, message.now)
            except ServerError:
                lagging = list(message.before)
        for number, data in message.whole.items():
            held.adopt(data, place=f"{place}, bucket {number}")
        if message.kept is not None:
            for number in held.buckets.keys() - message.kept:
                held.drop(number)
        return Copied(lagging=tuple({*lagging, *_other(message.after, held)}))

    def copies_of(self, source: str) -> dict[int, bytes]:
        """The snapshots of the copies of a shard's buckets, which starts anew, perhaps by a clock that is behind."""
        self._last.pop(source, None)
        held = self._copies.get(source)
        return {} if held is None else {number: held.snapshot(number) for number in held.buckets}

    def adopt_copies(self, copies: Mapping[str, Mapping[int, bytes]], wanted: Collection[int]) -> set[int]:
        """Hold wanted buckets of which other shards have copies, by their names; returns the numbers of these.

        While copies go to another shard, two may have one; it counts where it is to be.
        """
        found: set[int] = set()
        for peer, several in copies.items():
            for number in several.keys() & set(wanted):
                if number not in found or peer == self._peer_of(number):
                    self.own.adopt(several[number], place=f"the copy of bucket {number} on {peer}")
                    self._copied[number] = peer, self.own.buckets[number].changes
                    found.add(number)
        return found

    def place(self, placement: Placement) -> None:
        """Have copies made from now on where a placement says."""
        self._placement = placement

    # Buckets that come and go

    def depart(self, numbers: Iterable[int], *, most_bytes: int) -> Parcels:
        """Hold the first of these buckets no more, and return what there is of them; asked again, the same.

        Raises:
            ServerError: one of them is not here, and was not handed out.
        """
        return pack(self.own, numbers, self._leaving, most_bytes=most_bytes)

    def forget(self, numbers: Iterable[int]) -> None:
        """Let go of what was handed out, and has arrived."""
        for number in numbers:
            self._leaving.pop(number, None)
            self._copied.pop(number, None)

    def arrive(self, parcels: Parcels, now: float) -> None:
        """Hold buckets from now on, those that are here already left as they are, and have them copied.

        Raises:
            ServerRefusedError: one of them is damaged, or of another run or model.
            ShardUnreachableError: a copy could not be made; they are held, and it is made when this is called again.
        """
        unpack(self.own, parcels, now)
        if self._copying:
            self._copy(parcels.buckets, {}, None, now)

    def settle(self, placement: Placement, now: float, *, at_most: int = _AT_ONCE) -> int:
        """Have copies lie where a placement says, some buckets a call; returns how many are left to do.

        Once none is, other shards hold no copies of this one's that are out of date.

        Raises:
            ShardUnreachableError: another shard gave no answer.
        """
        self.place(placement)
        for source in self._copies.keys() - set(placement.weights):
            self._copies.pop(source, None)
        if not self._copying:
            return 0
        left = [number for number in self.own.buckets if not self._is_copied(number)]
        self._copy(left[:at_most], {}, None, now)
        if len(left) <= at_most:
            for peer in placement.weights.keys() - {self.own.name}:
                kept = frozenset(number for number in self.own.buckets if self._copied[number][0] == peer)
                self._send(peer, self._message(now, kept=kept))
        return max(0, len(left) - at_most)

    def _peer_of(self, number: int) -> str:
        """The shard that has the copy: the next one, also of a bucket that is not where it will be."""
        return next(shard for shard in self._placement.holders(number, 3) if shard != self.own.name)

    def _is_copied(self, number: int) -> bool:
        return self._copied.get(number) == (self._peer_of(number), self.own.buckets[number].changes)

    def _copy(self, numbers: Iterable[int], before: Mapping[int, int], request: Request | None, now: float) -> None:
        """Bring the copies of buckets up to date, by the request where they stood where the buckets stood before it."""
        due: dict[str, list[int]] = {}
        for number in numbers:
            if not self._is_copied(number):
                due.setdefault(self._peer_of(number), []).append(number)
        for peer, lacking in due.items():
            whole = lacking
            if isinstance(request, Push | Create | Advance):
                near = [number for number in lacking if self._copied.get(number) == (peer, before[number])]
                if near:
                    after = {number: self.own.buckets[number].changes for number in near}
                    part, marks = _part(request, set(near)), {number: before[number] for number in near}
                    reply = self._send(peer, self._message(now, request=part, before=marks, after=after))
                    self._note(peer, set(near) - set(reply.lagging))
                    whole = sorted(set(lacking) - set(near) | set(reply.lagging))
            for first in range(0, len(whole), _AT_ONCE):
                several = whole[first : first + _AT_ONCE]
                snapshots = {number: self.own.snapshot(number) for number in several}
                after = {number: self.own.buckets[number].changes for number in several}
                reply = self._send(peer, self._message(now, whole=snapshots, after=after))
                if reply.lagging:
                    raise ServerError(f"{self.own.name}: {peer} does not take the copies of buckets {reply.lagging}")
                self._note(peer, several)

    def _message(self, now: float, **values: object) -> Copy:
        start, number = self._order
        self._order = start, number + 1
        own = self.own
        return Copy(
            source=own.name,
            order=self._order,
            now=now,
            members=dict(own.members),
            fenced=dict(own.fenced),
            token=own.config.token,
            **values,  # type: ignore[arg-type]
        )

    def _note(self, peer: str, numbers: Iterable[int]) -> None:
        self._copied.update({number: (peer, self.own.buckets[number].changes) for number in numbers})


def touched(request: Request, shard: Shard) -> list[int]:
    """The buckets of a shard that a request may change."""
    if isinstance(request, Create):
        numbers = {bucket_of_piece(*key) for key in request.pieces}
    elif isinstance(request, Push | Ask | Advance):  # an answer may say that what is here has been copied
        numbers = set(request.buckets.tolist())
    elif isinstance(request, Pull):  # time may close a round
        numbers = set(request.buckets).union(
            *(buckets_of_rows(table, ids).tolist() for table, (ids, _) in request.rows.items())
        )
    else:
        numbers = set(shard.buckets)
    return sorted(numbers & set(shard.buckets))


def _part(request: Push | Create | Advance, numbers: set[int]) -> Request:
    """The request as far as it is about these buckets."""
    if not isinstance(request, Advance):
        pieces = {key: one for key, one in request.pieces.items() if bucket_of_piece(*key) in numbers}
        if isinstance(request, Create):
            return replace(request, pieces=pieces)
    is_mine = np.isin(request.buckets, sorted(numbers))
    if is_mine.all():
        return request
    if isinstance(request, Push):
        rows = {}
        for table, (ids, payload) in request.rows.items():
            chosen = np.isin(buckets_of_rows(table, ids), sorted(numbers))
            rows[table] = ids[chosen], select_rows(payload, chosen)
        return replace(
            request,
            buckets=request.buckets[is_mine],
            sequences=request.sequences[is_mine],
            bases=request.bases[is_mine],
            pieces=pieces,
            rows=rows,
        )
    return replace(request, buckets=request.buckets[is_mine], counts=request.counts[is_mine])


def _other(changes: Mapping[int, int], shard: Shard) -> list[int]:
    """The buckets that a shard lacks, or has with other ``changes``."""
    return [
        number
        for number, count in changes.items()
        if number not in shard.buckets or shard.buckets[number].changes != count
    ]
