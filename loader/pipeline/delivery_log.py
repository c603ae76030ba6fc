"""A log of the batches that a rank handed out: the input of an audit."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...storage.files import in_home
from ..errors import ConfigError, DatasetError
from ..ranks.detect import own_process

if TYPE_CHECKING:
    from ..columns import IntArray
    from ..dataset.manifest import Manifest
    from ..order.selecting import Selection
    from ..reading.bad.samples import BadOfSources
    from .delivery_queue import Delivery

MAGIC = 0x70656E73746F636B
SKIP_MAGIC = 0x70656E736B697070
DROP_MAGIC = 0x70656E64726F7070
SIZE_MAGIC = 0x70656E7362736978
FILTER_MAGIC = 0x70656E73746B6472
END_MAGIC = 0x70656E73746B656E
BAD_MAGIC = 0x70656E7374626164
REPLACE_MAGIC = 0x70656E7374727066
LOAD_MAGIC = 0x70656E736C6F6164
SEEK_MAGIC = 0x70656E737365656B
SUFFIX = ".deliveries"
KEY_BITS = 40  # of a mixture's sample ids, in front of which logs have the epochs of their sources
_LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def to_keys(ids: IntArray, epochs: IntArray) -> IntArray:
    """Make a mixture's log keys: the sample id, joint of all sources, and the epoch of its source."""
    keys: IntArray = ids | epochs << KEY_BITS
    return keys


def pair_replaced(item: Delivery, delivered: IntArray | None) -> IntArray | None:
    """Pair what a log holds of replaced rows with their substitutes, (n, 2), of a batch that has ``delivered`` ids."""
    if delivered is None:
        return None
    differs = item.ids != delivered
    if not differs.any():
        return None
    planned, came = item.ids[differs], delivered[differs]
    if item.logged is not None:
        planned = item.logged[differs]
        came = to_keys(came, planned >> KEY_BITS)
    pairs: IntArray = np.stack((planned, came), axis=1)
    return pairs


