"""The quarantine file: a line of JSON for each sample or chunk that could not be used; written here, and read again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from ....storage.files import in_home
from ...errors import ConfigError, DatasetError

if TYPE_CHECKING:
    from ...dataset.manifest import Manifest

SUFFIX = ".quarantine.jsonl"
_MOST_REASON = 2000  # characters

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """A sample that could not be used, or a chunk: then ``id`` is the first of its ``samples`` samples.

    ``number``: the sample's ordinal in its shard, None of a chunk; ``offset``: the byte at which its chunk begins.
    ``step``: "read", "decode" or "transform"; ``field`` and ``key`` are None where they are not known. ``source``: the
    name of a mixture's source, whose ids and epochs these are; None where there is one data set.
    """

    kind: Literal["sample", "chunk"]
    id: int
    samples: int
    shard: str
    offset: int
    number: int | None
    key: str | None
    field: str | None
    step: str
    reason: str
    epoch: int
    source: str | None = None


class QuarantineFile:
    """One rank's file in ``folder``. A line is one write to a file opened for appending, so several runs may share it.

    Each ``source`` of a mixture has a folder of its own inside, as ids are those of one data set.

    Raises:
        ConfigError: the folder cannot be written to.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int, fingerprint: str, source: str | None = None) -> None:
        place = Path(in_home(folder))
        own = place if source is None else place / quote(source, safe=" ")
        self.path = own / f"rank{rank:05d}{SUFFIX}"
        self._fingerprint = fingerprint
        self._rank = rank
        try:
            place.mkdir(parents=True, exist_ok=True)
            if not os.access(place, os.W_OK) or (self.path.exists() and not os.access(self.path, os.W_OK)):
                raise PermissionError("no permission to write")
        except OSError as exc:
            raise ConfigError(f"quarantine={os.fspath(folder)!r} cannot be written: {exc}") from exc

    def append(self, entry: Quarantined) -> None:
        """Append an entry. Raises DatasetError if it cannot be written."""
        fields = {name: value for name, value in asdict(entry).items() if name != "source" or value is not None}
        record = {
            **fields,
            "reason": entry.reason[:_MOST_REASON],
            "rank": self._rank,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "fingerprint": self._fingerprint,
        }
        line = json.dumps(record).encode() + b"\n"
        try:
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                if file.write(line) != len(line):
                    raise OSError("only a part of a line was written; is the disk full?")
        except OSError as exc:
            raise DatasetError(f"{self.path}: a bad sample cannot be recorded: {exc}") from exc


def read_quarantine(
    paths: Paths,
    manifest: Manifest,
    argument: str = "avoid",
    *,
    is_same: bool = True,
    others: set[str] | None = None,
) -> list[Quarantined]:
    """The samples and chunks that files name, or all such files of folders, each once, in the order of their ids.

    A last line that a kill cut short is skipped. With ``is_same`` they must be of this very index of the data. With
    ``others``, which is for a source of a mixture, lines of other data sets are left out, and ``others`` gets the
    fingerprints of these; folders may hold the folders of sources.

    Raises:
        ConfigError: a file cannot be read, is damaged, or is of another data set. ``argument`` is its name for users.
    """
    found: dict[tuple[str, int], Quarantined] = {}
    for path in _files(paths, argument, of_sources=others is not None):
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as exc:
            raise ConfigError(f"{argument}={str(path)!r} cannot be read: {exc}") from exc
        for number, line in enumerate(lines[:-1], start=1):
            try:
                read = json.loads(line)
                if others is not None and (fingerprint := _fingerprint(read)) != manifest.fingerprint:
                    others.add(fingerprint)
                    continue
                entry = _entry(read, manifest if is_same else None)
            except (ValueError, TypeError, KeyError, RecursionError) as exc:
                raise ConfigError(
                    f"{argument}={str(path)!r}, line {number}: {exc}; expected what a loader's quarantine= wrote"
                ) from exc
            found.setdefault((entry.kind, entry.id), entry)
    return sorted(found.values(), key=lambda entry: entry.id)


def _files(paths: Paths, argument: str, *, of_sources: bool = False) -> list[Path]:
    files: list[Path] = []
    for given in [paths] if isinstance(paths, str | os.PathLike) else list(paths):
        path = Path(in_home(given))
        if path.is_dir():
            inside = sorted(path.glob(f"*{SUFFIX}")) + (sorted(path.glob(f"*/*{SUFFIX}")) if of_sources else [])
            if not inside:
                raise ConfigError(f"{argument}={str(path)!r}: a folder without *{SUFFIX}")
            files += inside
        else:
            files.append(path)
    return files


def _fingerprint(line: Any) -> str:
    if not isinstance(line, Mapping) or not isinstance(line["fingerprint"], str):
        raise ValueError("not an object with a fingerprint")
    return line["fingerprint"]


def _entry(line: Any, manifest: Manifest | None) -> Quarantined:
    if not isinstance(line, Mapping):
        raise ValueError("not an object")
    if manifest is not None and line["fingerprint"] != manifest.fingerprint:
        raise ValueError(f"it is of another data set than {manifest.url}, or of one whose index has changed since")
    kinds = {"id": int, "samples": int, "shard": str, "offset": int, "step": str, "reason": str, "epoch": int}
    wrong = [name for name, kind in kinds.items() if type(line[name]) is not kind]
    if line["kind"] not in ("sample", "chunk") or wrong:
        raise ValueError(f"{wrong or ['kind']} has a value of another type")
    if line["id"] < 0 or (manifest is not None and line["id"] >= manifest.num_samples):
        raise ValueError(f"there is no sample {line['id']}")
    if line["kind"] == "sample" and type(line["number"]) is not int:
        raise ValueError("number has a value of another type")
    fields: dict[str, Any] = {name: line.get(name) for name in Quarantined.__dataclass_fields__}
    return Quarantined(**fields)
