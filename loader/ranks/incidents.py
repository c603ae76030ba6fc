"""Incidents: what ranks tell each other of loaders that failed, as a log in the key-value store of their process group.

Each has a number, which the first rank to tell it takes. A rank keeps what it has heard until the loader that it is
about raises it, or is closed.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..dataset.exchange import RemoteError
from ..errors import RankStoppedError

NAMESPACE = "penstock/stop"
AGAIN_S = 0.02
TOLD_WITHIN_S = 2.0  # how long an error is held back until the others have seen it
_PROCESS = uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Pending:
    """An error of another rank that was not raised here yet. ``names``: the loader's, or none for all loaders."""

    error: RankStoppedError
    names: tuple[str, ...]

    def concerns(self, names: Collection[str]) -> bool:
        return not self.names or not set(self.names).isdisjoint(names)


@dataclass(slots=True)
class Heard:
    """What this process has heard of a group. Mutable, under the lock of the group's watch.

    ``number``: of the newest incident that was looked at; ``made``: the names of the loaders that this rank has made,
    or failed to make.
    """

    number: int = 0
    pending: list[Pending] = field(default_factory=list)
    made: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Incident:
    """What one rank tells the others: an error, the names of the loader that it stops, and which process tells it.

    ``teller`` is empty where that one, too, raises it only when it is read.
    """

    error: RemoteError
    names: tuple[str, ...]
    teller: str

    @staticmethod
    def of(error: RemoteError, names: Sequence[str], *, is_raised: bool) -> Incident:
        return Incident(error, tuple(names), this_process() if is_raised else "")

    @staticmethod
    def read(text: bytes | str) -> Incident:
        told = json.loads(text)
        names, teller = tuple(told.pop("loader", ())), told.pop("teller", "")
        return Incident(RemoteError(**told), names, teller)

    def post(self, store: Any, number: int) -> Incident:
        """Tell it under a number, unless something was told under that before; returns what is told there."""
        text = json.dumps({**asdict(self.error), "loader": self.names, "teller": self.teller})
        there = bytes(store.compare_set(f"{NAMESPACE}/{number}/cause", "", text))
        return self if there == text.encode() else Incident.read(there)

    def concerns(self, names: Collection[str]) -> bool:
        return not self.names or not set(self.names).isdisjoint(names)

    def to_exception(self) -> RankStoppedError:
        return RankStoppedError(self.error.rank, self.error.kind, self.error.text)


def this_process() -> str:
    return f"{_PROCESS}/{os.getpid()}"


def wait_until_known(store: Any, number: int, others: int) -> None:
    until = time.monotonic() + TOLD_WITHIN_S
    while int(store.add(f"{NAMESPACE}/{number}/known", 0)) < others and time.monotonic() < until:
        time.sleep(AGAIN_S)
