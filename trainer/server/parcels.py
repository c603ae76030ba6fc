"""Parcels: buckets on their way from one shard to another, with all that the first one knew of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ..errors import NotJoinedError, ServerError
from .messages import Header, Join, Leave
from .shard import Shard


@dataclass(frozen=True, kw_only=True)
class Parcels:
    """Buckets by number as snapshots, of a shard's members and of workers that it forgot, each by incarnation.

    ``durable`` are the sequences that a checkpoint has, by bucket and worker. A bucket without them is from one, or
    from a copy. Of those in ``absent`` there is nothing; they are held empty.
    """

    buckets: Mapping[int, bytes]
    absent: frozenset[int] = frozenset()
    durable: Mapping[int, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    members: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    fenced: Mapping[str, int] = field(default_factory=dict)

    @property
    def numbers(self) -> frozenset[int]:
        """All buckets that these are of."""
        return self.absent | self.buckets.keys()


def pack(
    shard: Shard, numbers: Iterable[int], leaving: MutableMapping[int, Parcels] | None = None, *, most_bytes: int
) -> Parcels:
    """Take buckets out of a shard until there are so many bytes, one at least.

    Each is noted in ``leaving``, from where it is taken if it has been packed before.

    Raises:
        ServerError: a bucket is neither on the shard nor there.
    """
    leaving = {} if leaving is None else leaving
    buckets: dict[int, bytes] = {}
    durable: dict[int, Mapping[str, tuple[int, int]]] = {}
    total = 0
    for number in numbers:
        if buckets and total >= most_bytes:
            break
        if number in shard.buckets:
            data = shard.snapshot(number)
            known = {number: shard.durable(number)}
            leaving[number] = Parcels(buckets={number: data}, durable=known)
            shard.drop(number)
        if number not in leaving:
            raise ServerError(f"{shard.name} is to hand out bucket {number}, and does not hold it")
        buckets.update(leaving[number].buckets)
        durable.update(leaving[number].durable)
        total += len(buckets[number])
    return Parcels(buckets=buckets, durable=durable, members=dict(shard.members), fenced=dict(shard.fenced))


def unpack(shard: Shard, parcels: Parcels, now: float) -> None:
    """Hold buckets on a shard from now on, but for those that it holds already, which may have changed since.

    Raises:
        ServerRefusedError: one of them is damaged, or of another run or model.
    """
    new = [number for number in parcels.buckets if number not in shard.buckets]
    if new:
        _meet(shard, parcels, now)
    for number in new:
        shard.adopt(parcels.buckets[number], place="a bucket that moves")
        if number in parcels.durable:
            shard.confirm(number, _less(shard, number, parcels.durable[number]))
    shard.hold_empty([number for number in parcels.absent if number not in shard.buckets])


def _meet(shard: Shard, parcels: Parcels, now: float) -> None:
    """Let members join and leave of whom only the shard that the buckets come from has heard by now."""
    config = shard.config
    header = Header(run=config.run, schema=config.schema.digest, worker="", token=config.token)
    for worker, incarnation in parcels.fenced.items():
        if incarnation > shard.fenced.get(worker, -1):
            of_worker = replace(header, worker=worker, incarnation=incarnation)
            shard.handle(Leave(header=of_worker, worker=worker), now)
    for worker, (incarnation, clock) in parcels.members.items():
        with suppress(NotJoinedError):  # it has left by now, or lives anew
            shard.handle(Join(header=replace(header, worker=worker, incarnation=incarnation), clock=clock), now)


def _less(shard: Shard, number: int, durable: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """The sequences that are durable: none of a worker of whom no checkpoint has any."""
    sequences = shard.buckets[number].sequences
    return {worker: durable.get(worker, (incarnation, 0)) for worker, (incarnation, _) in sequences.items()}
