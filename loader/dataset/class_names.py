"""The names of classes that the numbers in ``cls`` stand for, and whether two data sets number them alike."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ...storage import StorageError, Store
from ..errors import ConfigError, DatasetError
from .manifest import MANIFEST_NAME, Manifest

LABEL_FIELD = "cls"
_MOST_FOLDERS = 16  # that are asked for names of their own


class ClassNumbersWarning(UserWarning):
    """Data sets that are read or packed together number their classes differently."""


def check_class_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names as a tuple. Raises ConfigError unless there is one at least, and each is text and there once."""
    checked = tuple(names)
    wrong = next((name for name in checked if not isinstance(name, str) or not name), None)
    if not checked or wrong is not None:
        raise ConfigError(f"classes={checked!r}: give the names of the classes, in the order of their numbers")
    if len(set(checked)) < len(checked):
        twice = next(name for number, name in enumerate(checked) if name in checked[:number])
        raise ConfigError(f"classes= names {twice!r} twice; give each class one number")
    return checked


def find_difference(one: Sequence[str], other: Sequence[str]) -> int | None:
    """The first number that stands for another class in ``other``; None where one list begins with the other."""
    return next((number for number, names in enumerate(zip(one, other, strict=False)) if names[0] != names[1]), None)


def join_class_names(parts: Mapping[str, Sequence[str] | None]) -> tuple[tuple[str, ...] | None, str | None]:
    """The names for all parts, given by place, and in words the first two that differ.

    The names are the longest list, which must begin with all others; None where a part has no names; () with words.
    """
    known = [(place, tuple(names)) for place, names in parts.items() if names is not None]
    longest = max(known, key=lambda part: len(part[1]), default=("", ()))
    for place, names in known:
        if not names:
            return (), f"the parts of {place} number classes differently"
        number = find_difference(longest[1], names)
        if number is not None:
            mine, theirs = longest[1][number], names[number]
            return (), f"{number} in {LABEL_FIELD!r} is {mine!r} in {longest[0]} and {theirs!r} in {place}"
    return (longest[1] if known and len(known) == len(parts) else None), None


def warn_of_numbers(problem: str, advice: str) -> None:
    """Warn that one number stands for several classes."""
    warnings.warn(f"{problem}; {advice}", ClassNumbersWarning, stacklevel=2)


def with_names_of_parts(store: Store, manifest: Manifest) -> Manifest:
    """A manifest that was built of shards in folders, with the class names that manifests in these folders hold."""
    if manifest.classes is not None or LABEL_FIELD not in manifest.fields:
        return manifest
    folders = list(dict.fromkeys(shard.key.rpartition("/")[0] for shard in manifest.shards))
    if "" in folders or len(folders) > _MOST_FOLDERS:
        return manifest
    names, _ = join_class_names({folder: _read_names(store, folder) for folder in folders})
    return manifest if names is None else replace(manifest, classes=names)


def warn_of_parts(manifest: Manifest) -> None:
    """Warn where a manifest says that the parts of its data set number classes differently."""
    if manifest.classes == ():
        warn_of_numbers(
            f"{manifest.url}: its parts number classes differently, so that one number in {LABEL_FIELD!r} stands for "
            "several classes",
            "`penstock inspect` of each shows its names: pack them anew with the same classes= (--classes)",
        )


def _read_names(store: Store, folder: str) -> tuple[str, ...] | None:
    key = f"{folder}/{MANIFEST_NAME}"
    try:
        return Manifest.from_bytes(store.get(key), folder, key).classes
    except (StorageError, DatasetError):
        return None  # none there, or of no use