class DeliveryLog:
    """One rank's log: a line of JSON, then one record per batch: (magic, epoch, start, stop, n, n sample ids) as int64.

    Batches that were skipped on purpose have one record together, of another magic number and without sample ids; so do
    samples at an epoch's end that fill no batch. A change of the batch size has a record with that number; a state
    that is loaded after some batches, one of where that is; and so has a batch that was sought.
    After a batch may follow, with numbers of their own, the samples that were filtered out on the way to it, and after
    the last one of an epoch whose samples are filtered, those that fill no batch. Which of those filtered out are bad
    follows once more; and so do pairs of bad samples of the batch and their substitutes.

    Of a mixture, the header has the name, fingerprint, number of samples and of samples an epoch of each of its
    ``sources``, and records have ``to_keys`` in the place of sample ids.

    Every record is one unbuffered write, so a SIGKILL loses none; at most it truncates the last one. Used by the
    training loop's thread.
    """

    _bad: BadOfSources | None = None  # knows which of those filtered out are bad
    _dropped: tuple[int, int] | None = None  # where the last samples of an epoch that fill no batch begin
    _has_records = False

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        manifest: Manifest,
        rank: int,
        world_size: int,
        selection: Selection | None = None,
        sources: Sequence[tuple[str, str, int, int]] = (),
        may_drop: bool = False,
        is_packed: bool = False,
        bad: BadOfSources | None = None,
    ) -> None:
        self._bad = bad
        self._has_keys = bool(sources)
        if manifest.num_samples >= 1 << KEY_BITS and sources:
            raise ConfigError(
                f"audit_dir= with a mixture of {manifest.num_samples:,} samples: at most {1 << KEY_BITS:,}"
            )
        started_ns = time.time_ns()
        header = {
            "fingerprint": manifest.fingerprint,
            "num_samples": manifest.num_samples,
            "rank": rank,
            "world_size": world_size,
            "process": own_process(),
            "started_ns": started_ns,
            "launch": _name_launch(),
            **_describe(selection),
            **({"sources": [list(source) for source in sources]} if sources else {}),
            **({"may_drop": True} if may_drop else {}),
            **({"is_packed": True} if is_packed else {}),
        }
        try:
            place = Path(in_home(folder))
            place.mkdir(parents=True, exist_ok=True)
            path = place / f"{started_ns}-rank{rank:05d}-{os.getpid()}{SUFFIX}"
            self._file = path.open("xb", buffering=0)
            self._file.write(json.dumps(header).encode() + b"\n")
        except OSError as exc:
            raise ConfigError(f"audit_dir={os.fspath(folder)!r} cannot be written: {exc}") from exc

    def record(
        self,
        epoch: int,
        start: int,
        stop: int,
        ids: IntArray,
        dropped: IntArray | None = None,
        left: IntArray | None = None,
        replaced: IntArray | None = None,
    ) -> None:
        """Record that this rank is about to get ``ids`` of the global batch at positions ``start`` to ``stop``.

        ``dropped`` are the ids that were dropped on the way to them; ``left``, at an epoch's end, those that fill no
        batch; ``replaced`` (n, 2) those of ``ids`` that are bad, each with the id of its substitute.

        Raises:
            DatasetError: it cannot be written; nothing of it is in the log.
        """
        bad = None if dropped is None else self._find_bad(epoch, dropped)
        pairs = None if replaced is None else replaced.ravel()
        kinds = [(MAGIC, ids), (FILTER_MAGIC, dropped), (END_MAGIC, left), (BAD_MAGIC, bad), (REPLACE_MAGIC, pairs)]
        records = [
            np.concatenate((np.array((magic, epoch, start, stop, len(some)), np.int64), some))
            for magic, some in kinds
            if some is not None
        ]
        self._write(np.concatenate(records))

    def _find_bad(self, epoch: int, dropped: IntArray) -> IntArray | None:
        if self._bad is None or not self._has_keys:
            return None if self._bad is None else self._bad.among(epoch, dropped)
        ids, epochs = dropped & ((1 << KEY_BITS) - 1), dropped >> KEY_BITS
        by_epoch = ((each, self._bad.among(each, ids[epochs == each])) for each in np.unique(epochs).tolist())
        found = [to_keys(bad, np.full(len(bad), each, np.int64)) for each, bad in by_epoch]
        keys: IntArray = np.concatenate([np.empty(0, np.int64), *found])
        return keys

    def record_skip(self, epoch: int, start: int, stop: int) -> None:
        """Record that the positions ``start`` to ``stop`` are handed out on no rank, on purpose."""
        self._write(np.array((SKIP_MAGIC, epoch, start, stop, 0), np.int64))

    def record_drop(self, epoch: int, start: int, stop: int) -> None:
        """Record, once, that the positions ``start`` to ``stop``, an epoch's last, fill no batch and are left out."""
        if self._dropped == (epoch, start):
            return
        self._dropped = epoch, start
        self._write(np.array((DROP_MAGIC, epoch, start, stop, 0), np.int64))

    def record_load(self, epoch: int, position: int) -> None:
        """Record that a state was loaded, where batches were handed out before: they need not lead up to it."""
        if self._has_records:
            self._write(np.array((LOAD_MAGIC, epoch, position, position, 0), np.int64))

    def record_seek(self, epoch: int, position: int) -> None:
        """Record that a batch was sought, by whoever deals them out: they need not lead up to it."""
        self._write(np.array((SEEK_MAGIC, epoch, position, position, 0), np.int64))

    def record_batch_size(self, epoch: int, position: int, size: int) -> None:
        """Record that global batches have ``size`` samples from a position on."""
        self._write(np.array((SIZE_MAGIC, epoch, position, position, 1, size), np.int64))

    def _write(self, words: IntArray) -> None:
        record = words.astype("<i8").tobytes()
        before = self._file.tell()
        try:
            written = self._file.write(record)
        except OSError as exc:
            raise DatasetError(f"{self._file.name}: a delivery cannot be logged: {exc}") from exc
        if written != len(record):
            self._file.truncate(before)
            self._file.seek(before)
            raise DatasetError(f"{self._file.name}: a delivery was logged only in part; is the disk full?")
        self._has_records = True

    def close(self) -> None:
        self._file.close()


def _name_launch() -> str:
    """Name this launch: the same on its ranks, and different from every other start of the run."""
    from ..ranks.peers import agreed_start

    start = agreed_start() or os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return ":".join([*(os.environ.get(name, "") for name in _LAUNCH), start])


def _describe(selection: Selection | None) -> dict[str, Any]:
    """Describe a subset in a header, with its members, so that nobody needs to count them."""
    if selection is None or selection.subset is None:
        return {}
    return {"subset": selection.subset.to_dict(), "members": selection.members}
