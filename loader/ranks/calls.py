"""Compare the calls that every rank must make to its loader with those of the other ranks.

The n-th call of a loader on one rank is to be the n-th on the others, with the same values after the same batch. The
thread that watches for other ranks' errors puts it into the process group's store, or compares it with the one there.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import ConfigError
from .detect import own_process

_NAMESPACE = "penstock/calls"
_CURE = "every rank must call it, with the same values and after the same batch"


@dataclass(frozen=True, slots=True)
class Call:
    """A call before the batch at ``position`` of ``epoch``; ``moves``: how often the loader was moved before."""

    rank: int
    text: str
    epoch: int
    position: int
    moves: int

    @property
    def described(self) -> str:
        return f"rank {self.rank} called {self.text} at position {self.position:,} of epoch {self.epoch:,}"

    def is_same(self, other: Call) -> bool:
        return (self.text, self.epoch, self.position) == (other.text, other.epoch, other.position)


class Calls:
    """The calls of one loader on this rank.

    Mutable state: the calls and the moves, which the training loop's thread counts up; how many calls were compared,
    and the call that another rank has made and this one has not, of the thread that compares.
    """

    def __init__(self, name: str, processes: int) -> None:
        """``name`` is the loader's, the same on all ranks, of which ``processes`` take part."""
        self.name = name
        self._prefix = f"{_NAMESPACE}/{name}"
        self._processes = processes
        self._calls: list[Call] = []
        self._moves = 0
        self._compared = 0
        self._expected: tuple[int, Call] | None = None

    # -- the training loop's thread -------------------------------------------------------------------------------

    def note(self, text: str, upcoming: tuple[int, int], passes: int) -> None:
        """Note a call before the ``upcoming`` batch, by (epoch, position), of the pass with this number."""
        self._calls.append(Call(own_process(), text, *upcoming, self._moves + passes))

    def note_move(self) -> None:
        """Note that the position was set: from here on, it is not before or after those of earlier calls."""
        self._moves += 1

    @property
    def lacks_one(self) -> bool:
        """True if another rank has made a call that this one has not, or not yet."""
        return self._expected is not None

    def check(self, upcoming: tuple[int, int], passes: int) -> None:
        """Check that no call is overdue: one that this rank lacks, though it has taken a batch that comes after it.

        Raises:
            ConfigError: it is; names both ranks.
        """
        number, expected = self._expected or (0, None)
        if expected is None or len(self._calls) > number:
            return
        if expected.moves == self._moves + passes and upcoming > (expected.epoch, expected.position):
            self._expected = None
            self._compared = sys.maxsize  # the ranks differ from here on: one error is enough
            here = f"rank {own_process()}, which is at {upcoming[1]:,} of epoch {upcoming[0]:,}, did not"
            raise ConfigError(f"{expected.described}, and {here}: {_CURE}")

    # -- the thread that compares ---------------------------------------------------------------------------------

    def compare(self, store: Any) -> ConfigError | None:
        """Compare what was not compared yet; returns an error that names the ranks whose calls differ.

        Raises:
            RuntimeError: the store is gone.
        """
        distributed = sys.modules["torch.distributed"]
        if self._processes != distributed.get_world_size():
            return None  # some of the ranks share this data, and others may have a loader of the same name
        while self._compared < len(self._calls):
            own = self._calls[self._compared]
            there = store.compare_set(self._key(self._compared), "", json.dumps(asdict(own)))
            first = Call(**json.loads(there))
            if not own.is_same(first):
                self._compared, self._expected = sys.maxsize, None
                return ConfigError(f"{first.described}, and {own.described.replace(' called', '', 1)}: {_CURE}")
            self._compared, self._expected = self._compared + 1, None
        if self._expected is None and self._compared < sys.maxsize and store.check([self._key(self._compared)]):
            self._expected = self._compared, Call(**json.loads(store.get(self._key(self._compared))))
        return None

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number}"
