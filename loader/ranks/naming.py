"""Names of loaders that all ranks derive alike, without messages: one name is the same loader on every rank.

A loader that was made is named by its data set and by what it takes of that, and by its number among those that were
begun with the same source: so ranks may make several loaders in any order, and one may try again. A loader that could
not be made has no data set yet. It is named by its source, and, for ranks where that is called otherwise, by its number
among all.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from .incidents import Incident


@dataclass(slots=True)
class _Counts:
    """Counts of a group's loaders that this process has made, by source and by name."""

    begun: Counter[str] = field(default_factory=Counter)
    named: Counter[str] = field(default_factory=Counter)


_counts: weakref.WeakKeyDictionary[Any, _Counts] = weakref.WeakKeyDictionary()  # by store: its ranks count alike
last_posted: dict[int, Incident] = {}  # by process: what it has posted, until one of its loaders continues
_before = _Counts()  # of loaders that are made before there is a group


@dataclass(frozen=True, slots=True)
class Attempt:
    """A loader that is being made: ``number`` of its source, and its names until it is, the surest one first."""

    group: weakref.ref[Any] | None
    number: int
    names: tuple[str, ...]

    @staticmethod
    def begin(group: Any, source: Any, taken: Mapping[str, object]) -> Attempt:
        """Begin the next one of a process group, or of none, by its loader's arguments."""
        counts = _of(group)
        digest = _digest([_describe(source), *(f"{name}={value!r}" for name, value in sorted(taken.items()))])
        counts.begun[digest] += 1
        counts.begun[""] += 1
        number = counts.begun[digest]
        names = (f"source/{digest}/{number}", f"all/{counts.begun['']}")
        return Attempt(None if group is None else weakref.ref(group), number, names)

    def name(self, fingerprint: str, selection: Mapping[str, Any], *, shuffle: bool, processes: int) -> str:
        """The name of the loader, once its data set is known; ``processes`` share it out."""
        group = None if self.group is None else self.group()
        digest = _digest([fingerprint, json.dumps(selection, sort_keys=True, default=str), shuffle, processes])
        name = f"{digest}/{processes}/{self.number}"
        counts = _of(group)
        counts.named[name] += 1
        again = counts.named[name]  # of data that is called by two names
        name = name if again == 1 else f"{name}.{again}"
        return name if group is not None else f"before/{name}"


def _of(group: Any) -> _Counts:
    return _before if group is None else _counts.setdefault(group, _Counts())


def _describe(source: Any) -> str:
    """The same text on all ranks that are given the same source: a mixture's, a manifest's, paths and URLs."""
    if hasattr(source, "leaves"):
        return repr([(name, _describe(of)) for name, of in source.leaves()])
    if hasattr(source, "fingerprint"):
        return str(source.fingerprint)
    if hasattr(source, "url"):
        return repr((_describe(source.url), source.split, source.subset))
    if isinstance(source, list | tuple):
        return repr([_describe(one) for one in source])
    return str(source) if isinstance(source, str | PathLike) else type(source).__name__


def _digest(parts: list[Any]) -> str:
    return xxhash.xxh3_64_hexdigest("\n".join(map(str, parts)).encode("utf-8", "backslashreplace"))


def group_store() -> Any:
    """The store of the default process group, where that is initialised with two or more ranks."""
    distributed = sys.modules.get("torch.distributed")  # imported by whoever initialised it
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    with suppress(RuntimeError, ValueError):  # it is being destroyed meanwhile
        if distributed.get_world_size() >= 2:
            return distributed.distributed_c10d._get_default_store()
    return None
