"""The bad samples that one rank has met: counted against a limit, reported to the user, and written down."""

from __future__ import annotations

import heapq
import itertools
import threading
import warnings
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...errors import DatasetError

if TYPE_CHECKING:
    from ...columns import IntArray
    from ...dataset.manifest import Manifest
    from .file import Quarantined, QuarantineFile

_KEPT = 1000  # records in memory
_MOST_IDS = 100_000  # of bad samples, in epochs before the last two
_SHOWN = 3
_MOST_IN_A_ROW = 100
_NUMBERS = itertools.count()  # of records, in the order in which they came


class BadSampleWarning(UserWarning):
    """A sample could not be decoded or transformed; another replaces it, or it is skipped. Shown once per loader."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Limit of bad samples in an epoch on a rank, and how users wrote it."""

    samples: int
    shown: str


@dataclass(frozen=True, slots=True)
class BadNews:
    """Bad samples that were found: the ids of each epoch with the step that failed, and records with their numbers."""

    epochs: Mapping[int, Mapping[int, str]]
    records: Sequence[tuple[int, Quarantined]]

    def __bool__(self) -> bool:
        return bool(self.epochs or self.records)


class BadSamples:
    """Counts each bad sample of a data set once an epoch. Used by the assembler's and the batches' threads, by a lock.

    A sample that ``avoid=`` names is not counted: it is known. ``after``: what is done about a bad sample, for people.
    ``source``: the data set's name in a mixture, whose epochs and limit are its own.
    """

    def __init__(
        self,
        manifest: Manifest,
        limit: Limit,
        file: QuarantineFile | None = None,
        after: str = "",
        source: str | None = None,
    ) -> None:
        self.manifest = manifest
        self._limit = limit
        self._file = file
        self.after = after
        self._source = source
        self._epochs: dict[int, dict[int, str]] = {}  # the ids of an epoch's bad samples, and the step that failed
        self._written: set[tuple[str, int]] = set()
        self._records: deque[tuple[int, Quarantined]] = deque(maxlen=_KEPT)
        self._in_a_row = 0
        self._news: BadNews | None = None
        self._lock = threading.Lock()

    def take_news(self) -> BadNews:
        """Take what was found since this was last called, for another process; at first that is nothing."""
        with self._lock:
            news, self._news = self._news, BadNews({}, [])
        return news or self._news

    def export(self) -> BadNews:
        """Describe all that is known."""
        with self._lock:
            return BadNews({epoch: dict(bad) for epoch, bad in self._epochs.items()}, list(self._records))

    def absorb(self, news: BadNews) -> None:
        """Take over what another process found, which has counted, written and warned of it."""
        with self._lock:
            for epoch, bad in news.epochs.items():
                self._of(epoch).update(bad)
            for _, entry in news.records:
                if (entry.kind, entry.id) not in self._written:
                    self._written.add((entry.kind, entry.id))
                    self._records.append((next(_NUMBERS), entry))

    @property
    def records(self) -> list[tuple[int, Quarantined]]:
        """The latest 1,000, each sample and chunk once, with numbers that grow over all data sets."""
        with self._lock:
            return list(self._records)

    def among(self, epoch: int, ids: IntArray) -> IntArray:
        """Those of ``ids`` that are known to be bad in an epoch."""
        with self._lock:
            bad = self._epochs.get(epoch, {})
            return np.array([sample_id for sample_id in ids.tolist() if sample_id in bad], np.int64)

    def note_avoided(self, epoch: int, ids: Sequence[int]) -> None:
        """Samples that were not tried."""
        with self._lock:
            self._note(epoch, ids, "avoid")

    def _note(self, epoch: int, ids: Sequence[int], step: str) -> None:
        bad = self._of(epoch)
        new = {sample_id: step for sample_id in ids if sample_id not in bad}
        bad.update(new)
        if self._news is not None and new:
            epochs = dict(self._news.epochs)
            epochs[epoch] = {**epochs.get(epoch, {}), **new}
            self._news = replace(self._news, epochs=epochs)

    def tell(self, entry: Quarantined, ids: Sequence[int] | None = None) -> None:
        """Count a bad sample, or the samples ``ids`` of a bad chunk, and write it down.

        Raises:
            DatasetError: more are bad than may be; or it cannot be written down.
        """
        entry = entry if self._source is None else replace(entry, source=self._source)
        with self._lock:
            self._note(entry.epoch, [entry.id] if ids is None else ids, entry.step)
            self._in_a_row += entry.step == "transform"
            if (entry.kind, entry.id) not in self._written:
                self._written.add((entry.kind, entry.id))
                self._records.append((next(_NUMBERS), entry))
                if self._news is not None:
                    self._news = replace(self._news, records=[*self._news.records, self._records[-1]])
                if self._file is not None:
                    self._file.append(entry)
                if len(self._written) == 1 and entry.kind == "sample":
                    self._warn(entry)
            self._check(entry.epoch)

    def note_good(self) -> None:
        """A sample was transformed."""
        with self._lock:
            self._in_a_row = 0

    def _of(self, epoch: int) -> dict[int, str]:
        if epoch not in self._epochs:
            # Many epochs of a small data set are read ahead of those that are handed out, and few of a large one.
            for old in sorted(known for known in self._epochs if known < epoch - 1):
                if sum(map(len, self._epochs.values())) > _MOST_IDS:
                    del self._epochs[old]
            self._epochs[epoch] = {}
        return self._epochs[epoch]

    def _warn(self, entry: Quarantined) -> None:
        where = f"; {self._file.path} records all bad samples" if self._file is not None else "; see loader.bad_samples"
        warnings.warn(f"{entry.reason}; it is {self.after}{where}", BadSampleWarning, stacklevel=2)

    def _check(self, epoch: int) -> None:
        steps = Counter(step for step in self._epochs[epoch].values() if step != "avoid")
        if self._in_a_row >= _MOST_IN_A_ROW:
            problem = f"transform= failed for {self._in_a_row} samples in a row, which looks like a fault of its own"
        elif steps.total() > self._limit.samples:
            parts = ", ".join(f"{count:,} {_DONE[step]}" for step, count in sorted(steps.items()))
            count = steps.total()
            bad = f"1 sample of epoch {epoch} is" if count == 1 else f"{count:,} samples of epoch {epoch} are"
            problem = f"{bad} bad on this rank, more than {self._limit.shown} allows ({parts})"
        else:
            return
        last = "; ".join(entry.reason for _, entry in list(self._records)[-_SHOWN:])
        where = "" if self._source is None else f"the source {self._source!r} of the mixture: "
        raise DatasetError(f"{where}{problem}. The last: {last}")


class BadOfSources:
    """The bad samples of all sources of a loader on this rank; their joint ids begin at ``first_ids``."""

    def __init__(self, of_sources: Sequence[BadSamples], first_ids: Sequence[int]) -> None:
        self._of_sources = of_sources
        self._first_ids = first_ids

    @property
    def records(self) -> list[Quarantined]:
        """The latest 1,000 of all sources, each sample and chunk once."""
        merged = heapq.merge(*(bad.records for bad in self._of_sources), key=lambda numbered: numbered[0])
        return [entry for _, entry in merged][-_KEPT:]

    def among(self, epoch: int, ids: IntArray) -> IntArray:
        """Find those of the joint ``ids`` that are known to be bad in an epoch of their source."""
        numbers = np.searchsorted(np.array(self._first_ids[1:], np.int64), ids, side="right")
        found = [
            self._of_sources[number].among(epoch, ids[numbers == number] - first) + first
            for number in np.unique(numbers).tolist()
            for first in [self._first_ids[number]]
        ]
        return np.concatenate([np.empty(0, np.int64), *found])


_DONE = {"read": "could not be read", "decode": "not decoded", "transform": "not transformed"}
