"""The records of a delivery log, read back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..loader.columns import IntArray
from ..loader.errors import DatasetError
from ..loader.pipeline.delivery_log import (
    BAD_MAGIC,
    DROP_MAGIC,
    END_MAGIC,
    FILTER_MAGIC,
    KEY_BITS,
    LOAD_MAGIC,
    MAGIC,
    REPLACE_MAGIC,
    SEEK_MAGIC,
    SIZE_MAGIC,
    SKIP_MAGIC,
)

_MOST_SAMPLES = 1 << 60  # as in a manifest
# Of the words that follow; None: any number.
_ANY = dict.fromkeys((MAGIC, FILTER_MAGIC, END_MAGIC, BAD_MAGIC, REPLACE_MAGIC))
_COUNTS: dict[int, int | None] = {**_ANY, SKIP_MAGIC: 0, DROP_MAGIC: 0, LOAD_MAGIC: 0, SEEK_MAGIC: 0, SIZE_MAGIC: 1}
_HEADER = {"fingerprint": str, "num_samples": int, "rank": int, "world_size": int, "started_ns": int, "launch": str}


@dataclass(frozen=True, slots=True)
class Delivered:
    epoch: int
    start: int
    stop: int
    ids: IntArray
    is_skip: bool = False
    is_drop: bool = False
    may_drop: bool = False
    is_packed: bool = False  # positions are those of sequences, of which samples make any number
    dropped: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    left: IntArray | None = None  # of an epoch's last batch, where samples may be dropped
    replaced: IntArray = field(default_factory=lambda: np.empty(0, np.int64))  # of the ids, those that are bad
    bad: IntArray = field(default_factory=lambda: np.empty(0, np.int64))  # of the dropped ids, those that are bad

    @property
    def batch(self) -> int:
        return 0 if self.is_skip or self.is_drop else self.stop - self.start


@dataclass(slots=True)
class Log:
    """One file's header and records; ``sizes``: changes of the batch size, as (epoch, position, samples).

    ``loads``: the states that were loaded in between, as (records before it, epoch, position). ``is_dealt``: batches
    were sought, one of many logs of a run whose batches are dealt out.
    """

    header: dict[str, Any]
    records: list[Delivered]
    sizes: list[tuple[int, int, int]]
    loads: list[tuple[int, int, int]] = field(default_factory=list)
    is_dealt: bool = False


def read_log(path: Path) -> Log | None:
    """A log's complete records; None if a kill truncated even the header."""
    try:
        head, newline, body = path.read_bytes().partition(b"\n")
        if not newline:
            return None
        header = json.loads(head)
        lacking = _HEADER.keys() - header.keys()
        if lacking or any(type(header[name]) is not kind for name, kind in _HEADER.items()):
            raise ValueError("its first line is not the header of a log")
        if not 0 < header["num_samples"] < _MOST_SAMPLES or not 0 <= header["rank"] < header["world_size"]:
            raise ValueError("its first line states an impossible number of samples or ranks")
        words = np.frombuffer(body[: len(body) // 8 * 8], "<i8").astype(np.int64)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as exc:
        raise DatasetError(f"{path}: not a readable delivery log ({exc})") from exc
    records: list[Delivered] = []
    sizes = []
    loads = []
    is_dealt = False
    at = 0
    while at + 5 <= len(words):
        magic, epoch, start, stop, count = words[at : at + 5].tolist()
        if magic not in _COUNTS or count < 0 or _COUNTS[magic] not in (None, count):
            raise DatasetError(f"{path}: damaged at byte {len(head) + 1 + 8 * at}; expected a record")
        if at + 5 + count > len(words):
            break  # a record that a kill truncated was not handed out
        ids = words[at + 5 : at + 5 + count]
        is_mixed = "sources" in header
        # A mixture's positions count epochs of sources, those of packed sequences are no samples.
        most = _MOST_SAMPLES if is_mixed or "is_packed" in header else header["num_samples"]
        own = ids & ((1 << KEY_BITS) - 1) if is_mixed else ids
        is_size = magic == SIZE_MAGIC
        is_possible = ids[0] > 0 if is_size else not _any_outside(own, header["num_samples"])
        if epoch < 0 or not 0 <= start <= stop <= most or not is_possible:
            raise DatasetError(f"{path}: damaged at byte {len(head) + 1 + 8 * at}; the record is not a possible batch")
        if is_size:
            sizes.append((epoch, start, int(ids[0])))
        elif magic == SEEK_MAGIC:
            is_dealt = True
        elif magic == LOAD_MAGIC:
            loads.append((len(records), epoch, start))
        elif magic == REPLACE_MAGIC:
            latest = records[-1] if records else None
            is_of_batch = latest is not None and (latest.epoch, latest.start, latest.stop) == (epoch, start, stop)
            if latest is None or not is_of_batch or count % 2 or not np.isin(ids[::2], latest.ids).all():
                raise DatasetError(
                    f"{path}: damaged at byte {len(head) + 1 + 8 * at}; what was replaced is of another batch"
                )
            records[-1] = replace(latest, replaced=ids[::2])
        elif magic in (FILTER_MAGIC, BAD_MAGIC, END_MAGIC):
            latest = records[-1] if records else None
            is_of_batch = latest is not None and (latest.epoch, latest.start, latest.stop) == (epoch, start, stop)
            if latest is None or not is_of_batch or (magic == BAD_MAGIC and not np.isin(ids, latest.dropped).all()):
                raise DatasetError(
                    f"{path}: damaged at byte {len(head) + 1 + 8 * at}; what was dropped is of another batch"
                )
            changed: dict[int, dict[str, Any]] = {
                FILTER_MAGIC: {"dropped": ids},
                BAD_MAGIC: {"bad": ids},
                END_MAGIC: {"left": ids},
            }
            records[-1] = replace(latest, **changed[magic])
        else:
            kind = magic == SKIP_MAGIC, magic == DROP_MAGIC, "may_drop" in header, "is_packed" in header
            records.append(Delivered(epoch, start, stop, ids, *kind))
        at += 5 + count
    return Log(header, records, sizes, loads, is_dealt)


def _any_outside(ids: IntArray, num_samples: int) -> bool:
    return bool(len(ids)) and not 0 <= int(ids.min()) <= int(ids.max()) < num_samples
