"""Ledger of an epoch's lanes that all ranks share: outputs so far, ends, and offsets at which work can begin again.

All entries are facts about (order, epoch): they hold whichever rank found them, and however often passes begin anew.
"""

from __future__ import annotations

import json
import threading
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import xxhash

from ...storage.threads.interruptible import Thread
from ..dataset.exchange import RemoteError
from ..errors import ConfigError, DatasetError
from ..order.outputs import Cursors, Tail, fillable, keeper_ranks, limit
from ..order.plan import Order, lane_offsets, lane_sizes, lane_turns
from .channel import Channel, MemoryChannel

if TYPE_CHECKING:
    from ..columns import IntArray
    from .channel import ChannelAddress

_ANCHOR, _FRONTIER, _END = 0, 1, 2
_LEAVE_S = 2.0
_LEFT = "left"  # the topic of ranks whose loaders were closed
_CLOSED = (
    "the loader of rank {} was closed, or its process ended, before its lanes did, and this rank's next batch needs "
    "them; leave an epoch after the same batch on all ranks"
)


class EpochLedger:
    """The facts of one epoch. Used by the assembler thread, and by the training loop's for cursors: one lock.

    An *anchor* is an input at which work on a lane can begin, with the number of outputs before it. All ranks know the
    same anchors up to what is known of a lane, so states are the same on every rank.
    """

    def __init__(self, channel: Channel, topic: str, *, lanes: int, rank: int, world_size: int) -> None:
        self._channel = channel
        self._topic = topic
        self._rank = rank
        self._keepers = keeper_ranks(lanes, world_size)
        self._read = 0
        self._is_shared = world_size > 1
        self._lock = threading.Lock()
        self._offsets = [array("q", [0]) for _ in range(lanes)]  # of anchors, increasing
        self._outputs = [array("q", [0]) for _ in range(lanes)]
        self._new: list[tuple[int, int, int, int]] = []
        self._errors: dict[int, tuple[int, Exception | RemoteError]] = {}  # lane: (outputs before what failed, why)
        self.turns = lane_turns(lanes)
        self.known: IntArray = np.zeros(lanes, np.int64)
        self.totals: IntArray = np.full(lanes, -1, np.int64)
        self.tail: Tail | None = None
        self.raised: Exception | None = None  # what was posted to all ranks

    # -- facts of this rank ---------------------------------------------------------------------------------------

    def begin_at(self, cursors: Cursors) -> None:
        """Note what a state says of the lanes, and forget errors of others: they may have been overcome since."""
        with self._lock:
            self._errors.clear()
            self.tail = None
            anchors = zip(cursors.offsets.tolist(), cursors.outputs.tolist(), strict=True)
            for lane, (offset, outputs) in enumerate(anchors):
                if 0 < outputs == cursors.taken[lane]:  # nothing was dropped before, whatever would be now
                    self._offsets[lane], self._outputs[lane] = array("q", [offset]), array("q", [outputs])
                self._anchor(lane, offset, outputs)
            self.known = np.maximum(self.known, cursors.outputs)

    def note(self, lane: int, anchors: Sequence[tuple[int, int]], outputs: int, *, is_end: bool) -> None:
        """Note that a lane has ``outputs`` outputs so far, or in all, and anchors as (input, outputs before it)."""
        with self._lock:
            for offset, before in anchors:
                if self._anchor(lane, offset, before):
                    self._new.append((lane, offset, before, _ANCHOR))
            if is_end and self.totals[lane] < 0:
                self._set_total(lane, outputs)
                self._new.append((lane, 0, outputs, _END))
            elif is_end and self.totals[lane] != outputs:
                raise _not_repeatable(lane)
            elif outputs > self.known[lane]:
                self.known[lane] = outputs
                self._new.append((lane, 0, outputs, _FRONTIER))

    def post(self) -> None:
        """Tell the other ranks what is new here."""
        with self._lock:
            new, self._new = self._new, []
        if new and self._is_shared:
            kinds = np.array(new, np.int64)
            frontiers = {int(row[0]): place for place, row in enumerate(kinds) if row[3] == _FRONTIER}
            keep = kinds[:, 3] != _FRONTIER
            keep[list(frontiers.values())] = True  # of each lane, the last
            self._channel.post(self._topic, b"F" + zlib.compress(kinds[keep].astype("<i8").tobytes(), 1))

    def fail(self, lane: int, outputs: int, error: Exception) -> None:
        """Note that a lane cannot continue beyond its outputs so far, and tell the other ranks why."""
        with self._lock:
            self._errors[lane] = outputs, error
        self.post_error([lane], error)

    def post_error(self, lanes: Sequence[int], error: Exception) -> None:
        """Tell the other ranks that lanes do not continue beyond what is known of them here, and why."""
        self.post()  # what is known first
        if self._is_shared:
            known = self.known.tolist()
            text = {"lanes": [[lane, known[lane]] for lane in lanes], "error": asdict(_in_transit(error, self._rank))}
            self._channel.post(self._topic, b"E" + json.dumps(text).encode())

    # -- facts of all ranks ---------------------------------------------------------------------------------------

    def look(self) -> None:
        """Read what other ranks have posted since."""
        if not self._is_shared:
            return
        messages = self._channel.read(self._topic, self._read)
        left = [] if messages else [RemoteError(**json.loads(text)) for text in self._channel.read(_LEFT, 0)]
        if left:
            messages = self._channel.read(self._topic, self._read)  # what they posted before they left
        self._read += len(messages)
        with self._lock:
            for message in messages:
                if message[:1] == b"E":
                    entry = json.loads(message[1:])
                    error = RemoteError(**entry["error"])
                    if error.rank != self._rank:
                        self._errors = {lane: (outputs, error) for lane, outputs in entry["lanes"]} | self._errors
                    continue
                for lane, offset, outputs, kind in np.frombuffer(zlib.decompress(message[1:]), "<i8").reshape(-1, 4):
                    self._take_in(int(lane), int(offset), int(outputs), int(kind))
            for error in left:
                for lane in np.flatnonzero((self._keepers == error.rank) & (self.totals < 0)).tolist():
                    self._errors.setdefault(lane, (int(self.known[lane]), error))

    def _take_in(self, lane: int, offset: int, outputs: int, kind: int) -> None:
        if kind == _ANCHOR:
            self._anchor(lane, offset, outputs)
        elif kind == _END:
            if self.totals[lane] not in (-1, outputs):
                raise _not_repeatable(lane)
            self._set_total(lane, outputs)
        self.known[lane] = max(int(self.known[lane]), outputs)
        if lane in self._errors and outputs > self._errors[lane][0]:
            del self._errors[lane]  # it has gone on since

    def _set_total(self, lane: int, outputs: int) -> None:
        self.totals[lane] = self.known[lane] = outputs

    def _anchor(self, lane: int, offset: int, outputs: int) -> bool:
        """Insert an anchor; returns whether it is new. Holds the lock."""
        offsets, counts = self._offsets[lane], self._outputs[lane]
        place = bisect_left(offsets, offset)
        if place < len(offsets) and offsets[place] == offset:
            if counts[place] != outputs:
                raise _not_repeatable(lane)
            return False
        offsets.insert(place, offset)
        counts.insert(place, outputs)
        return True

    @property
    def blocked(self) -> tuple[int, Exception | RemoteError] | None:
        """The first position that a lane cannot fill because something failed, and the error; None if none is known."""
        with self._lock:
            stuck = {
                outputs * len(self.turns) + int(self.turns[lane]): error
                for lane, (outputs, error) in self._errors.items()
                if self.known[lane] <= outputs
            }
        return None if not stuck else (min(stuck), stuck[min(stuck)])

    def raise_blocked(self) -> NoReturn:
        """Raise what failed first, in the order of positions, here or on another rank."""
        assert self.blocked is not None
        _, error = self.blocked
        self.raised = error.to_exception() if isinstance(error, RemoteError) else error
        raise self.raised

    # -- what follows ---------------------------------------------------------------------------------------------

    @property
    def fillable(self) -> int:
        """The first position for which some lane is not known to have the output that rule 4 asks of it."""
        return fillable(self.known, self.turns)

    @property
    def limit(self) -> int | None:
        """The first position for which a lane has no output left; None while no lane's end is known."""
        return limit(self.totals, self.turns)

    @property
    def has_totals(self) -> bool:
        return bool((self.totals >= 0).all())

    def estimate(self, sizes: IntArray) -> float | None:
        """Estimate the outputs of the epoch; lanes have ``sizes`` (lanes,) inputs. None while nothing is known."""
        with self._lock:
            last = [(offsets[-1], counts[-1]) for offsets, counts in zip(self._offsets, self._outputs, strict=True)]
        inputs, outputs = np.array(last, np.int64).T
        ended = self.totals >= 0
        worked = int(np.where(ended, sizes, inputs).sum())
        return None if not worked else float(np.where(ended, self.totals, outputs).sum() / worked * sizes.sum())

    def ranks_behind(self, position: int) -> list[int]:
        """The ranks that answer for lanes that are not known to reach a position, nor to end."""
        short = (self.totals < 0) & (self.known * len(self.turns) + self.turns < position)
        return sorted(set(self._keepers[short].tolist()))

    def keeps(self, lane: int) -> bool:
        """Return whether this rank answers for a lane's end."""
        return bool(self._keepers[lane] == self._rank)

    def taken_at(self, position: int) -> IntArray:
        """(lanes,): how many outputs of each lane come before a position."""
        if self.tail is not None and position >= self.tail.start:
            return self.tail.taken_at(position)
        return lane_offsets(np.array(position, np.int64), self.turns)

    def taken_at_each(self, positions: IntArray) -> IntArray:
        """(positions, lanes): the same for several positions."""
        if self.tail is not None and positions[-1] >= self.tail.start:
            return np.stack([self.taken_at(position) for position in positions.tolist()])
        return lane_offsets(positions, self.turns)

    def anchor_before(self, lane: int, outputs: int) -> tuple[int, int]:
        """The last anchor of a lane, as (input, outputs before it), with fewer outputs than this; else the first one.

        Fewer, so that work that begins there meets the last output before, and knows which inputs were dropped since.
        """
        with self._lock:
            place = max(0, bisect_left(self._outputs[lane], outputs) - 1)
            return self._offsets[lane][place], self._outputs[lane][place]

    def base(self, lane: int) -> int:
        """The number of the first output of a lane that can be located: nothing is known of inputs before it."""
        with self._lock:
            return self._outputs[lane][0]

    def cursors_at(self, position: int) -> Cursors:
        """The cursors of all lanes where this many outputs have been handed out."""
        taken = self.taken_at(position)
        anchors = [self.anchor_before(lane, outputs) for lane, outputs in enumerate(taken.tolist())]
        offsets, outputs = np.array(anchors, np.int64).T
        is_tail = self.tail is not None and (position > self.tail.start or self.tail.is_resumed)
        return Cursors(offsets, outputs, taken, in_tail=is_tail)


