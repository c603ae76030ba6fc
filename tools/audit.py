"""The account of what a run delivered, by attempt and epoch, from the logs that its ranks wrote.

A run that is killed has delivered batches after its last checkpoint; the attempt that resumes from the checkpoint
delivers them again. So does a pass that is left early and begun again. The account counts those first deliveries as
replayed, not as delivered. Batches that were skipped on purpose count as skipped. Samples that keep= or transform=
dropped count as dropped, once each, too. What remains must be every sample exactly once.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ..loader.errors import DatasetError
from ..loader.order.distinct import distinct
from ..loader.pipeline.delivery_log import SUFFIX
from ..storage.files import in_home
from .attempts import join_dealt, settle, sort_attempts, split_passes
from .coverage import Standing, count_lost, refuse_other_order
from .delivery_records import Delivered, Log, read_log
from .members import Members, read_members
from .mixed_audit import MixtureAccount, account_mixture, read_sources, to_common

_MOST_ABSENT = 10_000  # epochs
_DENSE = 16


@dataclass(frozen=True, kw_only=True)
class EpochAccount:
    """One epoch of ``samples`` samples, of which ``reached`` positions were handed out.

    An epoch that a later one followed has been reached to its end, less what does not fill a batch: what it did not
    deliver is missing. ``delivered``: rows handed out; ``missing``: samples reached but not delivered; ``duplicated``:
    rows beyond the first of a sample; ``replayed``: rows that were handed out again, after a resume or in a pass begun
    again; ``skipped``: positions reached that were passed over on purpose, by ``skip_batches``. ``samples`` are those
    of the loader's subset; ``outside``: all others of the data set; ``stray``: delivered rows of these.

    Where samples may be dropped, positions are places among those that are not. ``dropped``: samples that ``keep=`` or
    ``transform=`` dropped; ``left``: samples that filled no batch, at the end. Each sample is delivered, dropped or
    left, once, or bad: what is several of these, or the same on two ranks, is ``duplicated``.

    ``bad``: samples that were skipped since they could not be read, decoded or transformed; ``dropped`` does not count
    them. ``replaced``: of the samples delivered, those that are bad, in whose places others came. These count for
    nothing else, so that a sample that came once for itself and once for a bad one is not ``duplicated``.
    """

    epoch: int
    samples: int
    reached: int
    delivered: int
    missing: int
    duplicated: int
    replayed: int
    skipped: int = 0
    outside: int = 0
    stray: int = 0
    dropped: int = 0
    left: int = 0
    replaced: int = 0
    bad: int = 0


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """Account of a run.

    ``attempts`` has the world size, start epoch and start position of each, ``batch_sizes`` the changes of the batch
    size, as epoch, position and size. A mixture is accounted for by the epochs of its sources, in ``mixture``, and has
    no ``epochs`` here.
    """

    attempts: Sequence[tuple[int, int, int]]
    epochs: Sequence[EpochAccount] = field(default_factory=tuple)
    batch_sizes: Sequence[tuple[int, int, int]] = ()
    mixture: MixtureAccount | None = None

    @property
    def is_exact(self) -> bool:
        """Return whether every sample reached was delivered once, or left out on purpose, and none is from outside."""
        if self.mixture is not None:
            return self.mixture.is_exact
        return all(not (account.missing or account.duplicated or account.stray) for account in self.epochs)


def audit(folder: str | os.PathLike[str]) -> AuditReport:
    """Account for everything that was delivered according to the logs in a folder.

    Raises:
        DatasetError: there are no logs, a log is damaged, or the logs are of several data sets or subsets.
    """
    folder = in_home(folder)
    if not Path(folder).is_dir():
        what = "is a file" if Path(folder).exists() else "is not there"
        raise DatasetError(f"{os.fspath(folder)}: {what}; give the folder that was passed as audit_dir=")
    try:
        names = os.listdir(folder)  # noqa: PTH208 - Path.glob finds nothing where it may not look
    except OSError as exc:
        raise DatasetError(f"{os.fspath(folder)}: cannot be read ({exc.strerror}); check its permissions") from exc
    paths = sorted(Path(folder) / name for name in names if name.endswith(SUFFIX))
    started = [log for log in map(read_log, paths) if log is not None]
    if not any(log.records for log in started):
        raise DatasetError(f"{os.fspath(folder)}: no delivery logs; train with audit_dir= first")
    if any("sources" in log.header for log in started):
        return _audit_mixture(folder, started)
    fingerprints = {log.header["fingerprint"] for log in started}
    if len(fingerprints) > 1:
        raise DatasetError(f"{os.fspath(folder)}: logs of {len(fingerprints)} data sets; use one audit_dir= for each")
    if any(log.header.get(name) != started[0].header.get(name) for log in started for name in ("subset", "members")):
        raise DatasetError(f"{os.fspath(folder)}: logs of several subsets; use one audit_dir= for each")
    members = read_members(started[0].header)
    joined, dealt_again = join_dealt(started)
    groups = sort_attempts(joined)
    attempts = _list_attempts(groups)
    standing, replayed = settle(groups)
    replayed += dealt_again
    lost = count_lost(standing)
    counted = [each.record for each in standing]
    by_epoch, again = _by_epoch(counted), _by_epoch(replayed)
    epochs = range(min(by_epoch), max(by_epoch) + 1)
    absent = len(epochs) - len(by_epoch)
    if absent > _MOST_ABSENT:
        raise DatasetError(
            f"{os.fspath(folder)}: logs of epochs {epochs[0]} to {epochs[-1]}, of which {absent:,} are absent; a log "
            "is damaged, or is of another run"
        )
    last_batches = _last_batches(standing, groups)
    return AuditReport(
        attempts=attempts,
        epochs=[
            _account(
                epoch,
                members,
                by_epoch[epoch],
                again[epoch],
                is_last=epoch == epochs[-1],
                batch=last_batches.get(epoch, max(last_batches.values(), default=1)),
                lost=lost.get(epoch, 0),
            )
            for epoch in epochs
        ],
        batch_sizes=sorted({size for log in started for size in log.sizes}),
    )


def _list_attempts(groups: Sequence[Sequence[Log]]) -> list[tuple[int, int, int]]:
    """World size, epoch and position of the beginning of each attempt, or of each pass or loaded state in one.

    Raises:
        DatasetError: they cannot have come in this order.
    """
    attempts = [attempt for group in groups for attempt in split_passes(group)]
    starts = [min((record.epoch, record.start) for record in records) for _, records in attempts]
    ends = [max((record.epoch, record.stop) for record in records) for _, records in attempts]
    refuse_other_order(starts, ends)
    listed = [attempt for group in groups for attempt in split_passes(group, at_loads=True)]
    return [(size, *min((record.epoch, record.start) for record in records)) for size, records in listed]


def _last_batches(standing: Sequence[Standing], groups: Sequence[Sequence[Log]]) -> dict[int, int]:
    """By epoch, how many samples a batch had at its end: of the attempt that came furthest, as it was set or taken.

    The last batch itself may be smaller.
    """
    largest: defaultdict[int, int] = defaultdict(int)
    furthest: dict[int, tuple[int, int]] = {}
    for each in standing:
        largest[each.attempt] = max(largest[each.attempt], each.record.batch)
        at = each.record.stop, each.attempt
        furthest[each.record.epoch] = max(furthest.get(each.record.epoch, at), at)
    batches = {}
    for epoch, (_, attempt) in furthest.items():
        sizes = sorted({size for log in groups[attempt] for size in log.sizes})
        set_last = next((size for of_epoch, _, size in reversed(sizes) if of_epoch <= epoch), None)
        batches[epoch] = set_last or largest[attempt] or 1
    return batches


def _audit_mixture(folder: str | os.PathLike[str], logs: Sequence[Log]) -> AuditReport:
    if not all("sources" in log.header for log in logs):
        raise DatasetError(f"{os.fspath(folder)}: logs of a mixture and of one data set; use one audit_dir= for each")
    lists = [read_sources(log.header) for log in logs]
    sources = list(dict.fromkeys(source for of_log in lists for source in of_log))
    for log, of_log in zip(logs, lists, strict=True):
        log.records[:] = [
            replace(
                record,
                ids=to_common(record.ids, of_log, sources),
                dropped=to_common(record.dropped, of_log, sources),
                replaced=to_common(record.replaced, of_log, sources),
                bad=to_common(record.bad, of_log, sources),
            )
            for record in log.records
        ]
    joined, dealt_again = join_dealt(logs)
    groups = sort_attempts(joined)
    attempts = _list_attempts(groups)
    standing, replayed = settle(groups)
    replayed += dealt_again
    counted = [each.record for each in standing]
    skips: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for record in counted:
        if record.is_skip:
            skips[record.epoch].append((record.start, record.stop))
    return AuditReport(
        attempts=attempts,
        batch_sizes=sorted({size for log in logs for size in log.sizes}),
        mixture=account_mixture(
            sources,
            np.concatenate([np.empty(0, np.int64), *(record.ids for record in counted)]),
            np.concatenate([np.empty(0, np.int64), *(record.ids for record in replayed)]),
            np.concatenate([np.empty(0, np.int64), *(record.dropped for record in counted)]),
            np.concatenate([np.empty(0, np.int64), *(record.replaced for record in counted)]),
            np.concatenate([np.empty(0, np.int64), *(record.bad for record in counted)]),
            mixtures=set(map(frozenset, lists)),
            lost=sum(count_lost(standing, by_rows=True).values()),
            skipped=sum(_length_of_union(ranges) for ranges in skips.values()),
        ),
    )


def _by_epoch(records: Iterable[Delivered]) -> defaultdict[int, list[Delivered]]:
    found: defaultdict[int, list[Delivered]] = defaultdict(list)
    for record in records:
        found[record.epoch].append(record)
    return found


def _account(
    epoch: int,
    members: Members,
    records: Sequence[Delivered],
    replayed: Sequence[Delivered],
    *,
    is_last: bool,
    batch: int,
    lost: int,
) -> EpochAccount:
    """``batch``: samples of the epoch's last batches; ``lost``: positions that records lack."""
    if any(record.may_drop for record in records):
        return _account_of_dropping(epoch, members, records, replayed, is_last=is_last, lost=lost)
    ids = np.concatenate([np.empty(0, np.int64), *(record.ids for record in records)])
    num_samples = members.count
    reached = max((record.stop for record in records if not record.is_drop), default=0)
    is_dropped = any(record.is_drop and record.start == reached for record in records)
    if not is_last and not is_dropped and num_samples - reached >= batch:
        reached = num_samples - num_samples % batch
    here = members.holds(ids)
    # Counting is faster than sorting, and takes memory for every sample of the data set.
    is_dense = members.total <= _DENSE * max(len(ids), 1)
    unique = int(np.count_nonzero(np.bincount(ids[here]))) if is_dense else len(distinct(ids[here]))
    stray = len(ids) - int(np.count_nonzero(here))
    skipped = _length_of_union((record.start, record.stop) for record in records if record.is_skip)
    return EpochAccount(
        epoch=epoch,
        samples=num_samples,
        reached=reached,
        delivered=len(ids),
        missing=max(0, reached - skipped - unique),
        duplicated=len(ids) - stray - unique,
        replayed=sum(len(record.ids) for record in replayed),
        skipped=skipped,
        outside=members.total - num_samples,
        stray=stray,
        replaced=sum(len(record.replaced) for record in records),
    )


