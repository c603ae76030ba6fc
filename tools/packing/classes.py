"""Names of classes for ``pack``: from a list, a file or another data set; and whether a split beside numbers alike."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from ...loader.dataset.class_names import LABEL_FIELD, check_class_names, find_difference, warn_of_numbers
from ...loader.dataset.index import open_manifest
from ...loader.dataset.manifest import MANIFEST_NAME, Manifest
from ...loader.dataset.splits import name_siblings
from ...loader.errors import ConfigError
from ...storage import PenstockError, open_store
from ...storage.files import in_home

_FILES = (".txt", ".json")
_BUCKET = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/]*/?")

Classes: TypeAlias = "str | PathLike[str] | Sequence[str]"


def read_classes(given: Classes | None, storage_options: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """The names, in the order of their numbers, of ``classes=``: names, or the place of a file or of a data set.

    A file (.txt or .json) has a name a line, or a JSON list of names, or an object from names to numbers or back.

    Raises:
        ConfigError: these are no names of classes, or the data set has none.
    """
    if given is None:
        return None
    if not isinstance(given, str | PathLike):
        if not isinstance(given, Sequence):
            raise ConfigError(f"classes={given!r}: give a list of names, or the place of a file or of a data set")
        return check_class_names(given)
    place = str(given)
    if place.endswith(_FILES) or ("://" not in place and Path(in_home(place)).is_file()):
        return check_class_names(_read_file(place, storage_options))
    names = open_manifest(place, storage_options=storage_options, progress=False).classes
    if not names:
        raise ConfigError(
            f"classes={place!r}: this data set has no names of classes that hold for all of it; give their names, or "
            "the folder of the split that was packed first"
        )
    return names


def _read_file(place: str, storage_options: Mapping[str, Any] | None) -> list[str]:
    folder, _, name = str(place if "://" in place else Path(in_home(place)).absolute()).rpartition("/")
    store = open_store(folder + "/", storage_options=storage_options)
    try:
        text = bytes(store.get(name)).decode("utf-8-sig")
        if not name.endswith(".json"):
            return [line.strip() for line in text.splitlines() if line.strip()]
        return _in_order(json.loads(text))
    except (ValueError, TypeError) as exc:
        raise ConfigError(
            f"classes={place!r}: has no names of classes ({exc}); write one a line, or a JSON list of names, or an "
            "object from names to the numbers from 0 on"
        ) from exc
    finally:
        store.close()


def _in_order(value: Any) -> list[str]:
    if isinstance(value, dict):
        pairs = [(each, name) if isinstance(each, int) else (int(name), each) for name, each in value.items()]
        numbers = dict(pairs)
        if sorted(numbers) != list(range(len(value))):
            raise ValueError(f"its numbers are not 0 to {len(value) - 1}, each once")
        return [numbers[number] for number in range(len(value))]
    if not isinstance(value, list):
        raise TypeError(f"it is a {type(value).__name__}")
    return value


def warn_of_siblings(url: str, classes: Sequence[str], storage_options: Mapping[str, Any] | None) -> None:
    """Warn if another split beside ``url``, which will be packed with ``classes``, numbers them differently."""
    for sibling in sibling_urls(url):
        names = _names_at(sibling, storage_options)
        number = None if names is None else find_difference(classes, names)
        if number is not None:
            assert names is not None
            warn_of_numbers(
                f"{url}: its classes are numbered differently from those of {sibling}: {number} in {LABEL_FIELD!r} is "
                f"{classes[number]!r} here and {names[number]!r} there",
                f"pack it with classes={sibling!r} (--classes {sibling}) to take those numbers",
            )
            return


def sibling_urls(url: str) -> list[str]:
    """URLs where other splits of the data set packed to ``url`` would lie, by the words in its path."""
    bucket = found[0] if (found := _BUCKET.match(url)) else ""
    return [bucket + path for path in name_siblings(url[len(bucket) :])]


def _names_at(url: str, storage_options: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    try:
        store = open_store(url, storage_options=storage_options)
        try:
            return Manifest.from_bytes(store.get(MANIFEST_NAME), url).classes or None
        finally:
            store.close()
    except PenstockError:
        return None  # nothing there, or nothing that can be read
