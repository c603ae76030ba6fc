"""The account of a mixture: whether each sample came exactly once in each epoch of its source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..loader.columns import IntArray
from ..loader.errors import DatasetError
from ..loader.order.distinct import distinct
from ..loader.pipeline.delivery_log import KEY_BITS

_ID_MASK = (1 << KEY_BITS) - 1


@dataclass(frozen=True, kw_only=True)
class SourceAccount:
    """One source of a mixture, of ``samples`` samples, and what was handed out of it.

    ``delivered``: rows that count; ``epochs``: epochs of the source that these are of, of which the last may have only
    begun; ``missing``: samples that did not come in an epoch that a later one followed; ``duplicated``: rows beyond the
    first of a sample in one epoch; ``replayed``: rows that were handed out again after a resume or in a pass begun
    again; ``dropped``: samples that were dropped instead, which count for their epoch as if they had come, as do
    ``bad`` ones, which could not be read, decoded or transformed; ``replaced``: of those delivered, the bad samples in
    whose places others came. These count for nothing else.
    """

    name: str
    samples: int
    delivered: int
    epochs: int
    missing: int
    duplicated: int
    replayed: int
    dropped: int = 0
    replaced: int = 0
    bad: int = 0

    @property
    def flaws(self) -> int:
        """Number of samples that did not come exactly once."""
        return self.missing + self.duplicated


@dataclass(frozen=True, kw_only=True)
class MixtureAccount:
    """Account of a mixture.

    ``lost`` counts rows of global batches that no rank logged, ``skipped`` positions that were passed over on purpose;
    their samples are among the ``missing`` of their sources.
    """

    sources: Sequence[SourceAccount]
    lost: int
    skipped: int

    @property
    def is_exact(self) -> bool:
        """Return whether each sample came once per epoch of its source, except those skipped on purpose."""
        missing = sum(source.missing for source in self.sources)
        return not self.lost and missing <= self.skipped and not any(source.duplicated for source in self.sources)


@dataclass(frozen=True, slots=True)
class LoggedSource:
    """A source as logs' headers name it: its data set's samples, of which one of its epochs has ``per_epoch``."""

    name: str
    fingerprint: str
    samples: int
    per_epoch: int

    @property
    def data(self) -> tuple[str, int, int]:
        """Identity of the data behind the name."""
        return self.fingerprint, self.samples, self.per_epoch


def read_sources(header: Any) -> list[LoggedSource]:
    """The sources that a log's header lists.

    Raises:
        DatasetError: it lists none.
    """
    try:
        return [LoggedSource(str(n), str(f), int(samples), int(epoch)) for n, f, samples, epoch in header["sources"]]
    except (TypeError, ValueError, KeyError) as exc:
        raise DatasetError(f"a log's header lists no sources ({exc}); it is damaged") from exc


def to_common(keys: IntArray, own: Sequence[LoggedSource], sources: Sequence[LoggedSource]) -> IntArray:
    """Keys of a log whose mixture has the sources ``own``, as those of a mixture of all ``sources``."""
    firsts, own_firsts = _edges(sources), _edges(own)
    places = np.array([sources.index(source) for source in own], np.int64)
    ids = keys & _ID_MASK
    source = np.searchsorted(own_firsts[1:], ids, side="right")
    moved: IntArray = ids - own_firsts[source] + firsts[places[source]]
    return moved | keys & ~np.int64(_ID_MASK)


def _edges(sources: Sequence[LoggedSource]) -> IntArray:
    """(sources + 1,) int64: the joint id of each source's first sample, and their number."""
    return np.cumsum([0, *(source.samples for source in sources)])


def account_mixture(
    sources: Sequence[LoggedSource],
    counted: IntArray,
    replayed: IntArray,
    dropped: IntArray,
    replaced: IntArray,
    bad: IntArray,
    *,
    mixtures: Collection[Collection[LoggedSource]] = (),
    lost: int,
    skipped: int,
) -> MixtureAccount:
    """Count the keys that were handed out, those handed out again and those dropped.

    ``replaced`` are some of the first, and ``bad`` some of the last.
    ``mixtures``: the sources that the logs' mixtures had. Two of the same data of which none had both are one that got
    another name, if it went on where it was.
    """
    parts = zip(*(_keys_of(sources, keys) for keys in (counted, dropped, replayed, replaced, bad)), strict=True)
    accounts: list[SourceAccount] = []
    places: defaultdict[Any, dict[int, tuple[list[LoggedSource], _Keys]]] = defaultdict(dict)
    for source, of_source in zip(sources, parts, strict=True):
        keys = _Keys(*of_source)
        account = keys.account(source)
        of_data = places[source.data]
        for place, (names, before) in of_data.items():
            if any(source in mixture and name in mixture for mixture in mixtures for name in names):
                continue
            joined = before.join(keys)
            as_one = joined.account(source)
            if as_one.flaws <= account.flaws + accounts[place].flaws:
                accounts[place], of_data[place] = as_one, ([*names, source], joined)
                break
        else:
            of_data[len(accounts)] = [source], keys
            accounts.append(account)
    return MixtureAccount(sources=accounts, lost=lost, skipped=skipped)


def _keys_of(sources: Sequence[LoggedSource], keys: IntArray) -> list[IntArray]:
    """The keys of each source, with ids of its own."""
    edges = _edges(sources)
    source_of = np.searchsorted(edges[1:], keys & _ID_MASK, side="right")
    return [keys[source_of == number] - edges[number] for number in range(len(sources))]


@dataclass(frozen=True, slots=True)
class _Keys:
    """Samples of a source that were handed out, dropped, handed out again, replaced by others, or dropped as bad."""

    own: IntArray
    gone: IntArray
    again: IntArray
    replaced: IntArray
    bad: IntArray

    def join(self, other: _Keys) -> _Keys:
        return _Keys(*(np.concatenate([getattr(self, of.name), getattr(other, of.name)]) for of in fields(self)))

    def account(self, source: LoggedSource) -> SourceAccount:
        keys = np.concatenate([self.own, self.gone])
        unique = distinct(keys)
        epochs = unique >> KEY_BITS
        first, last = (int(epochs[0]), int(epochs[-1])) if len(epochs) else (0, 0)
        return SourceAccount(
            name=source.name,
            samples=source.per_epoch,
            delivered=len(self.own),
            dropped=len(self.gone) - len(self.bad),
            epochs=last - first + 1 if len(epochs) else 0,
            missing=(last - first) * source.per_epoch - int(np.count_nonzero(epochs < last)),
            duplicated=len(keys) - len(unique),
            replayed=len(self.again),
            replaced=len(self.replaced),
            bad=len(self.bad),
        )
