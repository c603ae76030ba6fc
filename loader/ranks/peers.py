"""Errors that end the loader on one rank are posted to all, through the key-value store of their process group.

So are those that kept a loader from being made, and calls that ranks make differently (``calls.py``). There are no
collectives, so a rank that is late, blocked or gone delays nobody. A thread of each process polls the store twice a
second. A rank that waits for a batch is woken; one that trains gets the error with its next batch; one
that is blocked in a collective cannot be woken by us, but its log names the first cause.

The store holds a log of incidents (``incidents.py``). An incident belongs to a loader (``naming.py``): it stops
that loader on the other ranks, perhaps before they have made it, and none that they make or have beside it. A rank that
has closed that loader only logs it. The silence of a rank stops every loader, and so does the end of its process, if it
has not continued with any loader since its last incident.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...storage.store_link import SILENT_S, START_KEY, clone_store, is_cut_off, place_of
from ...storage.threads.interruptible import Condition, Thread
from ..dataset.exchange import RemoteError
from ..errors import RankStoppedError
from .incidents import AGAIN_S, KNOWN_WITHIN_S, NAMESPACE, Heard, Incident, Pending, this_process, wait_until_known
from .naming import group_store, last_posted

if TYPE_CHECKING:
    from .calls import Calls


SIGN_S = 5.0
_LOOKED_PAST = 16  # ranks that have not come yet, or have left, which one poll passes over
_NAMESPACE = "penstock/alive"
_LEFT = "left"
_LATE = 4.0  # polls that come this many times later than they should: this process was suspended


@dataclass(frozen=True, slots=True)
class Seen:
    """The newest heartbeat of a rank, and when it was first seen, by the reader's clock."""

    rank: int
    sign: str
    since_s: float


def look_on(before: Seen | None, rank: int, sign: str, now_s: float, looked_at_s: float) -> Seen:
    """Update what is known of a rank after a poll; a late poll begins anew, as the reader itself was suspended."""
    is_late = now_s - looked_at_s > _LATE * SIGN_S
    if before is None or is_late or (before.rank, before.sign) != (rank, sign):
        return Seen(rank, sign, now_s)
    return before


def judge(seen: Seen, now_s: float) -> RemoteError | None:
    """The silence of a rank as the error that stops the others; None while it may be alive."""
    if now_s - seen.since_s <= SILENT_S:
        return None
    host = seen.sign.partition(" ")[2]
    return RemoteError(
        seen.rank,
        "Silence",
        f"it has shown no sign of life for {now_s - seen.since_s:.0f} s: its process is dead or stopped, or its host, "
        f"{host}, is down or cut off; start again without that host, and the order goes on on the ranks that are left",
    )


