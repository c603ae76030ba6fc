"""The loader's arguments about bad samples, checked, and what follows from them once the data set is known."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from ...storage.files import in_home
from ...storage.suggestions import unknown_choice
from ..errors import ConfigError
from .checks import check_at_least

if TYPE_CHECKING:
    from ..dataset.manifest import Manifest
    from ..decoding.replace import Substitutes
    from ..order.plan import Share
    from ..order.selecting import Selection
    from ..reading.bad.file import Paths
    from ..reading.bad.samples import BadSamples
    from ..reading.chunk_source import ChunkSource

OnError = Literal["stop", "skip", "replace"]
"""Fate of a sample that cannot be read, decoded or transformed: an error, dropped, or another in its place."""

_USUAL_SHARE = 0.01
_DONE = {"skip": "skipped", "replace": "replaced"}


@dataclass(frozen=True, kw_only=True)
class ErrorArguments:
    """The arguments about samples that cannot be read, decoded or transformed.

    Raises:
        ConfigError: a value, or a combination with the other arguments, cannot work; says what would.
    """

    on_error: OnError
    max_errors: int | float
    max_bad_chunks: int | None
    quarantine: str | os.PathLike[str] | None
    avoid: Paths | None

    @staticmethod
    def read(
        on_error: OnError,
        max_errors: int | float | None,
        max_bad_chunks: int | None,
        quarantine: str | os.PathLike[str] | None,
        avoid: Paths | None,
        *,
        drops: bool,
        packs: bool,
        by_stage: bool,
        has_budget: bool,
        audit_dir: str | os.PathLike[str] | None,
        is_mixture: bool = False,
    ) -> ErrorArguments:
        if on_error not in get_args(OnError):
            raise ConfigError(unknown_choice("on_error", on_error, get_args(OnError)))
        if max_bad_chunks is not None:
            max_bad_chunks = check_at_least("max_bad_chunks", max_bad_chunks, 0)
        if max_bad_chunks and has_budget:
            raise ConfigError(
                f"max_bad_chunks={max_bad_chunks} with batch_tokens=: samples that replace a bad chunk's may hold more "
                "tokens than the batch has room for; give batch_size= instead"
            )
        if on_error == "stop":
            given = {"max_errors": max_errors or None, "quarantine": quarantine, "avoid": avoid}
            unused = [f"{name}={value!r}" for name, value in given.items() if value is not None]
            if unused:
                raise ConfigError(
                    f"{', '.join(unused)} with on_error='stop', where the first bad sample ends the run; give "
                    "on_error='replace' or 'skip' too"
                )
            return ErrorArguments(
                on_error="stop", max_errors=0, max_bad_chunks=max_bad_chunks or 0, quarantine=None, avoid=None
            )
        if by_stage:
            raise ConfigError(
                f"on_error={on_error!r} with fields_by_stage=: stages that read other fields would find others bad; "
                "leave out one of the two"
            )
        if packs:
            raise ConfigError(
                f"on_error={on_error!r} with packing=: documents are packed many at once; leave out one of the two, "
                "and keep out what is bad by keep="
            )
        if drops and on_error == "replace":
            raise ConfigError(
                "on_error='replace' with keep= or may_drop=True: what replaces a sample might be dropped; give "
                "on_error='skip', or leave out one of the two"
            )
        if has_budget:
            raise ConfigError(
                f"on_error={on_error!r} with batch_tokens=: a sample that replaces another may hold more tokens than "
                "the batch has room for; give batch_size= instead"
            )
        if avoid is not None and not _are_paths(avoid):
            raise ConfigError(
                f"avoid={avoid!r}: give a folder or file that an earlier run wrote (its quarantine=), or a list of them"
            )
        quarantine = audit_dir if quarantine is None else quarantine
        if avoid is not None and quarantine is not None and _holds(quarantine, avoid, depth=2 if is_mixture else 1):
            raise ConfigError(
                f"avoid={avoid!r} is where this run writes what is bad (quarantine= or audit_dir=): a rank that starts "
                "later would avoid more than the first; copy the files elsewhere, or give another quarantine="
            )
        return ErrorArguments(
            on_error=on_error,
            max_errors=_check_limit(_USUAL_SHARE if max_errors is None else max_errors),
            max_bad_chunks=max_bad_chunks,
            quarantine=quarantine,
            avoid=avoid,
        )

    @property
    def goes_on(self) -> bool:
        """Return whether the run continues after a bad sample."""
        return self.on_error != "stop"

    def open(
        self, manifest: Manifest, share: Share, selection: Selection | None, source: str | None = None
    ) -> ErrorPolicy:
        """Choose the policy for this data set; ``source`` is its name in a mixture."""
        if not self.goes_on:
            return ErrorPolicy(self, manifest, selection, None)
        from ..reading.bad.file import QuarantineFile, read_quarantine
        from ..reading.bad.samples import BadSamples, Limit

        others: set[str] | None = None if source is None else set()
        entries = [] if self.avoid is None else read_quarantine(self.avoid, manifest, others=others)
        chunks = [entry.id for entry in entries if entry.kind == "chunk"]
        ordinals = np.searchsorted(manifest.first_ids, np.array(chunks, np.int64), side="right") - 1
        file = None
        if self.quarantine is not None:
            file = QuarantineFile(self.quarantine, share.rank, manifest.fingerprint, source)
        count = manifest.num_samples if selection is None else selection.num_samples
        limit, shown = self.max_errors, f"max_errors={self.max_errors}"
        if isinstance(limit, float):
            limit = math.ceil(limit * count / share.world_size)
            shown += f", {limit:,} of a rank's {-(-count // share.world_size):,},"
        return ErrorPolicy(
            self,
            manifest,
            selection,
            BadSamples(manifest, Limit(limit, shown), file, _DONE[self.on_error], source),
            frozenset(entry.id for entry in entries if entry.kind == "sample"),
            frozenset(ordinals.tolist()),
            frozenset(others or ()),
        )

    def check_avoided(self, policies: Sequence[ErrorPolicy]) -> None:
        """Raise ConfigError where ``avoid`` names samples of a data set that is none of a mixture's."""
        known = {policy.manifest.fingerprint for policy in policies}
        strange = {other for policy in policies for other in policy.others} - known
        if strange:
            raise ConfigError(
                f"avoid={self.avoid!r}: some lines are of a data set that is none of the mixture's, or of one whose "
                f"index has changed since (fingerprint {min(strange)}); leave out their file"
            )


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """The policy for bad samples of one data set: ``avoided`` ids and ``avoided_chunks`` are bad untried.

    ``others``: the fingerprints of other data sets that the files to avoid name.
    """

    arguments: ErrorArguments
    manifest: Manifest
    selection: Selection | None
    bad: BadSamples | None
    avoided: frozenset[int] = frozenset()
    avoided_chunks: frozenset[int] = frozenset()
    others: frozenset[str] = frozenset()

    def substitutes(self, chunks: ChunkSource, first_id: int, *, counts: bool = True) -> Substitutes:
        """Make the reader of what replaces bad samples, by ``chunks``. Without ``counts`` it records nothing."""
        from ..decoding.replace import Substitutes
        from ..reading.bad.samples import BadSamples, Limit

        assert self.bad is not None
        bad = self.bad if counts else BadSamples(self.manifest, Limit(self.manifest.num_samples, ""), None, "replaced")
        return Substitutes(chunks, bad, self.selection, self.avoided, first_id)


def _check_limit(value: object) -> int | float:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if is_count or (isinstance(value, float) and 0 <= value < 1):
        assert isinstance(value, int | float)
        return value
    raise ConfigError(
        f"max_errors={value!r}: must be a whole number of samples, 0 to tolerate none, or a share of a rank's samples "
        "below 1"
    )


def _are_paths(value: object) -> bool:
    paths = [value] if isinstance(value, str) or not isinstance(value, Collection) else value
    return all(isinstance(path, str | os.PathLike) for path in paths)


def _holds(folder: str | os.PathLike[str], paths: Paths, *, depth: int) -> bool:
    given = [Path(in_home(path)).resolve() for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    place = Path(in_home(folder)).resolve()
    return any(place in (path, *list(path.parents)[:depth]) for path in given)
