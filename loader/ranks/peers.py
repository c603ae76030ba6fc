"""An error that ends the loader on one rank is told to all, through the key-value store of their process group.

So is one that kept a loader from being made, and calls that ranks make differently (``calls.py``). There are no
collectives, so a rank that is late, blocked or gone delays nobody. A thread of each process looks at the store twice a
second. A rank that waits for a batch is woken; one that trains gets the error with its next batch; one
that is blocked in a collective cannot be woken by us, but its log names the first cause.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import wraps
from typing import Any, ParamSpec

from ...storage.store_link import SILENT_S, START_KEY, clone_store, is_cut_off, place_of
from ...storage.threads.interruptible import Condition, Thread
from ..dataset.exchange import RemoteError
from ..errors import RankStoppedError
from .calls import Calls
from .detect import is_torch_worker
from .signs import Signs

LOOK_S = 0.5
RANKS_A_SECOND = 2000  # that one store answers without effort: larger worlds look less often
_AGAIN_S = 0.02
TOLD_WITHIN_S = 2.0  # how long an error is held back until the others have seen it
_NAMESPACE = "penstock/stop"
_LOG = logging.getLogger(__name__)

P = ParamSpec("P")
Interrupt = Callable[[RankStoppedError | None], None]

_lock = threading.Lock()
_watches: dict[int, PeerWatch] = {}  # by process: a fork has none of its parent's threads
_seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # incidents that this process raised, by store


def join_peers(key: object, interrupt: Interrupt, calls: Calls | None = None) -> PeerWatch | None:
    """Watch for errors of other ranks until ``leave(key)``; None outside a process group of two or more ranks.

    ``interrupt`` is called, perhaps more than once, with an error that whoever waits for a batch is to raise, and with
    None once it was raised. ``calls`` are compared with those of the other ranks.
    """
    store = _group_store()
    if store is None:
        return None
    with _lock:
        watch = _watches.get(os.getpid())
        if watch is None or not watch.is_of(store) or not watch.join(key, interrupt, calls):
            watch = _watches[os.getpid()] = PeerWatch(store)
            watch.join(key, interrupt, calls)
        return watch


@atexit.register
def _leave_at_exit() -> None:
    """A process that ends well without closing its loaders is not missed by the others."""
    watch = _watches.get(os.getpid())
    if watch is not None:
        watch.end()


def agreed_start() -> str | None:
    """The name that the ranks of a trainer's process group gave to this start, the same on all; else None.

    torchrun's count of restarts is no such name: each node counts those that it asked for by itself.
    """
    store = _group_store()
    with suppress(RuntimeError):  # the store is gone; so is the group, as the first use of it will tell
        if store is not None and (store := _clone(store)).check([START_KEY]):
            return str(store.get(START_KEY).decode())
    return None


def tell_of_failure(init: Callable[P, None]) -> Callable[P, None]:
    """Tell all ranks where a loader that they are to share cannot be made on this one; see ``PeerWatch.tell``."""

    @wraps(init)
    def telling(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            init(*args, **kwargs)
        except Exception as exc:
            if kwargs.get("world_size") != 1:
                _tell_at_once(exc)
            raise

    return telling


def _tell_at_once(error: Exception) -> None:
    """Tell of an error without a watch. Where all ranks fail alike, each raises its own, and nobody waits."""
    group = _group_store()
    if group is None or is_torch_worker():
        return
    with _lock:
        number = _seen[group] = _seen.get(group, 0) + 1
    incident, (rank, world_size) = f"{_NAMESPACE}/{number}", _place()
    with suppress(RuntimeError):  # the store is gone, and nobody is left to tell
        store = _clone(group)
        if int(store.add(f"{incident}/claims", 1)) == 1:
            store.set(f"{incident}/cause", json.dumps(asdict(_in_transit(error, rank))))
        elif store.check([f"{incident}/cause"]):
            first = RemoteError(**json.loads(store.get(f"{incident}/cause")))
            if first.message not in str(error):
                error.add_note(f"before that, {RankStoppedError(first.rank, first.kind, first.text)}")
        until = time.monotonic() + TOLD_WITHIN_S
        while time.monotonic() < until:
            if sum(int(store.add(f"{incident}/{what}", 0)) for what in ("known", "claims")) >= world_size:
                return
            time.sleep(_AGAIN_S)


class PeerWatch:
    """What this process knows of errors on other ranks. Owns one thread, from its first member to its last.

    Mutable state, under a lock: the members; the error of another rank that was not raised here yet; the error of this
    rank that is to be told. Each error is an incident with a number; the first rank to claim the number is its cause.
    """

    def __init__(self, store: Any) -> None:
        self._group = weakref.ref(store)
        self._rank, world_size = _place()
        self._signs = Signs(self._rank, world_size, time.monotonic())
        self._at = place_of(store)
        self._look_s = max(LOOK_S, world_size / RANKS_A_SECOND)
        self._changed = Condition()
        self._members: dict[int, tuple[Interrupt, Calls | None]] = {}
        self._own: BaseException | None = None
        self._is_over = False
        self._thread: Thread | None = None
        self.pending: RankStoppedError | None = None

    def is_of(self, store: Any) -> bool:
        """Whether it is of the group with this store."""
        return self._group() is store

    def join(self, key: object, interrupt: Interrupt, calls: Calls | None = None) -> bool:
        """Become a member; returns False where the watch is over."""
        with self._changed:
            if self._is_over:
                return False
            if self._thread is None or self._thread.ident is None:  # an interrupt came before it began
                self._thread = Thread(target=self._watch, name="penstock-peers")
                self._thread.start()
            self._members[id(key)] = interrupt, calls  # now only: who is interrupted before this cannot leave
            return True

    def leave(self, key: object) -> None:
        """End the thread with the last member."""
        with self._changed:
            self._members.pop(id(key), None)
            if self._members:
                return
        self.end()

    def end(self) -> None:
        """End the thread; waits for it a moment, as a store that is gone may hold it."""
        with self._changed:
            thread, self._is_over = self._thread, True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(TOLD_WITHIN_S)

    def check(self) -> None:
        """Raise the error of another rank, once. Called before each batch: cheap where there is none."""
        if self.pending is not None:
            raise self._take()

    def _take(self) -> RankStoppedError:
        with self._changed:
            error = self.pending
            self._note_seen()
        assert error is not None
        return error

    def tell(self, error: BaseException) -> None:
        """Tell all ranks of an error of this one, and hold it back until they know it, for two seconds at most.

        Where another rank failed before, the error gets a note that names that one as the first cause.
        """
        until = time.monotonic() + TOLD_WITHIN_S
        with self._changed:
            if isinstance(error, RankStoppedError) or self._is_over:
                if error is self.pending:
                    self._note_seen()
                return
            self._own = error
            self._changed.notify_all()
            while self._own is not None and not self._is_over and time.monotonic() < until:
                self._changed.wait(max(0.0, until - time.monotonic()))
            self._own = None

    def _note_seen(self) -> None:
        """The newest incident was raised here."""
        self.pending = None
        for interrupt, _ in self._members.values():
            interrupt(None)
        store = self._group()
        if store is not None:
            _seen[store] = _seen.get(store, 0) + 1

    # -- the thread -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            store = _clone(self._group())
            store.add(f"{_NAMESPACE}/watching", 1)
            while self._wait():
                group = self._group()
                if group is None or _group_store() is not group:
                    break
                number = _seen.get(group, 0) + 1
                del group  # which would keep the store after its group
                self._look(store, number, f"{_NAMESPACE}/{number}")
            store.add(f"{_NAMESPACE}/watching", -1)
            self._signs.leave(store)
        except RuntimeError as exc:
            if is_cut_off(exc):
                self._lose_store(exc)
            # Else it is gone, and with it the process group: nobody is left to tell or to hear of.
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _wait(self) -> bool:
        """Wait until it is time to look, or there is something to tell; False once nobody is a member."""
        with self._changed:
            if not self._is_over:
                self._changed.wait(self._look_s if self._own is None else _AGAIN_S)
            return not self._is_over

    def _look(self, store: Any, number: int, incident: str) -> None:
        if self.pending is None and store.check([f"{incident}/cause"]):
            self._note(number, RemoteError(**json.loads(store.get(f"{incident}/cause"))))
            store.add(f"{incident}/known", 1)  # after the log has it: the rank that failed may exit now
        if self._own is not None:
            self._tell(store, incident)
        self._compare_calls(store, incident)
        silence = self._signs.exchange(store, time.monotonic())
        if silence is not None and self.pending is None and int(store.add(f"{incident}/claims", 1)) == 1:
            store.set(f"{incident}/cause", json.dumps(asdict(silence)))
        with self._changed:
            if self.pending is not None:
                for interrupt, _ in self._members.values():
                    interrupt(self.pending)  # again each time: a pass may just have begun

    def _compare_calls(self, store: Any, incident: str) -> None:
        """Where this rank and another one made different calls, that is the cause that all ranks find next."""
        with self._changed:
            members = [calls for _, calls in self._members.values() if calls is not None]
        for calls in members:
            error = calls.compare(store)
            if error is not None and int(store.add(f"{incident}/claims", 1)) == 1:
                store.set(f"{incident}/cause", json.dumps(asdict(RemoteError.of(error, self._rank))))

    def _lose_store(self, error: RuntimeError) -> None:
        """Who waits for a batch may wait for what other ranks tell, and who is in a collective is there in vain."""
        lost = RankStoppedError(
            0,
            "Silence",
            f"the key-value store of the process group, at {self._at}, has not been heard of for over "
            f"{SILENT_S:.0f} s: its host (rank 0's, or another torchrun agent's) is down or cut off from this one "
            f"({str(error).splitlines()[0]})",
        )
        _LOG.error("%s", lost)
        with self._changed:
            self.pending = lost
            for interrupt, _ in self._members.values():
                interrupt(lost)

    def _note(self, number: int, cause: RemoteError) -> None:
        error = RankStoppedError(cause.rank, cause.kind, cause.text)
        with self._changed:
            group = self._group()
            if group is None or _seen.get(group, 0) >= number:
                return  # raised a moment ago
            self.pending = error
        _LOG.error("%s", error)

    def _tell(self, store: Any, incident: str) -> None:
        with self._changed:
            own, first = self._own, self.pending
        if own is None:
            return
        if first is not None:
            own.add_note(f"before that, {first}")
        elif int(store.add(f"{incident}/claims", 1)) == 1:
            store.set(f"{incident}/cause", json.dumps(asdict(_in_transit(own, self._rank))))
            self._wait_for_others(store, incident)
        else:
            return  # another rank was first, and its cause is there at the next look
        with self._changed:
            self._own = None
            self._note_seen()
            self._changed.notify_all()

    def _wait_for_others(self, store: Any, incident: str) -> None:
        until = time.monotonic() + TOLD_WITHIN_S
        others = int(store.add(f"{_NAMESPACE}/watching", 0)) - 1
        while int(store.add(f"{incident}/known", 0)) < others and time.monotonic() < until:
            time.sleep(_AGAIN_S)


def _in_transit(error: BaseException, rank: int) -> RemoteError:
    """The error with its notes, which tell of a user's function the sample and its shard."""
    cause = RemoteError.of(error, rank)
    return replace(cause, message="; ".join([cause.message, *getattr(error, "__notes__", [])]))


def _group_store() -> Any:
    """The store of the default process group, where that is initialised with two or more ranks."""
    distributed = sys.modules.get("torch.distributed")  # imported by whoever initialised it
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    with suppress(RuntimeError, ValueError):  # it is being destroyed meanwhile
        if distributed.get_world_size() >= 2:
            return distributed.distributed_c10d._get_default_store()
    return None


def _place() -> tuple[int, int]:
    distributed = sys.modules["torch.distributed"]
    return distributed.get_rank(), distributed.get_world_size()


def _clone(store: Any) -> Any:
    """A connection of its own: the group's may be held for minutes by a thread that waits for a key."""
    if store is None:
        raise RuntimeError("the process group was destroyed")
    return clone_store(store)