class Signs:
    """Heartbeats that one rank sends and reads. Used by one thread. Mutable state: the own count, and what was seen."""

    def __init__(self, rank: int, world_size: int, now_s: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._count = 0
        self._seen: Seen | None = None
        self._looked_at_s = now_s
        self._due_s = now_s

    def exchange(self, store: Any, now_s: float) -> RemoteError | None:
        """Send a heartbeat and poll the next rank's, if they are due; returns an error if that rank is silent.

        Raises:
            RuntimeError: the store is gone.
        """
        if now_s < self._due_s:
            return None
        self._due_s = now_s + SIGN_S
        self._count += 1
        store.set(_key(self._rank), f"{self._count} {socket.gethostname()}")
        found = self._find_next(store)
        before, looked_at_s, self._looked_at_s = self._seen, self._looked_at_s, now_s
        self._seen = None if found is None else look_on(before, *found, now_s, looked_at_s)
        return None if self._seen is None else judge(self._seen, now_s)

    def leave(self, store: Any) -> None:
        """Announce that this rank sends no more heartbeats, and is not missed."""
        store.set(_key(self._rank), _LEFT)

    def _find_next(self, store: Any) -> tuple[int, str] | None:
        for step in range(1, min(self._world_size, _LOOKED_PAST + 1)):
            rank = (self._rank + step) % self._world_size
            if store.check([_key(rank)]) and (sign := store.get(_key(rank)).decode()) != _LEFT:
                return rank, sign
        return None


def _key(rank: int) -> str:
    return f"{_NAMESPACE}/{rank}"


LOOK_S = 0.5
RANKS_A_SECOND = 2000  # that one store answers without effort: larger worlds look less often
_LOG = logging.getLogger(__name__)

Interrupt = Callable[[RankStoppedError | None], None]

_lock = threading.Lock()
_watches: dict[int, PeerWatch] = {}  # by process: a fork has none of its parent's threads


_heard: weakref.WeakKeyDictionary[Any, Heard] = weakref.WeakKeyDictionary()  # by store


def join_peers(key: object, names: Sequence[str], interrupt: Interrupt, calls: Calls | None = None) -> PeerWatch | None:
    """Watch for errors of other ranks until ``leave(key)``; None outside a process group of two or more ranks.

    ``names`` are those of the loader, the surest one first. ``interrupt`` is called, perhaps more than once, with an
    error for the thread that waits for a batch to raise, and with None once it was raised. ``calls`` are compared with
    those of the other ranks.
    """
    store = group_store()
    if store is None:
        return None
    member = _Member(tuple(names), interrupt, calls)
    with _lock:
        watch = _watches.get(os.getpid())
        if watch is None or not watch.is_of(store) or not watch.join(key, member):
            watch = _watches[os.getpid()] = PeerWatch(store, _heard.setdefault(store, Heard()))
            watch.join(key, member)
        return watch


@atexit.register
def _leave_at_exit() -> None:
    """End the watch: a process that ends well is not missed, and one that failed posts its error for all loaders."""
    watch = _watches.get(os.getpid())
    if watch is not None:
        watch.end()
    posted, group = last_posted.get(os.getpid()), group_store()
    if posted is not None and group is not None:
        with suppress(RuntimeError):  # the store is gone, and nobody is left to tell
            store, number = _clone(group), _heard.setdefault(group, Heard()).number
            own = replace(posted, names=())
            while own.post(store, number := number + 1) is not own:
                pass


def agreed_start() -> str | None:
    """The name that the ranks of a trainer's process group gave to this start, the same on all; else None.

    torchrun's count of restarts is no such name: each node counts those that it asked for by itself.
    """
    store = group_store()
    with suppress(RuntimeError):  # the store is gone; so is the group, as its first use will show
        if store is not None and (store := _clone(store)).check([START_KEY]):
            return str(store.get(START_KEY).decode())
    return None


def note_made(names: Iterable[str]) -> None:
    """Note that a loader of these names is no longer being made here; incidents that name it concern this process."""
    if (group := group_store()) is not None:
        with _lock:
            _heard.setdefault(group, Heard()).made.update(names)


def tell_at_once(error: Exception, names: tuple[str, ...]) -> None:
    """Post an error without a watch. If all ranks fail alike, each raises its own, and none waits."""
    group = group_store()
    if group is None:
        return
    with _lock:
        number = _heard.setdefault(group, Heard()).number
    rank, world_size = _place()
    with suppress(RuntimeError):  # the store is gone, and nobody is left to tell
        store, own = _clone(group), Incident.of(_in_transit(error, rank), names, is_raised=True)
        while (first := own.post(store, number := number + 1)) is not own:
            if first.concerns(names):
                store.add(f"{NAMESPACE}/{number}/known", 1)
                if first.error.message not in str(error):
                    error.add_note(f"before that, {first.to_exception()}")
                return
        last_posted[os.getpid()] = own
        wait_until_known(store, number, world_size - 1)


@dataclass(frozen=True, slots=True)
class _Member:
    """A loader that raises errors of other ranks."""

    names: tuple[str, ...]
    interrupt: Interrupt
    calls: Calls | None


class PeerWatch:
    """Watch for errors on other ranks. Owns one thread, from its first member to its last.

    Mutable state, under a lock: the members; what was ``heard``, with the errors of other ranks that were not raised
    here yet; the error of this rank that is to be posted.
    """

    def __init__(self, store: Any, heard: Heard) -> None:
        self._group = weakref.ref(store)
        self._heard = heard
        self._rank, world_size = _place()
        self._signs = Signs(self._rank, world_size, time.monotonic())
        self._at = place_of(store)
        self._look_s = max(LOOK_S, world_size / RANKS_A_SECOND)
        self._changed = Condition()
        self._members: dict[int, _Member] = {}
        self._own: tuple[BaseException, tuple[str, ...]] | None = None
        self._is_over = False
        self._thread: Thread | None = None

    def is_of(self, store: Any) -> bool:
        """Return whether it watches the group with this store."""
        return self._group() is store

    def join(self, key: object, member: _Member) -> bool:
        """Become a member; returns False where the watch is over."""
        with self._changed:
            if self._is_over:
                return False
            if self._thread is None or self._thread.ident is None:  # an interrupt came before it began
                self._thread = Thread(target=self._watch, name="penstock-peers")
                self._thread.start()
            self._heard.made.update(member.names)
            self._members[id(key)] = member  # only now: a member that is interrupted earlier cannot leave
            return True

    def leave(self, key: object) -> None:
        """Forget what is pending of this loader; end the thread with the last member."""
        with self._changed:
            member = self._members.pop(id(key), None)
            if member is not None:
                self._heard.pending[:] = [
                    one for one in self._heard.pending if not one.names or not one.concerns(member.names)
                ]
            if self._members:
                return
        self.end()

    def end(self) -> None:
        """End the thread; waits for it a moment, as a store that is gone may hold it."""
        with self._changed:
            thread, self._is_over = self._thread, True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(KNOWN_WITHIN_S)

    @property
    def pending(self) -> RankStoppedError | None:
        """The first error of another rank that a loader here has not raised yet."""
        with self._changed:
            names = [name for member in self._members.values() for name in member.names]
            return next((one.error for one in self._heard.pending if one.concerns(names)), None)

    def check(self, key: object) -> None:
        """Raise the error of another rank's loader, once. Called before each batch: cheap where there is none."""
        if self._heard.pending and (error := self._take(key)) is not None:
            raise error
        if last_posted:
            last_posted.pop(os.getpid(), None)

    def _take(self, key: object) -> RankStoppedError | None:
        with self._changed:
            member = self._members.get(id(key))
            found = [] if member is None else [one for one in self._heard.pending if one.concerns(member.names)]
            if not found:
                return None
            self._forget(found[0])
            return found[0].error

    def tell(self, key: object, error: BaseException) -> None:
        """Post an error of this rank, and hold it back until all know it, for two seconds at most.

        Where another rank failed before, the error gets a note that names that one as the first cause.
        """
        until = time.monotonic() + KNOWN_WITHIN_S
        with self._changed:
            member = self._members.get(id(key))
            if isinstance(error, RankStoppedError) or self._is_over or member is None:
                for one in [one for one in self._heard.pending if one.error is error]:
                    self._forget(one)
                return
            self._own = error, member.names
            self._changed.notify_all()
            while self._own is not None and not self._is_over and time.monotonic() < until:
                self._changed.wait(max(0.0, until - time.monotonic()))
            self._own = None

    def _forget(self, raised: Pending) -> None:
        """Forget an error that was raised here, or is known."""
        self._heard.pending.remove(raised)
        for member in self._members.values():
            if raised.concerns(member.names):
                member.interrupt(None)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            store = _clone(self._group())
            store.add(f"{NAMESPACE}/watching", 1)
            while self._wait():
                if (group := self._group()) is None or group_store() is not group:
                    break
                del group  # which would keep the store after its group
                self._look(store)
            store.add(f"{NAMESPACE}/watching", -1)
            self._signs.leave(store)
        except RuntimeError as exc:
            if is_cut_off(exc):
                self._lose_store(exc)
            # Else it is gone, and with it the process group: no rank is left.
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _wait(self) -> bool:
        """Wait for the next poll, or an error to post; returns False once there are no members."""
        with self._changed:
            if not self._is_over:
                self._changed.wait(self._look_s if self._own is None else AGAIN_S)
            return not self._is_over

    def _look(self, store: Any) -> None:
        while store.check([f"{NAMESPACE}/{self._heard.number + 1}/cause"]):
            self._hear(store, Incident.read(store.get(f"{NAMESPACE}/{self._heard.number + 1}/cause")))
        if self._own is not None:
            self._tell(store, *self._own)
        self._compare_calls(store)
        silence = self._signs.exchange(store, time.monotonic())
        if silence is not None and all(one.names for one in self._heard.pending):
            self._post(store, Incident.of(silence, (), is_raised=False))
        with self._changed:
            for member in self._members.values():
                for one in self._heard.pending:
                    if one.concerns(member.names):
                        member.interrupt(one.error)  # again each time: a pass may just have begun
                        break

    def _hear(self, store: Any, incident: Incident) -> None:
        """Read the next incident: keep it for its loader, unless that is closed here."""
        number, error = self._heard.number + 1, incident.to_exception()
        with self._changed:
            self._heard.number = number
            if incident.teller == this_process():
                return  # raised here
            names = self._names_here(incident)
            if names is not None:
                self._heard.pending.append(Pending(error, names))
        _LOG.error("%s", error if names is not None else f"{error} (that loader is closed on this rank)")
        store.add(f"{NAMESPACE}/{number}/known", 1)  # after the log has it: the rank that failed may exit now

    def _names_here(self, incident: Incident) -> tuple[str, ...] | None:
        """The names of the loader that an incident stops, which may still be made; None where it is closed."""
        made = next((name for name in incident.names if name in self._heard.made), None)
        if made is None:
            return incident.names
        return (made,) if any(made in member.names for member in self._members.values()) else None

    def _post(self, store: Any, incident: Incident) -> int:
        """Post an incident under the next number, after reading those before; returns the number."""
        while (first := incident.post(store, self._heard.number + 1)) is not incident:
            self._hear(store, first)
        return self._heard.number + 1

    def _compare_calls(self, store: Any) -> None:
        """Compare calls with another rank's and post the first difference, as the cause that all ranks find next."""
        with self._changed:
            compared = [member.calls for member in self._members.values() if member.calls is not None]
        for calls in compared:
            error = calls.compare(store)
            if error is not None:
                self._post(store, Incident.of(RemoteError.of(error, self._rank), [calls.name], is_raised=False))

    def _lose_store(self, error: RuntimeError) -> None:
        """Interrupt all loaders, as the store is gone: none would wake ranks waiting for a batch or a collective."""
        lost = RankStoppedError(
            0,
            "Silence",
            f"the key-value store of the process group, at {self._at}, has not been heard of for over "
            f"{SILENT_S:.0f} s: its host (rank 0's, or another torchrun agent's) is down or cut off from this one "
            f"({str(error).splitlines()[0]})",
        )
        _LOG.error("%s", lost)
        with self._changed:
            self._heard.pending.append(Pending(lost, ()))
            for member in self._members.values():
                member.interrupt(lost)

    def _tell(self, store: Any, own: BaseException, names: tuple[str, ...]) -> None:
        """Post an error of this rank, unless another rank was first with one of the same loader."""
        incident = Incident.of(_in_transit(own, self._rank), names[:1], is_raised=True)
        first = self._first(names)
        while first is None and (there := incident.post(store, self._heard.number + 1)) is not incident:
            self._hear(store, there)
            first = self._first(names)
        if first is None:
            number = self._heard.number + 1
            with self._changed:
                self._heard.number = number
                last_posted[os.getpid()] = incident
            wait_until_known(store, number, int(store.add(f"{NAMESPACE}/watching", 0)) - 1)
        else:
            own.add_note(f"before that, {first.error}")
        with self._changed:
            self._own = None
            if first is not None and first in self._heard.pending:
                self._forget(first)
            self._changed.notify_all()

    def _first(self, names: Collection[str]) -> Pending | None:
        with self._changed:
            return next((one for one in self._heard.pending if one.concerns(names)), None)


def _in_transit(error: BaseException, rank: int) -> RemoteError:
    """The error with its notes, which name the sample and its shard if a user's function failed."""
    cause = RemoteError.of(error, rank)
    return replace(cause, message="; ".join([cause.message, *getattr(error, "__notes__", [])]))


def _place() -> tuple[int, int]:
    distributed = sys.modules["torch.distributed"]
    return distributed.get_rank(), distributed.get_world_size()


def _clone(store: Any) -> Any:
    """A connection of its own: the group's may be held for minutes by a thread that waits for a key."""
    if store is None:
        raise RuntimeError("the process group was destroyed")
    return clone_store(store)
