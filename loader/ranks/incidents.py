"""Incidents: failures of loaders that ranks post to each other, as a log in the store of their process group.

Each has a number, which the first rank that posts it takes. A rank keeps the incidents that it has read until the
loader that they concern raises them, or is closed.
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
KNOWN_WITHIN_S = 2.0  # how long an error is held back until the others have seen it
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
    """Incidents of a group that this process has seen. Mutable, under the lock of the group's watch.

    ``number``: of the newest incident that was looked at; ``made``: the names of the loaders that this rank has made,
    or failed to make.
    """

    number: int = 0
    pending: list[Pending] = field(default_factory=list)
    made: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Incident:
    """Incident that one rank posts: an error, the names of the loader that it stops, and the process that posts it.

    ``teller`` is empty if the posting process, too, raises it only when it reads it.
    """

    error: RemoteError
    names: tuple[str, ...]
    teller: str

    @staticmethod
    def of(error: RemoteError, names: Sequence[str], *, is_raised: bool) -> Incident:
        return Incident(error, tuple(names), this_process() if is_raised else "")

    @staticmethod
    def read(text: bytes | str) -> Incident:
        entry = json.loads(text)
        names, teller = tuple(entry.pop("loader", ())), entry.pop("teller", "")
        return Incident(RemoteError(**entry), names, teller)

    def post(self, store: Any, number: int) -> Incident:
        """Post it under a number, unless that is taken; returns the incident that is there."""
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
    until = time.monotonic() + KNOWN_WITHIN_S
    while int(store.add(f"{NAMESPACE}/{number}/known", 0)) < others and time.monotonic() < until:
        time.sleep(AGAIN_S)
