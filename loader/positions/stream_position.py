"""Where a loader that drops samples is in its run: positions count what is left, and each lane has a cursor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import StateMismatchError
from ..order.cursors import Cursors
from ..order.plan import Share, lane_offsets, lane_sizes, lane_turns
from ..order.state import PACKING, LoaderState
from ..pipeline.delivery_queue import Delivery
from ..ranks.ledger import order_key
from .position import Position, Tell, tell_nobody
from .uncounted import UncountedPosition

FILTER = "filter"


class StreamPosition(UncountedPosition, Position):
    """As ``Position``, where only reading tells how many batches an epoch has: each batch says whether it is the last.

    Mutable state besides: the cursors of the position where a pipeline began.
    """

    who = "a loader that drops or packs samples"

    def __init__(
        self, *args: Any, packing: tuple[str, int] | None = None, only_skips: bool = False, **options: Any
    ) -> None:
        """``packing`` is what decides how documents are packed, and how many samples are packed together.

        ``only_skips``: nothing is dropped but bad samples, so that states of a loader that drops none are good here.
        """
        self._packing = packing
        self._only_skips = only_skips
        super().__init__(*args, **options)
        self._began: tuple[int, int, Cursors] | None = None

    def check_share(self, share: Share) -> None:
        if self._packing is None:  # else few samples may make many sequences
            super().check_share(share)

    def follows(self, item: Delivery) -> bool:
        if item.is_end and (item.epoch, item.start) == (self.epoch, self.consumed):
            return True  # nothing is left here: of the rest, no global batch of this size can be made
        return super().follows(item)

    def take(self, item: Delivery) -> None:
        super().take(item)
        self.ledgers.forget(item.epoch)

    def cursors(self) -> Cursors:
        """Where each lane stands, before the next batch."""
        epoch, consumed = self.upcoming
        if not consumed:
            return Cursors.at_start(self.order.lanes)
        if self._began is None or self._began[:2] != (epoch, consumed):
            ledger = self.ledgers.open(order_key(self.order), self.order.lanes, epoch)
            self._began = epoch, consumed, ledger.cursors_at(consumed)
        return self._began[2]

    def to_state(self) -> LoaderState:
        return self._state({**self._kind, **self.cursors().to_dict()})

    @property
    def _kind(self) -> dict[str, Any]:
        if self._packing is None:
            return {"kind": FILTER}
        return {"kind": PACKING, "packing": self._packing[0], "unit": self._packing[1]}

    def _is_own(self, loaded: LoaderState) -> bool:
        """Whether the cursors of a state mean the same here."""
        return bool(loaded.stream) and {name: loaded.stream.get(name) for name in self._kind} == self._kind

    def check_state(self, state: Mapping[str, Any]) -> LoaderState:
        loaded = super().check_state(state)
        if self._is_own(loaded):
            self._read(loaded)
        return loaded

    def _check_stream(self, loaded: LoaderState) -> None:
        if loaded.consumed and not loaded.stream and not self._only_skips:
            raise StateMismatchError(
                "the state is inside an epoch of a loader that drops nothing and packs nothing, and this one does; "
                "load it there, or start from its next epoch with set_epoch (on_error='skip' alone can begin here)"
            )
        if not loaded.stream:
            return
        kind = loaded.stream.get("kind") if loaded.stream else None
        if loaded.stream and kind not in (FILTER, PACKING):
            raise StateMismatchError(f"a damaged loader state: stream of kind {kind!r}")
        if not loaded.consumed or self._is_own(loaded):
            return
        if kind != self._kind["kind"]:
            has, here = ("packs", "does not") if kind == PACKING else ("does not pack", "does")
            raise StateMismatchError(
                f"the state is inside an epoch of a loader that {has} documents, and this one {here}; give it the "
                "same packing=, or start from its next epoch with set_epoch"
            )
        raise StateMismatchError(
            "the state is inside an epoch of a loader that packs documents otherwise (seq_len, method, tokenizer, eos "
            "or another setting of Packing, which decides what sequences there are); give it the same packing=, or "
            "start from its next epoch with set_epoch"
        )

    def _read(self, loaded: LoaderState) -> Cursors:
        lanes = loaded.lanes
        is_packed = self._packing is not None
        cursors = Cursors.from_dict(loaded.stream, lanes=lanes, consumed=loaded.consumed, one_each=not is_packed)
        due = lane_offsets(np.array(loaded.consumed, np.int64), lane_turns(lanes))
        sizes = lane_sizes(self._num_samples, lanes)
        left = cursors.offsets <= sizes
        if self._packing is None:
            left &= cursors.taken - cursors.outputs <= sizes - cursors.offsets
        else:
            left &= cursors.offsets % self._packing[1] == 0
        if not left.all() or not (cursors.in_tail or (cursors.taken == due).all()):
            raise StateMismatchError("a damaged loader state: its cursors point past the ends of lanes")
        return cursors

    def load(self, state: LoaderState, tell: Tell = tell_nobody) -> None:
        self._has_ended = False
        super().load(state, tell)
        self._began = None
        if self._is_own(state):
            self._began = state.epoch, state.consumed, self._read(state)
        elif state.consumed:  # so far, each input had an output
            due = lane_offsets(np.array(state.consumed, np.int64), lane_turns(state.lanes))
            self._began = state.epoch, state.consumed, Cursors(due, due, due)
