"""Leases: workers take ranges of an epoch's positions, and say which they have trained on.

A position is consumed once: it is free, leased to one worker, or consumed. What a worker that died had leased and not
consumed is free again. Every change is a line of a journal before it counts, so that a coordinator that died is
replaced by one that reads the journal.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ...storage.hashing import xxh3_64
from ..errors import LeaseError, TrainerConfigError

Range = tuple[int, int]
"""Positions from the first to before the second."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Positions from ``start`` to before ``stop``, of which those before ``done`` are consumed."""

    number: int
    worker: str
    epoch: int
    start: int
    stop: int
    done: int
    expires: float


class Leases:
    """The leases of an epoch of ``total`` positions, in ranges of at most ``span`` (say, a few global batches).

    ``write`` puts a line into the journal, and returns when it is safe. Times are seconds of the caller's clock.
    All mutable state: the epoch, consumed and free ranges, leases, and the number of the next lease.

    Raises:
        TrainerConfigError: ``total``, ``span`` or ``seconds`` is out of range.
    """

    def __init__(
        self, total: int, span: int, *, seconds: float, write: Callable[[bytes], None], epoch: int = 0
    ) -> None:
        if total < 0 or span < 1 or not seconds > 0:
            raise TrainerConfigError(f"leases of total={total}, span={span} and seconds={seconds} are not possible")
        self.total, self.span, self.seconds = total, span, seconds
        self._write = write
        self._next = 0
        self._begin(epoch, [])

    def _begin(self, epoch: int, consumed: Iterable[Range]) -> None:
        self.epoch = epoch
        self._consumed = _joined(consumed)
        self._leases: dict[int, Lease] = {}
        edges = [0, *(edge for pair in self._consumed for edge in pair), self.total]
        self._free = [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]

    @property
    def is_finished(self) -> bool:
        """Return whether all positions of the epoch are consumed."""
        return self._consumed == ([(0, self.total)] if self.total else [])

    @property
    def is_untouched(self) -> bool:
        """Return whether no position of the epoch is leased or consumed."""
        return not self._leases and not self._consumed

    @property
    def num_consumed(self) -> int:
        """Count the positions of the epoch that are consumed."""
        return sum(stop - start for start, stop in self._consumed)

    @property
    def first_left(self) -> int:
        """The first position of the epoch that is not consumed."""
        return self._consumed[0][1] if self._consumed and self._consumed[0][0] == 0 else 0

    @property
    def held(self) -> tuple[Lease, ...]:
        """The leases that are out, in the order of their numbers."""
        return tuple(self._leases.values())

    def lease(self, worker: str, now: float) -> Lease | None:
        """Lease the first free positions to a worker; None if none is free (yet)."""
        self.expire(now)
        if not self._free:
            return None
        start, stop = self._free[0]
        stop = min(stop, start + self.span)
        self._commit({"op": "lease", "number": self._next, "worker": worker, "start": start, "stop": stop}, now)
        return self._leases[self._next - 1]

    def renew(self, worker: str, now: float) -> None:
        """Note that a worker lives. It is not journaled: a new coordinator gives all leases their full time."""
        for number, lease in self._leases.items():
            if lease.worker == worker:
                self._leases[number] = replace(lease, expires=now + self.seconds)

    def consume(self, number: int, worker: str, upto: int, now: float) -> None:
        """Note that a lease's positions before ``upto`` are trained on; saying so again changes nothing.

        Raises:
            LeaseError: the lease went back, or ``upto`` is not of it. The worker must not count these positions.
        """
        self.expire(now)
        lease = self._leases.get(number)
        if lease is None or lease.worker != worker:
            raise LeaseError(f"lease {number} of epoch {self.epoch} went back or is done; drop what was read for it")
        if not lease.start <= upto <= lease.stop:
            raise LeaseError(f"lease {number} is of positions {lease.start} to {lease.stop}, and not up to {upto}")
        if upto > lease.done:
            self._commit({"op": "consume", "number": number, "upto": upto}, now)

    def forget(self, worker: str, now: float) -> list[Range]:
        """Take back what a worker has leased and not consumed; returns those ranges."""
        mine = [lease for lease in self.held if lease.worker == worker]
        for lease in mine:
            self._commit({"op": "return", "number": lease.number}, now)
        return [(lease.done, lease.stop) for lease in mine]

    def expire(self, now: float) -> None:
        """Take back leases whose time is over."""
        for lease in self.held:
            if lease.expires <= now:
                self._commit({"op": "return", "number": lease.number}, now)

    def begin_epoch(self, now: float, *, total: int | None = None) -> None:
        """Go on to the next epoch, of ``total`` positions if it has another number.

        Raises:
            LeaseError: positions of this one are not consumed yet.
        """
        if not self.is_finished:
            raise LeaseError(f"epoch {self.epoch} has positions that nobody has consumed; finish it first")
        self._commit({"op": "epoch", "epoch": self.epoch + 1, "total": self.total if total is None else total}, now)

    def state_dict(self) -> dict[str, Any]:
        """Return (epoch, consumed ranges): all that a run of any other number of workers needs to go on.

        The number of the next lease is there, too, so that no lease of before can be taken for one of after.
        """
        consumed = [list(pair) for pair in self._consumed]
        return {"epoch": self.epoch, "total": self.total, "next_lease": self._next, "consumed": consumed}

    def load_state_dict(self, state: Mapping[str, Any], now: float, *, total: int | None = None) -> None:
        """Continue from a state; leases that are out go back. ``total`` as in ``begin_epoch``.

        Raises:
            LeaseError: the state is of another number of positions, or its ranges are not within it.
        """
        consumed = [(start, stop) for start, stop in state["consumed"]]
        total = self.total if total is None else total
        if state["total"] != total or any(not 0 <= a < b <= total for a, b in consumed):
            raise LeaseError(f"a state of {state['total']} positions is not one of {total}, or is damaged")
        if any(after[0] < before[1] for before, after in pairwise(consumed)):
            raise LeaseError("the consumed ranges of a state overlap or are out of order")
        number = max(self._next, state["next_lease"])
        change = {"op": "load", "epoch": state["epoch"], "total": total, "next": number, "consumed": consumed}
        self._commit(change, now)

    def _commit(self, change: dict[str, Any], now: float) -> None:
        """Write a change to the journal, and then make it."""
        self._write(journal_line(change))
        self.make(change, now)

    def make(self, change: Mapping[str, Any], now: float) -> None:
        """Make a change of the journal."""
        kind = change["op"]
        if kind == "lease":
            number, start, stop = change["number"], change["start"], change["stop"]
            free = heapq.heappop(self._free)
            if free[0] != start or stop > free[1]:
                raise LeaseError(f"lease {number} of positions {start} to {stop} is not of those that are free")
            if stop < free[1]:
                heapq.heappush(self._free, (stop, free[1]))
            self._next = number + 1
            self._leases[number] = Lease(
                number=number,
                worker=change["worker"],
                epoch=self.epoch,
                start=start,
                stop=stop,
                done=start,
                expires=now + self.seconds,
            )
        elif kind == "consume":
            lease = self._leases[change["number"]]
            self._consumed = _joined([*self._consumed, (lease.done, change["upto"])])
            if change["upto"] == lease.stop:
                del self._leases[lease.number]
            else:
                self._leases[lease.number] = replace(lease, done=change["upto"], expires=now + self.seconds)
        elif kind == "return":
            lease = self._leases.pop(change["number"])
            heapq.heappush(self._free, (lease.done, lease.stop))
        elif kind == "epoch":
            self.total = change["total"]
            self._begin(change["epoch"], [])
        else:
            self.total, self._next = change["total"], change["next"]
            self._begin(change["epoch"], [(start, stop) for start, stop in change["consumed"]])

    def replay(self, journal: bytes, now: float) -> int:
        """Make the changes of a journal; returns the bytes that hold whole lines, after which to write on.

        A last line without its end was being written when the coordinator died, and never counted.

        Raises:
            LeaseError: another line is damaged.
        """
        length = 0
        for change, stop in read_journal(journal):
            self.make(change, now)
            length = stop
        return length


def journal_line(change: Mapping[str, Any]) -> bytes:
    """Write a change as a line: JSON, and its checksum."""
    text = json.dumps(change).encode()
    return text + f" {xxh3_64(text):016x}\n".encode()


def read_journal(journal: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    """Read the changes of a journal, each with the number of bytes up to its end.

    A last line without its end was being written when the coordinator died, and never counted.

    Raises:
        LeaseError: another line is damaged.
    """
    length = 0
    for index, line in enumerate(journal.splitlines(keepends=True)):
        if not line.endswith(b"\n"):
            break
        text, _, checksum = line[:-1].rpartition(b" ")
        if checksum != f"{xxh3_64(text):016x}".encode():
            raise LeaseError(f"line {index + 1} of the journal of leases is damaged; restore the run's checkpoint")
        length += len(line)
        yield json.loads(text), length


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Sort ranges that do not overlap, and join those that touch."""
    joined: list[Range] = []
    for start, stop in sorted(ranges):
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        elif start < stop:
            joined.append((start, stop))
    return joined