def _account_of_dropping(
    epoch: int,
    members: Members,
    records: Sequence[Delivered],
    replayed: Sequence[Delivered],
    *,
    is_last: bool,
    lost: int,
) -> EpochAccount:
    none = np.empty(0, np.int64)
    delivered = np.concatenate([none, *(record.ids for record in records)])
    dropped = np.concatenate([none, *(record.dropped for record in records)])
    left = np.concatenate([none, *(record.left for record in records if record.left is not None)])
    ids = np.concatenate([delivered, dropped, left])
    here = members.holds(ids)
    unique = len(distinct(ids[here]))
    reached = max((record.stop for record in records), default=0)
    has_ended = not is_last or any(record.left is not None for record in records)
    # Until an epoch has ended, it is known how many samples have been delivered, and not how many are to be dropped.
    is_packed = any(record.is_packed for record in records)  # then positions are those of sequences
    missing = members.count - unique if has_ended else lost if is_packed else reached - len(distinct(delivered))
    stray = len(ids) - int(np.count_nonzero(here))
    bad = sum(len(record.bad) for record in records)
    return EpochAccount(
        epoch=epoch,
        samples=members.count,
        reached=reached,
        delivered=len(delivered),
        missing=max(0, missing),
        duplicated=len(ids) - stray - unique,
        replayed=sum(len(record.ids) for record in replayed),
        outside=members.total - members.count,
        stray=stray,
        dropped=len(dropped) - bad,
        bad=bad,
        left=len(left),
    )


def _length_of_union(ranges: Iterable[tuple[int, int]]) -> int:
    """Number of positions in the union of the ranges: every rank logs the same skips."""
    length = end = 0
    for start, stop in sorted(ranges):
        length += max(0, stop - max(start, end))
        end = max(end, stop)
    return length