class PlainLedger(EpochLedger):
    """Ledger of lanes whose inputs are all outputs: everything is known, and nothing is posted to other ranks."""

    def __init__(self, num_samples: int, *, lanes: int, rank: int, world_size: int) -> None:
        super().__init__(MemoryChannel(), "", lanes=lanes, rank=rank, world_size=1)
        self._keepers = keeper_ranks(lanes, world_size)
        self.totals = lane_sizes(num_samples, lanes)
        self.known = self.totals.copy()

    def begin_at(self, cursors: Cursors) -> None:
        pass

    def note(self, lane: int, anchors: Sequence[tuple[int, int]], outputs: int, *, is_end: bool) -> None:
        pass

    def anchor_before(self, lane: int, outputs: int) -> tuple[int, int]:
        """The input before an output's: work may begin at any."""
        before = max(0, outputs - 1)
        return before, before

    def cursors_at(self, position: int) -> Cursors:
        taken = self.taken_at(position)
        before = np.maximum(taken - 1, 0)
        return Cursors(before, before, taken)


class Ledgers:
    """The ledgers of one loader, an epoch each: of those at and after the last one opened. Used by any thread."""

    def __init__(
        self,
        channel: Callable[[], Channel],
        *,
        rank: int,
        world_size: int,
        locate: Callable[[], ChannelAddress | None] = lambda: None,
    ) -> None:
        self._open_channel = channel
        self._locate = locate
        self._channel: Channel | None = None
        self._rank = rank
        self._world_size = world_size
        self._lock = threading.Lock()
        self._ledgers: dict[tuple[str, int], EpochLedger] = {}

    def open(self, order: str, lanes: int, epoch: int) -> EpochLedger:
        """The ledger of an epoch of an order. Raises ConfigError where ranks cannot tell each other."""
        with self._lock:
            if self._channel is None:
                self._channel = self._open_channel()
            key = order, epoch
            if key not in self._ledgers:
                self._ledgers[key] = EpochLedger(
                    self._channel, f"{order}/{epoch}", lanes=lanes, rank=self._rank, world_size=self._world_size
                )
            return self._ledgers[key]

    def locate_channel(self) -> ChannelAddress | None:
        """The address of the channel for another process; None for a single rank. Raises as ``locate`` does."""
        return self._locate()

    def connect(self, address: ChannelAddress) -> None:
        """Use the channel at an address, unless one is open."""
        with self._lock:
            self._open_channel = address.open

    def find(self, order: str, epoch: int) -> EpochLedger | None:
        """The ledger of an epoch, if it has been opened."""
        with self._lock:
            return self._ledgers.get((order, epoch))

    def close(self) -> None:
        """Tell the other ranks to stop waiting for this one; does not wait long for a store that is gone."""
        channel = self._channel
        if channel is None or self._world_size == 1:
            return
        error = DatasetError(_CLOSED.format(self._rank))

        def leave() -> None:
            with self._lock:
                ledgers = list(self._ledgers.values())
            with suppress(DatasetError):
                for ledger in ledgers:
                    ledger.post()
                channel.post(_LEFT, json.dumps(asdict(_in_transit(error, self._rank))).encode())

        with suppress(RuntimeError):  # the interpreter ends, and starts no more threads
            thread = Thread(target=leave, name="penstock-leave")
            thread.start()
            thread.join(_LEAVE_S)

    def forget(self, before: int, order: str | None = None) -> None:
        """Drop the ledgers of epochs before one: of all orders, or of one."""
        with self._lock:
            for key in [key for key in self._ledgers if key[1] < before and order in (None, key[0])]:
                del self._ledgers[key]


def order_key(order: Order) -> str:
    """A name for an order, the same on every rank."""
    parts = (order.seed, order.shuffle, order.lanes, order.window, order.piece)
    return xxhash.xxh3_64_hexdigest(repr(parts).encode())


def _in_transit(error: BaseException, rank: int) -> RemoteError:
    posted = RemoteError.of(error, rank)
    notes = "; ".join(getattr(error, "__notes__", []))
    return replace(posted, message=f"{posted.message} [{notes}]") if notes else posted


def _not_repeatable(lane: int) -> ConfigError:
    return ConfigError(
        f"lane {lane} yielded other outputs than before: keep= or transform= decides differently about a sample when "
        "it is asked again. What drops samples must depend on the sample alone, or on its argument `rng`"
    )
